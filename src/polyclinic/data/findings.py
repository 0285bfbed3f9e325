"""Faults found in a dataset: one finding for each kind of fault, with its count and the first five places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from polyclinic.core import DataError

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
    stopping = [finding for finding in findings if finding.stops]
    if stopping:
        sentences = [f"{f.sentence} ({format_places(f.where, f.count)}); {f.remedy}." for f in stopping]
        raise DataError(" ".join([*sentences, *([end] if end else [])]))
