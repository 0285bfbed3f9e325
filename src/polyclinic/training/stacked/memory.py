"""How many sites' jobs fit into a device's memory at once."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from polyclinic.core.contract import Bundle
from polyclinic.training.dp import dp_sgd
from polyclinic.training.network import LiveNetwork, on
from polyclinic.training.stacked.batching import StackMember

COPIES = 6
"""Of a site's weights: themselves, their gradients, the optimiser's state, and what is made on the way."""
SPARE = 2
"""Memory is estimated, and others use it too: only one part in so many is taken."""


def room(seat: StackMember, network: LiveNetwork) -> int:
    """The most jobs like this one that one stack should hold; at least one."""
    held = COPIES * size(seat.job.weights) + size(seat.job.reference) + 2 * saved_for_backward(seat, network)
    held += kept_by_example(seat, network)
    return max(1, free(network.device) // (SPARE * held))


def size(bundle: Bundle) -> int:
    return sum(tensor.nbytes for group in bundle.values() for tensor in group.values())


def at_once(seat: StackMember) -> int:
    """Images of one call; a private step's batch is of random length, and may see each in several views."""
    training, examples = seat.job.training, len(seat.data)
    return min(examples, dp_sgd.room(training, examples, seat.job.whole))


def kept_by_example(seat: StackMember, network: LiveNetwork) -> int:
    """Bytes of gradients that private steps keep for every example: all but those of dense layers."""
    if dp_sgd.changes_nothing(seat.job.training.private):
        return 0
    layers = [layer for layer in network.module.modules() if not isinstance(layer, nn.Linear)]
    return at_once(seat) * sum(p.nbytes for layer in layers for p in layer.parameters(recurse=False))


def saved_for_backward(seat: StackMember, network: LiveNetwork) -> int:
    """Bytes that one batch's forward pass keeps for its gradient."""
    network, kept = network.stackable, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    weights, reference = (_copies(on(bundle, network.device)) for bundle in (seat.job.weights, seat.job.reference))
    live = {"model": {n: t.requires_grad_() for n, t in weights["model"].items()}}
    live["buffers"] = weights.get("buffers", {})
    network.training_mode(frozenset(live["model"]))
    training = seat.job.training
    views = 1 if training.private is None else training.private.views
    batch = seat.data.batch(torch.arange(at_once(seat)).repeat_interleave(views))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        images, labels = (tensor.to(network.device) for tensor in batch)
        for step in seat.job.sequence:
            step.objective(network, live, (images, labels), reference)
    return sum(kept.values())


def _copies(bundle: Bundle) -> Bundle:
    return {kind: {name: t.detach().clone() for name, t in group.items()} for kind, group in bundle.items()}


def free(device: torch.device) -> int:
    """Bytes that could be had on a device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system says
        return 1 << 32
