"""Draws features of several runs by t-SNE: a colour for each site, a marker for each class (FedMP, Figures 5 and 6)."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from polyclinic.analysis.features import RunFeatures, embed_tsne
from polyclinic.analysis.figures import new_sheet, shorten_text
from polyclinic.core import Stream
from polyclinic.evaluation.metrics import Floats
from polyclinic.reporting.figures import COLOURS, FAINT, INK, TEXT, save

PANEL, LEGEND, ABOVE, TITLE = 4.8, 2.4, 1.05, 0.4
"""Inches: a panel's side, the legend's width, and the height of a panel's text and of the title."""
IN_A_ROW = 3
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "d")
SIZE, LARGER = 34, {"*": 2.0, "P": 1.3, "X": 1.3}
"""A marker's area in square points for 600 images; thin markers are drawn larger, so that all look alike."""
LISTED, LINE = 12, 0.235
"""The most names of sites, and of classes, in the legend; the height of a line in inches."""


def draw_features(
    runs: Sequence[RunFeatures], sites: Sequence[str], classes: Sequence[str], title: str, path: Path, stream: Stream
) -> None:
    """Draw a panel for each run. `sites`, `classes`: all names, by number."""
    columns = min(len(runs), IN_A_ROW)
    rows = -(-len(runs) // columns)
    shown = [classes[number] for number in np.unique(np.concatenate([run.points.label for run in runs]))]
    lines = 4 + len(_join_names(sites)) + len(_join_names(shown))
    size = max(columns * PANEL, PANEL * 1.3) + LEGEND, max(rows * (PANEL + ABOVE) + TITLE, LINE * lines)
    sheet = new_sheet(title, size, ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.0, hspace=0.04))
    panels = sheet.subplots(rows, columns, squeeze=False).flatten()
    # The colours of Okabe and Ito if they are enough; else evenly spaced hues.
    hues = colormaps["turbo"](np.linspace(0.02, 0.98, len(sites)))
    colours = list(COLOURS) if len(sites) <= len(COLOURS) else [to_hex(shade) for shade in hues]
    for axes, run in zip(panels, runs, strict=False):
        _draw_panel(axes, run, embed_tsne(run.points.values, stream.child("t-sne")), colours, stream.child("order"))
    for axes in panels[len(runs) :]:
        axes.set_visible(False)
    _draw_legend(sheet, sites, colours, {name: _class_marker(classes.index(name)) for name in shown})
    words = "; ".join(f"{run.name}: {', '.join(format_scores(run))}" for run in runs)
    save(sheet, path, title, f"t-SNE of features, a colour for each site, a marker for each class. {words}.")


def format_scores(run: RunFeatures) -> list[str]:
    """Return the scores of a run's features as text."""
    if run.scores is None:
        return ["too few patients of a class at two sites"]
    scores = {"site recognised": run.scores.recognised, "Hausdorff": run.scores.apart}
    return [f"{name} {score.value:.2f} (by chance {score.chance:.2f})" for name, score in scores.items() if score]


def _draw_panel(axes: Axes, run: RunFeatures, places: Floats, colours: Sequence[str], stream: Stream) -> None:
    # In random order, or the last site would hide the others.
    order = np.random.default_rng(stream.integer()).permutation(len(places))
    points, shades = run.points.select_rows(order), np.array(colours)
    size = SIZE * min(3.0, max(0.5, math.sqrt(600 / len(places))))
    for number in np.unique(points.label):
        own = points.label == number
        x, y = places[order][own].T
        axes.scatter(
            x,
            y,
            c=shades[points.site[own]],
            marker=_class_marker(number),
            s=size * LARGER.get(_class_marker(number), 1),
            alpha=0.8,
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_color(FAINT)
    axes.set_box_aspect(1)
    whose = "" if run.shared else ", each site's own network"
    words = [shorten_text(run.name, 44), f"stage {run.stage} of {run.stages}{whose}", *format_scores(run)]
    axes.set_title("\n".join(words), fontsize=TEXT, color=INK, loc="left").set_parse_math(False)


def _draw_legend(sheet: Figure, sites: Sequence[str], colours: Sequence[str], markers: dict[str, str]) -> None:
    """Draw the legend to the right of all panels: sites by colour, below them classes by marker."""
    dots = [_legend_handle("o", colour) for colour in colours[: len(sites)]]
    shapes = [_legend_handle(marker, INK) for marker in markers.values()]
    blank = _legend_handle("", INK)
    more_sites, more_classes = ([blank] * (len(names) > LISTED) for names in (sites, markers))
    handles = [blank, *dots[:LISTED], *more_sites, blank, blank, *shapes[:LISTED], *more_classes]
    names = ["site", *_join_names(sites), "", "class", *_join_names(list(markers))]
    legend = sheet.legend(
        handles,
        names,
        loc="outside right upper",
        frameon=False,
        fontsize=TEXT,
        labelcolor=INK,
        labelspacing=0.35,
        handlelength=1.2,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    for heading in (0, names.index("") + 1):
        legend.get_texts()[heading].set_fontweight("bold")


def _join_names(names: Sequence[str]) -> list[str]:
    more = [f"and {len(names) - LISTED} others"] if len(names) > LISTED else []
    return [shorten_text(name, 20) for name in names[:LISTED]] + more


def _legend_handle(marker: str, colour: str) -> Line2D:
    size = 8 * math.sqrt(LARGER.get(marker, 1))
    return Line2D([], [], linestyle="none", marker=marker, color=colour, markersize=size, markeredgecolor="white")


def _class_marker(number: int) -> str:
    return MARKERS[number % len(MARKERS)]
