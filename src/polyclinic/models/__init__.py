"""The networks a recipe can name, and how one is built from a seed."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from polyclinic.core.contract import Stream
from polyclinic.core.errors import RecipeError
from polyclinic.models import groupnorm_cnn, pfedcdp, resnet22, scattering, small, torchvision
from polyclinic.models.classifier import Classifier, ModelBuilder
from polyclinic.models.weights.load import LoadedWeights, adopt_weights, download_weights, load_weights

__all__ = [
    "MODELS",
    "Classifier",
    "LoadedWeights",
    "ModelSpec",
    "adopt_weights",
    "build_model",
    "download_weights",
    "load_weights",
]


@dataclass(frozen=True)
class ModelSpec:
    builder: ModelBuilder
    min_size: int
    """The smallest side of a square image, in pixels, that the network can run on."""
    dropout: float
    """The network's own rate, used when the recipe names none."""
    description: str
    paper: str


MODELS: dict[str, ModelSpec] = {
    "cnn_a": ModelSpec(pfedcdp.cnn_a, 4, 0.0, "two convolutions (32, 64), 128 dense units: strong devices", "PFedCDP"),
    "cnn_b": ModelSpec(pfedcdp.cnn_b, 4, 0.5, "two convolutions (16, 32), 64 dense units: medium devices", "PFedCDP"),
    "cnn_c": ModelSpec(pfedcdp.cnn_c, 4, 0.0, "two convolutions (8, 16), 32 dense units: weak devices", "PFedCDP"),
    "student": ModelSpec(pfedcdp.student, 4, 0.5, "the server's student, built as cnn_b", "PFedCDP"),
    "groupnorm_cnn": ModelSpec(
        groupnorm_cnn.groupnorm_cnn, 8, 0.3, "three convolutions with GroupNorm and a skip", "adaptive-noise DP-FL"
    ),
    "small_cnn": ModelSpec(small.small_cnn, 4, 0.0, "the benchmark's small CNN, built as cnn_a", "-"),
    "mlp": ModelSpec(small.mlp, 1, 0.0, "one hidden layer of 64 units", "-"),
    "linear": ModelSpec(small.linear, 1, 0.0, "logistic regression on pixels", "-"),
    "scattering_linear": ModelSpec(
        scattering.scattering_linear, 8, 0.0, "one linear layer on fixed wavelet features", "Tramèr and Boneh 2021"
    ),
    "scattering_cnn": ModelSpec(
        scattering.scattering_cnn, 8, 0.0, "one convolution on fixed wavelet features", "Tramèr and Boneh 2021"
    ),
    "mobilenet_v2": ModelSpec(torchvision.mobilenet_v2, 1, 0.2, "MobileNetV2", "FedCycle; Sandler et al. 2018"),
    "mobilenet_v3_small": ModelSpec(
        torchvision.mobilenet_v3_small, 1, 0.2, "MobileNetV3-Small", "FedCycle; Howard et al. 2019"
    ),
    "efficientnet_b0": ModelSpec(torchvision.efficientnet_b0, 1, 0.2, "EfficientNet-B0", "FedCycle; Tan and Le 2019"),
    "densenet201": ModelSpec(torchvision.densenet201, 29, 0.0, "DenseNet-201", "FedCycle; Huang et al. 2017"),
    "resnet18": ModelSpec(torchvision.resnet18, 1, 0.0, "ResNet-18", "He et al. 2016"),
    "resnet22": ModelSpec(resnet22.resnet22, 11, 0.5, "ResNet-22 for whole mammograms", "Fed-Align-CL; Wu et al. 2020"),
    "resnet50": ModelSpec(torchvision.resnet50, 1, 0.0, "ResNet-50", "FedMP; He et al. 2016"),
    "resnet152": ModelSpec(torchvision.resnet152, 1, 0.0, "ResNet-152", "FedCycle; He et al. 2016"),
    "inception_v3": ModelSpec(torchvision.inception_v3, 75, 0.5, "InceptionV3", "FedCycle; Szegedy et al. 2016"),
}


def build_model(
    name: str, *, classes: int, channels: int, size: int, dropout: float | None = None, seed: Stream
) -> Classifier:
    """The network `name`; its first weights depend on `seed` alone, torch's own random state is not touched.

    `size` is the side of the square images; `dropout` None means the network's own rate.
    """
    spec = _find_spec(name)
    rate = spec.dropout if dropout is None else dropout
    _check_arguments(name, spec, classes, channels, size, rate)
    # Only the CPU's generator is seeded: torch.manual_seed would also reseed every accelerator.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed.integer())
        return spec.builder(classes=classes, channels=channels, size=size, dropout=rate)


def _find_spec(name: str) -> ModelSpec:
    if name in MODELS:
        return MODELS[name]
    close = difflib.get_close_matches(name, MODELS)
    advice = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(MODELS)}."
    raise RecipeError(f"There is no model '{name}'; {advice}")


def _check_arguments(name: str, spec: ModelSpec, classes: int, channels: int, size: int, dropout: float) -> None:
    if classes < 2:
        raise RecipeError(f"Model '{name}' is asked for {classes} classes; a classifier needs at least 2.")
    if channels not in (1, 3):
        raise RecipeError(f"Model '{name}' is asked for {channels} channels; images have 1 (grey) or 3 (colour).")
    if size < spec.min_size:
        raise RecipeError(
            f"Model '{name}' needs images of at least {spec.min_size} pixels a side, not {size}; raise `size`."
        )
    if not 0 <= dropout < 1:
        raise RecipeError(f"Model '{name}' is asked for dropout {dropout}; it must be at least 0 and below 1.")
