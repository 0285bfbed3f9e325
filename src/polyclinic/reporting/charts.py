"""The kinds of charts of reports and the board; a section (`sections/`) calls one of them for a figure block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from polyclinic.reporting.blocks import Figure, Panel, Table
from polyclinic.reporting.formatting import (
    MISSING,
    format_compact,
    format_interval,
    format_percent,
    format_points,
)
from polyclinic.reporting.html.style import COLOURS
from polyclinic.reporting.html.svg import (
    WIDTH,
    Banded,
    Plot,
    Point,
    linear_ticks,
    log_ticks,
    marker_shape,
    padded_range,
    stroke_class,
)
from polyclinic.reporting.html.tags import tag

MOST_LINES = 8
"""More lines in one plot cannot be distinguished."""
MOST_PANELS = 16
MOST_VALUES = 60
ROW_HEIGHT = 38.0
Series = Mapping[str, Sequence[Banded]]


def without_band(points: Iterable[tuple[float, float]]) -> list[Banded]:
    return [(float(x), y, math.nan, math.nan) for x, y in points]


@dataclass(frozen=True)
class LineAxes:
    """The axes of a line chart. `show` formats a value of y; `least` is the smallest range of y."""

    x: str
    y: str
    show: Callable[[float], str] = format_percent
    bounds: tuple[float, float] = (0.0, 1.0)
    least: float = 0.1
    whole: bool = True
    """Whether x has whole numbers only, as rounds do."""

    @staticmethod
    def from_zero(x: str, y: str, series: Series, show: Callable[[float], str]) -> LineAxes:
        """Axes of a quantity that has no upper bound."""
        top = max((point[1] for points in series.values() for point in points), default=0.0)
        return LineAxes(x, y, show, (0.0, 2 * top or 1.0), 0.2 * top)

    def describe(self) -> str:
        return f"Lines of {self.y} against {self.x}."

    def show_exactly(self, value: float) -> str:
        return format_percent(value, 1) if self.show is format_percent else self.show(value)


def line_chart(name: str, title: str, series: Series, axes: LineAxes, words: str = "") -> Figure:
    """Draw lines. With more than three, HTML shows a panel for each, with the others in grey behind it."""
    known = {label: points for label, points in series.items() if points}
    shown = dict(list(known.items())[:MOST_PANELS]) if len(known) > 3 else known
    plot = _plot_lines(shown, axes, list(shown))
    panels = []
    if len(known) > 3:
        left = len(known) - len(shown)
        words += f" Grey: the others.{f' The first {len(shown)} of {len(known)}.' if left else ''}"
        panels = [
            Panel(
                label,
                _plot_lines(shown, axes, [label], number),
                f"{axes.describe()} It ends at {axes.show(points[-1][1])}.",
            )
            for number, (label, points) in enumerate(shown.items())
        ]
    last = "; ".join(f"{label} {axes.show(points[-1][1])}" for label, points in shown.items())
    return Figure(
        name,
        title,
        plot,
        f"{axes.describe()} Last values: {last}.",
        words.strip(),
        list(shown) if len(shown) > 1 else [],
        panels=panels,
        values=_value_table(title, shown, axes),
    )


def _plot_lines(series: Series, axes: LineAxes, shown: Sequence[str], number: int = 0) -> Plot:
    every = [point for points in series.values() for point in points]
    bands = [edge for name in shown for point in series[name] for edge in point[1:]]
    y = padded_range([*(point[1] for point in every), *bands], axes.least, axes.bounds)
    x = min(point[0] for point in every), max(point[0] for point in every)
    plot = Plot(x, y, height=190, width=300) if len(shown) == 1 and len(series) > 1 else Plot(x, y)
    plot.draw_axes(
        axes.x, axes.y, linear_ticks(*x, whole=axes.whole, show=format_compact), linear_ticks(*y, show=axes.show)
    )
    for name, points in series.items():
        if name not in shown:
            plot.add_path([(x, y) for x, y, *_ in points if math.isfinite(y)], "faint")
    for at, name in enumerate(shown):
        plot.add_line(series[name], number + at)
    return plot


def _value_table(title: str, series: Series, axes: LineAxes) -> Table:
    """Every point as a number; of long series every n-th, the last among them."""
    at = sorted({point[0] for points in series.values() for point in points})
    kept = at[:: -math.ceil(len(at) / MOST_VALUES)][::-1] if at else []
    found = {name: {point[0]: point for point in points} for name, points in series.items()}
    rows = [[format_compact(x), *(_format_point(points.get(x), axes) for points in found.values())] for x in kept]
    return Table(f"{title}: {axes.y}", [axes.x, *series], rows)


def _format_point(point: Banded | None, axes: LineAxes) -> str:
    if point is None or not math.isfinite(point[1]):
        return MISSING
    band = f" ({format_interval(point[2], point[3], axes.show_exactly)})" if math.isfinite(point[2]) else ""
    return axes.show_exactly(point[1]) + band


@dataclass(frozen=True)
class Estimate:
    """A named value with its interval."""

    name: str
    value: float
    low: float
    high: float

    def describe(self, is_difference: bool) -> str:
        """The value and its interval, in per cent or in percentage points."""
        show = format_points if is_difference else format_percent
        bounds = "" if math.isnan(self.low) else f" ({format_interval(self.low, self.high, show)})"
        return f"{show(self.value)}{bounds}"


def interval_chart(
    name: str, title: str, rows: Sequence[Estimate], axis: str, words: str = "", line: float | None = None
) -> Figure:
    """Draw a dot and its interval for each row. `line`: a value to compare all rows with; 0 makes x a difference."""
    edges = [edge for row in rows for edge in (row.value, row.low, row.high)]
    texts = [row.describe(line == 0) for row in rows]
    bounds = (-1.0, 1.0) if line == 0 else (0.0, 1.0)
    x = padded_range([*edges, *([line] if line is not None else [])], 0.1, bounds)
    plot = _plot_rows(x, len(rows))
    plot.draw_axes(axis, "", linear_ticks(*x, show=(lambda v: f"{100 * v:+.0f}") if line == 0 else format_percent), [])
    if line is not None:
        plot.add_path([(line, 0.0), (line, float(len(rows)))], "ideal")
    for number, row in enumerate(rows):
        y = _label_row(plot, len(rows), number, row.name, texts[number])
        if math.isfinite(row.low):
            plot.add_path([(row.low, y), (row.high, y)], "whisker s0")
        if math.isfinite(row.value):
            plot.add_marker(row.value, y, 0, 5)
    described = "; ".join(f"{row.name} {text}" for row, text in zip(rows, texts, strict=True))
    return Figure(name, title, plot, f"Dots with intervals of {axis}: {described}.", words)


def _plot_rows(x: tuple[float, float], count: int) -> Plot:
    return Plot(x, (0.0, float(count)), height=46 + ROW_HEIGHT * count, left=8, top=4)


def _label_row(plot: Plot, count: int, number: int, name: str, text: str) -> float:
    """Write the row's name and its text; returns where its dot or bar belongs."""
    y = count - number - 0.72
    plot.add_text(8, plot.y_pixel(y) - 10, name)
    plot.add_text(WIDTH - plot.right, plot.y_pixel(y) - 10, text, "end", "soft")
    return y


def stacked_bars(name: str, title: str, rows: Mapping[str, Sequence[float]], parts: Sequence[str]) -> Figure:
    """Draw for each site how its images divide among classes."""
    plot = _plot_rows((0.0, 1.0), len(rows))
    for number, (site, counts) in enumerate(rows.items()):
        y = _label_row(plot, len(rows), number, site, f"{sum(counts):,.0f} images")
        shares = [count / (sum(counts) or 1.0) for count in counts]
        for part, (start, end) in enumerate(pairwise(accumulate(shares, initial=0.0))):
            left, right = plot.x_pixel(start), plot.x_pixel(end)
            box = {"x": f"{left:.1f}", "y": f"{plot.y_pixel(y) - 5:.1f}", "width": f"{max(0.0, right - left - 1):.1f}"}
            plot.drawn.append(tag("rect", height=12, class_=f"f{part % COLOURS}", **box))
    plot.draw_axes("share of a site's images", "", linear_ticks(0, 1, show=format_percent), [])
    described = "; ".join(
        f"{site} " + ", ".join(f"{part} {count:g}" for part, count in zip(parts, counts, strict=True))
        for site, counts in rows.items()
    )
    return Figure(name, title, plot, f"Bars in parts. {described}.", legend=list(parts), areas=True)


def unit_square_curves(
    name: str,
    title: str,
    series: Mapping[str, Sequence[Point]],
    axes: tuple[str, str],
    words: str,
    ideal: Sequence[Point] = (),
) -> Figure:
    """Draw curves that lie between 0 and 1 on both axes: ROC, precision–recall."""
    plot = Plot((0.0, 1.0), (0.0, 1.0), height=360)
    scale = linear_ticks(0, 1, show=format_percent)
    plot.draw_axes(*axes, scale, scale)
    if ideal:
        plot.add_path(ideal, "ideal")
    for number, points in enumerate(series.values()):
        plot.add_path(points, stroke_class(number))
        if points:
            x, y = points[len(points) // 2]
            plot.add_marker(x, y, number)
    return Figure(name, title, plot, words, words, list(series))


@dataclass(frozen=True)
class ConfidenceBin:
    """Predictions of similar confidence: their mean confidence, the share that is right, its interval, their number."""

    confidence: float
    right: float
    low: float
    high: float
    count: int


def reliability_diagram(name: str, title: str, bins: Sequence[ConfidenceBin], words: str, start: float) -> Figure:
    """Draw the share of right predictions against their confidence, with their number at the bottom."""
    plot = Plot((start, 1.0), (0.0, 1.0), height=330)
    plot.draw_axes(
        "confidence of the model",
        "share of right predictions",
        linear_ticks(start, 1, show=format_percent),
        linear_ticks(0, 1, show=format_percent),
    )
    plot.add_path([(start, start), (1.0, 1.0)], "ideal")
    largest = max((one.count for one in bins), default=1)
    for one in bins:
        x, tall = plot.x_pixel(one.confidence), 34 * one.count / largest
        box = {"x": f"{x - 5:.1f}", "y": f"{plot.y_pixel(0) - tall:.1f}", "height": f"{tall:.1f}"}
        plot.drawn.append(tag("rect", width=10, class_="band f4", **box))
        plot.add_path([(one.confidence, one.low), (one.confidence, one.high)], "whisker s0")
        plot.add_marker(one.confidence, one.right, 0, 5)
    rows = [
        [
            format_percent(one.confidence),
            format_percent(one.right),
            format_interval(one.low, one.high, format_percent),
            f"{one.count:,}",
        ]
        for one in bins
    ]
    values = Table(title, ["mean confidence", "right", "95 % interval", "images"], rows)
    return Figure(
        name,
        title,
        plot,
        f"Dots with intervals: {'; '.join(f'{row[0]} sure, {row[1]} right, {row[3]} images' for row in rows)}.",
        words,
        values=values,
    )


@dataclass(frozen=True)
class CostPoint(Estimate):
    """A method's accuracy and cost. `optimal`: no other method costs less and has a higher accuracy."""

    cost: float
    optimal: bool


def cost_scatter(name: str, title: str, points: Sequence[CostPoint], x_label: str, y_label: str, words: str) -> Figure:
    """Draw accuracy against cost on a logarithmic axis; optimal methods are ringed and joined."""
    x = (min(point.cost for point in points) / 1.6, max(point.cost for point in points) * 1.6)
    y = padded_range([edge for point in points for edge in (point.value, point.low, point.high)])
    plot = Plot(x, y, height=300, log=True)
    ticks = (log_ticks if x[1] / x[0] > 10 else linear_ticks)(*x, show=format_compact)
    plot.draw_axes(x_label, y_label, ticks, linear_ticks(*y, show=format_percent))
    front = sorted((point.cost, point.value) for point in points if point.optimal)
    if len(front) > 1:
        plot.add_path([p for a, b in pairwise(front) for p in (a, (b[0], a[1]))] + front[-1:], "ideal")
    for number, point in enumerate(points):
        if math.isfinite(point.low):
            plot.add_path([(point.cost, point.low), (point.cost, point.high)], f"whisker s{number % COLOURS}")
        if point.optimal:
            at = {"cx": f"{plot.x_pixel(point.cost):.1f}", "cy": f"{plot.y_pixel(point.value):.1f}"}
            plot.drawn.append(tag("circle", r="8.5", class_="ring", **at))
        plot.drawn.append(marker_shape(plot.x_pixel(point.cost), plot.y_pixel(point.value), number, 5))
    described = "; ".join(
        f"{p.name} {format_compact(p.cost)}, {format_percent(p.value)}{', optimal' if p.optimal else ''}"
        for p in points
    )
    return Figure(
        name, title, plot, f"Dots of {y_label} against {x_label}: {described}.", words, [point.name for point in points]
    )
