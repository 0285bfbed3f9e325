"""Faults of single files: not there, not readable, blank, of another size or depth than the rest, listed twice."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from polyclinic.data.findings import Finding
from polyclinic.data.quality.finding_text import Group, Kind, about_set, by, findings, many, singly, used_positions
from polyclinic.data.quality.image_stats import Looks
from polyclinic.data.records import Listing, Record
from polyclinic.data.sources.folder import SUFFIXES

SMALLEST = 8
FAR_AREA = 4.0
FAR_ASPECT = 2.0
RARE = 0.1
"""Sizes that more than this share of a site's images have are a second scanner, not a mistake."""

MISSING = Kind("missing file", "stop", "put the files there or remove them from the list")
UNREADABLE = Kind("unreadable file", "stop", "get these files anew, or leave them out")
BLANK = Kind("blank image", "stop", "get these images anew, or leave them out")
TINY = Kind("tiny image", "warn", "look whether they are icons or previews, and leave those out")
OUTLIER = Kind("unusual size", "warn", "look whether they show what the others show: previews, crops and scouts do not")
SIZES = Kind("several sizes", "note", "nothing: all are brought to one size; choose pad, crop or stretch")
DEPTHS = Kind("several bit depths", "warn", "convert them alike; a set of 10- or 12-bit images needs the option bits")
COLOURS = Kind(
    "grey and colour", "note", "nothing: all are brought to the chosen channels; look whether marks are drawn"
)
TWICE = Kind("file listed twice", "warn", "remove all but one of these lines")
TWICE_OTHERWISE = Kind(
    "file listed twice with other labels", "stop", "find out which label is right, remove the others"
)
ALIKE = Kind("names alike", "warn", "look whether they are copies; some computers cannot keep both in one folder")
UNLISTED = Kind("unlisted image", "warn", "add them to the list or move them away; --show-names tells which they are")


def file_findings(listing: Listing, looks: Looks) -> Iterator[Finding]:
    yield from missing_files(listing, looks.missing)
    yield from unreadable_files(listing, looks.unreadable)
    yield from _blank(listing, looks)
    yield from _sizes(listing, looks)
    yield from _mixtures(listing, looks)
    yield from listed_twice(listing)
    yield from _alike(listing)
    yield from _unlisted(listing)


def missing_files(listing: Listing, positions: Iterable[int]) -> Iterator[Finding]:
    beside = _Beside()

    def sentence(faults: list[Group]) -> str:
        alike = sum(beside.has_like(listing.records[position].path) for fault in faults for position in fault)
        told = f", {alike:,} of them differ from a file that is there only in case or accents" if alike else ""
        return many(len(faults), "listed file") + " cannot be found" + told

    yield from findings(listing, MISSING, singly(positions), sentence)


class _Beside:
    """What is there in place of missing files; every folder is listed once."""

    def __init__(self) -> None:
        self.names = cache(_names)
        self.folder = cache(self._folder)

    def has_like(self, path: Path) -> bool:
        found = self._like(path)
        return found is not None and os.path.isfile(found)

    def _like(self, path: Path) -> Path | None:
        """What differs from this path in case, or in the form of accents, alone."""
        folder = self.folder(path.parent)
        name = self.names(folder).get(_folded(path.name)) if folder else None
        return folder / name if folder and name else None

    def _folder(self, path: Path) -> Path | None:
        return path if os.path.isdir(path) or path == path.parent else self._like(path)


def _names(folder: Path) -> dict[str, str]:
    with suppress(OSError):
        return {_folded(name): name for name in os.listdir(folder)}
    return {}


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def unreadable_files(listing: Listing, reasons: Mapping[int, str]) -> Iterator[Finding]:
    def sentence(faults: list[Group]) -> str:
        counts = Counter(reasons[position] for fault in faults for position in fault).most_common()
        return many(len(faults), "file") + " cannot be read: " + ", ".join(f"{why} ({n})" for why, n in counts)

    yield from findings(listing, UNREADABLE, singly(reasons), sentence)


def _blank(listing: Listing, looks: Looks) -> Iterator[Finding]:
    blank = [position for position, look in looks.images.items() if look.blank]
    yield from findings(
        listing, BLANK, singly(blank), lambda f: many(len(f), "image is", "images are") + " of one grey value all over"
    )


def _sizes(listing: Listing, looks: Looks) -> Iterator[Finding]:
    tiny = [position for position, look in looks.images.items() if min(look.height, look.width) < SMALLEST]
    yield from findings(
        listing,
        TINY,
        singly(tiny),
        lambda f: many(len(f), "image is", "images are") + f" less than {SMALLEST} pixels high or wide",
    )
    sites: defaultdict[str, list[int]] = defaultdict(list)
    for position in sorted(looks.images.keys() - set(tiny)):
        sites[listing.records[position].site].append(position)
    unusual = [position for positions in sites.values() for position in _unusual(positions, looks)]
    yield from findings(
        listing,
        OUTLIER,
        singly(unusual),
        lambda f: (
            many(len(f), "image is", "images are")
            + f" {FAR_AREA:g} times larger or smaller than is usual at the site, or {FAR_ASPECT:g} times longer"
        ),
    )


def _unusual(positions: list[int], looks: Looks) -> list[int]:
    sides = np.array([(looks.images[p].height, looks.images[p].width) for p in positions], dtype=np.float64)
    area, aspect = np.log(sides.prod(axis=1)), np.log(sides[:, 0] / sides[:, 1])
    far = np.abs(area - np.median(area)) > np.log(FAR_AREA)
    far |= np.abs(aspect - np.median(aspect)) > np.log(FAR_ASPECT)
    return [positions[index] for index in np.flatnonzero(far)] if far.mean() <= RARE else []


def _mixtures(listing: Listing, looks: Looks) -> Iterator[Finding]:
    """Sizes, depths and colours of the images in use."""
    images = {position: looks.images[position] for position in used_positions(listing) if position in looks.images}
    sizes, rarer = _mixture({position: f"{look.width} × {look.height}" for position, look in images.items()})
    if rarer:
        told = f"the images have {len(sizes):,} sizes; {sizes[0][1]:,} of {len(images):,} are {sizes[0][0]} pixels"
        yield about_set(listing, SIZES, rarer, told)
    # DICOM files say themselves how their bits are to be shown
    depths, rarer = _mixture({position: f"{look.bits} bits" for position, look in images.items() if not look.windowed})
    if rarer:
        told = "the images are stored with different depths: " + ", ".join(f"{n:,} with {bits}" for bits, n in depths)
        yield about_set(listing, DEPTHS, rarer, told)
    colours, rarer = _mixture({position: "colour" if look.colour else "grey" for position, look in images.items()})
    if rarer:
        yield about_set(listing, COLOURS, rarer, "of the images " + " and ".join(f"{n:,} are {c}" for c, n in colours))


def _mixture(values: Mapping[int, str]) -> tuple[list[tuple[str, int]], list[int]]:
    """How often each value comes, the commonest first; and which images have another than that."""
    counts = Counter(values.values()).most_common()
    return counts, [position for position, value in values.items() if value != counts[0][0]]


def _file(record: Record) -> tuple[str, str, int | None]:
    return os.path.normpath(record.path), record.array, record.row


def one_per_file(listing: Listing) -> list[int]:
    """The first position of every file (or row of an array), in use if any is."""
    first: dict[tuple[str, str, int | None], int] = {}
    for position in sorted(range(len(listing.records)), key=lambda p: bool(listing.records[p].excluded)):
        first.setdefault(_file(listing.records[position]), position)
    return sorted(first.values())


def listed_twice(listing: Listing) -> Iterator[Finding]:
    files: defaultdict[tuple[str, str, int | None], list[int]] = defaultdict(list)
    for position, record in enumerate(listing.records):
        files[_file(record)].append(position)
    twice = [positions for positions in files.values() if len(positions) > 1]
    conflict = [group for group in twice if len({listing.records[p].label for p in group}) > 1]
    plain = [group for group in twice if len({listing.records[p].label for p in group}) == 1]
    yield from findings(
        listing, TWICE, plain, lambda f: many(len(f), "file is", "files are") + " listed more than once", spare=1
    )
    yield from findings(
        listing,
        TWICE_OTHERWISE,
        conflict,
        lambda f: many(len(f), "file is", "files are") + " listed more than once, under different labels",
        spare=1,
    )


def _alike(listing: Listing) -> Iterator[Finding]:
    """Names in one folder that differ in case or suffix only."""
    whole = [position for position in one_per_file(listing) if listing.records[position].row is None]
    stems = by(listing, whole, lambda record: _stem(record.path))
    alike = [group for group in stems.values() if len(group) > 1]
    yield from findings(
        listing,
        ALIKE,
        alike,
        lambda f: (
            many(len(f), "group of files has", "groups of files have")
            + " names in one folder that differ in case or suffix only"
        ),
        spare=1,
    )


def _stem(path: Path) -> str:
    name = path.stem if path.suffix.lower() in SUFFIXES else path.name
    return f"{os.path.normpath(path.parent)}/{name.casefold()}"


def _unlisted(listing: Listing) -> Iterator[Finding]:
    count = len(listing.unlisted)
    if count:
        sentence = many(count, "image lies", "images lie") + " beside the listed ones without being listed"
        yield Finding(UNLISTED.name, UNLISTED.level, count, sentence, UNLISTED.remedy)
