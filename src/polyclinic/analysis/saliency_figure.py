"""Draws Grad-CAM maps, described in words too: of several runs side by side, or of predicted files; and histograms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from polyclinic.analysis.figures import COLOUR_MAP, HALF, draw_heat_map, draw_image, new_sheet, shorten_text
from polyclinic.analysis.predict import Prediction, Preprocessing, RunModel
from polyclinic.analysis.saliency import (
    PREDICTION,
    TRUTH,
    Case,
    Explanation,
    IntensityDistribution,
    grad_cam,
    resize_map,
)
from polyclinic.core import RecipeError, SiteId
from polyclinic.evaluation.metrics import Floats
from polyclinic.reporting.figures import COLOURS, INK, TEXT, draw_curves, save
from polyclinic.storage.files import explain_os_errors

PANEL, WORDS, ABOVE, GROUP, BAR, TITLE = 2.0, 1.8, 0.3, 0.65, 0.9, 0.45
"""Inches: a panel's side, the width of a case's text, the space above a panel and a group, for colour bar and title."""
LONGEST = 60
"""Letters of a file's name that the figure's name keeps."""
PLACES = (
    ("to the upper left", "at the top", "to the upper right"),
    ("to the left", "at the centre", "to the right"),
    ("to the lower left", "at the bottom", "to the lower right"),
)


def draw_saliency_gallery(found: Explanation, title: str, path: Path) -> None:
    """Draw a row for each case: the image, and every run's map beside it."""
    groups = [group for group in found.groups if len(group.shown)]
    heights = [len(group.shown) * (PANEL + ABOVE) + GROUP for group in groups]
    size = WORDS + (len(found.names) + 1) * (PANEL + 0.15), sum(heights) + BAR + TITLE
    sheet = new_sheet(title, size, ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05, wspace=0.0, hspace=0.0))
    *parts, foot = sheet.subfigures(len(groups) + 1, 1, height_ratios=[*heights, BAR], squeeze=False).flatten()
    number = 1
    for part, group in zip(parts, groups, strict=True):
        part.suptitle(
            f"{shorten_text(group.name, 40)}: {len(group.shown)} of {group.images} images",
            x=0.01,
            ha="left",
            fontsize=TEXT + 1,
            fontweight="bold",
            color=INK,
        ).set_parse_math(False)
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
        truth = shorten_text(found.classes[case.truth], 19)
        words = "\n".join([f"case {number + place}", shorten_text(case.site, 19), "truth:", truth])
        row[0].text(
            0, 0.5, words, va="center", fontsize=TEXT - 1, color=INK, parse_math=False, linespacing=1.4
        ).set_in_layout(False)  # otherwise rows with long words would be narrower
        draw_image(row[1], case.image)
        _draw_title(row[1], "image" if place == 0 else "", "", INK)
        for axes, name, look in zip(row[2:], found.names, case.saliencies, strict=True):
            heat = resize_map(look.map, case.image)
            draw_heat_map(axes, case.image, heat)
            mark, colour = ("✓", INK) if look.predicted == case.truth else ("✗", COLOURS[1])
            heading = f"{mark} {shorten_text(found.classes[look.predicted], 16)} {look.probability:.2f}"
            _draw_title(axes, shorten_text(name, 19) if place == 0 else "", heading, colour)
            if not heat.any():
                box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2}
                axes.text(
                    0.5,
                    0.5,
                    "nothing speaks\nfor this class",
                    transform=axes.transAxes,
                    ha="center",
                    va="center",
                    fontsize=TEXT - 2,
                    bbox=box,
                )


def _draw_title(axes: Axes, name: str, heading: str, colour: str) -> None:
    axes.set_title(heading, fontsize=TEXT - 1, color=colour, loc="left", pad=4).set_parse_math(False)
    if name:
        axes.annotate(
            name, (0, 1), xytext=(0, 20), xycoords="axes fraction", textcoords="offset points", fontsize=TEXT - 1
        ).set(parse_math=False, color=INK)


def _draw_bar(part: SubFigure, found: Explanation) -> None:
    bar = part.colorbar(ScalarMappable(cmap=COLOUR_MAP), cax=part.subplots(), orientation="horizontal")
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
    target, names = _format_target(found.of), ", ".join(found.names)
    return f"Images with Grad-CAM maps for {target}, beside each other for {names}. {cases}"


def describe_case(case: Case, number: int, found: Explanation) -> str:
    looks = [
        f"{name} says {found.classes[look.predicted]} ({look.probability:.2f}) and looks "
        f"{describe_map(resize_map(look.map, case.image))}"
        for name, look in zip(found.names, case.saliencies, strict=True)
    ]
    return f"Case {number}, {case.group}, at {case.site}, is {found.classes[case.truth]}: {'; '.join(looks)}."


def describe_map(heat: Floats) -> str:
    """Describe where a map's centre lies, and how much of the image it covers."""
    found = locate_map(heat)
    if found is None:
        return "nowhere: nothing speaks for that class"
    down, across = (int(min(2, 3 * place)) for place in found["centre"])
    return f"{PLACES[down][across]}, at {found['looked_at']:.0%} of the image"


class MapLocation(TypedDict):
    centre: list[float]
    """From the top and from the left, as shares of the sides."""
    looked_at: float
    """The share of pixels above half the map's maximum."""


def locate_map(heat: Floats) -> MapLocation | None:
    """Return where a map's centre lies and how much of the image it covers; None for a map of zeros."""
    if not heat.any():
        return None
    places = [
        np.average((np.arange(size) + 0.5) / size, weights=heat.sum(1 - axis)) for axis, size in enumerate(heat.shape)
    ]
    return {"centre": [float(place) for place in places], "looked_at": float((heat >= HALF * heat.max()).mean())}


def draw_intensities(sites: Mapping[SiteId, IntensityDistribution], title: str, path: Path) -> None:
    draw_curves(
        {name: found.curve for name, found in sites.items()},
        title,
        "pixel value, as stored",
        "% of the pixels that are not black",
        path,
        whole=False,
    )


@dataclass
class HeatMapWriter:
    """Writes a numbered figure for each predicted file."""

    model: RunModel
    preprocessing: Preprocessing
    classes: tuple[str, ...]
    folder: Path
    drawn: int = 0

    def __post_init__(self) -> None:
        if len(self.model.networks) > 1:
            raise RecipeError("--grad-cam shows where one network looks, and an ensemble is several; choose --model")
        if not self.model.has_convolutions:
            raise RecipeError("--grad-cam needs a network with convolutions, and this one has none; leave it out")

    def draw_prediction(self, prediction: Prediction) -> Path:
        """Write one figure. Only the folder's owner can read it, since it shows a patient."""
        with explain_os_errors(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.drawn += 1
        path = self.folder / f"{self.drawn:04d}-{prediction.file.stem[:LONGEST]}.png"
        title = f"Where the network looks for {self.classes[prediction.predicted_class]}"
        _draw_figure(prediction, self._compute_heat_map(prediction), title, self._format_prediction(prediction), path)
        return path

    def _compute_heat_map(self, prediction: Prediction) -> Floats:
        device, target = self.model.device, torch.tensor([prediction.predicted_class])
        image = self.preprocessing.normalise(prediction.image[None]).to(device)
        return resize_map(grad_cam(self.model.networks[0], image, target)[0].cpu(), prediction.image)

    def _format_prediction(self, prediction: Prediction) -> str:
        label, number = "uncalibrated" if prediction.calibrated is None else "calibrated", prediction.predicted_class
        found = prediction.probabilities if prediction.calibrated is None else prediction.calibrated
        return f"{self.classes[number]}, {label} probability {found[number]:.2f}"


def _draw_figure(prediction: Prediction, heat: Floats, title: str, label: str, path: Path) -> None:
    """Draw the prepared image, and beside it the same with the map."""
    image = prediction.image.float() / 255
    sheet = new_sheet(f"{title}\n{label}", (7, 4.4), "constrained", TEXT)
    plain, over = sheet.subplots(1, 2)
    draw_image(plain, image)
    shown = draw_heat_map(over, image, heat)
    for axes in (plain, over):
        axes.set_axis_off()
    bar = sheet.colorbar(shown, ax=[plain, over], orientation="horizontal", fraction=0.05)
    bar.set_alpha(1)
    bar.set_label("Grad-CAM; 1 is the map's own largest value, line: half of it", fontsize=TEXT - 2, color=INK)
    save(sheet, path, title, f"{label}. The network looks {describe_map(heat)}.")
