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
    describe_last_values,
    line_legend,
    linear_ticks,
    log_ticks,
    marker_shape,
    padded_range,
    plain,
    share,
)
from polyclinic.reporting.html.tags import figure, join_cells, table, tag

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


def line_chart(title: str, series: Series, axes: Axes, words: str = "") -> Markup:
    """Lines over rounds in one picture; where they are many, a picture for each, with the others behind it."""
    known = {name: points for name, points in series.items() if points}
    if len(known) > 3:
        shown = dict(list(known.items())[:MOST_PANELS])
        pictures = [
            tag("figure", tag("figcaption", tag("strong", name)), _draw_panel(title, name, shown, axes))
            for name in shown
        ]
        grid = tag("div", *pictures, class_="figures small")
        left = len(known) - len(shown)
        behind = f"Grey: the others. The first {len(shown)} of {len(known)}." if left else "Grey: the others."
        return figure(grid, title, words, behind, values=_value_table(title, shown, axes), class_="wide")
    svg = _plot_lines(known, axes, list(known)).to_svg(
        title, f"{_describe_axes(axes)} Last values: {describe_last_values(known, axes.show)}."
    )
    picture = join_cells([svg, line_legend(known)]) if len(known) > 1 else svg
    return figure(picture, title, words, values=_value_table(title, known, axes))


def _draw_panel(title: str, name: str, series: Series, axes: Axes) -> Markup:
    number = list(series).index(name)
    words = f"{_describe_axes(axes)} It ends at {axes.show(series[name][-1][1])}."
    return _plot_lines(series, axes, [name], number).to_svg(f"{title}: {name}", words)


def _describe_axes(axes: Axes) -> str:
    return f"Lines of {axes.y} against {axes.x}."


def _plot_lines(series: Series, axes: Axes, shown: Sequence[str], number: int = 0) -> Plot:
    every = [point for points in series.values() for point in points]
    bands = [edge for name in shown for point in series[name] for edge in point[1:]]
    y = padded_range([*(point[1] for point in every), *bands], axes.least, axes.bounds)
    x = min(point[0] for point in every), max(point[0] for point in every)
    alone = len(shown) == 1 and len(series) > 1
    plot = Plot(x, y, height=190, width=300) if alone else Plot(x, y)
    plot.draw_axes(axes.x, axes.y, linear_ticks(*x, whole=True, show=plain), linear_ticks(*y, show=axes.show))
    for name, points in series.items():
        if name not in shown:
            plot.add_path([(x, y) for x, y, *_ in points if math.isfinite(y)], "faint")
    for at, name in enumerate(shown):
        plot.add_line(series[name], number + at)
    return plot


def _value_table(title: str, series: Series, axes: Axes) -> Markup:
    """Every point as a number; of long series every so many-th, the last among them."""
    at = sorted({point[0] for points in series.values() for point in points})
    every = math.ceil(len(at) / MOST_VALUES)
    kept = at[::-every][::-1] if at else []
    found = {name: {point[0]: point for point in points} for name, points in series.items()}
    rows = [[plain(x), *(_format_point(points.get(x), axes) for points in found.values())] for x in kept]
    return table(f"{title}: {axes.y}", [axes.x, *series], rows)


def _format_point(point: Banded | None, axes: Axes) -> str:
    if point is None or not math.isfinite(point[1]):
        return "–"
    exact = _exact_format(axes)
    band = f" ({exact(point[2])} to {exact(point[3])})" if math.isfinite(point[2]) else ""
    return exact(point[1]) + band


def _exact_format(axes: Axes) -> Callable[[float], str]:
    return (lambda value: f"{100 * value:.1f} %") if axes.show is share else axes.show


@dataclass(frozen=True)
class Dot:
    """A value and its interval, by name."""

    name: str
    value: float
    low: float
    high: float
    told: str


def interval_chart(title: str, rows: Sequence[Dot], axis: str, words: str = "", line: float | None = None) -> Markup:
    """A dot and its interval for each row, name and figures above it. `line`: a value that all are held against."""
    step, edges = 38.0, [edge for row in rows for edge in (row.value, row.low, row.high)]
    bounds = (-1.0, 1.0) if line == 0 else (0.0, 1.0)
    x = padded_range([*edges, *([line] if line is not None else [])], 0.1, bounds)
    plot = Plot(x, (0.0, float(len(rows))), height=46 + step * len(rows), left=8, top=4)
    signed = (lambda v: f"{100 * v:+.0f}") if line == 0 else share
    plot.draw_axes(axis, "", linear_ticks(*x, show=signed), [])
    if line is not None:
        plot.add_path([(line, 0.0), (line, float(len(rows)))], "ideal")
    for number, row in enumerate(rows):
        y = len(rows) - number - 0.72
        top = plot.y_pixel(y) - 10
        plot.add_text(8, top, row.name)
        plot.add_text(WIDTH - plot.right, top, row.told, "end", "soft")
        if math.isfinite(row.low):
            plot.add_path([(row.low, y), (row.high, y)], "whisker s0")
        if math.isfinite(row.value):
            plot.add_marker(row.value, y, 0, 5)
    said = "; ".join(f"{row.name} {row.told}" for row in rows)
    return figure(plot.to_svg(title, f"Dots with intervals of {axis}: {said}."), title, words)


def stacked_bars(title: str, rows: Mapping[str, Sequence[float]], parts: Sequence[str], words: str = "") -> Markup:
    """For each row, how it divides: bars as long as all, in parts."""
    step = 38.0
    plot = Plot((0.0, 1.0), (0.0, float(len(rows))), height=46 + step * len(rows), left=8, top=4)
    for number, (name, counts) in enumerate(rows.items()):
        y, total, start = len(rows) - number - 0.72, sum(counts) or 1.0, 0.0
        plot.add_text(8, plot.y_pixel(y) - 10, name)
        plot.add_text(WIDTH - plot.right, plot.y_pixel(y) - 10, f"{sum(counts):,.0f} images", "end", "soft")
        for part, count in enumerate(counts):
            left, right = plot.x_pixel(start), plot.x_pixel(start + count / total)
            box = {"x": f"{left:.1f}", "y": f"{plot.y_pixel(y) - 5:.1f}", "width": f"{max(0.0, right - left - 1):.1f}"}
            plot.drawn.append(tag("rect", height=12, class_=f"f{part % COLOURS}", **box))
            start += count / total
    plot.draw_axes("share of a site's images", "", linear_ticks(0, 1, show=share), [])
    said = "; ".join(
        f"{name} " + ", ".join(f"{part} {count:g}" for part, count in zip(parts, counts, strict=True))
        for name, counts in rows.items()
    )
    svg = plot.to_svg(title, f"Bars in parts. {said}.")
    return figure(join_cells([svg, area_legend(parts)]), title, words)


def area_legend(names: Sequence[str]) -> Markup:
    """A legend of areas."""
    square = '<svg viewBox="0 0 34 12" aria-hidden="true"><rect width="34" height="12" class="f{}"/></svg>{}'
    items = (tag("li", Markup(square).format(n % COLOURS, name)) for n, name in enumerate(names))
    return tag("ul", *items, class_="legend")


def unit_square_curves(
    title: str, series: Mapping[str, Sequence[Point]], axes: tuple[str, str], words: str, ideal: Sequence[Point] = ()
) -> Markup:
    """Curves between 0 and 1 both ways: ROC, precision–recall."""
    plot = Plot((0.0, 1.0), (0.0, 1.0), height=360)
    scale = linear_ticks(0, 1, show=share)
    plot.draw_axes(*axes, scale, scale)
    if ideal:
        plot.add_path(ideal, "ideal")
    for number, points in enumerate(series.values()):
        plot.add_path(points, f"line s{number % COLOURS} d{number % 4}")
        if points:
            x, y = points[len(points) // 2]
            plot.add_marker(x, y, number)
    svg = plot.to_svg(title, words)
    return figure(join_cells([svg, line_legend(series)]), title, words)


@dataclass(frozen=True)
class Bin:
    """Predictions of about the same confidence: how sure they were, how often right, how many."""

    sure: float
    right: float
    low: float
    high: float
    count: int


def reliability_diagram(title: str, bins: Sequence[Bin], words: str, start: float) -> Markup:
    """How often predictions are right against how sure they are, and below how many there are."""
    plot = Plot((start, 1.0), (0.0, 1.0), height=330)
    plot.draw_axes(
        "how sure the model is",
        "how often it is right",
        linear_ticks(start, 1, show=share),
        linear_ticks(0, 1, show=share),
    )
    plot.add_path([(start, start), (1.0, 1.0)], "ideal")
    largest = max((b.count for b in bins), default=1)
    for one in bins:
        x, tall = plot.x_pixel(one.sure), 34 * one.count / largest
        box = {"x": f"{x - 5:.1f}", "y": f"{plot.y_pixel(0) - tall:.1f}", "height": f"{tall:.1f}"}
        plot.drawn.append(tag("rect", width=10, class_="band f4", **box))
        plot.add_path([(one.sure, one.low), (one.sure, one.high)], "whisker s0")
        plot.add_marker(one.sure, one.right, 0, 5)
    said = "; ".join(f"{share(b.sure)} sure, {share(b.right)} right, {b.count} images" for b in bins)
    rows = [[share(b.sure), share(b.right), f"{share(b.low)} to {share(b.high)}", f"{b.count:,}"] for b in bins]
    values = table(title, ["mean confidence", "right", "95 % interval", "images"], rows)
    return figure(plot.to_svg(title, f"Dots with intervals: {said}."), title, words, values=values)


@dataclass(frozen=True)
class Spot:
    """A method in a picture of cost against accuracy; `edge`: none has both less cost and more accuracy."""

    name: str
    x: float
    y: float
    low: float
    high: float
    edge: bool


def cost_scatter(title: str, spots: Sequence[Spot], x_label: str, y_label: str, words: str) -> Markup:
    """Cost against accuracy; those at the edge ringed and joined."""
    positive = [spot.x for spot in spots if spot.x > 0]
    x = (min(positive) / 1.6, max(positive) * 1.6)
    y = padded_range([edge for spot in spots for edge in (spot.y, spot.low, spot.high)])
    plot = Plot(x, y, height=300, log=True)
    wide = x[1] / x[0] > 10
    plot.draw_axes(
        x_label, y_label, (log_ticks if wide else linear_ticks)(*x, show=plain), linear_ticks(*y, show=share)
    )
    front = sorted((spot.x, spot.y) for spot in spots if spot.edge)
    if len(front) > 1:
        plot.add_path([p for a, b in pairwise(front) for p in (a, (b[0], a[1]))] + front[-1:], "ideal")
    for number, spot in enumerate(spots):
        if math.isfinite(spot.low):
            plot.add_path([(spot.x, spot.low), (spot.x, spot.high)], f"whisker s{number % COLOURS}")
        if spot.edge:
            at = {"cx": f"{plot.x_pixel(spot.x):.1f}", "cy": f"{plot.y_pixel(spot.y):.1f}"}
            plot.drawn.append(tag("circle", r="8.5", class_="ring", **at))
        plot.drawn.append(marker_shape(plot.x_pixel(spot.x), plot.y_pixel(spot.y), number, 5))
    said = "; ".join(f"{s.name} {plain(s.x)}, {share(s.y)}{', at the edge' if s.edge else ''}" for s in spots)
    svg = plot.to_svg(title, f"Dots of {y_label} against {x_label}: {said}.")
    return figure(join_cells([svg, line_legend(spot.name for spot in spots)]), title, words)
