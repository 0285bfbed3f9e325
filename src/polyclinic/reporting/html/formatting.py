"""Figures in the words of those who read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from polyclinic.evaluation.comparison import nan_if_none
from polyclinic.reporting.html.pairwise_tests import Difference
from polyclinic.reporting.html.tags import join_cells, screen_reader_text, tag

WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def of_hundred(row: Mapping[str, Any], metric: str = "accuracy") -> str:
    """ "66 of 100 test images (95 % interval 60 to 72)"."""
    low, high = bounds(row, metric)
    interval = "" if math.isnan(low) else f" (95 % interval {100 * low:.0f} to {100 * high:.0f})"
    return f"{100 * nan_if_none(row.get(metric)):.0f} of 100 {row.get('part', 'test')} images{interval}"


def bounds(row: Mapping[str, Any], metric: str) -> tuple[float, float]:
    low, high = (row.get("intervals") or {}).get(metric) or (None, None)
    return nan_if_none(low), nan_if_none(high)


def figure_of(row: Mapping[str, Any], metric: str) -> Markup:
    return with_interval(fixed(row.get(metric)), *bounds(row, metric))


def with_interval(told: str, low: float, high: float) -> Markup:
    """A figure, and below it its interval."""
    return join_cells([told, "" if math.isnan(low) else tag("small", f"{low:.3f} to {high:.3f}")])


def fixed(value: float | None, places: int = 3) -> str:
    return "–" if math.isnan(nan_if_none(value)) else f"{value:.{places}f}"


def points(value: float) -> str:
    """A difference of shares, in percentage points."""
    if math.isnan(value):
        return "–"
    return "0.0" if abs(value) < 0.0005 else f"{100 * value:+.1f}".replace("-", "−")


def change(one: Difference) -> Markup:
    """A difference with a mark only where the test allows one."""
    told = points(one.value)
    if one.verdict > 0:
        return join_cells([tag("span", f"{told} ▲", class_="up"), screen_reader_text(" better, beyond chance")])
    if one.verdict < 0:
        return join_cells([tag("span", f"{told} ▼", class_="down"), screen_reader_text(" worse, beyond chance")])
    return Markup(told)


def interval_of(one: Difference) -> str:
    return "–" if math.isnan(one.low) else f"{points(one.low)} to {points(one.high)}"


def series(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nobody"


def some(names: Sequence[str], most: int = 5) -> str:
    return series(names) if len(names) <= most else f"{', '.join(names[:most])} and {len(names) - most} more"


def count(amount: int, thing: str) -> str:
    """ "one hospital", "5 hospitals"."""
    return f"{WORDS[amount] if amount < 2 else amount} {thing}{'' if amount == 1 else 's'}"


def megabytes(amount: float) -> str:
    return f"{amount / 1e6:,.1f}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
