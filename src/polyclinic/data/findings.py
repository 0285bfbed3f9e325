"""What is wrong with data: one finding per kind, counted, the first five told."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from polyclinic.errors import DataError

Level = Literal["stop", "warn", "note"]
"""stop: training may not start; warn: it may, but read this before you believe the result; note: good to know."""
SHOWN = 5


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


def first(places: Iterable[str]) -> tuple[str, ...]:
    """The first five places, each once."""
    return tuple(list(dict.fromkeys(places))[:SHOWN])


def told(places: Sequence[str], count: int) -> str:
    """ "labels.csv row 2, 7, 9, 12, 30 and 12 more": what all begin with is said once."""
    more = f" and {count - len(places)} more" if count > len(places) else ""
    head = os.path.commonprefix(list(places)) if len(places) > 1 else ""  # noqa: RUF071  texts, not paths
    shared = head[: head.rfind(" ") + 1]
    return f"{shared}{', '.join(place.removeprefix(shared) for place in places)}{more}"


def refuse(findings: Iterable[Finding]) -> None:
    """Raise the findings that stop training, all in one error, a sentence each."""
    stopping = [finding for finding in findings if finding.stops]
    if stopping:
        raise DataError(" ".join(f"{f.sentence} ({told(f.where, f.count)}); {f.remedy}." for f in stopping))
