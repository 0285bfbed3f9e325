"""Pictures as PNG files, drawn by matplotlib: the colours and the saving that all share, and lines over rounds.

Colours are those of Okabe and Ito (2008) without yellow, which fades on white; a marker and a dash repeat
what the colour says, for readers and printers that see none. Each picture describes itself in its metadata.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from polyclinic.core import DataError
from polyclinic.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

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


def draw_curves(
    series: Mapping[str, Sequence[Point]], title: str, x_label: str, y_label: str, path: Path, whole: bool = True
) -> None:
    """Draw a line for each method, with a band where its points have one. The legend follows the lines' ends.

    `whole`: x has whole numbers only, as rounds do.
    """
    from matplotlib.ticker import MaxNLocator  # matplotlib takes a second to load

    if not any(series.values()):
        raise DataError(f"There are no points to draw for {title!r}: finish at least one round.")
    figure, axes = _new_figure(title, height=max(5.0, 1.2 + 0.28 * len(series)))
    lines = {name: _draw_line(axes, number, points) for number, (name, points) in enumerate(series.items())}
    axes.set_xlabel(x_label, fontsize=TEXT, color=INK, parse_math=False)
    axes.set_ylabel(y_label, fontsize=TEXT, color=INK, parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=whole, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.grid(color=FAINT, linewidth=0.8)
    last = {name: _last_value(points) for name, points in series.items()}
    order = sorted(series, key=last.__getitem__, reverse=True)
    draw_legend(axes, [lines[name] for name in order], [_wrap(name, 24) for name in order], TEXT - 1, 3.2)
    words = "; ".join(f"{name} {_format(value)}" for name, value in last.items())
    save(figure, path, title, f"Lines of {y_label} against {x_label}. Last values: {words}.")


def _new_figure(title: str, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    style_axes(axes)
    axes.tick_params(labelsize=TEXT - 1)
    figure.suptitle(_wrap(title, 78), x=0.01, ha="left", fontsize=TEXT + 2, color=INK).set_parse_math(False)
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


def style_axes(axes: Axes) -> None:
    """Two dark spines, and grid lines behind what is drawn."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK)


def draw_legend(
    axes: Axes,
    handles: Sequence[Artist],
    names: Sequence[str],
    size: float,
    length: float,
    spacing: float | None = None,
) -> None:
    """A legend right of the axes, with the names as they are. `length`: of the handles, in units of the font size."""
    legend = axes.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=size,
        labelcolor=INK,
        handlelength=length,
        labelspacing=spacing,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _last_value(points: Sequence[Point]) -> float:
    """The last defined value; a line without one comes below all others."""
    return next((point[1] for point in reversed(points) if math.isfinite(point[1])), -math.inf)


def _format(value: float) -> str:
    if not math.isfinite(value):
        return "undefined"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _wrap(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width)) or text


def save(figure: Figure, path: Path, title: str, description: str) -> None:
    """Save a picture as PNG with its title and description as metadata."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(
        picture, format="png", dpi=DPI, metadata={"Title": title, "Description": description, "Software": None}
    )
    write_atomically(path, picture.getvalue())
