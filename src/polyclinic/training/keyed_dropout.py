"""Dropout whose mask depends on a key and the position in the tensor, and on nothing else.

PyTorch's dropout draws from one generator per process, so a site's masks would depend on which other sites train in the
process. Here a site's key comes from its own stream: it drops the same units alone, in a stack, or on its own machine.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from polyclinic.core import Stream

MASK_32 = 0xFFFFFFFF
"""All arithmetic is on 32-bit numbers, held in 64 bits."""


class KeyedDropout(nn.Dropout):
    """An `nn.Dropout` whose mask is computed from `key`, an integer that changes with every step."""

    key: Tensor
    layer: int

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return values
        mask = hash_uniform(self.key + self.layer, values.numel()).reshape(values.shape) >= self.p
        return values * mask / (1 - self.p)


def hash_uniform(key: Tensor, count: int) -> Tensor:
    """Return `count` numbers in [0, 1), hashed from their positions and the key.

    The key is hashed first: consecutive keys would otherwise give the same numbers in another order.
    """
    low, high = key & MASK_32, (key >> 32) & MASK_32
    one = _mix_bits(_mix_bits(low) ^ high)
    other = _mix_bits((one + 0x9E3779B9) & MASK_32)
    return _mix_bits((_mix_bits(torch.arange(count, device=key.device) ^ one) + other) & MASK_32).float() / 2**32


def _mix_bits(x: Tensor) -> Tensor:
    """Apply a bijection of 32-bit numbers with very little bias: C. Wellons, "lowbias32" (2018)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK_32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK_32
    return x ^ (x >> 16)


def key_dropout_layers(layers: Iterable[tuple[str, nn.Module]], device: torch.device) -> dict[str, KeyedDropout]:
    """Turn every plain dropout layer among the named `layers` into a keyed one, and return these by name."""
    found: dict[str, KeyedDropout] = {}
    for name, layer in layers:
        if type(layer) in (nn.Dropout, KeyedDropout):
            layer.__class__ = KeyedDropout
            found[name] = cast(KeyedDropout, layer)
            found[name].layer = len(found)
            layer.register_buffer("key", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
    return found


def first_key(stream: Stream) -> int:
    """Return the key of a site's first step; it leaves room for later ones in 64 bits."""
    return stream.child("dropout").integer() >> 1


def dropout_key(first: int, number: int, position: int) -> int:
    """Return the key of the `position`-th batch of step `number`; each of up to 256 layers adds its own number."""
    return first + (((number << 12) + position) << 8)


def has_own_randomness(layer: nn.Module) -> bool:
    """Return whether a layer draws nothing, or from a key, so that its draws do not depend on other sites."""
    # Stochastic depth is recognised by name, as importing torchvision takes time and only its networks have it.
    is_random = isinstance(layer, nn.modules.dropout._DropoutNd) or type(layer).__name__ == "StochasticDepth"
    return not is_random or not layer.p or isinstance(layer, KeyedDropout)
