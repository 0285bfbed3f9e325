"""The registry of models: the networks that a recipe can name. Importing it does not load torch.

To add a model, write its builder (the protocol is `classifier.ModelBuilder`) and add its line to `MODELS`. Another
package decorates its builder with `register_model`, or names it as an entry point of the group `polyclinic.models`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeVar, cast

from polyclinic import core
from polyclinic.core import RecipeError

if TYPE_CHECKING:
    from polyclinic.core.rng import Stream
    from polyclinic.models.classifier import Classifier, ModelBuilder

__all__ = ["MODELS", "ModelSpec", "build_model", "register_model"]

B = TypeVar("B", bound="ModelBuilder")


@dataclass(frozen=True)
class ModelSpec:
    """What the registry knows of a model before it is imported."""

    builder: ModelBuilder | str
    """The builder, or its place as "module:function"; a leading dot stands for this package."""
    min_size: int
    """The smallest side of a square image, in pixels, that the network can run on."""
    dropout: float
    """The network's own rate, used when the recipe names none."""
    description: str
    paper: str = "-"

    def load_builder(self) -> ModelBuilder:
        """Return the builder, importing its module if that has not been done."""
        if not isinstance(self.builder, str):
            return self.builder
        module, _, function = self.builder.partition(":")
        return cast("ModelBuilder", getattr(import_module(module, __name__), function))


SCATTERING_PAPER = "Tramèr and Boneh 2021"
MODELS: dict[str, ModelSpec] = {
    "cnn_a": ModelSpec(".small:cnn_a", 4, 0.0, "two convolutions (32, 64), 128 dense units: strong devices", "PFedCDP"),
    "cnn_b": ModelSpec(".small:cnn_b", 4, 0.5, "two convolutions (16, 32), 64 dense units: medium devices", "PFedCDP"),
    "cnn_c": ModelSpec(".small:cnn_c", 4, 0.0, "two convolutions (8, 16), 32 dense units: weak devices", "PFedCDP"),
    "student": ModelSpec(".small:student", 4, 0.5, "the server's student, built as cnn_b", "PFedCDP"),
    "groupnorm_cnn": ModelSpec(
        ".groupnorm_cnn:groupnorm_cnn", 8, 0.3, "three convolutions with GroupNorm and a skip", "adaptive-noise DP-FL"
    ),
    "small_cnn": ModelSpec(".small:small_cnn", 4, 0.0, "the benchmark's small CNN, built as cnn_a"),
    "mlp": ModelSpec(".small:mlp", 1, 0.0, "one hidden layer of 64 units"),
    "linear": ModelSpec(".small:linear", 1, 0.0, "logistic regression on pixels"),
    "scattering_linear": ModelSpec(
        ".scattering:scattering_linear", 8, 0.0, "one linear layer on fixed wavelet features", SCATTERING_PAPER
    ),
    "scattering_digits": ModelSpec(
        ".digit_features:scattering_digits", 14, 0.0, "one linear layer on wavelet features of upright digits", "-"
    ),
    "scattering_cnn": ModelSpec(
        ".scattering:scattering_cnn", 8, 0.0, "one convolution on fixed wavelet features", SCATTERING_PAPER
    ),
    "mobilenet_v2": ModelSpec(".torchvision:mobilenet_v2", 1, 0.2, "MobileNetV2", "FedCycle; Sandler et al. 2018"),
    "mobilenet_v3_small": ModelSpec(
        ".torchvision:mobilenet_v3_small", 1, 0.2, "MobileNetV3-Small", "FedCycle; Howard et al. 2019"
    ),
    "efficientnet_b0": ModelSpec(
        ".torchvision:efficientnet_b0", 1, 0.2, "EfficientNet-B0", "FedCycle; Tan and Le 2019"
    ),
    "densenet201": ModelSpec(".torchvision:densenet201", 29, 0.0, "DenseNet-201", "FedCycle; Huang et al. 2017"),
    "resnet18": ModelSpec(".torchvision:resnet18", 1, 0.0, "ResNet-18", "He et al. 2016"),
    "resnet22": ModelSpec(
        ".resnet22:resnet22", 11, 0.5, "ResNet-22 for whole mammograms", "Fed-Align-CL; Wu et al. 2020"
    ),
    "resnet50": ModelSpec(".torchvision:resnet50", 1, 0.0, "ResNet-50", "FedMP; He et al. 2016"),
    "resnet152": ModelSpec(".torchvision:resnet152", 1, 0.0, "ResNet-152", "FedCycle; He et al. 2016"),
    "inception_v3": ModelSpec(".torchvision:inception_v3", 75, 0.5, "InceptionV3", "FedCycle; Szegedy et al. 2016"),
}
BUILTIN = frozenset(MODELS)
for _entry in entry_points(group=__name__):
    MODELS.setdefault(_entry.name, ModelSpec(_entry.value, 1, 0.0, f"from the package {_entry.module}"))


def register_model(
    name: str, *, min_size: int = 1, dropout: float = 0.0, description: str = "", paper: str = "-"
) -> Callable[[B], B]:
    """Return a decorator that adds a builder to the registry, so that recipes may give `name`.

    Args:
        name: The model's name in recipes. The names of built-in models are taken.
        min_size: The smallest side of an image, in pixels, that the network can run on.
        dropout: The network's own dropout rate, used when the recipe names none.
        description: One line for `polyclinic list models`; by default the builder's docstring.
        paper: The paper that the network comes from.
    """
    if name in BUILTIN:
        raise RecipeError(f"{name!r} is already a model of polyclinic; register yours under another name")

    def add(builder: B) -> B:
        text = description or (builder.__doc__ or name).strip().splitlines()[0]
        MODELS[name] = ModelSpec(builder, min_size, dropout, text, paper)
        return builder

    return add


def build_model(
    name: str, *, classes: int, channels: int, size: int, dropout: float | None = None, seed: Stream
) -> Classifier:
    """Build a network of the registry.

    Args:
        name: The model's name in `MODELS`.
        classes: The number of classes, at least 2.
        channels: The images' channels, 1 or 3.
        size: The side of the square images in pixels.
        dropout: The dropout rate; None means the network's own.
        seed: The stream of its first weights, which depend on nothing else. torch's random state stays as it was.
    """
    import torch

    spec = _find_spec(name)
    rate = spec.dropout if dropout is None else dropout
    _check_arguments(name, spec, classes, channels, size, rate)
    cpu = torch.device("cpu")
    with core.seed_generators(seed, cpu), cpu:
        return spec.load_builder()(classes=classes, channels=channels, size=size, dropout=rate)


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
