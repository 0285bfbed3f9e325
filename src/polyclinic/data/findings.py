"""Faults found in a dataset: one finding for each kind of fault, with its count and the first five places.

Findings name no patient: they say where an image is listed.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

from polyclinic.core import DataError
from polyclinic.data.records import Listing, Record, is_disclosable

Level = Literal["stop", "warn", "note"]
"""stop: training may not start; warn: it may, but the result may mislead; note: for information."""
SHOWN = 5
NUMBERED = re.compile(r"((?:(?! = ).)*? |)(\d+(?: = \d+)*(?: = …)?)")
"""A place that ends in a number, or in the numbers of identical images: "labels.csv row 2 = 7"."""


@dataclass(frozen=True)
class Finding:
    kind: str
    """A stable name: "unreadable file"."""
    level: Level
    count: int
    sentence: str
    """The fault, in one sentence, with the count."""
    remedy: str
    """How to correct it, in one sentence."""
    where: tuple[str, ...] = ()
    """The first five places (`Record.where`), free of names."""
    handled: str = ""
    """How the loader of a public dataset already handles it; then it does not stop training."""
    positions: tuple[int, ...] = ()
    """The positions of all affected records in the listing."""

    @property
    def stops(self) -> bool:
        return self.level == "stop" and not self.handled


def first_places(places: Iterable[str]) -> tuple[str, ...]:
    """Return the first five distinct places."""
    return tuple(list(dict.fromkeys(places))[:SHOWN])


def format_places(places: Sequence[str], count: int) -> str:
    """Join places. A common beginning is written once if only numbers follow: "labels.csv row 2, 7, 9 and 12 more"."""
    more = f" and {count - len(places)} more" if count > len(places) else ""
    heads = {match[1] if (match := NUMBERED.fullmatch(place)) else None for place in places}
    shared = heads.pop() if len(heads) == 1 else None
    return f"{shared or ''}{', '.join(place.removeprefix(shared or '') for place in places)}{more}"


def raise_findings(findings: Iterable[Finding], end: str = "") -> None:
    """Raise a `DataError` with one sentence for each finding that stops training, followed by `end`."""
    sentences = [f"{f.sentence} ({format_places(f.where, f.count)}); {f.remedy}." for f in findings if f.stops]
    if sentences:
        raise DataError(" ".join([*sentences, *([end] if end else [])]))


Group: TypeAlias = Sequence[int]
"""One fault: the positions of the affected records in the listing."""
SHOWN_OF_GROUP = 3


class FindingKind(NamedTuple):
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
    every = [(fault, _is_excluded(listing, fault, spare)) for fault in faults]
    standing, excluded = ([fault for fault, is_excluded in every if is_excluded is side] for side in (False, True))
    for some, why in ((standing, handled), (excluded, _exclusion_reason(listing, excluded))):
        if some:
            where = first_places((place or partial(_format_place, listing))(fault) for fault in some)
            yield Finding(
                kind.name,
                kind.level,
                len(some),
                sentence(some),
                kind.remedy,
                where,
                handled=why,
                positions=tuple(chain.from_iterable(some)),
            )


def build_set_finding(
    listing: Listing, kind: FindingKind, positions: Group, sentence: str, handled: str = ""
) -> Finding:
    """Build a finding about the dataset as a whole; the records at `positions` are examples."""
    return Finding(
        kind.name,
        kind.level,
        len(positions),
        sentence,
        kind.remedy,
        where=first_places(place_of(listing, position) for position in positions),
        handled=handled,
        positions=tuple(positions),
    )


def _is_excluded(listing: Listing, fault: Group, spare: int) -> bool:
    used = sum(not listing.records[position].excluded for position in fault)
    return used < len(fault) and used <= spare


def _exclusion_reason(listing: Listing, faults: Iterable[Group]) -> str:
    reasons = [
        *dict.fromkeys(
            listing.records[position].excluded
            for fault in faults
            for position in fault
            if listing.records[position].excluded
        )
    ]
    return f"left out ({reasons[0]}{', …' if len(reasons) > 1 else ''})" if reasons else ""


def place_of(listing: Listing, position: int) -> str:
    return listing.records[position].where or f"image {position + 1}"


def _format_place(listing: Listing, fault: Group) -> str:
    places = [place_of(listing, position) for position in fault[:SHOWN_OF_GROUP]]
    return " = ".join([*places, *(["…"] if len(fault) > SHOWN_OF_GROUP else [])])


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
        groups[value(listing.records[position])].append(position)
    groups.pop("", None)
    return dict(groups)


def count_patients(listing: Listing, positions: Iterable[int]) -> int:
    """Count the patients; an image without a patient counts as one."""
    return len({listing.records[position].patient or position for position in positions})


def disclosable_groups(listing: Listing, groups: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return the labels or sites that are frequent enough to be shown."""
    return {name: group for name, group in groups.items() if is_disclosable(len(group), count_patients(listing, group))}
