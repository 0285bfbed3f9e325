"""The user's own images in a folder, a table or an npz file; and several named datasets combined into one."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from polyclinic.core import DataError
from polyclinic.data import NAMED_DATASETS
from polyclinic.data.data_dir import VARIABLE, data_folder
from polyclinic.data.datasets.toolkit import (
    Columns,
    Dataset,
    ImageOptions,
    Level,
    Listing,
    NamedDataset,
    Record,
    read_folder,
    read_npz,
    read_table,
)
from polyclinic.data.loading.loader import apply_task
from polyclinic.data.options import Options


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
    raise DataError(
        f"There is nothing at {' or '.join(map(str, places))}; correct data.path, or --data DIR; if sites hold the "
        "images, what the recipe would send and cost there is shown at a site by `polyclinic join --dry-run`."
    )


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
        if part.set not in sets:
            raise DataError(f"There is no set '{part.set}' to take a part from; there are: {', '.join(sets)}.")
        named = sets[part.set]
        records += _assign_sites(apply_task(named.read(named.options(), named.find_folder(data)), part.task), part)
    return Listing("multi", data_folder(data), tuple(records), classes, official=False, declared=True)


def _assign_sites(listing: Listing, part: SetPart) -> Iterator[Record]:
    """Yield the records of a dataset, assigned to the sites of this part."""
    turns: dict[str, int] = {}
    for number, record in enumerate(listing.records):
        turn = turns.setdefault(record.patient or f"image {number}", len(turns)) % part.pieces
        site = part.site if part.pieces == 1 else f"{part.site}-{turn + 1}"
        patient = record.patient and f"{part.set}-{record.patient}"
        yield replace(record, site=site, patient=patient, split="", where=f"{part.set}: {record.where}")


FOLDER = Dataset.from_reader(read_user_folder, FolderOptions)
TABLE = Dataset.from_reader(read_user_table, TableOptions)
NPZ = Dataset.from_reader(read_user_npz, UserDataOptions)
MULTI = Dataset.from_reader(read_multi, MultiOptions)
