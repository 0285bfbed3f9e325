"""From faults (groups of records) to findings without patients' names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from polyclinic.data.findings import Finding, Level, first_places
from polyclinic.data.records import Listing, Record, is_disclosable

Group: TypeAlias = Sequence[int]
"""One fault: the positions of the affected records in the listing."""
SHOWN_OF_GROUP = 3


@dataclass(frozen=True)
class FindingKind:
    """The name, level and remedy of one kind of fault."""

    name: str
    level: Level
    remedy: str


def build_findings(
    listing: Listing,
    kind: FindingKind,
    faults: Iterable[Group],
    sentence: Callable[[list[Group]], str],
    *,
    spare: int = 0,
    place: Callable[[Group], str] | None = None,
    handled: str = "",
) -> Iterator[Finding]:
    """Build one finding of the open faults, and one of those that the loader already handles.

    A fault is handled if the loader excludes all but `spare` of its records; `handled` says that all faults are.
    """
    standing: list[Group] = []
    excluded: list[Group] = []
    for fault in faults:
        (excluded if _is_excluded(listing, fault, spare) else standing).append(fault)
    for some, why in ((standing, handled), (excluded, _exclusion_reason(listing, excluded))):
        if some:
            where = first_places((place or _place_formatter(listing))(fault) for fault in some)
            positions = tuple(position for fault in some for position in fault)
            yield Finding(kind.name, kind.level, len(some), sentence(some), kind.remedy, where, why, positions)


def build_set_finding(
    listing: Listing, kind: FindingKind, positions: Group, sentence: str, handled: str = ""
) -> Finding:
    """Build a finding about the dataset as a whole; the records at `positions` are examples."""
    places = first_places(place_of(listing, position) for position in positions)
    return Finding(kind.name, kind.level, len(positions), sentence, kind.remedy, places, handled, tuple(positions))


def _is_excluded(listing: Listing, fault: Group, spare: int) -> bool:
    used = sum(not listing.records[position].excluded for position in fault)
    return used < len(fault) and used <= spare


def _exclusion_reason(listing: Listing, faults: Iterable[Group]) -> str:
    reasons = dict.fromkeys(listing.records[position].excluded for fault in faults for position in fault)
    told = [reason for reason in reasons if reason]
    return f"left out ({told[0]}{', …' if len(told) > 1 else ''})" if told else ""


def place_of(listing: Listing, position: int) -> str:
    return listing.records[position].where or f"image {position + 1}"


def _place_formatter(listing: Listing) -> Callable[[Group], str]:
    def place(fault: Group) -> str:
        more = " = …" if len(fault) > SHOWN_OF_GROUP else ""
        return " = ".join(place_of(listing, position) for position in fault[:SHOWN_OF_GROUP]) + more

    return place


def format_count(count: int, one: str, several: str = "") -> str:
    """ "1 image", "1,234 images"."""
    return f"1 {one}" if count == 1 else f"{count:,} {several or one + 's'}"


def as_groups(positions: Iterable[int]) -> list[Group]:
    return [(position,) for position in positions]


def used_positions(listing: Listing) -> list[int]:
    return [position for position, record in enumerate(listing.records) if not record.excluded]


def group_positions(listing: Listing, positions: Iterable[int], value: Callable[[Record], str]) -> dict[str, list[int]]:
    """Group positions by a value of their records, leaving out those whose value is ""."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for position in positions:
        said = value(listing.records[position])
        if said:
            groups[said].append(position)
    return dict(groups)


def count_patients(listing: Listing, positions: Iterable[int]) -> int:
    """Count the patients; an image without a patient counts as one."""
    return len({listing.records[position].patient or position for position in positions})


def disclosable_groups(listing: Listing, groups: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return the labels or sites that are frequent enough to be shown."""
    return {name: group for name, group in groups.items() if is_disclosable(len(group), count_patients(listing, group))}
