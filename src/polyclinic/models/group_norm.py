"""Networks without layers through which one image touches another: BatchNorm gives way to GroupNorm."""

from __future__ import annotations

import copy
import math
from typing import TypeVar

from torch import nn

GROUPS = 32
"""At most; as Wu and He (2018) and Opacus' ModuleValidator take it. Dense layers' values, one each, are one group: two
or four of them by themselves would come out as little more than their signs."""
M = TypeVar("M", bound=nn.Module)


def replace_batch_norm(module: M) -> M:
    """A copy whose BatchNorm layers are GroupNorm, with the same scale and shift; statistics are dropped."""
    module = copy.deepcopy(module)
    for parent in list(module.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, _to_group_norm(layer))
    return module


def _to_group_norm(layer: nn.modules.batchnorm._BatchNorm) -> nn.GroupNorm:
    width = layer.num_features
    groups = 1 if isinstance(layer, nn.BatchNorm1d) else math.gcd(GROUPS, width)
    found = nn.GroupNorm(groups, width, layer.eps, layer.affine)
    if layer.affine:
        found.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
    return found
