"""Duplicates: images with the same pixels, or almost the same."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial

from polyclinic.data.findings import Finding, FindingKind, Group, build_findings, format_count
from polyclinic.data.quality.files import one_per_file
from polyclinic.data.quality.image_stats import ListingStats
from polyclinic.data.quality.near_duplicates import group_near_duplicates
from polyclinic.data.records import Listing
from polyclinic.data.splits import PARTS

CONFLICT = FindingKind(
    "duplicate with another label", "stop", "find out which label is correct, or leave all of them out"
)
LEAK = FindingKind(
    "duplicate in the test part", "stop", "remove them from one part: the result would count what was learned"
)
EXACT = FindingKind("duplicate image", "warn", "leave out all but one of each group")
NEAR_CONFLICT = FindingKind("near duplicate with another label", "warn", "compare the images: one label may be wrong")
NEAR = FindingKind("near duplicate", "warn", "compare the images and leave out copies, or give them one patient")


def duplicate_findings(listing: Listing, stats: ListingStats) -> Iterator[Finding]:
    positions = [p for p in one_per_file(listing) if p in stats.images and not stats.images[p].blank]
    same: defaultdict[bytes, list[int]] = defaultdict(list)
    for position in positions:
        same[stats.images[position].digest].append(position)
    distinct = [min(group, key=lambda position: bool(listing.records[position].excluded)) for group in same.values()]
    near = group_near_duplicates({position: stats.images[position].thumbnail for position in distinct})
    conflicting, agreeing = _separate_conflicts(listing, [group for group in same.values() if len(group) > 1])
    near_conflicting, near_agreeing = _separate_conflicts(listing, near)
    for kind, groups, likeness in (
        (CONFLICT, conflicting, "the same"),
        (LEAK, [group for group in agreeing if _has_leak(listing, group)], "the same"),
        (EXACT, [group for group in agreeing if not _has_leak(listing, group)], "the same"),
        (NEAR_CONFLICT, near_conflicting, "almost the same"),
        (NEAR, near_agreeing, "almost the same"),
    ):
        yield from build_findings(listing, kind, groups, partial(_describe_groups, listing, likeness), spare=1)


def _separate_conflicts(listing: Listing, groups: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups with conflicting labels, and the others."""
    conflicting = [group for group in groups if _differs_in(listing, group, "label")]
    return conflicting, [group for group in groups if not _differs_in(listing, group, "label")]


def _differs_in(listing: Listing, group: Group, field: str) -> bool:
    return len({getattr(listing.records[position], field) for position in group} - {""}) > 1


def _has_leak(listing: Listing, group: Group) -> bool:
    """Whether a copy of a test image is in another part. Copies between training and validation distort no result."""
    parts = {listing.records[position].split for position in group if not listing.records[position].excluded}
    return listing.official and "test" in parts and len(parts - {""}) > 1


def _describe_groups(listing: Listing, likeness: str, groups: list[Group]) -> str:
    fields = {"label": "under two labels", "patient": "of two patients", "site": "at two sites"}
    spread = {text: sum(_differs_in(listing, group, field) for group in groups) for field, text in fields.items()}
    spread |= Counter(_describe_parts(listing, group) for group in groups if _differs_in(listing, group, "split"))
    details = ", ".join(f"{count:,} {text}" for text, count in spread.items() if count)
    images = sum(map(len, groups))
    return f"{images:,} images have {likeness} pixels as others, in {format_count(len(groups), 'group')}" + (
        details and f": {details}"
    )


def _describe_parts(listing: Listing, group: Group) -> str:
    """Name the parts ("in train and test"). An unknown part is not named, since its cell may hold anything."""
    found = {listing.records[position].split for position in group} - {""}
    named = [part for part in PARTS if part in found]
    return "in " + " and ".join([*named, *(["other parts"] if len(named) < len(found) else [])])
