"""Everything that the module of a dataset needs: listings, readers of publishers' layouts, and known duplicates."""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from polyclinic.core import DataError
from polyclinic.data import NAMED_DATASETS
from polyclinic.data.datasets.base import Dataset, Download, NamedDataset
from polyclinic.data.findings import first_places, format_places
from polyclinic.data.loading.image_options import ImageOptions
from polyclinic.data.options import Options
from polyclinic.data.records import Listing, Record, pseudonymise
from polyclinic.data.sources.folder import (
    SPLITS,
    Level,
    is_image,
    list_images,
    list_subfolders,
    parse_part,
    plain_read_errors,
    read_folder,
)
from polyclinic.data.sources.npz import read_npz
from polyclinic.data.sources.table import Columns, read_table

__all__ = [
    "SPLITS",
    "Columns",
    "Dataset",
    "Download",
    "ImageOptions",
    "Level",
    "Listing",
    "NamedDataset",
    "Record",
    "define_public_dataset",
    "exclude_duplicates",
    "find_subfolder",
    "has_one_part_per_patient",
    "is_image",
    "list_images",
    "list_subfolders",
    "parse_part",
    "pseudonymise_patients",
    "read_duplicates",
    "read_folder",
    "read_npz",
    "read_public_set",
    "read_rows",
    "read_table",
    "read_table_without_copies",
]

TABLE = "labels.csv"
SAME_IMAGE = "the same image as"


def define_public_dataset(
    name: str,
    *,
    licence: str,
    classes: tuple[str, ...],
    obtain: str,
    read_published: Callable[[Any, Path], Listing | None],
    sites: tuple[str, ...] = (),
    read_plain: Callable[..., Listing] = read_table,
    options: type[Options] = ImageOptions,
    downloads: tuple[Download, ...] = (),
) -> NamedDataset:
    """Define a dataset that `read_public_set` reads.

    `read_published` is called with the options and the dataset's folder. It may put the publisher's patient names into
    the records, since these are replaced by pseudonyms; the other arguments are those of `read_public_set`.
    """

    def read(chosen: Any, folder: Path) -> Listing:
        publisher = partial(read_published, chosen)
        return read_public_set(name, folder, publisher, obtain, classes=classes, sites=sites, read_plain=read_plain)

    return NamedDataset(name, licence, classes, read, obtain, options, downloads=downloads)


def read_public_set(
    set_: str,
    folder: Path,
    read_published: Callable[[Path], Listing | None],
    obtain: str,
    *,
    classes: tuple[str, ...],
    sites: tuple[str, ...] = (),
    read_plain: Callable[..., Listing] = read_table,
) -> Listing:
    """Read a public dataset from its plain table (`folder/labels.csv`), or else in the publisher's layout.

    `read_published` returns None, or a listing without records, if the publisher's layout is not there; the patients in
    its records are replaced by pseudonyms. `read_plain` reads the table and is called like `read_table`. A folder of
    another dataset is refused: none of its labels is in `classes`, or it names sites and none of them is in `sites` (if
    given, since datasets of the same organ often share their classes).
    """
    found: Listing | None = None
    with plain_read_errors(folder):
        if (folder / TABLE).is_file():
            found = read_plain(folder / TABLE, name=set_, classes=classes)
        elif folder.is_dir() and (published := read_published(folder)):
            found = pseudonymise_patients(published)
    foreign = _find_mismatch(found, classes, sites) if found else ""
    if found is None or (foreign and not (folder / TABLE).is_file()):
        raise DataError(
            f"The set {set_} was not found in {folder}, "
            f"which must hold {TABLE} (path, label, site, split, patient) or the publisher's files: {obtain}"
        )
    if foreign:
        raise DataError(
            f"The folder {folder} is not that of the set {set_}: the {TABLE} there lists another set "
            f"({foreign}{_suggest_similar_sets(found, set_)}); put each set into a folder of its own: {obtain}"
        )
    return found


def _find_mismatch(listing: Listing, classes: tuple[str, ...], sites: tuple[str, ...]) -> str:
    """Return why a listing must be another dataset's, in terms of the expected dataset, or ""."""
    if {record.label for record in listing.records}.isdisjoint(classes):
        return f"its labels are none of: {format_places(first_places(classes), len(classes))}"
    named = {record.site for record in listing.records} - {""}
    if named and sites and named.isdisjoint(sites):
        return f"its sites are none of: {format_places(first_places(sites), len(sites))}"
    return ""


def _suggest_similar_sets(listing: Listing, set_: str) -> str:
    """Name the other public datasets with the same labels. Other labels may be anything and are not shown."""
    labels = {record.label for record in listing.records}
    others = {name: set(named.classes) for name, named in NAMED_DATASETS.items() if name != set_}
    like = [name for name, classes in others.items() if labels == classes] or [
        name for name, classes in others.items() if labels <= classes
    ]
    return f"; it looks like {' or '.join(like)}" if like else ""


def pseudonymise_patients(listing: Listing) -> Listing:
    """Replace the names of patients in all records by pseudonyms; existing pseudonyms stay unchanged."""
    patients = pseudonymise([record.patient for record in listing.records])
    records = [replace(record, patient=patient) for record, patient in zip(listing.records, patients, strict=True)]
    return replace(listing, records=tuple(records))


def find_subfolder(folder: Path, *names: str) -> Path:
    """Return the first existing subfolder, else the folder: archives unpack with or without their top-level folder."""
    return next((folder / name for name in names if (folder / name).is_dir()), folder)


def has_one_part_per_patient(pairs: Iterable[tuple[str, str]]) -> bool:
    """Whether no patient is in two parts, given pairs of a patient and a part."""
    distinct = set(pairs)
    return len(distinct) == len(dict(distinct))


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each row of a publisher's CSV: its place ("metadata.csv row 18") and its cells by column in lower case."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            table = csv.reader(lines, strict=True)
            header = [name.strip().lower() for name in next(table, [])]
            for number, cells in enumerate(table, start=2):
                if any(cells[len(header) :]):
                    raise DataError(f"{file} has more cells than its header in row {number}; correct that row.")
                if cells:
                    texts = [cell.strip() for cell in cells] + [""] * (len(header) - len(cells))
                    yield f"{file.name} row {number}", dict(zip(header, texts, strict=False))
    except (OSError, UnicodeDecodeError, csv.Error):
        raise DataError(f"{file} cannot be read as a table; save it as a UTF-8 CSV file.") from None


def read_duplicates(folder: Path) -> list[list[Path]]:
    """Read the groups of identical images from `folder/duplicates.csv` (group, path), if it exists."""
    file = folder / "duplicates.csv"
    groups: defaultdict[str, list[Path]] = defaultdict(list)
    for _, row in read_rows(file) if file.is_file() else ():
        groups[row.get("group", "")].append(folder / row.get("path", ""))
    return list(groups.values())


def read_table_without_copies(table: Path, *, name: str, classes: tuple[str, ...]) -> Listing:
    """Read a table and keep one of each group of identical images that `duplicates.csv` beside it lists."""
    return exclude_duplicates(read_table(table, name=name, classes=classes), read_duplicates(table.parent))


def exclude_duplicates(listing: Listing, groups: Iterable[Sequence[Path]]) -> Listing:
    """Keep the first of each group of identical images, or none if their labels or sites conflict."""
    positions = {record.path: position for position, record in enumerate(listing.records)}
    reasons: dict[int, str] = {}
    for group in groups:
        reasons |= _duplicate_reasons(listing.records, sorted(positions[path] for path in group if path in positions))
    return listing.exclude_records(reasons)


def _duplicate_reasons(records: Sequence[Record], here: list[int]) -> dict[int, str]:
    if len(here) < 2:
        return {}
    first, second = records[here[0]], records[here[1]]
    if len({(records[position].label, records[position].site) for position in here}) == 1:
        return dict.fromkeys(here[1:], f"{SAME_IMAGE} {first.where}")
    conflict = dict.fromkeys(here[1:], f"{SAME_IMAGE} {first.where}, under another label or site")
    return conflict | {here[0]: f"{SAME_IMAGE} {second.where}, under another label or site"}
