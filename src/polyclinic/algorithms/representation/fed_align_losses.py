"""The losses of Fed-Align: equations 2, 3, 5 and 6 of fed_align.py."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyclinic.core import Batch, Bundle, Network, Stream, Tensors
from polyclinic.training.network import build_with_seed, copy_auxiliary_weights

DISCRIMINATOR = "discriminator"


class Discriminator(nn.Module):
    """Tells a site's own features (positive logit) from others'. Two dense layers, as in the paper's Table IV."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, hidden)
        self.leave = nn.Linear(hidden, 1)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.leave(F.relu(self.enter(features))).squeeze(-1)
        return logits


def discriminator_loss(network: Network, weights: Bundle, _batch: Batch, reference: Bundle) -> Tensor:
    """Return (2), of own and others' features of the last exchange. It uses no image."""
    own, others = reference["own"], reference["others"]
    mine, theirs = (network.auxiliary(weights, DISCRIMINATOR, each["values"].flatten(1)) for each in (own, others))
    return _masked_mean(F.softplus(-mine), own["there"]) + _masked_mean(F.softplus(theirs), others["there"])


def alignment_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Return (3): the cross-entropy, and the discriminator's certainty about own features."""
    images, labels = batch
    handed = network.features(weights, images)
    doubt = network.auxiliary(weights, DISCRIMINATOR, handed.flatten(1))
    unsure = (F.softplus(doubt) + F.softplus(-doubt)).mean() / 2
    return network.output_loss(network.head(weights, handed), labels) + reference["scalars"]["align"] * unsure


def initial_discriminator(shown: Tensors, hidden: int, rng: Stream) -> Bundle:
    """Return the initial weights of a site's discriminator, which every site draws for itself."""
    like = shown["values"]
    network = build_with_seed(lambda: Discriminator(math.prod(like.shape[2:]), hidden), rng.child("discriminator"))
    return copy_auxiliary_weights(DISCRIMINATOR, network.to(like))


def bank_reference(own: Tensors, others: Tensors, align: float) -> Bundle:
    """Return the reference of (2) and (3): both banks and α."""
    like = others["values"]

    def shown(bank: Tensors) -> Tensors:
        values = bank["values"][0].to(like)
        there = torch.arange(len(values), device=like.device) < bank["held"].to(like.device)
        return {"values": values, "there": there.to(like.dtype)}

    return {"own": shown(own), "others": shown(others), "scalars": {"align": like.new_tensor(align)}}


def separation_loss(mine: Tensor, theirs: Tensor) -> Tensor:
    """Return (5) of the discriminator's logits for own and for another site's features."""
    return F.softplus(-mine).mean() + F.softplus(theirs).mean()


def confusion_loss(mine: Tensor, theirs: Tensor) -> Tensor:
    """Return (6) of the discriminator's logits for own and for another site's features."""
    return F.softplus(-mine).mean() + F.softplus(-theirs).mean()


def _masked_mean(values: Tensor, there: Tensor) -> Tensor:
    return (values * there).sum() / there.sum()


def add_noise(weights: Tensors, variance: float, generator: torch.Generator) -> Tensors:
    """Add noise N(0, variance) to every value."""
    if not variance:
        return weights
    return {n: t + variance**0.5 * torch.randn(t.shape, generator=generator).to(t) for n, t in weights.items()}
