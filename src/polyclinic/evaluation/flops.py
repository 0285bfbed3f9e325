"""FLOPs of a training step (multiplications and additions, by torch's own counter), and numbers of parameters."""

import copy
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polyclinic.core import DataError


def _convolution_backward(
    grad_shape: Sequence[int], image_shape: Sequence[int], weight_shape: Sequence[int], *rest: Any, **_: Any
) -> int:
    """The gradients of input and weight, where wanted, each take the multiplications of the forward pass.

    torch's own formula forgets the groups in the gradient of the weights (pytorch/pytorch#183405): for a
    depthwise layer of 96 channels it counts that gradient 96 times.
    """
    *_bias_stride_padding_dilation, transposed, _output_padding, _groups, wanted = rest
    positions = image_shape[2:] if transposed else grad_shape[2:]
    return 2 * grad_shape[0] * prod(positions) * prod(weight_shape) * int(sum(wanted[:2]))


OWN_FORMULAS = {torch.ops.aten.convolution_backward: _convolution_backward}


def training_step_flops(module: nn.Module, batch_shape: Sequence[int]) -> int:
    """FLOPs of forward and backward for one batch (examples × channels × height × width).

    The step runs on a copy without storage, so the module keeps its weights, statistics and gradients, and
    nothing is computed. Gradients of frozen parameters and of the images are not needed, so not counted.
    """
    shadow = copy.deepcopy(module).to("meta").train()
    images = torch.empty(tuple(batch_shape), device="meta")
    with FlopCounterMode(display=False, custom_mapping=OWN_FORMULAS) as counter:
        try:
            logits = shadow(images)
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"The network cannot take a batch of shape {tuple(batch_shape)}: choose another image "
                f"or batch size (torch says: {error})."
            ) from error
        if logits.requires_grad:
            logits.sum().backward()
    return int(counter.get_total_flops())


def count_parameters(module: nn.Module) -> int:
    """How many numbers the module learns; shared ones count once, frozen ones count."""
    return sum(parameter.numel() for parameter in module.parameters())
