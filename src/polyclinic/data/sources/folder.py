"""Images in folders whose names are labels, parts, sites or patients: `benign/…`, `train/benign/…`."""

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

from polyclinic.core import DataError
from polyclinic.data.findings import first_places, format_places
from polyclinic.data.records import Listing, Record, find_classes, is_disclosable, pseudonymise

Level = Literal["label", "site", "split", "patient", "skip"]
DISCLOSED_LEVELS: tuple[Level, ...] = ("label", "site", "split")
"""Levels whose folder names may be shown, unlike those of patients."""
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".dcm", ".dicom"})
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}


class _Folder(NamedTuple):
    """A folder, and the names of the folders from the root to it."""

    path: Path
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    """The same path with the number of each folder among its siblings."""

    def format_path(self, names: Sequence[str | None]) -> str:
        """Format the path, with a number where the name is None."""
        return "/".join(text or f"folder {number}" for text, number in zip(names, self.numbers, strict=False))


def read_folder(
    root: Path,
    *,
    name: str,
    levels: tuple[Level, ...] = ("label",),
    classes: tuple[str, ...] | None = None,
    pattern: str = "*",
    guessed: bool = False,
) -> Listing:
    """List the images in folders; `levels` gives the meaning of each folder level below `root`.

    Only files that match the glob `pattern` (in any case) count. Images at another depth are `unlisted`. A patient is
    identified by the folder's name alone: the same name at two sites is the same patient. If `levels` are
    `guessed`, a folder may be a patient's, so it is shown by name only if it holds enough images for a class or a site.
    """
    if any(levels.count(level) > 1 for level in levels if level != "skip"):
        raise DataError(f"The folder levels {'/'.join(levels)} name one level twice; call the others 'skip'.")
    with plain_read_errors(root):
        ranks = _folders_by_depth(root, len(levels))
        files = {
            folder: [file for file in list_images(folder.path) if _matches_pattern(file, pattern)]
            for folder in ranks[-1]
        }
        unlisted = tuple(file for file in _images_elsewhere(ranks) if _matches_pattern(file, pattern))
    _check_empty_folders(root, levels, ranks, {folder.names for folder in files if files[folder]}, classes is not None)
    records = _build_records(levels, files, guessed)
    found = find_classes(record.label for record in records) if classes is None else tuple(map(clean_text, classes))
    return Listing(name, root, records, found, declared=classes is not None, unlisted=unlisted)


def is_image(path: Path) -> bool:
    """Whether a file is an image by its suffix or, without one, by DICOM's mark (a UID's last digits are no suffix)."""
    suffix = path.suffix.lower()
    if path.name.startswith(".") or path.name == "DICOMDIR":
        return False
    return suffix in SUFFIXES or ((not suffix or suffix[1:].isdigit()) and _has_dicom_mark(path))


def clean_text(text: str) -> str:
    """Strip spaces, and write accents in one form, since the same word can be encoded in two ways."""
    return unicodedata.normalize("NFC", text.strip())


def parse_part(text: str) -> str:
    """Return the part that a text names: "Training" is train, "val" is validation; other texts are unchanged."""
    return SPLITS.get(text.lower(), text)


def list_images(folder: Path) -> Iterator[Path]:
    """Yield the images directly in a folder, by name. Dangling links count; opening them reports the fault."""
    for entry in _list_entries(folder):
        if (entry.is_file() or entry.is_symlink()) and not entry.is_dir() and is_image(path := folder / entry.name):
            yield path


def list_subfolders(folder: Path) -> list[Path]:
    return [folder / entry.name for entry in _list_entries(folder) if entry.is_dir()]


@contextmanager
def plain_read_errors(root: Path) -> Iterator[None]:
    """Turn operating system errors below `root` into one sentence that names no other folder or file."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"'{root}' or a folder in it cannot be read ({error.strerror}); correct the path or the permissions."
        ) from None


def _list_entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        seen = [entry for entry in entries if not entry.name.startswith(".") and entry.name != "__MACOSX"]
    return sorted(seen, key=lambda entry: entry.name)


def _has_dicom_mark(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return True  # unknown: if listed, it is reported as unreadable instead of overlooked


def _matches_pattern(file: Path, pattern: str) -> bool:
    return pattern == "*" or fnmatchcase(file.name.lower(), pattern.lower())


def _folders_by_depth(root: Path, depth: int) -> list[list[_Folder]]:
    """Return all folders by depth below the root, starting with the root."""
    ranks = [[_Folder(root, (), ())]]
    for _ in range(depth):
        ranks.append(
            [
                _Folder(path, (*above.names, clean_text(path.name)), (*above.numbers, number))
                for above in ranks[-1]
                for number, path in enumerate(list_subfolders(above.path), 1)
            ]
        )
    return ranks


def _images_elsewhere(ranks: Sequence[Sequence[_Folder]]) -> Iterator[Path]:
    """Yield the images above the last level and below it."""
    for rank in ranks[:-1]:
        for folder in rank:
            yield from list_images(folder.path)
    for folder in ranks[-1]:
        yield from _images_below(folder.path)


def _images_below(folder: Path) -> Iterator[Path]:
    for deeper in list_subfolders(folder):
        if not deeper.is_symlink():  # a link may lead back up, for ever
            yield from list_images(deeper)
            yield from _images_below(deeper)


def _build_records(
    levels: tuple[Level, ...], files: Mapping[_Folder, Sequence[Path]], guessed: bool
) -> tuple[Record, ...]:
    named = [dict(zip(levels, folder.names, strict=True)) for folder in files]
    patients = pseudonymise([names.get("patient", "") for names in named])
    places = (
        _numbered_places(levels, files)
        if guessed
        else ["/".join(names[level] for level in levels if level in DISCLOSED_LEVELS) for names in named]
    )
    numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(1))
    records = []
    for names, patient, place, found in zip(named, patients, places, files.values(), strict=True):
        label, site, split = names.get("label", ""), names.get("site", ""), parse_part(names.get("split", ""))
        for file in found:
            number = next(numbers[place])
            where = f"{place}, file {number}" if place else f"file {number}"
            records.append(Record(file, label, site, patient, split, where))
    return tuple(records)


def _numbered_places(levels: tuple[Level, ...], files: Mapping[_Folder, Sequence[Path]]) -> list[str]:
    """Format the folders' paths with the names that may be shown, and numbers for others."""
    sizes: Counter[tuple[Level, str]] = Counter()
    for folder, found in files.items():
        sizes.update({way: len(found) for way in zip(levels, folder.names, strict=True)})
    known = {way for way, size in sizes.items() if is_disclosable(size, size) or way[0] == "split"}
    return [
        folder.format_path([way[1] if way in known else None for way in zip(levels, folder.names, strict=True)])
        for folder in files
    ]


def _check_empty_folders(
    root: Path,
    levels: tuple[Level, ...],
    ranks: Sequence[Sequence[_Folder]],
    used: set[tuple[str, ...]],
    declared: bool,
) -> None:
    """Refuse folders of a class, site or part without an image, which would otherwise be overlooked."""
    if not used:
        layout = "".join(f"<{level}>/" for level in levels)
        raise DataError(f"'{root}' holds no image as {layout}<file>; give the folder that is laid out so.")
    for depth, level in enumerate(levels):
        folders = {folder.names[depth]: folder for folder in reversed(ranks[depth + 1])}
        if level not in DISCLOSED_LEVELS:
            continue
        _check_printable(root, level, folders)
        names = [] if level == "label" and declared else sorted(folders.keys() - {path[depth] for path in used})
        if empty := first_places(folders[name].format_path([None] * (depth + 1)) for name in names):
            raise DataError(
                f"'{root}' has {len(names)} {level} folder(s) without an image "
                f"(counted by name: {format_places(empty, len(names))}); "
                "put images there or remove the folder(s)."
            )


def _check_printable(root: Path, level: Level, names: Iterable[str]) -> None:
    if broken := sum(not name.isprintable() for name in names):
        raise DataError(
            f"'{root}' has {broken} {level} folder(s) whose name is not printable UTF-8 text; rename the folder(s)."
        )
