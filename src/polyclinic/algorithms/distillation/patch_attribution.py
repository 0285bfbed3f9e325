"""Patch attribution: the Shapley value ψ of every patch of an image for a teacher. PFedCDP, section III-D.

    (16)  ψ = (1/K)·Σ_k ψ⁽ᵏ⁾          ψ⁽ᵏ⁾: mean of |ψ| over the images, for every patch
    (19)  L ← (1/|F|)·Σ_i ψ_i · L      the loss times one number, the mean of ψ

The players of an image's game are the patches of a grid, and its value is the teacher's probability of the image's
class. A patch that is left out shows the mean of all images. So an image's ψ add up to that probability minus the one
of the mean image. Random orders of the patches give an unbiased estimate of ψ (captum's ShapleyValueSampling), and the
sum is exact in every order. (16) takes absolute values, as the authors' code does: with signed ones (19) could maximise
the loss.

Departures: the paper uses test images, here they are training images; it has a ψ of every pixel, here of every patch,
since the number of network calls grows with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyclinic.algorithms.distillation.losses import Teacher
from polyclinic.core import Examples, Stream
from polyclinic.core.rng import seed_generators
from polyclinic.training.fit import evaluation_batch_size

GRID = 7
"""Patches along a side."""
ORDERS = 10
"""Random orders of the patches; the error of ψ falls with their square root."""
PER_CLASS = 2


@dataclass(frozen=True, eq=False)
class AttributionMaps:
    """Images of every class with the attributions of their patches for each teacher."""

    images: Tensor
    labels: Tensor
    psi: dict[str, Tensor]
    """For each teacher images × patches down × patches across, on the CPU."""


def attribute_patches(
    teachers: Sequence[Teacher],
    data: Examples,
    stream: Stream,
    per_class: int = PER_CLASS,
    grid: int = GRID,
    orders: int = ORDERS,
) -> AttributionMaps:
    """Return ψ of every teacher, on `per_class` images of each class. All teachers use the same images and orders."""
    images, labels = data.batch(sample_balanced(data.labels, per_class, stream.child("images")))
    psi = {
        each.name: patch_importance(each.on_device(), images, labels, stream.child("orders"), grid, orders)
        for each in teachers
    }
    return AttributionMaps(images.cpu(), labels.cpu(), psi)


def sample_balanced(labels: Tensor, per_class: int, stream: Stream) -> Tensor:
    """Return the positions of up to `per_class` random images of each class, class by class."""
    here = labels.cpu()
    mixed = torch.randperm(len(here), generator=stream.generator())
    return torch.cat([mixed[here[mixed] == value][:per_class] for value in here.bincount().nonzero()])


def patch_importance(
    teacher: Teacher, images: Tensor, labels: Tensor, stream: Stream, grid: int, orders: int
) -> Tensor:
    """Return ψ of every patch of every image for one teacher."""
    from captum.attr import ShapleyValueSampling  # takes half a second to load

    device = teacher.network.device
    here, patch = images.to(device), patch_index(images.shape[-2], images.shape[-1], grid).to(device)
    mean = here.mean(0, keepdim=True)

    def prediction(present: Tensor) -> Tensor:
        """Return the teacher's probabilities for all images (repeated), with the present patches only."""
        shown = present[:, None, patch] > 0
        whole = here.repeat(len(present) // len(here), 1, 1, 1)
        return torch.softmax(teacher.logits(torch.where(shown, whole, mean)), -1)

    # captum gets the players, not the pixels: its work for each of them takes longer than most networks.
    players = torch.ones(len(here), int(patch.max()) + 1, device=device)
    with seed_generators(stream, device):
        found: Tensor = ShapleyValueSampling(prediction).attribute(
            players,
            target=labels.to(device),
            n_samples=orders,
            perturbations_per_eval=max(1, evaluation_batch_size(device) // len(here)),
        )
    return found.cpu().reshape(len(images), -1, int(patch[0, -1]) + 1)


def patch_index(height: int, width: int, grid: int) -> Tensor:
    """Return the number of every pixel's patch, counted row by row."""
    down, across = (torch.arange(side) * min(grid, side) // side for side in (height, width))
    return down[:, None] * (across[-1] + 1) + across


def loss_factor(maps: Mapping[str, Tensor]) -> float:
    """Return the factor on the loss in (19)."""
    return float(torch.stack([each.abs().mean(0) for each in maps.values()]).mean(0).mean())  # (16), (19)
