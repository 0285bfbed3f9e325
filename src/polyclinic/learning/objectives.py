"""Losses: module-level pure functions (network, weights, batch, reference) -> scalar, so that sites stack."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.core import Batch, Bundle, Network, Objective, Tensors

SEPARABLE: set[Objective] = set()
"""Objectives that are `network.loss` of the weights, called once, plus terms that look at no data."""


def separable(objective: Objective) -> Objective:
    """Mark an objective as the mean of its examples' own losses, so that private training may take them apart.

    Its data may enter through one call of `network.loss(weights, batch)` only, which adds to the rest. Never mark one
    that mixes examples (contrasts, batch statistics), looks at features, or calls the network with other weights.
    """
    SEPARABLE.add(objective)
    return objective


@separable
def task_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """The task's own loss on the batch: for classification, the mean negative log-likelihood."""
    del reference
    return network.loss(weights, batch)


@separable
def proximal(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Task loss + (μ/2)·‖w − anchor‖²."""
    anchor = reference["anchor"]
    distance = sum((w - anchor[name]).pow(2).sum() for name, w in weights["model"].items())
    return task_loss(network, weights, batch, reference) + reference["scalars"]["mu"] / 2 * distance


@separable
def corrected(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Task loss + ⟨correction, w⟩: a linear term, whose gradient is the correction itself."""
    correction = reference["correction"]
    linear = sum((correction[name] * w).sum() for name, w in weights["model"].items())
    return task_loss(network, weights, batch, reference) + linear


def distilling(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """(1 − λ)·task loss + λ·T²·KL(teacher ‖ student), both softened by the temperature T."""
    share, temperature = reference["scalars"]["share"], reference["scalars"]["temperature"]
    images, labels = batch
    logits = network(weights, images)
    teacher = network.taught({"model": reference["teacher"], "buffers": reference["teacher buffers"]}, images)
    mine, wanted = (F.log_softmax(z / temperature, -1) for z in (logits, teacher))
    apart = (wanted.exp() * (wanted - mine)).sum(-1).mean()  # F.kl_div does not stack
    return (1 - share) * F.cross_entropy(logits, labels) + share * temperature**2 * apart


def probabilities(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    """Softmax of the logits, a row per example, with the labels."""
    del reference
    images, labels = batch
    return {"probabilities": torch.softmax(network(weights, images), -1), "labels": labels}
