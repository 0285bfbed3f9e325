"""The same picture more than once: pixel by pixel, or almost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from polyclinic.data.findings import Finding
from polyclinic.data.quality.files import one_per_file
from polyclinic.data.quality.finding_text import FindingKind, Group, build_findings, format_count
from polyclinic.data.quality.image_stats import ListingStats
from polyclinic.data.quality.near_duplicates import group_near_duplicates
from polyclinic.data.records import Listing
from polyclinic.data.splits import PARTS

CONFLICT = FindingKind(
    "duplicate with another label", "stop", "find out which label is right, or leave all of them out"
)
LEAK = FindingKind(
    "duplicate in the test part", "stop", "remove them from one part: the result would count what was learned"
)
EXACT = FindingKind("duplicate image", "warn", "leave out all but one of each group")
NEAR_CONFLICT = FindingKind(
    "near duplicate with another label", "warn", "look at them side by side: one label may be wrong"
)
NEAR = FindingKind("near duplicate", "warn", "look at them side by side and leave out copies, or give them one patient")


def duplicate_findings(listing: Listing, stats: ListingStats) -> Iterator[Finding]:
    positions = [p for p in one_per_file(listing) if p in stats.images and not stats.images[p].blank]
    same: defaultdict[bytes, list[int]] = defaultdict(list)
    for position in positions:
        same[stats.images[position].digest].append(position)
    yield from _exact_findings(listing, [group for group in same.values() if len(group) > 1])
    distinct = [_choose_representative(listing, group) for group in same.values()]
    thumbnails = {position: stats.images[position].thumbnail for position in distinct}
    yield from _near_findings(listing, group_near_duplicates(thumbnails))


def _choose_representative(listing: Listing, group: list[int]) -> int:
    return next((position for position in group if not listing.records[position].excluded), group[0])


def _exact_findings(listing: Listing, groups: list[list[int]]) -> Iterator[Finding]:
    conflict = [group for group in groups if _differs_in(listing, group, "label")]
    agreeing = [group for group in groups if not _differs_in(listing, group, "label")]
    leak = [group for group in agreeing if _has_leak(listing, group)]
    plain = [group for group in agreeing if not _has_leak(listing, group)]
    for kind, some in ((CONFLICT, conflict), (LEAK, leak), (EXACT, plain)):
        yield from build_findings(
            listing, kind, some, lambda f: _describe_groups(listing, f, "the same pixels"), spare=1
        )


def _near_findings(listing: Listing, groups: list[list[int]]) -> Iterator[Finding]:
    conflict = [group for group in groups if _differs_in(listing, group, "label")]
    plain = [group for group in groups if not _differs_in(listing, group, "label")]
    for kind, some in ((NEAR_CONFLICT, conflict), (NEAR, plain)):
        yield from build_findings(
            listing, kind, some, lambda f: _describe_groups(listing, f, "almost the same pixels"), spare=1
        )


def _differs_in(listing: Listing, group: Group, field: str) -> bool:
    return len({getattr(listing.records[position], field) for position in group} - {""}) > 1


def _has_leak(listing: Listing, group: Group) -> bool:
    """A result is believed for its test images; a copy between training and validation only flatters the choice."""
    parts = {listing.records[position].split for position in group if not listing.records[position].excluded}
    return listing.official and "test" in parts and len(parts - {""}) > 1


def _describe_groups(listing: Listing, groups: list[Group], what: str) -> str:
    images = sum(map(len, groups))
    fields = {
        "label": "under two labels",
        "patient": "of two patients",
        "site": "at two sites",
    }
    spread = {told: sum(_differs_in(listing, group, field) for group in groups) for field, told in fields.items()}
    spread |= Counter(_describe_parts(listing, group) for group in groups if _differs_in(listing, group, "split"))
    details = ", ".join(f"{count:,} {told}" for told, count in spread.items() if count)
    return f"{images:,} images have {what} as others, in {format_count(len(groups), 'group')}" + (
        details and f": {details}"
    )


def _describe_parts(listing: Listing, group: Group) -> str:
    """ "in train and test"; a part that is none of the three is not named: its cell may hold anything."""
    found = {listing.records[position].split for position in group} - {""}
    named = [part for part in PARTS if part in found]
    return "in " + " and ".join([*named, *(["other parts"] if len(named) < len(found) else [])])
