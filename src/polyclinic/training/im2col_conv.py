"""Convolutions as matrix products (im2col), which for many networks at once is one batched product per layer.

Under `vmap` a convolution with a weight per site becomes a grouped convolution, whose kernels are slow (five times, for
a hundred sites on one GPU). Image patches, multiplied by each site's own matrix, give the same.
"""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

MAX_KERNEL_PIXELS = 25
"""Larger kernels stay convolutions, since the image is copied once for every pixel of the kernel."""
M = TypeVar("M", bound=nn.Module)


class Im2colConv2d(nn.Conv2d):
    """An `nn.Conv2d` that computes a matrix product."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        patches = extract_patches(input, self.kernel_size, self.stride, self.padding, self.dilation)
        return self.multiply_patches(patches, weight, bias).reshape(*patches.shape[:-1], -1).permute(0, 3, 1, 2)

    def multiply_patches(self, patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs as rows (… × filters)."""
        output = patches.reshape(-1, patches.shape[-1]) @ weight.permute(2, 3, 1, 0).reshape(-1, weight.shape[0])
        return output if bias is None else output + bias.to(output.dtype)


def extract_patches(
    images: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: str | tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """Return each output pixel's patch: n × channels × height × width → n × height' × width' × (kernel·channels)."""
    assert not isinstance(padding, str)
    (above, left), (down, right), (high, wide) = padding, stride, dilation
    pixels = nn.functional.pad(images.permute(0, 2, 3, 1), (0, 0, left, left, above, above))
    rows = (pixels.shape[1] - high * (kernel[0] - 1) - 1) // down + 1
    columns = (pixels.shape[2] - wide * (kernel[1] - 1) - 1) // right + 1
    shifted = [
        pixels[:, i : i + (rows - 1) * down + 1 : down, j : j + (columns - 1) * right + 1 : right]
        for i in range(0, high * kernel[0], high)
        for j in range(0, wide * kernel[1], wide)
    ]
    return shifted[0] if len(shifted) == 1 else torch.cat(shifted, -1)


def copy_with_im2col(module: M) -> M:
    """Copy a module and replace its ordinary convolutions by matrix products."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        if type(layer) is nn.Conv2d and _is_ordinary(layer):
            layer.__class__ = Im2colConv2d
    return module


def _is_ordinary(layer: nn.Conv2d) -> bool:
    zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return layer.groups == 1 and zeros and layer.kernel_size[0] * layer.kernel_size[1] <= MAX_KERNEL_PIXELS
