"""Plots as SVG: text stays text, and colours follow the page, light, dark or printed.

A plot is 400 units wide, so that its letters can be read on a phone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from markupsafe import Markup

from polyclinic.reporting.html.style import CHART_CSS, COLOURS
from polyclinic.reporting.html.tags import join_markup, tag

Point: TypeAlias = tuple[float, float]
Banded: TypeAlias = tuple[float, float, float, float]
"""x, value, low, high."""
Ticks: TypeAlias = Sequence[tuple[float, str]]
WIDTH = 400.0
DASHES = 4
MARKERS = 5
MARKS_PER_LINE = 8


@dataclass
class Plot:
    """Two axes and the shapes between them."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: float = 250.0
    left: float = 60.0
    bottom: float = 40.0
    width: float = WIDTH
    log: bool = False
    """Whether x grows by factors."""
    right: float = 14.0
    top: float = 10.0
    drawn: list[Markup] = field(default_factory=list)

    def x_pixel(self, x: float) -> float:
        low, high = self.x
        share = (math.log(x / low) / math.log(high / low)) if self.log else (x - low) / ((high - low) or 1.0)
        return self.left + share * (self.width - self.left - self.right)

    def y_pixel(self, y: float) -> float:
        low, high = self.y
        return self.height - self.bottom - (y - low) / ((high - low) or 1.0) * (self.height - self.bottom - self.top)

    def draw_axes(self, x_label: str, y_label: str, x_ticks: Ticks, y_ticks: Ticks) -> None:
        floor, end = self.y_pixel(self.y[0]), self.width - self.right
        for value, text in y_ticks:
            at = self.y_pixel(value)
            self.add_path([(self.left, at), (end, at)], "grid", in_data_units=False)
            self.add_text(self.left - 6, at + 4, text, "end", "soft")
        for value, text in x_ticks:
            at = self.x_pixel(value)
            self.add_path([(at, floor), (at, floor + 4)], "axis", in_data_units=False)
            self.add_text(at, floor + 17, text, "middle", "soft")
        self.add_path([(self.left, floor), (end, floor)], "axis", in_data_units=False)
        self.add_text((self.left + end) / 2, self.height - 5, x_label, "middle")
        if y_label:
            middle = (self.top + floor) / 2
            turned = f"rotate(-90 12 {middle:.1f})"
            self.drawn.append(tag("text", y_label, x=12, y=f"{middle:.1f}", text_anchor="middle", transform=turned))

    def add_path(self, points: Iterable[Point], class_: str, in_data_units: bool = True, closed: bool = False) -> None:
        """Add a path. `in_data_units`: the points are values, else pixels."""
        places = [(self.x_pixel(x), self.y_pixel(y)) if in_data_units else (x, y) for x, y in points]
        steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        self.drawn.append(tag("path", d=f"M{steps}{'Z' if closed else ''}", class_=class_))

    def add_text(self, x: float, y: float, words: str, anchor: str = "start", class_: str | None = None) -> None:
        self.drawn.append(tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_=class_))

    def add_marker(self, x: float, y: float, number: int, size: float = 4.2) -> None:
        self.drawn.append(marker_shape(self.x_pixel(x), self.y_pixel(y), number, size))

    def add_line(self, points: Sequence[Banded], number: int) -> None:
        """Add a line with its band and some markers."""
        wide = [p for p in points if math.isfinite(p[2]) and math.isfinite(p[3])]
        if len(wide) > 1:
            around = [*((x, high) for x, _, _, high in wide), *((x, low) for x, _, low, _ in reversed(wide))]
            low, high = self.y
            clamped = [(x, min(max(y, low), high)) for x, y in around]
            self.add_path(clamped, f"band f{number % COLOURS}", closed=True)
        known = [(x, y) for x, y, *_ in points if math.isfinite(y)]
        self.add_path(known, stroke_class(number))
        every = max(1, math.ceil(len(known) / MARKS_PER_LINE))
        for x, y in known[number % every :: every]:
            self.add_marker(x, y, number)

    def to_svg(self, title: str, alt: str) -> Markup:
        """`alt` says what the plot shows, for readers who do not see it."""
        return tag(
            "svg",
            *self.drawn,
            class_="plot",
            viewBox=f"0 0 {self.width:g} {self.height:g}",
            role="img",
            aria_label=f"{title}. {alt}",
        )


def stroke_class(number: int) -> str:
    return f"line s{number % COLOURS} d{number % DASHES}"


def marker_shape(x: float, y: float, number: int, size: float = 4.2) -> Markup:
    class_ = f"mark f{number % COLOURS}"
    corners = _CORNERS[number % MARKERS]
    if not corners:
        return tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{size:g}", class_=class_)
    steps = "L".join(f"{x + size * a:.1f} {y + size * b:.1f}" for a, b in corners)
    return tag("path", d=f"M{steps}Z", class_=class_)


_CORNERS: tuple[tuple[Point, ...], ...] = (
    (),
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
    ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    ((0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
)


def legend_swatch(number: int, area: bool = False) -> Markup:
    """A short line with its marker, or a filled box, as it stands in a legend."""
    if area:
        drawn = tag("rect", width=34, height=12, class_=f"f{number % COLOURS}")
    else:
        drawn = tag("path", d="M0 6L34 6", class_=stroke_class(number)) + marker_shape(17, 6, number)
    return tag("svg", drawn, viewBox="0 0 34 12", width=34, height=12, aria_hidden="true")


def to_svg_file(plot: Plot, title: str, alt: str, legend: Sequence[str] = (), areas: bool = False) -> str:
    """The plot as a file of its own, with its title above, its legend below, and the page's colours."""
    top, step = 26.0, 18.0
    height = top + plot.height + (step * len(legend) + 8 if legend else 0)
    entries = [
        tag(
            "g",
            legend_swatch(number, areas),
            tag("text", name, x=42, y=10),
            transform=f"translate({plot.left:g} {y:g})",
        )
        for number, name in enumerate(legend)
        for y in [top + plot.height + 8 + step * number]
    ]
    inside = join_markup(
        [
            tag("title", f"{title}. {alt}"),
            tag("style", Markup(CHART_CSS)),
            tag("rect", width="100%", height="100%", style="fill:var(--paper)"),
            tag("text", title, x=8, y=16, style="font-weight:600"),
            tag("g", *plot.drawn, transform=f"translate(0 {top:g})"),
            *entries,
        ]
    )
    whole = tag(
        "svg",
        inside,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {plot.width:g} {height:g}",
        width=int(2 * plot.width),
        role="img",
        font_family="system-ui,sans-serif",
    )
    return f"{whole}\n"


def linear_ticks(
    low: float, high: float, most: int = 5, whole: bool = False, show: Callable[[float], str] = str
) -> Ticks:
    """Ticks at round values, 1, 2 or 5 times a power of ten apart."""
    rough = max((high - low) / most, 1e-9)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(n * step, show(n * step)) for n in range(first, last + 1)]


def log_ticks(low: float, high: float, show: Callable[[float], str]) -> Ticks:
    """Ticks of a logarithmic axis: 1, 3, 10, …"""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = len(decades) > 4
    found = [m * 10.0**d for d in decades for m in ((1,) if few else (1, 3)) if low <= m * 10.0**d <= high]
    return [(value, show(value)) for value in found or [low, high]]


def padded_range(
    values: Iterable[float], least: float = 0.1, bounds: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float]:
    """A range that holds all values with some room, within bounds."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=bounds[0]), max(known, default=bounds[1])
    pad = max(0.06 * (high - low), (least - (high - low)) / 2)
    return max(bounds[0], low - pad), min(bounds[1], high + pad)
