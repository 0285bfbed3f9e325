"""Where a teacher looks: the Shapley value ψ of every patch of an image. PFedCDP, section III-D.

    (16)  ψ = (1/K)·Σ_k ψ⁽ᵏ⁾          ψ⁽ᵏ⁾: mean of |ψ| over the images, for every patch
    (19)  L ← (1/|F|)·Σ_i ψ_i · L      a loss times one number, the mean of ψ

The players of an image's game are the patches of a grid, its value is the teacher's probability of the image's class; a
patch that does not take part shows the mean of all images. So an image's ψ add up to that probability less the one of
the mean image. Random orders of the patches estimate ψ without bias (captum's ShapleyValueSampling), and the sum is
exact in every one of them. Absolute values in (16), as in the authors' code: signed, (19) could climb the loss.

Departures: the paper takes test images, we take images that are trained on; it has a ψ of every pixel, we of every
patch: the calls of a network grow with their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyclinic.algorithms.distillation.losses import Teacher
from polyclinic.core.contract import Examples, Stream
from polyclinic.training.fit import evaluation_batch_size, seed_generators

GRID = 7
"""Patches along a side."""
ORDERS = 10
"""In which the patches of all images come in; a map's error falls with their square root."""
PER_CLASS = 2


@dataclass(frozen=True, eq=False)
class AttributionMaps:
    """Some images of every class, and what their patches are worth to each teacher."""

    images: Tensor
    labels: Tensor
    psi: dict[str, Tensor]
    """By teacher: images × patches down × patches across, on the CPU."""


def attribute_patches(
    teachers: Sequence[Teacher],
    data: Examples,
    stream: Stream,
    per_class: int = PER_CLASS,
    grid: int = GRID,
    orders: int = ORDERS,
) -> AttributionMaps:
    """ψ⁽ᵏ⁾ of every teacher, on as many images of each class. All teachers see the same images and orders."""
    images, labels = data.batch(sample_balanced(data.labels, per_class, stream.child("images")))
    ready = [teacher.on_device() for teacher in teachers]
    psi = {each.name: patch_importance(each, images, labels, stream.child("orders"), grid, orders) for each in ready}
    return AttributionMaps(images.cpu(), labels.cpu(), psi)


def sample_balanced(labels: Tensor, per_class: int, stream: Stream) -> Tensor:
    """So many random images of every class, or as many as there are; class by class."""
    here = labels.cpu()
    mixed = torch.randperm(len(here), generator=stream.generator())
    return torch.cat([mixed[here[mixed] == value][:per_class] for value in here.bincount().nonzero()])


def patch_importance(
    teacher: Teacher, images: Tensor, labels: Tensor, stream: Stream, grid: int, orders: int
) -> Tensor:
    """ψ of every patch of every image for one teacher."""
    from captum.attr import ShapleyValueSampling  # takes half a second to load

    device = teacher.network.device
    here, patch = images.to(device), patch_index(images.shape[-2], images.shape[-1], grid).to(device)
    mean = here.mean(0, keepdim=True)

    def prediction(present: Tensor) -> Tensor:
        """What the teacher says of images (all of them, so many times over) with some patches only."""
        shown = present[:, None, patch] > 0
        whole = here.repeat(len(present) // len(here), 1, 1, 1)
        return torch.softmax(teacher.logits(torch.where(shown, whole, mean)), -1)

    # The players are handed over, not the pixels: what captum does with each takes longer than most networks.
    players = torch.ones(len(here), int(patch.max()) + 1, device=device)
    together = max(1, evaluation_batch_size(device) // len(here))
    with seed_generators(stream, device):
        found: Tensor = ShapleyValueSampling(prediction).attribute(
            players, target=labels.to(device), n_samples=orders, perturbations_per_eval=together
        )
    return found.cpu().reshape(len(images), -1, int(patch[0, -1]) + 1)


def patch_index(height: int, width: int, grid: int) -> Tensor:
    """The number of every pixel's patch, row by row."""
    down, across = (torch.arange(side) * min(grid, side) // side for side in (height, width))
    return down[:, None] * (across[-1] + 1) + across


def loss_factor(maps: Mapping[str, Tensor]) -> float:
    """The number that multiplies the loss."""
    psi = torch.stack([each.abs().mean(0) for each in maps.values()]).mean(0)  # (16)
    return float(psi.mean())  # (19)
