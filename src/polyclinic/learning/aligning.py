"""Fed-Align's losses: equations 2 and 3 of algorithms/fed_align.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyclinic.core import Batch, Bundle, Network, Tensors

DISCRIMINATOR = "discriminator"


class Discriminator(nn.Module):
    """Whose feature is it: the site's own (positive) or another's. Two dense layers, as in the paper's Table IV."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, hidden)
        self.leave = nn.Linear(hidden, 1)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.leave(F.relu(self.enter(features))).squeeze(-1)
        return logits


def discriminating(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """(2): own features of the last exchange against others'. Looks at no image."""
    del batch
    own, others = reference["own"], reference["others"]
    mine, theirs = (network.beside(weights, DISCRIMINATOR, each["values"].flatten(1)) for each in (own, others))
    return _mean(F.softplus(-mine), own["there"]) + _mean(F.softplus(theirs), others["there"])


def aligning(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """(1) and (3): of own features the discriminator shall not know what to think."""
    images, labels = batch
    handed = network.features(weights, images)
    doubt = network.beside(weights, DISCRIMINATOR, handed.flatten(1))
    unsure = (F.softplus(doubt) + F.softplus(-doubt)).mean() / 2
    return F.cross_entropy(network.head(weights, handed), labels) + reference["scalars"]["align"] * unsure


def _mean(values: Tensor, there: Tensor) -> Tensor:
    return (values * there).sum() / there.sum()


def noised(weights: Tensors, variance: float, generator: torch.Generator) -> Tensors:
    """With N(0, variance) on every value."""
    if not variance:
        return weights
    return {n: t + variance**0.5 * torch.randn(t.shape, generator=generator).to(t) for n, t in weights.items()}
