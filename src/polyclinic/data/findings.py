"""What is wrong with data: one finding per kind, counted, the first five told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from polyclinic.core.errors import DataError

Level = Literal["stop", "warn", "note"]
"""stop: training may not start; warn: it may, but read this before you believe the result; note: good to know."""
SHOWN = 5
NUMBERED = re.compile(r"((?:(?! = ).)*? |)(\d+(?: = \d+)*(?: = …)?)")
"""A place that ends in a number, or in several that are the same: "labels.csv row 2 = 7"."""


@dataclass(frozen=True)
class Finding:
    kind: str
    """A stable name: "unreadable file"."""
    level: Level
    count: int
    sentence: str
    """What is wrong, in one sentence, with the count."""
    remedy: str
    """What to do, in one sentence."""
    where: tuple[str, ...] = ()
    """The first five, told by `Record.where`: free of names."""
    handled: str = ""
    """What the loader of a named set does about it by itself; then it stops nobody."""
    positions: tuple[int, ...] = ()
    """Every record concerned, by its position in the listing."""

    @property
    def stops(self) -> bool:
        return self.level == "stop" and not self.handled


def first_places(places: Iterable[str]) -> tuple[str, ...]:
    """The first five places, each once."""
    return tuple(list(dict.fromkeys(places))[:SHOWN])


def format_places(places: Sequence[str], count: int) -> str:
    """ "labels.csv row 2, 7, 9, 12, 30 and 12 more": what all begin with is said once, if only numbers remain."""
    more = f" and {count - len(places)} more" if count > len(places) else ""
    heads = {match[1] if (match := NUMBERED.fullmatch(place)) else None for place in places}
    shared = heads.pop() if len(heads) == 1 else None
    return f"{shared or ''}{', '.join(place.removeprefix(shared or '') for place in places)}{more}"


def raise_findings(findings: Iterable[Finding], end: str = "") -> None:
    """Raise the findings that stop training, all in one error, a sentence each; `end` is the last one."""
    stopping = [finding for finding in findings if finding.stops]
    if stopping:
        sentences = [f"{f.sentence} ({format_places(f.where, f.count)}); {f.remedy}." for f in stopping]
        raise DataError(" ".join([*sentences, *([end] if end else [])]))
