"""Losses: module-level pure functions (network, weights, batch, reference) -> scalar, so that sites stack."""

from __future__ import annotations

import torch
from torch import Tensor

from polyclinic.core import Batch, Bundle, Network, Tensors


def task_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """The task's own loss on the batch: for classification, the mean negative log-likelihood."""
    del reference
    return network.loss(weights, batch)


def proximal(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Task loss + (μ/2)·‖w − anchor‖²."""
    anchor = reference["anchor"]
    distance = sum((w - anchor[name]).pow(2).sum() for name, w in weights["model"].items())
    return task_loss(network, weights, batch, reference) + reference["scalars"]["mu"] / 2 * distance


def corrected(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
    """Task loss + ⟨correction, w⟩: a linear term, whose gradient is the correction itself."""
    correction = reference["correction"]
    linear = sum((correction[name] * w).sum() for name, w in weights["model"].items())
    return task_loss(network, weights, batch, reference) + linear


def probabilities(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    """Softmax of the logits, a row per example, with the labels."""
    del reference
    images, labels = batch
    return {"probabilities": torch.softmax(network(weights, images), -1), "labels": labels}
