"""The same picture more than once: pixel by pixel, or almost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from polyclinic.data.findings import Finding
from polyclinic.data.quality.files import one_per_file
from polyclinic.data.quality.finding_text import Group, Kind, findings, many
from polyclinic.data.quality.image_stats import Looks
from polyclinic.data.quality.near_duplicates import near_groups
from polyclinic.data.records import Listing
from polyclinic.data.splits import PARTS

CONFLICT = Kind("duplicate with another label", "stop", "find out which label is right, or leave all of them out")
LEAK = Kind("duplicate in the test part", "stop", "remove them from one part: the result would count what was learned")
EXACT = Kind("duplicate image", "warn", "leave out all but one of each group")
NEAR_CONFLICT = Kind("near duplicate with another label", "warn", "look at them side by side: one label may be wrong")
NEAR = Kind("near duplicate", "warn", "look at them side by side and leave out copies, or give them one patient")


def duplicate_findings(listing: Listing, looks: Looks) -> Iterator[Finding]:
    positions = [p for p in one_per_file(listing) if p in looks.images and not looks.images[p].blank]
    same: defaultdict[bytes, list[int]] = defaultdict(list)
    for position in positions:
        same[looks.images[position].digest].append(position)
    yield from _exact(listing, [group for group in same.values() if len(group) > 1])
    distinct = [_representative(listing, group) for group in same.values()]
    thumbnails = {position: looks.images[position].thumbnail for position in distinct}
    yield from _near(listing, near_groups(thumbnails))


def _representative(listing: Listing, group: list[int]) -> int:
    return next((position for position in group if not listing.records[position].excluded), group[0])


def _exact(listing: Listing, groups: list[list[int]]) -> Iterator[Finding]:
    conflict = [group for group in groups if _spread(listing, group, "label")]
    agreeing = [group for group in groups if not _spread(listing, group, "label")]
    leak = [group for group in agreeing if _leaks(listing, group)]
    plain = [group for group in agreeing if not _leaks(listing, group)]
    for kind, some in ((CONFLICT, conflict), (LEAK, leak), (EXACT, plain)):
        yield from findings(listing, kind, some, lambda f: _told(listing, f, "the same pixels"), spare=1)


def _near(listing: Listing, groups: list[list[int]]) -> Iterator[Finding]:
    conflict = [group for group in groups if _spread(listing, group, "label")]
    plain = [group for group in groups if not _spread(listing, group, "label")]
    for kind, some in ((NEAR_CONFLICT, conflict), (NEAR, plain)):
        yield from findings(listing, kind, some, lambda f: _told(listing, f, "almost the same pixels"), spare=1)


def _spread(listing: Listing, group: Group, field: str) -> bool:
    return len({getattr(listing.records[position], field) for position in group} - {""}) > 1


def _leaks(listing: Listing, group: Group) -> bool:
    """A result is believed for its test images; a copy between training and validation only flatters the choice."""
    parts = {listing.records[position].split for position in group if not listing.records[position].excluded}
    return listing.official and "test" in parts and len(parts - {""}) > 1


def _told(listing: Listing, groups: list[Group], what: str) -> str:
    images = sum(map(len, groups))
    fields = {
        "label": "under two labels",
        "patient": "of two patients",
        "site": "at two sites",
    }
    spread = {told: sum(_spread(listing, group, field) for group in groups) for field, told in fields.items()}
    spread |= Counter(_parts(listing, group) for group in groups if _spread(listing, group, "split"))
    details = ", ".join(f"{count:,} {told}" for told, count in spread.items() if count)
    return f"{images:,} images have {what} as others, in {many(len(groups), 'group')}" + (details and f": {details}")


def _parts(listing: Listing, group: Group) -> str:
    """ "in train and test"; a part that is none of the three is not named: its cell may hold anything."""
    found = {listing.records[position].split for position in group} - {""}
    named = [part for part in PARTS if part in found]
    return "in " + " and ".join([*named, *(["other parts"] if len(named) < len(found) else [])])
