"""Updates in b bits a value, a quarter of the bytes at 8. Shadin, Zhang, Wang, Pan: Heterogeneity-aware private
personalized federated learning for medical imaging via contrastive distillation (PFedCDP), Eq. 14 and 15. Stochastic
rounding: Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: communication-efficient SGD via gradient quantization and
encoding. NeurIPS 2017, section 3.1.

    d = w_k − w, in groups: each tensor, each channel, or each block of values;  low = min d
    (14)  q = (d − low) / step, rounded to an integer of b bits;  step = (max d − low) / (2ᵇ − 1)
    (15)  the server takes w + low + q·step

Rounding is stochastic by default, up with the probability of the fraction, so that E[low + q·step] = d: its errors are
independent and fade in the mean over sites, whereas rounding to the nearest (the paper's) makes the same error wherever
the same d comes. For a single site nearest errs less (by step/2 at most, where stochastic rounding may err by a whole
step), and it needs no random numbers.

Departures: step is never below the smallest normal number, so that a group of equal values has q = 0 and comes back
exactly. Chances are multiples of 2⁻¹⁶ and computed in single precision, so that the mean is off by up to
2⁻¹⁵·step + 2⁻²²·(max d − low); the latter is more from 8 bits on. NaN and infinity make their whole group so, and the
server's checks refuse it as they would without this stage. As in the paper 0 need not be one of the 2ᵇ levels: a value
that stayed put comes back up to a step away if others of its group moved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Literal, TypeAlias, get_args

import torch
from torch import Generator, Tensor

from polyclinic.core import Bundle, RecipeError, Refused, Stream, Tensors, contiguous_vector, split_vector
from polyclinic.privacy.transforms.bit_packing import pack_bits, packed_size, unpack_bits

VALUES, SCALES = "..values", "..scales"
"""Names of the tensors that replace those of a kind. No parameter has such a name: its module would have none."""
SMALLEST = torch.finfo(torch.float32).tiny
ROUNDING = 1.5 * 2.0**23
"""Added to a number below 2¹⁶ in single precision, it leaves the nearest integer in the lowest bits."""
CHUNK = 1 << 20
"""Values processed at a time, so that intermediate results stay in the processor's cache."""

Per: TypeAlias = Literal["tensor", "channel", "block"]
Runs: TypeAlias = Sequence[tuple[int, int]]
"""How a vector is divided: so many groups of so many values, then so many of …"""


@dataclass(frozen=True)
class Quantise:
    """Sends the difference from what was received in `bits` a value, with a scale per tensor, channel or block.

    A channel is one entry of the first axis; tensors with a single axis have but one. Blocks of `block` values take no
    heed of tensors. Only the single-precision tensors of these `kinds`, where every one that was received comes back;
    all else travels as it is. So do BatchNorm's statistics: a variance that errs by a share of the largest one could
    fall below zero.
    """

    kinds: tuple[str, ...] = ("model",)
    bits: int = 8
    per: Per = "block"
    block: int = 1024
    stochastic: bool = True

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 16:
            raise RecipeError(f"quantise.bits is {self.bits}; choose 2 to 16, usually 8")
        if self.per not in get_args(Per):
            raise RecipeError(f"quantise.per is {self.per!r}; choose {', '.join(get_args(Per))}")
        if self.block < 1:
            raise RecipeError(f"quantise.block is {self.block}; choose 1 value or more, usually 1024")

    def encode(self, tensors: Bundle, received: Bundle, rng: Stream) -> Bundle:
        return tensors | {
            k: self._quantise_group(tensors[k], received[k], rng.child(k))
            for k in self._common_tensors(tensors, received)
        }

    def decode(self, tensors: Bundle, received: Bundle) -> Bundle:
        return tensors | {
            k: self._restore_group(tensors[k], received[k]) for k in self._common_tensors(tensors, received)
        }

    def group_runs(self, shapes: Sequence[Sequence[int]]) -> Runs:
        """Return the groups of tensors of these shapes, in order."""
        if self.per == "block":
            return split_blocks(sum(map(prod, shapes)), self.block)
        counts = [shape[0] if self.per == "channel" and len(shape) > 1 else 1 for shape in shapes]
        filled = [(n, prod(shape) // n) for n, shape in zip(counts, shapes, strict=True) if prod(shape)]
        return [(sum(n for n, _ in alike), length) for length, alike in groupby(filled, key=lambda run: run[1])]

    def _common_tensors(self, tensors: Bundle, received: Bundle) -> list[str]:
        return [kind for kind in self.kinds if kind in tensors and kind in received]

    def _quantise_group(self, group: Tensors, received: Tensors, rng: Stream) -> Tensors:
        start = _float32_tensors(received)
        moved = {n: group[n] for n in start if n in group and _same_layout(group[n], start[n])}
        if not start or len(moved) < len(start):
            return group
        runs = self.group_runs([t.shape for t in start.values()])
        generator = rng.generator() if self.stochastic else None
        values, scales = quantise_vector(_as_vector(moved), _as_vector(start), runs, self.bits, generator)
        return {VALUES: values, SCALES: scales, **{n: t for n, t in group.items() if n not in moved}}

    def _restore_group(self, group: Tensors, received: Tensors) -> Tensors:
        start = _float32_tensors(received)
        if VALUES not in group or not start:
            return group
        runs = self.group_runs([t.shape for t in start.values()])
        vector = _as_vector(start).clone()
        self._check_group(group, len(vector), sum(count for count, _ in runs))
        dequantise_into(vector, group[VALUES], group[SCALES], runs, self.bits)
        pieces = split_vector(vector.to(next(iter(start.values())).device), list(start.values()))
        restored = dict(zip(start, pieces, strict=True))
        return restored | {n: t for n, t in group.items() if n not in (VALUES, SCALES)}

    def _check_group(self, group: Tensors, values: int, groups: int) -> None:
        sizes = {VALUES: (torch.uint8, (packed_size(self.bits, values),)), SCALES: (torch.float32, (2, groups))}
        found = {name: (group[name].dtype, tuple(group[name].shape)) for name in sizes if name in group}
        if found != sizes:
            raise Refused(
                "quantise", "the values are not from this stage; use it once, with the same options everywhere"
            )


def split_blocks(length: int, block: int) -> Runs:
    """Divide a vector into whole blocks and a shorter one at its end."""
    return [(n, size) for n, size in ((length // block, block), (1, length % block)) if n * size]


def quantise_vector(
    vector: Tensor, origin: Tensor | None, runs: Runs, bits: int = 8, generator: Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return (14): packed values, and `low` and `step` of each group; rounded to the nearest without a generator.

    Without an origin, the vector is the difference itself.
    """
    values = torch.empty(len(vector), dtype=torch.uint8 if bits <= 8 else torch.int32)
    scales = torch.empty(2, sum(count for count, _ in runs))
    room = torch.empty(_longest_piece(runs))
    nearest = torch.full((max((length for _, length in runs), default=0),), ROUNDING)
    most = 2.0**bits - 1
    sources = [vector] if origin is None else [vector, origin]
    for (low, step), small, new, *old in _iterate_pieces(runs, scales, values, *sources):
        rows = room[: new.numel()].view(new.shape)
        moved = torch.sub(new, old[0], out=rows) if old else new
        # Not by aminmax: it takes twenty times as long.
        torch.amin(moved, 1, out=low)
        torch.amax(moved, 1, out=step).sub_(low).div_(most).clamp_(min=SMALLEST)
        # Before it is scaled: values that are large beside their range would lose it.
        torch.sub(moved, low.unsqueeze(1), out=rows)
        bias = nearest[: new.shape[1]] if generator is None else _rounding_noise(new.shape, generator)
        torch.addcmul(bias, rows, step.reciprocal().unsqueeze_(1), out=rows)
        if generator is not None:
            rows.clamp_(max=most).add_(ROUNDING)
        # Bits of integers become bytes eight times as quickly as numbers do.
        small.copy_(rows.view(torch.int32))
    return pack_bits(values, bits), scales


def dequantise_into(vector: Tensor, values: Tensor, scales: Tensor, runs: Runs, bits: int = 8) -> None:
    """Add the dequantised values (15) to `vector`."""
    room = torch.empty(_longest_piece(runs))
    for (low, step), small, whole in _iterate_pieces(runs, scales, unpack_bits(values, bits, len(vector)), vector):
        rows = room[: small.numel()].view(small.shape).copy_(small)
        whole.add_(low.unsqueeze(1)).addcmul_(rows, step.unsqueeze(1))


def _rounding_noise(shape: torch.Size, generator: Generator) -> Tensor:
    """Return multiples of 2⁻¹⁶ in [−1/2, 1/2), four from each draw, since drawing takes most of the time."""
    count = shape.numel()
    draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return draws.view(torch.int16)[:count].view(shape).float().mul_(2.0**-16)


def _longest_piece(runs: Runs) -> int:
    return max((min(count, max(1, CHUNK // length)) * length for count, length in runs), default=0)


def _iterate_pieces(runs: Runs, scales: Tensor, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield scales and vectors together, as rows of one group each, at most `CHUNK` values at a time."""
    place = group = 0
    for count, length in runs:
        most = max(1, CHUNK // length)
        for rows in [most] * (count // most) + [count % most] * (count % most > 0):
            end = place + rows * length
            yield scales[:, group : group + rows], *(v[place:end].view(rows, length) for v in vectors)
            place, group = end, group + rows


def _float32_tensors(group: Tensors) -> Tensors:
    """Return the float32 tensors sorted by name, as in a decoded message."""
    return {name: group[name] for name in sorted(group) if group[name].dtype == torch.float32}


def _same_layout(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def _as_vector(tensors: Tensors) -> Tensor:
    """Return the tensors as one vector, without a copy if they are contiguous."""
    vector = contiguous_vector(list(tensors.values()))
    return torch.cat([t.detach().cpu().reshape(-1) for t in tensors.values()]) if vector is None else vector.cpu()
