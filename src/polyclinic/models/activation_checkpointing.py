"""Activations that are computed twice instead of kept, block by block: less memory, a third more time.

T. Chen et al.: "Training Deep Nets with Sublinear Memory Cost", 2016, by `torch.utils.checkpoint`. The second time a
block computes with the tensors that it had the first time, whoever's they were (a call may bring its own weights), and
with copies of its statistics: these move once a step, as they do without.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from polyclinic.core.errors import RecipeError
from polyclinic.models.classifier import Classifier
from polyclinic.models.split_point import chained_layers


class CheckpointedBlock(nn.Module):
    """What a layer is besides its own type. Off unless switched on: only plain autograd can compute anything again."""

    checkpointing = False

    def forward(self, values: Tensor, again: bool = False) -> Tensor:
        if again or not (self.checkpointing and torch.is_grad_enabled()):
            output: Tensor = super().forward(values)
            return output
        held = dict(self.named_parameters()) | {name: buffer.clone() for name, buffer in self.named_buffers()}
        first = True

        def compute(values: Tensor) -> Tensor:
            nonlocal first
            if first:
                first = False
                return self.forward(values, again=True)
            output: Tensor = functional_call(self, held, (values,), {"again": True})
            return output

        found: Tensor = checkpoint(compute, values, use_reentrant=False)
        return found


def enable_checkpointing(classifier: Classifier) -> Classifier:
    """Its blocks can compute their activations again instead of keeping them; no name and no weight changes."""
    layers = (list(layer) if type(layer) is nn.Sequential else [layer] for layer in chained_layers(classifier))
    blocks = [block for stage in layers for block in stage if len(list(block.children()))]
    if not blocks:
        raise RecipeError(
            "model.checkpoint is true, but this network is not a chain of blocks that could be computed again; "
            "leave it out, or take resnet22 or a torchvision network other than Inception"
        )
    for layer in blocks:
        layer.__class__ = type(f"Recomputed{type(layer).__name__}", (CheckpointedBlock, type(layer)), {})
    return classifier
