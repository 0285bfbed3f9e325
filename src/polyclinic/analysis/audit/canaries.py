"""Canaries: images made to be found (Steinke, Nasr, Jagielski 2023, section 6, "Dirac"), and a network that knows them.

A canary's gradient is ten clips long and lies on one weight of its own, its seat, on which no image's gradient lies.
Otherwise nothing treats canaries differently: the code that trains on patients draws, differentiates, clips, sums and
noises them. So a seat's noised sum is the noise alone where nobody sits, and the noise plus a clip where a member does.
"""

import copy
import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyclinic.core import Batch, Examples
from polyclinic.models.classifier import Classifier

LENGTH = 10.0
"""A canary's gradient, in clips: far too long, so that a clip that lets more through than it should is noticed."""
GAP = 1e4
"""Canary i is an image of pixels −GAP·(i + 1), which turning, cropping and blurring leave alone; no scan is so dark."""
EMPTY = 2**30
"""The number in the place of a canary that does not take part."""
SEATS = "head.seats.weight"
"""The weight on which the canaries' gradients lie."""


class CanaryExtractor(nn.Module):
    """An extractor whose features of a canary are the canary's number, negative and far from those of any image."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        number = _read_number(images)
        features: Tensor = self.inner(torch.where(_expand(number <= 0, images), images, 0.0))
        own = torch.where(features < -GAP / 4, -GAP / 4, features)
        return torch.where(_expand(number <= 0, own), own, -GAP * _expand(number, own))


class CanaryHead(nn.Module):
    """A head with a layer `seats`, on which the gradients of canaries lie, each on one weight, and those of images do
    not.

    Canary a·s + b sets the layer's input b and reads its output a, so that s² canaries need s inputs and s outputs. The
    layer's output is subtracted again: its weights change nothing but themselves.
    """

    def __init__(self, inner: nn.Module, canaries: int, length: float) -> None:
        super().__init__()
        self.inner, self.side, self.length = inner, math.isqrt(canaries - 1) + 1, length
        self.seats = nn.Linear(self.side, self.side, bias=False)
        nn.init.zeros_(self.seats.weight)

    def forward(self, features: Tensor) -> Tensor:
        number = _read_number(features)
        real = number <= 0
        logits: Tensor = self.inner(torch.where(_expand(real, features), features, 0.0))
        logits = torch.where(real[:, None], logits, 0.0)
        row = torch.div(number - 1, self.side, rounding_mode="floor")
        column = number - 1 - row * self.side
        places = torch.arange(self.side, device=features.device)
        asked, heard = ((place[:, None] == places).to(self.seats.weight.dtype) for place in (column, row))
        # The first of k equal logits has the gradient 1/k, as canaries are labelled otherwise.
        added = (self.seats(asked * self.length * logits.shape[1]) * heard).sum(1, keepdim=True)
        return logits + F.pad(added - added.detach(), (0, logits.shape[1] - 1))


def add_seats(network: Classifier, canaries: int, clip: float) -> Classifier:
    """Return a copy of the network with seats for so many canaries; it computes the same for images."""
    own = copy.deepcopy(network)
    seated = Classifier(CanaryExtractor(own.extractor), CanaryHead(own.head, canaries, LENGTH * clip))
    return seated.to(next(own.parameters()))


def _read_number(values: Tensor) -> Tensor:
    """Return the number of the canary in each row, 0 or less for an image."""
    middle = values[:, 0, values.shape[2] // 2, values.shape[3] // 2] if values.ndim == 4 else values.flatten(1)[:, 0]
    return (middle / -GAP).round()


def _expand(rows: Tensor, like: Tensor) -> Tensor:
    return rows.reshape(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True, eq=False)
class CanaryExamples:
    """A site's first `own` images, followed by `group` rows for every canary.

    A canary with `group` rows is a patient with so many images. One that does not take part (`members`) leaves rows
    with gradients of zero, as the number of examples is public.
    """

    images: Examples
    members: Tensor
    own: int
    group: int = 1
    blank: bool = False
    """The same rows without a single image or canary: whatever is released about them is noise."""

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def patients(self) -> tuple[str, ...] | None:
        known = self.images.patients
        if known is None:
            return None
        return (*known[: self.own], *(f"canary {seat}" for seat in range(len(self.members)) for _ in range(self.group)))

    @cached_property
    def labels(self) -> Tensor:
        own = self.images.labels[: self.own]
        return torch.cat([own, own.new_ones(len(self.members) * self.group)])

    @cached_property
    def _canary_numbers(self) -> Tensor:
        """The number of the canary in each row, 0 for the site's own images."""
        seats = torch.arange(1, len(self.members) + 1).where(self.members, EMPTY).repeat_interleave(self.group)
        numbers = torch.cat([seats.new_zeros(self.own), seats]).to(self.labels.device)
        return torch.full_like(numbers, EMPTY) if self.blank else numbers

    @cached_property
    def _blank_image(self) -> Tensor:
        return torch.zeros_like(self.images.batch(torch.zeros(1, dtype=torch.long))[0])

    def batch(self, index: Tensor) -> Batch:
        index = index.to(self.labels.device)
        number = self._canary_numbers[index].to(self._blank_image.dtype)
        images = self._blank_image - GAP * _expand(number, self._blank_image)
        own = number == 0
        if bool(own.any()):
            images[own] = self.images.batch(index[own])[0]
        return images, self.labels[index]
