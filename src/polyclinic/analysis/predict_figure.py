"""Draws where a network looks in an image that it predicts: one Grad-CAM figure for each file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from polyclinic.analysis.figures import draw_heat_map, draw_image, new_sheet
from polyclinic.analysis.predict import Prediction, Preprocessing, RunModel
from polyclinic.analysis.saliency import Saliency, grad_cam, resize_map
from polyclinic.analysis.saliency_figure import describe_map
from polyclinic.core import RecipeError
from polyclinic.evaluation.metrics import Floats
from polyclinic.reporting.figures import INK, TEXT, save
from polyclinic.storage.files import explain_os_errors

LONGEST = 60
"""Letters of a file's name that the figure's name keeps."""


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
        if not any(isinstance(module, nn.Conv2d) for module in self.model.networks[0].modules()):
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
        (found,) = grad_cam(self.model.networks[0], image, target).cpu()
        return resize_map(
            Saliency(prediction.predicted_class, 0.0, prediction.predicted_class, found), prediction.image
        )

    def _format_prediction(self, prediction: Prediction) -> str:
        calibrated = prediction.calibrated
        label = "uncalibrated" if calibrated is None else "calibrated"
        number = prediction.predicted_class
        probability = (prediction.probabilities if calibrated is None else calibrated)[number]
        return f"{self.classes[number]}, {label} probability {probability:.2f}"


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
