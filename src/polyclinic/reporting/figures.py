"""Two pictures: a figure over the rounds, and a comparison of figures with their intervals.

Colours are those of Okabe and Ito (2008) without yellow, which fades on white; a marker and a dash repeat
what the colour says, for readers and printers that see none. Each picture describes itself in its metadata.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from polyclinic.core.errors import DataError, StoreError

Point: TypeAlias = tuple[float, float] | tuple[float, float, float, float]
"""(x, value) or (x, value, low, high). A value that is NaN leaves a gap."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", "-.", ":")
INK, FAINT = "#222222", "#dddddd"
WIDTH, DPI = 9.0, 200
"""Twice 900 pixels, so that a sharp screen shows 900 of its own."""
TEXT = 12.0
MARKS_PER_LINE = 10


@dataclass(frozen=True)
class ComparisonRow:
    """One line of a comparison."""

    name: str
    value: float
    low: float
    high: float


def draw_curves(
    series: Mapping[str, Sequence[Point]], title: str, x_label: str, y_label: str, path: Path, whole: bool = True
) -> None:
    """A line for each method, with a band where its points have one. The legend follows the lines' ends.

    `whole`: there are no values between 1 and 2, as of rounds.
    """
    if not any(series.values()):
        raise DataError(f"There are no points to draw for {title!r}: finish at least one round.")
    figure, axes = _paper(title, height=max(5.0, 1.2 + 0.28 * len(series)))
    lines = {name: _draw_line(axes, number, points) for number, (name, points) in enumerate(series.items())}
    axes.set_xlabel(x_label, fontsize=TEXT, color=INK, parse_math=False)
    axes.set_ylabel(y_label, fontsize=TEXT, color=INK, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=whole, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.grid(color=FAINT, linewidth=0.8)
    last = {name: _last(points) for name, points in series.items()}
    _draw_legend(axes, lines, sorted(series, key=last.__getitem__, reverse=True))
    words = "; ".join(f"{name} {_figure(value)}" for name, value in last.items())
    save(figure, path, title, f"Lines of {y_label} against {x_label}. Last values: {words}.")


def draw_comparison(rows: Sequence[ComparisonRow], title: str, value_label: str, path: Path) -> None:
    """A dot and its interval for each row, in the order given, with the figures beside them."""
    if not rows:
        raise DataError(f"There are no rows to draw for {title!r}: finish at least one run.")
    figure, axes = _paper(title, height=1.6 + 0.45 * len(rows))
    heights = range(len(rows))
    for height, row in zip(heights, rows, strict=True):
        axes.plot([row.low, row.high], [height, height], color=COLOURS[0], linewidth=2.5, solid_capstyle="butt")
        axes.plot([row.value], [height], "o", color=COLOURS[0], markersize=9, markeredgecolor="white")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(heights, [_wrapped(row.name, 30) for row in rows], parse_math=False)
    axes.set_xlabel(value_label, fontsize=TEXT, color=INK, parse_math=False)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    _draw_figures(axes, [_interval(row) for row in rows])
    words = "; ".join(f"{row.name} {_interval(row)}" for row in rows)
    save(figure, path, title, f"Dots with intervals of {value_label}. {words}.")


def _paper(title: str, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(labelsize=TEXT - 1, colors=INK)
    heading = figure.suptitle(_wrapped(title, 78), x=0.01, ha="left", fontsize=TEXT + 2, color=INK)
    heading.set_parse_math(False)
    return figure, axes


def _draw_line(axes: Axes, number: int, points: Sequence[Point]) -> Line2D:
    colour = COLOURS[number % len(COLOURS)]
    every = max(1, math.ceil(len(points) / MARKS_PER_LINE))
    (line,) = axes.plot(
        [point[0] for point in points],
        [point[1] for point in points],
        color=colour,
        marker=MARKERS[number % len(MARKERS)],
        linestyle=DASHES[number % len(DASHES)],
        linewidth=2,
        markersize=8,
        markeredgecolor="white",
        markeredgewidth=0.7,
        # Staggered, so that the markers of lines that lie on each other do not.
        markevery=(number % every, every),
    )
    banded = [point for point in points if len(point) == 4]
    x, low, high = ([point[column] for point in banded] for column in (0, 2, 3))
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    return line


def _draw_legend(axes: Axes, lines: Mapping[str, Line2D], order: Sequence[str]) -> None:
    legend = axes.legend(
        [lines[name] for name in order],
        [_wrapped(name, 24) for name in order],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=TEXT - 1,
        labelcolor=INK,
        handlelength=3.2,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_figures(axes: Axes, texts: Sequence[str]) -> None:
    """Right of the axes, as the labels of a second scale, so that the layout makes room for them."""
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(texts)), texts)
    right.tick_params(length=0, labelsize=TEXT - 1, labelcolor=INK)
    right.spines["right"].set_visible(False)


def _last(points: Sequence[Point]) -> float:
    """The last defined value; a line without one comes below all others."""
    return next((point[1] for point in reversed(points) if math.isfinite(point[1])), -math.inf)


def _figure(value: float) -> str:
    if not math.isfinite(value):
        return "undefined"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _interval(row: ComparisonRow) -> str:
    if math.isfinite(row.low) and math.isfinite(row.high):
        return f"{_figure(row.value)} ({_figure(row.low)} to {_figure(row.high)})"
    return _figure(row.value)


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width)) or text


def save(figure: Figure, path: Path, title: str, description: str) -> None:
    picture = BytesIO()
    metadata = {"Title": title, "Description": description, "Software": None}
    FigureCanvasAgg(figure)
    figure.savefig(picture, format="png", dpi=DPI, metadata=metadata)
    _write(path, picture.getvalue())


def _write(path: Path, content: bytes) -> None:
    """All or nothing: whoever reads `path` sees the old picture or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        raise StoreError(f"The picture {path} cannot be written: {error.strerror}.") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
