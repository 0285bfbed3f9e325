"""Replaces BatchNorm by GroupNorm, so that no layer mixes the images of a batch, as DP-SGD requires."""

import copy
import math
from typing import TypeVar

from torch import nn

GROUPS = 32
"""The most groups, as in Wu and He (2018) and Opacus' ModuleValidator. The values after a dense layer are one group: in
groups of two or four, little more than their signs would be left."""
M = TypeVar("M", bound=nn.Module)


def replace_batch_norm(module: M) -> M:
    """Return a copy with GroupNorm in the place of BatchNorm. Scale and shift are kept, running statistics dropped."""
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, _to_group_norm(layer))
    return module


def _to_group_norm(layer: nn.modules.batchnorm._BatchNorm) -> nn.GroupNorm:
    width = layer.num_features
    groups = 1 if isinstance(layer, nn.BatchNorm1d) else math.gcd(GROUPS, width)
    norm = nn.GroupNorm(groups, width, layer.eps, layer.affine)
    if layer.affine:
        norm.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
    return norm
