"""The user's own images in a folder, a table or an npz file; and several named datasets combined into one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from polyclinic.core import DataError
from polyclinic.data import NAMED_DATASETS
from polyclinic.data.data_dir import VARIABLE, data_folder
from polyclinic.data.datasets.base import Dataset, NamedDataset
from polyclinic.data.loading.image_options import ImageOptions
from polyclinic.data.loading.loader import apply_task
from polyclinic.data.options import Options
from polyclinic.data.records import Listing, Record
from polyclinic.data.sources.folder import Level, read_folder
from polyclinic.data.sources.npz import read_npz
from polyclinic.data.sources.table import Columns, read_table


class UserDataOptions(ImageOptions):
    path: str
    """Absolute, or relative to the data folder or to the working directory."""
    classes: list[str] | None = None
    """The classes in the order of their numbers; if None, the distinct labels."""


class FolderOptions(UserDataOptions):
    levels: list[Level] = Field(default=["label"], min_length=1)
    """The meaning of the folders below `path`, from the outermost: label, site, split, patient, skip."""


class TableOptions(UserDataOptions):
    columns: Columns = Columns()
    """The names of the table's columns."""


def read_user_folder(options: FolderOptions, data: Path | None) -> Listing:
    root = resolve_path(options.path, data)
    return read_folder(root, name=root.name, levels=tuple(options.levels), classes=_declared_classes(options))


def read_user_table(options: TableOptions, data: Path | None) -> Listing:
    path = resolve_path(options.path, data)
    return read_table(path, name=path.name, columns=options.columns, classes=_declared_classes(options))


def read_user_npz(options: UserDataOptions, data: Path | None) -> Listing:
    path = resolve_path(options.path, data)
    return read_npz(path, name=path.name, classes=_declared_classes(options))


def _declared_classes(options: UserDataOptions) -> tuple[str, ...] | None:
    return tuple(options.classes) if options.classes else None


def resolve_path(path: str, data: Path | None) -> Path:
    """Return the existing location of a recipe's path, inside the data folder or as given."""
    named = data or os.environ.get(VARIABLE)
    wanted = Path(path).expanduser()
    places = list(dict.fromkeys([Path(named) / wanted, wanted] if named else [wanted]))
    for place in places:
        if place.exists():
            return place
    raise DataError(f"There is nothing at {' or '.join(map(str, places))}; correct data.path, or --data DIR.")


class SetPart(Options):
    """One of several datasets, whose images become one site (or several sites)."""

    set: str
    site: str
    task: dict[str, list[str]]
    """The common classes, each with this dataset's labels."""
    pieces: int = Field(1, ge=1, le=100)
    """The number of sites to divide the dataset into; patients are assigned in turn."""


class MultiOptions(ImageOptions):
    parts: list[SetPart] = Field(min_length=2)


def read_multi(options: MultiOptions, data: Path | None, sets: Mapping[str, NamedDataset] = NAMED_DATASETS) -> Listing:
    """Combine named datasets under common classes; each becomes a site, or several sites."""
    classes = tuple(options.parts[0].task)
    records: list[Record] = []
    for part in options.parts:
        if set(part.task) != set(classes):
            raise DataError(
                f"The part '{part.set}' has the classes {', '.join(part.task)}, "
                f"the first part {', '.join(classes)}; give all parts the same."
            )
        named = _find_set(part.set, sets)
        found = apply_task(named.read(named.options(), named.find_folder(data)), part.task)
        records += _assign_sites(found, part)
    return Listing("multi", data_folder(data), tuple(records), classes, official=False, declared=True)


def _find_set(name: str, sets: Mapping[str, NamedDataset]) -> NamedDataset:
    if name not in sets:
        raise DataError(f"There is no set '{name}' to take a part from; there are: {', '.join(sets)}.")
    return sets[name]


def _assign_sites(listing: Listing, part: SetPart) -> list[Record]:
    """Return the records of a dataset, assigned to the sites of this part."""
    turns: dict[str, int] = {}
    found = []
    for number, record in enumerate(listing.records):
        turn = turns.setdefault(record.patient or f"image {number}", len(turns)) % part.pieces
        site = part.site if part.pieces == 1 else f"{part.site}-{turn + 1}"
        patient = record.patient and f"{part.set}-{record.patient}"
        found.append(replace(record, site=site, patient=patient, split="", where=f"{part.set}: {record.where}"))
    return found


DATASETS = {
    "folder": Dataset.from_reader(read_user_folder, FolderOptions),
    "table": Dataset.from_reader(read_user_table, TableOptions),
    "npz": Dataset.from_reader(read_user_npz, UserDataOptions),
    "multi": Dataset.from_reader(read_multi, MultiOptions),
}
