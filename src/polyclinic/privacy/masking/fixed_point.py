"""Updates as integers, whose sum is exact: weighted differences from what was received, in steps of a fixed grid.

    (1)  q_k = round(w_k · (update_k − received) / step)  mod 2^bits        at site k
    (2)  mean = received + step · (Σ_k q_k) / Σ_k w_k                       at the server, whatever the order of the sum

A value that the sum could not carry is brought into range at the site, so that no sum wraps around, and NaN counts as
no change. It is not refused: whoever chooses the weights could learn from each refusal what an update was.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from polyclinic.core import Tensors

Words: TypeAlias = NDArray[Any]
"""A vector of unsigned integers, whose arithmetic wraps around."""


@dataclass(frozen=True)
class FixedGrid:
    """The integers of one kind of tensors."""

    bits: int
    step: float

    @property
    def words(self) -> Any:
        """The unsigned type of numpy in which masked values are added."""
        return np.uint32 if self.bits == 32 else np.uint64

    @property
    def dtype(self) -> torch.dtype:
        """The type in which they travel."""
        return torch.int32 if self.bits == 32 else torch.int64

    def limit(self, summands: int, reserved: float = 0.0) -> int:
        """Return the largest integer of which `summands` can be added without wrapping around, and `reserved` besides;
        0 or less if there is no room for that alone."""
        return ((1 << (self.bits - 1)) - 1 - math.ceil(reserved)) // summands


PARAMETERS = FixedGrid(32, 2.0**-24)
"""Parameters move by far less than 1 in a round."""
WIDE = FixedGrid(64, 2.0**-32)
"""Statistics, counters and control variates may be large."""


def grid_of(kind: str) -> FixedGrid:
    """Return the grid of a kind of tensors."""
    return PARAMETERS if kind == "model" else WIDE


def quantise_group(kind: str, group: Tensors, received: Tensors, weight: float, limit: int) -> tuple[Words, int]:
    """Return the integers (1) of a kind's tensors as one vector, in the order of names, and how many had to be changed.

    A tensor that was not received is measured from 0. Integers beyond ±`limit` become ±`limit`, and NaN becomes 0.
    """
    grid, pieces, changed = grid_of(kind), [], 0
    most = float(limit) if float(limit) <= limit else math.nextafter(limit, 0)  # 64 bits have no float of their own
    for name in sorted(group):
        moved = group[name].detach().cpu().double()
        if name in received:
            moved = moved - received[name].detach().cpu().double()
        scaled = moved.mul(weight / grid.step).round_().reshape(-1)
        changed += int((~(scaled.abs() <= most)).sum())
        scaled.nan_to_num_(0.0, math.inf, -math.inf).clamp_(-most, most)
        pieces.append(scaled.numpy().astype(np.int64).astype(grid.words))
    return (np.concatenate(pieces) if pieces else np.zeros(0, grid.words)), changed


def restore_group(
    kind: str, total: Words, received: Tensors, like: Mapping[str, torch.Tensor], weight: float
) -> Tensors:
    """Return the mean (2) of a kind from the sum of its integers; `like`: names and shapes, `weight`: Σ_k w_k."""
    grid = grid_of(kind)
    signed = torch.from_numpy(total.view(np.int32 if grid.bits == 32 else np.int64)).double()
    moved, found, place = signed.mul_(grid.step / weight), {}, 0
    for name in sorted(like):
        size, old = like[name].numel(), received.get(name, torch.zeros_like(like[name]))
        mean = moved[place : place + size].view(like[name].shape) + old.detach().cpu().double()
        mean = mean if like[name].is_floating_point() else mean.round()
        found[name] = mean.to(like[name])
        place += size
    return {name: found[name] for name in like}


def empty_group(kind: str, group: Tensors) -> torch.Tensor:
    """Return the tensor in which a kind's integers travel, with zeros: only its type and size count."""
    return torch.zeros(sum(t.numel() for t in group.values()), dtype=grid_of(kind).dtype)


def as_tensor(words: Words) -> torch.Tensor:
    """Return integers as a tensor to send, without a copy."""
    return torch.from_numpy(words.view(np.int32 if words.dtype == np.uint32 else np.int64))


def as_words(tensor: torch.Tensor) -> Words:
    """Return a tensor that was received as integers to add."""
    found: Words = tensor.cpu().numpy()
    return found.view(np.uint32 if found.dtype == np.int32 else np.uint64)
