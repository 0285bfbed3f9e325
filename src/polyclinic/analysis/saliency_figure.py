"""Draws the Grad-CAM maps of several runs side by side, described in words too; and sites' intensity histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from polyclinic.analysis.figures import COLOUR_MAP, HALF, draw_heat_map, draw_image, new_sheet, shorten_text
from polyclinic.analysis.saliency import (
    PREDICTION,
    TRUTH,
    Case,
    Explanation,
    IntensityDistribution,
    resize_map,
)
from polyclinic.core import SiteId
from polyclinic.evaluation.metrics import Floats
from polyclinic.reporting.figures import COLOURS, INK, TEXT, draw_curves, save

PANEL, WORDS, ABOVE, GROUP, BAR, TITLE = 2.0, 1.8, 0.3, 0.65, 0.9, 0.45
"""Inches: a panel's side, the width of a case's text, the space above a panel and a group, for colour bar and title."""
PLACES = (
    ("to the upper left", "at the top", "to the upper right"),
    ("to the left", "at the centre", "to the right"),
    ("to the lower left", "at the bottom", "to the lower right"),
)


def draw_saliency_gallery(found: Explanation, title: str, path: Path) -> None:
    """Draw a row for each case: the image, and every run's map beside it."""
    groups = [group for group in found.groups if len(group.shown)]
    heights = [len(group.shown) * (PANEL + ABOVE) + GROUP for group in groups]
    size = (WORDS + (len(found.names) + 1) * (PANEL + 0.15), sum(heights) + BAR + TITLE)
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05, wspace=0.0, hspace=0.0)
    sheet = new_sheet(title, size, layout)
    *parts, foot = sheet.subfigures(len(groups) + 1, 1, height_ratios=[*heights, BAR], squeeze=False).flatten()
    number = 1
    for part, group in zip(parts, groups, strict=True):
        heading = part.suptitle(
            f"{shorten_text(group.name, 40)}: {len(group.shown)} of {group.images} images",
            x=0.01,
            ha="left",
            fontsize=TEXT + 1,
            fontweight="bold",
            color=INK,
        )
        heading.set_parse_math(False)
        cases = found.cases[number - 1 : number - 1 + len(group.shown)]
        _draw_group(part, cases, found, number)
        number += len(cases)
    _draw_bar(foot, found)
    save(sheet, path, title, describe_gallery(found))


def _draw_group(part: SubFigure, cases: Sequence[Case], found: Explanation, number: int) -> None:
    ratios = [WORDS / PANEL, *[1.0] * (len(found.names) + 1)]
    panels = part.subplots(len(cases), len(ratios), squeeze=False, width_ratios=ratios)
    for axes in panels.flat:
        axes.set_axis_off()
    for place, (row, case) in enumerate(zip(panels, cases, strict=True)):
        words = [
            f"case {number + place}",
            shorten_text(case.site, 19),
            "truth:",
            shorten_text(found.classes[case.truth], 19),
        ]
        _write_text(row[0], "\n".join(words))
        draw_image(row[1], case.image)
        _draw_title(row[1], "image" if place == 0 else "", "", INK)
        for axes, name, look in zip(row[2:], found.names, case.saliencies, strict=True):
            heat = resize_map(look, case.image)
            draw_heat_map(axes, case.image, heat)
            right = look.predicted == case.truth
            said = f"{'✓' if right else '✗'} {shorten_text(found.classes[look.predicted], 16)} {look.probability:.2f}"
            _draw_title(axes, shorten_text(name, 19) if place == 0 else "", said, INK if right else COLOURS[1])
            if not heat.any():
                _draw_nothing(axes)


def _write_text(axes: Axes, words: str) -> None:
    text = axes.text(0, 0.5, words, va="center", fontsize=TEXT - 1, color=INK, parse_math=False, linespacing=1.4)
    text.set_in_layout(False)  # otherwise rows with long words would be narrower


def _draw_title(axes: Axes, name: str, said: str, colour: str) -> None:
    axes.set_title(said, fontsize=TEXT - 1, color=colour, loc="left", pad=4).set_parse_math(False)
    if name:
        line = axes.annotate(
            name, (0, 1), xytext=(0, 20), xycoords="axes fraction", textcoords="offset points", fontsize=TEXT - 1
        )
        line.set_parse_math(False)
        line.set_color(INK)


def _draw_nothing(axes: Axes) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}
    words = "nothing speaks\nfor this class"
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", fontsize=TEXT - 2, bbox=box)


def _draw_bar(part: SubFigure, found: Explanation) -> None:
    axes = part.subplots()
    bar = part.colorbar(ScalarMappable(cmap=COLOUR_MAP), cax=axes, orientation="horizontal")
    bar.ax.set_box_aspect(0.03)
    bar.ax.tick_params(labelsize=TEXT - 2, colors=INK)
    bar.set_label(
        f"Grad-CAM for {_format_target(found.of)}:\n1 is the map's own largest value; line: half of it",
        fontsize=TEXT - 1,
        color=INK,
    )
    bar.ax.xaxis.label.set_parse_math(False)


def _format_target(of: str) -> str:
    return {PREDICTION: "the predicted class", TRUTH: "the true class"}.get(of, f"the class {shorten_text(of, 24)}")


def describe_gallery(found: Explanation) -> str:
    """Describe the gallery in words."""
    cases = " ".join(describe_case(case, number, found) for number, case in enumerate(found.cases, 1))
    names = ", ".join(found.names)
    return f"Images with Grad-CAM maps for {_format_target(found.of)}, beside each other for {names}. {cases}"


def describe_case(case: Case, number: int, found: Explanation) -> str:
    looks = []
    for name, look in zip(found.names, case.saliencies, strict=True):
        says = f"{name} says {found.classes[look.predicted]} ({look.probability:.2f})"
        looks.append(f"{says} and looks {describe_map(resize_map(look, case.image))}")
    truth = found.classes[case.truth]
    return f"Case {number}, {case.group}, at {case.site}, is {truth}: {'; '.join(looks)}."


def describe_map(heat: Floats) -> str:
    """Describe where a map's centre lies, and how much of the image it covers."""
    seen = locate_map(heat)
    if seen is None:
        return "nowhere: nothing speaks for that class"
    down, across = (int(min(2, 3 * place)) for place in seen["centre"])
    return f"{PLACES[down][across]}, at {seen['looked_at']:.0%} of the image"


class MapLocation(TypedDict):
    centre: list[float]
    """From the top and from the left, as shares of the sides."""
    looked_at: float
    """The share of pixels above half the map's maximum."""


def locate_map(heat: Floats) -> MapLocation | None:
    """Where a map's centre lies and how much of the image it covers; None for a map of zeros."""
    if not heat.any():
        return None
    places = [
        np.average((np.arange(size) + 0.5) / size, weights=heat.sum(1 - axis)) for axis, size in enumerate(heat.shape)
    ]
    return {"centre": [float(place) for place in places], "looked_at": float((heat >= HALF * heat.max()).mean())}


def draw_intensities(sites: Mapping[SiteId, IntensityDistribution], title: str, path: Path) -> None:
    curves = {name: found.curve for name, found in sites.items()}
    draw_curves(curves, title, "pixel value, as stored", "% of the pixels that are not black", path, whole=False)
