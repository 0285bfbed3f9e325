"""The kinds of pictures that reports have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from polyclinic.reporting.html.style import COLOURS
from polyclinic.reporting.html.svg import (
    WIDTH,
    Banded,
    Plot,
    Point,
    last_values,
    legend,
    marker,
    plain,
    powers,
    roomy,
    share,
    ticks,
)
from polyclinic.reporting.html.tags import figure, joined, table, tag

MOST_LINES = 8
"""More cannot be told apart: each gets a picture of its own."""
MOST_PANELS = 16
MOST_VALUES = 60
Series = Mapping[str, Sequence[Banded]]


@dataclass(frozen=True)
class Axes:
    """What a picture of lines is of."""

    x: str
    y: str
    show: Callable[[float], str] = share
    bounds: tuple[float, float] = (0.0, 1.0)
    least: float = 0.1


def lines(title: str, series: Series, axes: Axes, words: str = "") -> Markup:
    """Lines over rounds in one picture; where they are many, a picture for each, with the others behind it."""
    known = {name: points for name, points in series.items() if points}
    if len(known) > 3:
        shown = dict(list(known.items())[:MOST_PANELS])
        pictures = [
            tag("figure", tag("figcaption", tag("strong", name)), _panel(title, name, shown, axes)) for name in shown
        ]
        grid = tag("div", *pictures, class_="figures small")
        left = len(known) - len(shown)
        behind = f"Grey: the others. The first {len(shown)} of {len(known)}." if left else "Grey: the others."
        return figure(grid, title, words, behind, values=_values(title, shown, axes), class_="wide")
    svg = _drawn(known, axes, list(known)).svg(title, f"{_said(axes)} Last values: {last_values(known, axes.show)}.")
    picture = joined([svg, legend(known)]) if len(known) > 1 else svg
    return figure(picture, title, words, values=_values(title, known, axes))


def _panel(title: str, name: str, series: Series, axes: Axes) -> Markup:
    number = list(series).index(name)
    words = f"{_said(axes)} It ends at {axes.show(series[name][-1][1])}."
    return _drawn(series, axes, [name], number).svg(f"{title}: {name}", words)


def _said(axes: Axes) -> str:
    return f"Lines of {axes.y} against {axes.x}."


def _drawn(series: Series, axes: Axes, shown: Sequence[str], number: int = 0) -> Plot:
    every = [point for points in series.values() for point in points]
    bands = [edge for name in shown for point in series[name] for edge in point[1:]]
    y = roomy([*(point[1] for point in every), *bands], axes.least, axes.bounds)
    x = min(point[0] for point in every), max(point[0] for point in every)
    alone = len(shown) == 1 and len(series) > 1
    plot = Plot(x, y, height=190, width=300) if alone else Plot(x, y)
    plot.axes(axes.x, axes.y, ticks(*x, whole=True, show=plain), ticks(*y, show=axes.show))
    for name, points in series.items():
        if name not in shown:
            plot.path([(x, y) for x, y, *_ in points if math.isfinite(y)], "faint")
    for at, name in enumerate(shown):
        plot.line(series[name], number + at)
    return plot


def _values(title: str, series: Series, axes: Axes) -> Markup:
    """Every point as a number; of long series every so many-th, the last among them."""
    at = sorted({point[0] for points in series.values() for point in points})
    every = math.ceil(len(at) / MOST_VALUES)
    kept = at[::-every][::-1] if at else []
    found = {name: {point[0]: point for point in points} for name, points in series.items()}
    rows = [[plain(x), *(_value(points.get(x), axes) for points in found.values())] for x in kept]
    return table(f"{title}: {axes.y}", [axes.x, *series], rows)


def _value(point: Banded | None, axes: Axes) -> str:
    if point is None or not math.isfinite(point[1]):
        return "–"
    exact = _exact(axes)
    band = f" ({exact(point[2])} to {exact(point[3])})" if math.isfinite(point[2]) else ""
    return exact(point[1]) + band


def _exact(axes: Axes) -> Callable[[float], str]:
    return (lambda value: f"{100 * value:.1f} %") if axes.show is share else axes.show


@dataclass(frozen=True)
class Dot:
    """A value and its interval, by name."""

    name: str
    value: float
    low: float
    high: float
    told: str


def dots(title: str, rows: Sequence[Dot], axis: str, words: str = "", line: float | None = None) -> Markup:
    """A dot and its interval for each row, name and figures above it. `line`: a value that all are held against."""
    step, edges = 38.0, [edge for row in rows for edge in (row.value, row.low, row.high)]
    bounds = (-1.0, 1.0) if line == 0 else (0.0, 1.0)
    x = roomy([*edges, *([line] if line is not None else [])], 0.1, bounds)
    plot = Plot(x, (0.0, float(len(rows))), height=46 + step * len(rows), left=8, top=4)
    signed = (lambda v: f"{100 * v:+.0f}") if line == 0 else share
    plot.axes(axis, "", ticks(*x, show=signed), [])
    if line is not None:
        plot.path([(line, 0.0), (line, float(len(rows)))], "ideal")
    for number, row in enumerate(rows):
        y = len(rows) - number - 0.72
        top = plot.up(y) - 10
        plot.text(8, top, row.name)
        plot.text(WIDTH - plot.right, top, row.told, "end", "soft")
        if math.isfinite(row.low):
            plot.path([(row.low, y), (row.high, y)], "whisker s0")
        if math.isfinite(row.value):
            plot.mark(row.value, y, 0, 5)
    said = "; ".join(f"{row.name} {row.told}" for row in rows)
    return figure(plot.svg(title, f"Dots with intervals of {axis}: {said}."), title, words)


def shares(title: str, rows: Mapping[str, Sequence[float]], parts: Sequence[str], words: str = "") -> Markup:
    """For each row, how it divides: bars as long as all, in parts."""
    step = 38.0
    plot = Plot((0.0, 1.0), (0.0, float(len(rows))), height=46 + step * len(rows), left=8, top=4)
    for number, (name, counts) in enumerate(rows.items()):
        y, total, start = len(rows) - number - 0.72, sum(counts) or 1.0, 0.0
        plot.text(8, plot.up(y) - 10, name)
        plot.text(WIDTH - plot.right, plot.up(y) - 10, f"{sum(counts):,.0f} images", "end", "soft")
        for part, count in enumerate(counts):
            left, right = plot.across(start), plot.across(start + count / total)
            box = {"x": f"{left:.1f}", "y": f"{plot.up(y) - 5:.1f}", "width": f"{max(0.0, right - left - 1):.1f}"}
            plot.drawn.append(tag("rect", height=12, class_=f"f{part % COLOURS}", **box))
            start += count / total
    plot.axes("share of a site's images", "", ticks(0, 1, show=share), [])
    said = "; ".join(
        f"{name} " + ", ".join(f"{part} {count:g}" for part, count in zip(parts, counts, strict=True))
        for name, counts in rows.items()
    )
    svg = plot.svg(title, f"Bars in parts. {said}.")
    return figure(joined([svg, blocks(parts)]), title, words)


def blocks(names: Sequence[str]) -> Markup:
    """A legend of areas."""
    square = '<svg viewBox="0 0 34 12" aria-hidden="true"><rect width="34" height="12" class="f{}"/></svg>{}'
    items = (tag("li", Markup(square).format(n % COLOURS, name)) for n, name in enumerate(names))
    return tag("ul", *items, class_="legend")


def curves(
    title: str, series: Mapping[str, Sequence[Point]], axes: tuple[str, str], words: str, ideal: Sequence[Point] = ()
) -> Markup:
    """Curves between 0 and 1 both ways: ROC, precision–recall."""
    plot = Plot((0.0, 1.0), (0.0, 1.0), height=360)
    scale = ticks(0, 1, show=share)
    plot.axes(*axes, scale, scale)
    if ideal:
        plot.path(ideal, "ideal")
    for number, points in enumerate(series.values()):
        plot.path(points, f"line s{number % COLOURS} d{number % 4}")
        if points:
            x, y = points[len(points) // 2]
            plot.mark(x, y, number)
    svg = plot.svg(title, words)
    return figure(joined([svg, legend(series)]), title, words)


@dataclass(frozen=True)
class Bin:
    """Predictions of about the same confidence: how sure they were, how often right, how many."""

    sure: float
    right: float
    low: float
    high: float
    count: int


def reliability(title: str, bins: Sequence[Bin], words: str, start: float) -> Markup:
    """How often predictions are right against how sure they are, and below how many there are."""
    plot = Plot((start, 1.0), (0.0, 1.0), height=330)
    plot.axes("how sure the model is", "how often it is right", ticks(start, 1, show=share), ticks(0, 1, show=share))
    plot.path([(start, start), (1.0, 1.0)], "ideal")
    largest = max((b.count for b in bins), default=1)
    for one in bins:
        x, tall = plot.across(one.sure), 34 * one.count / largest
        box = {"x": f"{x - 5:.1f}", "y": f"{plot.up(0) - tall:.1f}", "height": f"{tall:.1f}"}
        plot.drawn.append(tag("rect", width=10, class_="band f4", **box))
        plot.path([(one.sure, one.low), (one.sure, one.high)], "whisker s0")
        plot.mark(one.sure, one.right, 0, 5)
    said = "; ".join(f"{share(b.sure)} sure, {share(b.right)} right, {b.count} images" for b in bins)
    rows = [[share(b.sure), share(b.right), f"{share(b.low)} to {share(b.high)}", f"{b.count:,}"] for b in bins]
    values = table(title, ["mean confidence", "right", "95 % interval", "images"], rows)
    return figure(plot.svg(title, f"Dots with intervals: {said}."), title, words, values=values)


@dataclass(frozen=True)
class Spot:
    """A method in a picture of cost against accuracy; `edge`: none has both less cost and more accuracy."""

    name: str
    x: float
    y: float
    low: float
    high: float
    edge: bool


def scatter(title: str, spots: Sequence[Spot], x_label: str, y_label: str, words: str) -> Markup:
    """Cost against accuracy; those at the edge ringed and joined."""
    positive = [spot.x for spot in spots if spot.x > 0]
    x = (min(positive) / 1.6, max(positive) * 1.6)
    y = roomy([edge for spot in spots for edge in (spot.y, spot.low, spot.high)])
    plot = Plot(x, y, height=300, log=True)
    wide = x[1] / x[0] > 10
    plot.axes(x_label, y_label, (powers if wide else ticks)(*x, show=plain), ticks(*y, show=share))
    front = sorted((spot.x, spot.y) for spot in spots if spot.edge)
    if len(front) > 1:
        plot.path([p for a, b in pairwise(front) for p in (a, (b[0], a[1]))] + front[-1:], "ideal")
    for number, spot in enumerate(spots):
        if math.isfinite(spot.low):
            plot.path([(spot.x, spot.low), (spot.x, spot.high)], f"whisker s{number % COLOURS}")
        if spot.edge:
            at = {"cx": f"{plot.across(spot.x):.1f}", "cy": f"{plot.up(spot.y):.1f}"}
            plot.drawn.append(tag("circle", r="8.5", class_="ring", **at))
        plot.drawn.append(marker(plot.across(spot.x), plot.up(spot.y), number, 5))
    said = "; ".join(f"{s.name} {plain(s.x)}, {share(s.y)}{', at the edge' if s.edge else ''}" for s in spots)
    svg = plot.svg(title, f"Dots of {y_label} against {x_label}: {said}.")
    return figure(joined([svg, legend(spot.name for spot in spots)]), title, words)
