"""Dropout whose mask is a function of a key and the place in the tensor, and of nothing else.

PyTorch's own draws from one generator per process: what a site draws would depend on which sites train beside it. Here
a site's key comes from its stream, so it drops the same units alone, in a stack, or in a hospital.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from polyclinic.core.contract import Stream

MASK_32 = 0xFFFFFFFF
"""All arithmetic is on 32-bit numbers, held in 64 bits."""


class KeyedDropout(nn.Dropout):
    """Takes the place of an `nn.Dropout`. `key` is a whole number that changes with every step."""

    key: Tensor
    layer: int

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return values
        kept = hash_uniform(self.key + self.layer, values.numel()).reshape(values.shape) >= self.p
        return values * kept / (1 - self.p)


def hash_uniform(key: Tensor, count: int) -> Tensor:
    """`count` numbers in [0, 1), hashed from their positions and the key.

    Keys that follow each other are mixed first: taken as they are, they would only change the order of the numbers.
    """
    low, high = key & MASK_32, (key >> 32) & MASK_32
    one = _mix_bits(_mix_bits(low) ^ high)
    other = _mix_bits((one + 0x9E3779B9) & MASK_32)
    place = torch.arange(count, device=key.device)
    return _mix_bits((_mix_bits(place ^ one) + other) & MASK_32).float() / 2**32


def _mix_bits(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers with very little bias: C. Wellons, "lowbias32" (2018)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK_32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK_32
    return x ^ (x >> 16)


def key_dropout_layers(layers: Iterable[tuple[str, nn.Module]], device: torch.device) -> dict[str, KeyedDropout]:
    """Turn every plain dropout layer among the named `layers` into a keyed one; returns them by name."""
    found: dict[str, KeyedDropout] = {}
    for name, layer in layers:
        if type(layer) in (nn.Dropout, KeyedDropout):
            layer.__class__ = KeyedDropout
            found[name] = cast(KeyedDropout, layer)
            found[name].layer = len(found)
            layer.register_buffer("key", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
    return found


def first_key(stream: Stream) -> int:
    """Where a site's keys begin; what follows leaves 64 bits room."""
    return stream.child("dropout").integer() >> 1


def dropout_key(first: int, number: int, position: int) -> int:
    """The key of the `position`-th batch of step `number`; 256 layers add their own number to it."""
    return first + (((number << 12) + position) << 8)


def has_own_randomness(layer: nn.Module) -> bool:
    """Whether what a layer draws is its site's own: it draws nothing, or from a key."""
    # By its name: importing torchvision takes its time, and only its networks have such layers.
    drawing = isinstance(layer, nn.modules.dropout._DropoutNd) or type(layer).__name__ == "StochasticDepth"
    return not drawing or not layer.p or isinstance(layer, KeyedDropout)
