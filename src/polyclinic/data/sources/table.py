"""Tables (CSV) with one row per image: its path, label, site, patient and part."""

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from csv import Error, reader
from operator import itemgetter
from pathlib import Path
from posixpath import isabs, join, normpath
from typing import TextIO

from polyclinic.core import DataError
from polyclinic.data.findings import Finding, first_places, format_places, raise_findings
from polyclinic.data.options import Options
from polyclinic.data.records import Listing, Record, find_classes, pseudonymise
from polyclinic.data.sources.folder import clean_text, list_images, parse_part

DELIMITERS = ",;\t"
NEEDED = ("path", "label")


class Columns(Options):
    """The names of the columns. The last three may be missing from the file unless they were set explicitly."""

    path: str = "path"
    label: str = "label"
    site: str | None = "site"
    patient: str | None = "patient"
    split: str | None = "split"


PLAIN = Columns()


def read_table(
    csv: Path,
    *,
    name: str,
    columns: Columns = PLAIN,
    classes: tuple[str, ...] | None = None,
    root: Path | None = None,
) -> Listing:
    """List one image per row. Files may be missing or listed twice and labels empty, which `check_listing` reports.

    Relative paths start at the table's folder (or `root`) and may not leave it by "..", so that a table from elsewhere
    cannot point at other files of a site by counting folders. Absolute paths are allowed: their author knows this
    machine. Backslashes are separators. `unlisted` are image files in the same folders that no row names.
    """
    home, table = csv.parent if root is None else root, csv.name
    faults: defaultdict[str, list[int]] = defaultdict(list)
    with _open_table(csv) as file, _pause_garbage_collection():
        rows = list(_read_rows(csv, file, columns, faults))
    _check_rows(csv, faults)
    if not rows:
        raise DataError(f"'{csv}' has a header but no rows; add one row per image.")
    patients = pseudonymise([row[4] for row in rows])
    with _pause_garbage_collection():
        records = tuple(
            Record(home / path, label, site, patient, split, f"{table} row {number}")
            for (number, path, label, site, _, split), patient in zip(rows, patients, strict=True)
        )
    found = find_classes({record.label for record in records}) if classes is None else tuple(map(clean_text, classes))
    return Listing(
        name,
        home,
        records,
        found,
        declared=classes is not None,
        unlisted=_find_unlisted(home, [row[1] for row in rows]),
    )


_Row = tuple[int, str, str, str, str, str]
"""Number, path, label, site, patient, split."""


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Pause garbage collection: scanning millions of new objects, none of them garbage, takes a third more time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _open_table(csv: Path) -> Iterator[TextIO]:
    try:
        with csv.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError:
        raise DataError(f"'{csv}' is not UTF-8 text; save it as 'CSV UTF-8'.") from None
    except OSError as error:
        raise DataError(f"'{csv}' cannot be read ({error.strerror}); correct the path or the permissions.") from None


def _read_rows(csv: Path, file: TextIO, columns: Columns, faults: Mapping[str, list[int]]) -> Iterator[_Row]:
    """Yield the valid rows and add the numbers of others to `faults`. As in a spreadsheet, the header is row 1."""
    table = _read_cells(csv, file, _find_delimiter(csv, file, columns))
    header = [clean_text(cell) for cell in next(table, [])]
    pick = itemgetter(*_column_positions(csv, header, columns))
    parts = {"": ""}
    for number, cells in enumerate(table, 2):
        if not cells:  # a blank line
            continue
        if len(cells) != len(header):
            faults["length"].append(number)
            continue
        cells.append("")  # the value of missing columns
        path, *texts = pick(cells)
        label, site, patient, split = map(clean_text, texts)
        path = normpath(path.strip().replace("\\", "/"))
        if path == ".":
            faults["path"].append(number)
        elif path == ".." or path.startswith("../"):
            faults["outside"].append(number)
        elif not (label.isprintable() and site.isprintable() and split.isprintable()):
            faults["text"].append(number)
        else:
            yield number, path, label, site, patient, parts.setdefault(split, parse_part(split))


def _find_delimiter(csv: Path, file: TextIO, columns: Columns) -> str:
    """Return the delimiter that finds the required columns in the header, or else the most columns."""

    def merit(delimiter: str) -> tuple[bool, int]:
        file.seek(0)
        header = list(map(clean_text, next(_read_cells(csv, file, delimiter), [])))
        return {clean_text(columns.path), clean_text(columns.label)} <= set(header), len(header)

    best = max(DELIMITERS, key=merit)
    file.seek(0)
    return best


def _read_cells(csv: Path, file: TextIO, delimiter: str) -> Iterator[list[str]]:
    # strict, since otherwise a quote that is never closed silently swallows all following rows
    rows = reader(_read_lines(csv, file), delimiter=delimiter, strict=True)
    try:
        yield from rows
    except Error:
        raise DataError(
            f"'{csv}' cannot be read as a table near line {rows.line_num}; look for a quote that is not closed."
        ) from None


def _read_lines(csv: Path, file: TextIO) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if "\0" in line:
            raise DataError(f"'{csv}' has a NUL byte in line {number}; it is damaged or no text, save it again as CSV.")
        yield line


def _column_positions(csv: Path, header: Sequence[str], columns: Columns) -> list[int]:
    """Return the position of each field in a row; −1 for fields that the table lacks."""
    wanted = {field: column and clean_text(column) for field, column in columns}
    for field, column in wanted.items():
        needed = field in NEEDED or (column is not None and field in columns.model_fields_set)
        if needed and column not in header:
            raise DataError(f"'{csv}' has no column '{column}' for the {field}; {_describe_columns(header, columns)}.")
    if twice := first_places(column for column in header if column and header.count(column) > 1):
        raise DataError(f"'{csv}' has more than one column called {' and '.join(twice)}; rename all but one.")
    return [header.index(column) if column in header else -1 for column in wanted.values()]


def _describe_columns(header: Sequence[str], columns: Columns) -> str:
    """Describe the columns, unless the first row may hold a patient's data: tables without a header are common."""
    if not header:
        return "its first line is empty: write a header there"
    if not {clean_text(columns.path).lower(), clean_text(columns.label).lower()} <= {
        column.lower() for column in header
    }:
        return (
            f"the {len(header)} cells of its first row do not look like a header with a path and a label, and are not "
            "shown, since they may be a patient's: add a header or say what its columns are called"
        )
    shown = [column for column in header if column.isprintable() and column][:20]
    return f"there are {format_places(shown, len(header))}: name the right one or rename it"


_FAULTS = {
    "length": ("with more or fewer cells than its header", "correct them, quoting cells that contain a delimiter"),
    "path": ("without a path", "name the image file or remove the row"),
    "text": ("whose label, site or split has characters that cannot be printed", "type these cells again"),
    "outside": ("with a path that leaves its folder by '..'", "move the images below that folder or write whole paths"),
}


def _check_rows(csv: Path, faults: Mapping[str, list[int]]) -> None:
    found = [
        Finding(
            kind,
            "stop",
            len(rows),
            f"'{csv}' has {len(rows)} row(s) {fault}",
            remedy,
            first_places(f"row {row}" for row in rows),
        )
        for kind, (fault, remedy) in _FAULTS.items()
        if (rows := faults.get(kind))
    ]
    raise_findings(found, end="Nothing else of the set was checked: correct these rows and try again.")


def _find_unlisted(home: Path, paths: Iterable[str]) -> tuple[Path, ...]:
    """Find the images that no row names in the folders that rows do name; folders below these are not searched."""
    named = set(paths)
    folders = {path.rpartition("/")[0] for path in named if not isabs(path)}
    found = []
    for folder in sorted(folders):
        with suppress(OSError):  # a missing folder is reported by its missing files
            found += [path for path in list_images(home / folder) if join(folder, path.name) not in named]
    return tuple(found)
