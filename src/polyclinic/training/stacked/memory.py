"""How many sites' jobs fit into a device's memory at once."""

import os

import torch
from torch import Tensor, nn

from polyclinic.core import Bundle
from polyclinic.training.dp import dp_sgd
from polyclinic.training.network import LiveNetwork, move_bundle
from polyclinic.training.stacked.batching import StackMember

WEIGHT_COPIES = 6
"""Copies of a site's weights: the weights, their gradients, the optimiser's state, and temporary ones."""
SAFETY_FACTOR = 2
"""Only this fraction (1/2) of the free memory is used: sizes are estimates, and other programs use memory too."""


def max_stack_size(member: StackMember, network: LiveNetwork) -> int:
    """Return how many jobs like this one a stack may hold; at least one."""
    weights, reference = bundle_bytes(member.job.weights), bundle_bytes(member.job.reference)
    activations, gradients = activation_bytes(member, network), per_example_bytes(member, network)
    needed = WEIGHT_COPIES * weights + reference + 2 * activations + gradients
    return max(1, free_memory(network.device) // (SAFETY_FACTOR * needed))


def bundle_bytes(bundle: Bundle) -> int:
    return sum(tensor.nbytes for group in bundle.values() for tensor in group.values())


def images_per_call(member: StackMember) -> int:
    """Return the most images of one batch; a private step's batches are of random length."""
    training, examples = member.job.training, len(member.data)
    return min(examples, dp_sgd.max_physical_batch(training, examples, member.job.full_batch))


def per_example_bytes(member: StackMember, network: LiveNetwork) -> int:
    """Return the bytes of per-example gradients that private steps keep: those of all but dense layers."""
    if dp_sgd.is_plain_sgd(member.job.training.private):
        return 0
    others = [layer for layer in network.module.modules() if not isinstance(layer, nn.Linear)]
    return images_per_call(member) * sum(p.nbytes for layer in others for p in layer.parameters(recurse=False))


def activation_bytes(member: StackMember, network: LiveNetwork) -> int:
    """Return the bytes that one batch's forward pass keeps for the backward pass."""
    network, saved = network.stackable_copy, dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    weights, reference = (
        {kind: {name: t.detach().clone() for name, t in group.items()} for kind, group in moved.items()}
        for moved in (move_bundle(bundle, network.device) for bundle in (member.job.weights, member.job.reference))
    )
    model = {name: tensor.requires_grad_() for name, tensor in weights["model"].items()}
    live = {"model": model, "buffers": weights.get("buffers", {})}
    network.set_training_mode(frozenset(live["model"]))
    training = member.job.training
    views = 1 if training.private is None else training.private.views
    batch = member.data.batch(torch.arange(images_per_call(member)).repeat_interleave(views))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        images, labels = (tensor.to(network.device) for tensor in batch)
        for step in member.job.sequence:
            step.objective(network, live, (images, labels), reference)
    return sum(saved.values())


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not available on every system
        return 1 << 32
