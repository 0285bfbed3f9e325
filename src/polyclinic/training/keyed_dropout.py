"""Dropout whose mask depends on keys and positions in the tensor, and on nothing else.

PyTorch's dropout draws from one generator per process, so a site's masks would depend on which other sites train in the
process. Here a site's key comes from its own stream: it drops the same units alone, in a stack, or on its own machine.

Under a privacy plan every image has a key of its own, by its row at the site: with an image taken out of a batch, all
others keep their masks.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from polyclinic.core import Stream

MASK_32 = 0xFFFFFFFF
"""All arithmetic is on 32-bit numbers, held in 64 bits."""


class KeyedDropout(nn.Dropout):
    """An `nn.Dropout` whose mask is computed from `key`, which changes with every step: one integer, or one per row."""

    key: Tensor
    layer: int

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return values
        keys = _keys_of_rows(self.key, values) + self.layer
        mask = hash_uniform(keys, values.numel() // keys.numel()).reshape(values.shape) >= self.p
        return values * mask / (1 - self.p)


class StochasticDepth(nn.Module):
    """torchvision's layer of this name, which here drops by rows' keys if it has them, and else as torchvision does."""

    p: float
    mode: str
    key: Tensor
    layer: int

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return values
        if self.key.ndim:
            keys = _keys_of_rows(self.key, values).expand(len(values)) + self.layer
            kept = hash_uniform(keys, 1).reshape(-1, *[1] * (values.ndim - 1)) >= self.p
            return values * kept / (1 - self.p)
        shape = [len(values) if self.mode == "row" else 1, *[1] * (values.ndim - 1)]
        return values * values.new_empty(shape).bernoulli_(1 - self.p).div_(1 - self.p or 1)


def _keys_of_rows(key: Tensor, values: Tensor) -> Tensor:
    """Return `key`, or its first where `values` are other rows than its own: features of others, beside one image."""
    return key if key.ndim == 0 or len(key) == len(values) else key[0]


def hash_uniform(key: Tensor, count: int) -> Tensor:
    """Return `count` numbers in [0, 1) for each key, hashed from their positions and the key.

    The key is hashed first: consecutive keys would otherwise give the same numbers in another order.
    """
    low, high = key[..., None] & MASK_32, (key[..., None] >> 32) & MASK_32
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


def key_dropout_layers(
    layers: Iterable[tuple[str, nn.Module]], device: torch.device
) -> dict[str, KeyedDropout | StochasticDepth]:
    """Turn every plain dropout and stochastic depth among the named `layers` into a keyed one; return these by name."""
    layers = list(layers)
    dropouts = {name: layer for name, layer in layers if type(layer) in (nn.Dropout, KeyedDropout)}
    depths = {name: layer for name, layer in layers if type(layer).__name__ == StochasticDepth.__name__}
    for number, layer in enumerate([*dropouts.values(), *depths.values()], 1):
        layer.__class__ = KeyedDropout if isinstance(layer, nn.Dropout) else StochasticDepth
        keyed = cast(KeyedDropout | StochasticDepth, layer)
        keyed.layer = number
        keyed.register_buffer("key", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
    return cast(dict[str, KeyedDropout | StochasticDepth], dropouts | depths)


def first_key(stream: Stream) -> int:
    """Return the key of a site's first step; it leaves room for later ones in 64 bits."""
    return stream.child("dropout").integer() >> 1


def dropout_key(first: int, number: int, position: int) -> int:
    """Return the key of the `position`-th batch of step `number`; each of up to 256 layers adds its own number."""
    return first + (((number << 12) + position) << 8)


def row_keys(stream: Stream, rows: Tensor, views: int) -> Tensor:
    """Return a key for every view of every image, an image's one after another.

    Args:
        stream: The stream of the step, a secret one under a privacy plan.
        rows: The images' rows at the site.
        views: The augmentations of each image.
    """
    numbers = rows[:, None] * views + torch.arange(views, device=rows.device)
    return (numbers.flatten() << 8) + (stream.integer() >> 2)


def has_own_randomness(layer: nn.Module) -> bool:
    """Return whether a layer draws nothing, or from a key, so that its draws do not depend on other sites."""
    # Stochastic depth is recognised by name, as importing torchvision takes time and only its networks have it.
    is_random = isinstance(layer, nn.modules.dropout._DropoutNd) or type(layer).__name__ == "StochasticDepth"
    return not is_random or not layer.p or isinstance(layer, KeyedDropout)
