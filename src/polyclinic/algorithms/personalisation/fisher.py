"""The importance of each weight for a site's images: the diagonal of the Fisher information, as scores."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.func import grad, vmap

from polyclinic.core import Batch, Bundle, Network, Tensors
from polyclinic.training.dp.per_example_gradients import GradientTape, NotRecordableError, copy_with_record
from polyclinic.training.network import LiveNetwork

CHUNK_SIZE = 8
"""Examples whose gradients are computed at a time, for networks without the quicker way."""


def squared_gradients(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    """Return the mean over examples of the squared gradient of each example's log-likelihood."""
    del reference
    if isinstance(network, LiveNetwork) and weights is network.live:
        try:
            return _squared_gradients_from_tape(network, weights, batch)
        except NotRecordableError:
            pass
    return per_example_squared_gradients(network, weights, batch)


def squared_mean_gradient(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    """Return the squared gradient of a batch's mean loss. It is no Fisher information: it shrinks with the batch."""
    del reference
    found = grad(lambda model: network.loss({**weights, "model": model}, batch))(dict(weights["model"]))
    return {name: g.square() for name, g in found.items()}


def _squared_gradients_from_tape(network: LiveNetwork, weights: Bundle, batch: Batch) -> Tensors:
    """Compute `squared_gradients` in one forward and one backward pass."""
    names = frozenset(weights["model"])
    book, other = GradientTape(network.device), copy.copy(network)
    other.module = copy_with_record(network.module, names, book)
    book.begin_pass(len(batch[1]))
    with torch.enable_grad():
        parts = book.backward(other.loss(weights, batch) * len(batch[1]))
    if parts.keys() != names:
        raise NotRecordableError("a layer is not called")
    return {name: parts[name].sum_of_squares() / len(batch[1]) for name in weights["model"]}


def per_example_squared_gradients(network: Network, weights: Bundle, batch: Batch) -> Tensors:
    """Compute `squared_gradients` of any network, example by example."""

    def loss(model: Tensors, image: Tensor, label: Tensor) -> Tensor:
        return network.loss({**weights, "model": model}, (image[None], label[None]))

    found: Tensors = {}
    for images, labels in zip(*(torch.split(t, CHUNK_SIZE) for t in batch), strict=True):
        each = vmap(grad(loss), (None, 0, 0))(dict(weights["model"]), images, labels)
        sums = {name: g.square().sum(0) / len(batch[1]) for name, g in each.items()}
        found = {name: found[name] + t for name, t in sums.items()} if found else sums
    return found
