"""Where a network looks on an image that it predicts: Grad-CAM, one picture for each file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from polyclinic.analysis.predict import Prediction, Preprocessing, RunModel
from polyclinic.analysis.saliency import Saliency, grad_cam, resize_map
from polyclinic.analysis.saliency_figure import COLOUR_MAP, HALF, describe_map
from polyclinic.core.errors import RecipeError
from polyclinic.evaluation.metrics import Floats
from polyclinic.reporting.figures import DPI, INK, TEXT, save
from polyclinic.storage.run_files import explain_os_errors

LONGEST = 60
"""Letters of a file's name that its picture's name keeps."""


@dataclass
class HeatMapWriter:
    """Pictures of the files that are predicted, numbered as they come."""

    model: RunModel
    preprocessing: Preprocessing
    classes: tuple[str, ...]
    folder: Path
    drawn: int = 0

    def __post_init__(self) -> None:
        if len(self.model.networks) > 1:
            raise RecipeError("--grad-cam shows where one network looks, and an ensemble is several; choose --model")
        if not any(isinstance(module, nn.Conv2d) for module in self.model.networks[0].modules()):
            raise RecipeError("--grad-cam needs a network with convolutions, and this one has none; leave it out")

    def draw_prediction(self, prediction: Prediction) -> Path:
        """Draw one; the folder is its owner's alone, since pictures show patients."""
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
        (found,) = grad_cam(self.model.networks[0], image, target).cpu()
        return resize_map(
            Saliency(prediction.predicted_class, 0.0, prediction.predicted_class, found), prediction.image
        )

    def _format_prediction(self, prediction: Prediction) -> str:
        sure = prediction.probabilities if prediction.calibrated is None else prediction.calibrated
        told = "uncalibrated" if prediction.calibrated is None else "calibrated"
        return f"{self.classes[prediction.predicted_class]}, {told} probability {sure[prediction.predicted_class]:.2f}"


def _draw_figure(prediction: Prediction, heat: Floats, title: str, said: str, path: Path) -> None:
    """The prepared image, and the map over it; where it is zero, the image alone."""
    pixels = prediction.image.float().div(255).numpy()
    grey = {"cmap": "gray", "vmin": 0, "vmax": 1}
    paper = Figure(figsize=(7, 4.4), dpi=DPI, layout="constrained", facecolor="white")
    paper.suptitle(f"{title}\n{said}", x=0.01, ha="left", fontsize=TEXT, color=INK).set_parse_math(False)
    plain, over = paper.subplots(1, 2)
    plain.imshow(pixels.transpose(1, 2, 0)) if len(pixels) == 3 else plain.imshow(pixels[0], **grey)
    over.imshow(pixels.mean(0), **grey)
    shown = over.imshow(heat, cmap=COLOUR_MAP, vmin=0, vmax=1, alpha=0.65 * heat**0.5)
    if heat.min() < HALF < heat.max():
        over.contour(heat, levels=[HALF], colors="white", linewidths=1.2)
    for axes in (plain, over):
        axes.set_axis_off()
    bar = paper.colorbar(shown, ax=[plain, over], orientation="horizontal", fraction=0.05)
    bar.set_alpha(1)
    bar.set_label("Grad-CAM; 1 is the map's own largest value, line: half of it", fontsize=TEXT - 2, color=INK)
    save(paper, path, title, f"{said}. The network looks {describe_map(heat)}.")
