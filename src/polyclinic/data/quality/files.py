"""Faults of files: missing, unreadable, blank, of unusual size or depth, listed twice."""

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from polyclinic.data.findings import (
    Finding,
    FindingKind,
    Group,
    as_groups,
    build_findings,
    build_set_finding,
    format_count,
    group_positions,
    used_positions,
)
from polyclinic.data.quality.image_stats import ListingStats
from polyclinic.data.records import Listing, Record
from polyclinic.data.sources.folder import SUFFIXES

SMALLEST = 8
FAR_AREA = 4.0
FAR_ASPECT = 2.0
RARE = 0.1
"""Unusual sizes of more than this proportion of a site's images indicate a second scanner, not a fault."""

MISSING = FindingKind("missing file", "stop", "put the files there or remove them from the list")
BLANK = FindingKind("blank image", "stop", "get new copies of these images, or leave them out")


def file_findings(listing: Listing, stats: ListingStats) -> Iterator[Finding]:
    yield from missing_file_findings(listing, stats.missing)
    yield from unreadable_file_findings(listing, stats.unreadable)
    yield from build_findings(
        listing,
        BLANK,
        as_groups([position for position, image in stats.images.items() if image.blank]),
        lambda f: format_count(len(f), "image is", "images are") + " of one grey value all over",
    )
    yield from _size_findings(listing, stats)
    yield from _mixture_findings(listing, stats)
    yield from repeated_file_findings(listing)
    yield from similar_name_findings(listing)
    if count := len(listing.unlisted):
        yield Finding(
            "unlisted image",
            "warn",
            count,
            sentence=format_count(count, "image lies", "images lie") + " beside the listed ones without being listed",
            remedy="add them to the list or move them away; --show-names tells which they are",
        )


def missing_file_findings(listing: Listing, positions: Iterable[int]) -> Iterator[Finding]:
    names = cache(_list_names)

    @cache
    def find_folder(path: Path) -> Path | None:
        return path if os.path.isdir(path) or path == path.parent else find_similar(path)

    def find_similar(path: Path) -> Path | None:
        """Find the path that differs from this one only in case or in the form of accents."""
        folder = find_folder(path.parent)
        name = names(folder).get(_fold_name(path.name)) if folder else None
        return folder / name if folder and name else None

    def sentence(faults: list[Group]) -> str:
        found = (find_similar(listing.records[position].path) for fault in faults for position in fault)
        alike = sum(path is not None and os.path.isfile(path) for path in found)
        more = f", {alike:,} of them differ from a file that is there only in case or accents" if alike else ""
        return format_count(len(faults), "listed file") + " cannot be found" + more

    yield from build_findings(listing, MISSING, as_groups(positions), sentence)


def _list_names(folder: Path) -> dict[str, str]:
    with suppress(OSError):
        return {_fold_name(name): name for name in os.listdir(folder)}
    return {}


def _fold_name(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def unreadable_file_findings(listing: Listing, reasons: Mapping[int, str]) -> Iterator[Finding]:
    def sentence(faults: list[Group]) -> str:
        counts = Counter(reasons[position] for fault in faults for position in fault).most_common()
        return format_count(len(faults), "file") + " cannot be read: " + ", ".join(f"{why} ({n})" for why, n in counts)

    yield from build_findings(
        listing,
        FindingKind("unreadable file", "stop", "get new copies of these files, or leave them out"),
        as_groups(reasons),
        sentence,
    )


def _size_findings(listing: Listing, stats: ListingStats) -> Iterator[Finding]:
    tiny = [position for position, image in stats.images.items() if min(image.height, image.width) < SMALLEST]
    yield from build_findings(
        listing,
        FindingKind("tiny image", "warn", "check whether they are icons or previews, and leave those out"),
        as_groups(tiny),
        lambda f: format_count(len(f), "image is", "images are") + f" less than {SMALLEST} pixels high or wide",
    )
    sites: defaultdict[str, list[int]] = defaultdict(list)
    for position in sorted(stats.images.keys() - set(tiny)):
        sites[listing.records[position].site].append(position)
    yield from build_findings(
        listing,
        FindingKind(
            "unusual size", "warn", "look whether they show what the others show: previews, crops and scouts do not"
        ),
        as_groups([position for positions in sites.values() for position in _find_unusual(positions, stats)]),
        lambda f: (
            format_count(len(f), "image is", "images are")
            + f" {FAR_AREA:g} times larger or smaller than is usual at the site, or {FAR_ASPECT:g} times longer"
        ),
    )


def _find_unusual(positions: list[int], stats: ListingStats) -> list[int]:
    sides = np.array([(stats.images[p].height, stats.images[p].width) for p in positions], dtype=np.float64)
    area, aspect = np.log(sides.prod(axis=1)), np.log(sides[:, 0] / sides[:, 1])
    far = np.abs(area - np.median(area)) > np.log(FAR_AREA)
    far |= np.abs(aspect - np.median(aspect)) > np.log(FAR_ASPECT)
    return [positions[index] for index in np.flatnonzero(far)] if far.mean() <= RARE else []


def _mixture_findings(listing: Listing, stats: ListingStats) -> Iterator[Finding]:
    """Report mixed sizes, depths and colours among the used images."""
    images = {position: stats.images[position] for position in used_positions(listing) if position in stats.images}
    sizes, rarer = _count_values({position: f"{image.width} × {image.height}" for position, image in images.items()})
    if rarer:
        yield build_set_finding(
            listing,
            FindingKind("several sizes", "note", "nothing: all are brought to one size; choose pad, crop or stretch"),
            rarer,
            f"the images have {len(sizes):,} sizes; {sizes[0][1]:,} of {len(images):,} are {sizes[0][0]} pixels",
        )
    # DICOM files state themselves how their bits are shown
    depths, rarer = _count_values(
        {position: f"{image.bits} bits" for position, image in images.items() if not image.windowed}
    )
    if rarer:
        yield build_set_finding(
            listing,
            FindingKind(
                "several bit depths", "warn", "convert them alike; a set of 10- or 12-bit images needs the option bits"
            ),
            rarer,
            "the images are stored with different depths: " + ", ".join(f"{n:,} with {bits}" for bits, n in depths),
        )
    colours, rarer = _count_values(
        {position: "colour" if image.colour else "grey" for position, image in images.items()}
    )
    if rarer:
        yield build_set_finding(
            listing,
            FindingKind(
                "grey and colour",
                "note",
                "nothing: all are brought to the chosen channels; look whether marks are drawn",
            ),
            rarer,
            "of the images " + " and ".join(f"{n:,} are {c}" for c, n in colours),
        )


def _count_values(values: Mapping[int, str]) -> tuple[list[tuple[str, int]], list[int]]:
    """Count the values, the most frequent first, and list the images with any other value."""
    counts = Counter(values.values()).most_common()
    return counts, [position for position, value in values.items() if value != counts[0][0]]


def _file_identity(record: Record) -> tuple[str, str, int | None]:
    return os.path.normpath(record.path), record.array, record.row


def one_per_file(listing: Listing) -> list[int]:
    """Return one position for every file (or row of an array), a used one if there is any."""
    first: dict[tuple[str, str, int | None], int] = {}
    for position in sorted(range(len(listing.records)), key=lambda p: bool(listing.records[p].excluded)):
        first.setdefault(_file_identity(listing.records[position]), position)
    return sorted(first.values())


def repeated_file_findings(listing: Listing) -> Iterator[Finding]:
    files: defaultdict[tuple[str, str, int | None], list[int]] = defaultdict(list)
    for position, record in enumerate(listing.records):
        files[_file_identity(record)].append(position)
    twice = [positions for positions in files.values() if len(positions) > 1]
    yield from build_findings(
        listing,
        FindingKind("file listed twice", "warn", "remove all but one of these lines"),
        [group for group in twice if len({listing.records[p].label for p in group}) == 1],
        lambda f: format_count(len(f), "file is", "files are") + " listed more than once",
        spare=1,
    )
    yield from build_findings(
        listing,
        FindingKind("file listed twice with other labels", "stop", "find out which label is right, remove the others"),
        [group for group in twice if len({listing.records[p].label for p in group}) > 1],
        lambda f: format_count(len(f), "file is", "files are") + " listed more than once, under different labels",
        spare=1,
    )


def similar_name_findings(listing: Listing) -> Iterator[Finding]:
    """Report names in one folder that differ only in case or suffix."""
    files = [position for position in one_per_file(listing) if listing.records[position].row is None]
    stems = group_positions(listing, files, lambda record: _folded_stem(record.path))
    yield from build_findings(
        listing,
        FindingKind(
            "names alike", "warn", "look whether they are copies; some computers cannot keep both in one folder"
        ),
        [group for group in stems.values() if len(group) > 1],
        lambda f: (
            format_count(len(f), "group of files has", "groups of files have")
            + " names in one folder that differ in case or suffix only"
        ),
        spare=1,
    )


def _folded_stem(path: Path) -> str:
    name = path.stem if path.suffix.lower() in SUFFIXES else path.name
    return f"{os.path.normpath(path.parent)}/{name.casefold()}"
