"""Activation checkpointing: blocks compute their activations twice instead of keeping them. It saves memory and takes a
third more time.

T. Chen et al.: "Training Deep Nets with Sublinear Memory Cost", 2016, by `torch.utils.checkpoint`. The second time a
block uses the same weights as the first time, also if they were passed with the call, and copies of its statistics, so
that these move once a step, as they do without checkpointing.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyclinic.core import RecipeError
from polyclinic.models.classifier import Classifier
from polyclinic.models.split_point import chained_layers


class CheckpointedBlock(nn.Module):
    """A base class that is added to a block's own. It does nothing until `checkpointing` is set, as only plain autograd
    (neither `vmap` nor a recorded layer) can recompute."""

    checkpointing = False

    def forward(self, values: Tensor, again: bool = False) -> Tensor:
        if again or not (self.checkpointing and torch.is_grad_enabled()):
            return cast(Tensor, super().forward(values))
        tensors = dict(self.named_parameters()) | {name: buffer.clone() for name, buffer in self.named_buffers()}
        first = True

        def compute(values: Tensor) -> Tensor:
            nonlocal first
            if first:
                first = False
                return self.forward(values, again=True)
            return cast(Tensor, torch.func.functional_call(self, tensors, (values,), {"again": True}))

        return checkpoint(compute, values, use_reentrant=False)


def enable_checkpointing(classifier: Classifier) -> Classifier:
    """Turn the classifier's blocks into checkpointed ones, in place; the names of weights stay as they are."""
    layers = (list(layer) if type(layer) is nn.Sequential else [layer] for layer in chained_layers(classifier))
    blocks = [block for stage in layers for block in stage if len(list(block.children()))]
    if not blocks:
        raise RecipeError(
            "model.activation_checkpointing is true, but this network is not a chain of blocks; "
            "leave it out, or choose resnet22 or a torchvision network other than Inception"
        )
    for layer in blocks:
        layer.__class__ = type(f"Checkpointed{type(layer).__name__}", (CheckpointedBlock, type(layer)), {})
    return classifier
