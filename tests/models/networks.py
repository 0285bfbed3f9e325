"""Networks that several test files need; the large ones are built once."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torchvision import models as torchvision_models

from polyclinic.core.rng import Stream
from polyclinic.models import MODELS, build_model
from polyclinic.models.classifier import Classifier

CLASSES = 3
TORCHVISION = (
    "mobilenet_v2",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "densenet201",
    "resnet18",
    "resnet50",
    "resnet152",
    "inception_v3",
)
STREAM = Stream(2026, ("model",))


def fresh(name: str, channels: int = 3, seed: Stream = STREAM, classes: int = CLASSES) -> Classifier:
    size = MODELS[name].min_size
    return build_model(name, classes=classes, channels=channels, size=size, dropout=None, seed=seed).eval()


@cache
def network(name: str, channels: int) -> Classifier:
    """A shared network: tests must leave it as it is."""
    return fresh(name, channels)


@cache
def theirs(name: str, classes: int = CLASSES) -> nn.Module:
    """torchvision's own network, shared, with first weights of our choosing; Inception as it is published.

    Its BatchNorm has seen a few pictures: without that, deep networks answer with their last bias and whatever
    was loaded into the layers before would look right.
    """
    options = {"init_weights": False, "transform_input": True} if name == "inception_v3" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        built: nn.Module = torchvision_models.get_model(name, num_classes=classes, **options)
    norms = [module for module in built.eval().modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.train().momentum = None
    logits(built, pictures(name, 3, number=8))
    return built.eval()


def pictures(name: str, channels: int, number: int = 2) -> Tensor:
    side = MODELS[name].min_size
    return torch.rand(number, channels, side, side, generator=Stream(7, (name, channels)).generator())


def logits(classifier: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        answer: Tensor = classifier(images)
    return answer


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
