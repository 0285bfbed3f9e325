"""Updates as 8-bit integers: a quarter of the bytes. Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD:
communication-efficient SGD via gradient quantization and encoding. NeurIPS 2017, section 3.1, with the largest value
for the norm.

    (1)  d = w_k − w, in blocks of `block` values;  s = max|d| / 127 for each block
    (2)  q = d/s, rounded to an integer: stochastically, up with the probability of its fraction, so that E[q·s] = d;
         or to the nearest
    (3)  the server takes w + q·s

Stochastic rounding is the default: its errors are independent and fade in the mean over sites, whereas rounding to the
nearest drops every move below s/2, in every round and at every site alike. For a single site nearest errs less (by s/2
at most, where stochastic rounding may err by s), and it needs no random numbers.

Departures: s is 10⁻⁴ wider than in (1), so that rounding never leaves the range of 8 bits, and never 0. Chances in (2)
are multiples of 2⁻¹⁶, so that the mean is off by up to 2⁻¹⁵·s. NaN and infinity make their whole block so, and the
server's checks refuse it as they would without this stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from polyclinic.core import Bundle, Stream, Tensors
from polyclinic.errors import RecipeError, Refused
from polyclinic.flat import apart, side_by_side

VALUES, SCALES = "..int8", "..scales"
"""What replaces the tensors of a kind. No parameter has such a name: it would lie in a module without one."""
LEVELS = 126.99
SMALLEST = torch.finfo(torch.float32).tiny
CHUNK = 1 << 19
"""Values handled at a time, so that what is made in between stays in the processor's cache."""


@dataclass(frozen=True)
class Quantise:
    """Send the difference from what was received in 8 bits a value, and one scale for every `block` values.

    Only the single-precision tensors of these `kinds`, where every one that was received comes back; all else travels
    as it is. So do BatchNorm's statistics: a variance that errs by a share of the largest one could fall below zero.
    """

    kinds: tuple[str, ...] = ("model",)
    block: int = 1024
    stochastic: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.block <= CHUNK:
            raise RecipeError(f"quantise.block is {self.block}; choose 1 to {CHUNK} values, usually 1024")

    def out(self, tensors: Bundle, received: Bundle, rng: Stream) -> Bundle:
        return tensors | {
            k: self._shrink(tensors[k], received[k], rng.child(k)) for k in self._common(tensors, received)
        }

    def back(self, tensors: Bundle, received: Bundle) -> Bundle:
        return tensors | {k: self._restore(tensors[k], received[k]) for k in self._common(tensors, received)}

    def _common(self, tensors: Bundle, received: Bundle) -> list[str]:
        return [kind for kind in self.kinds if kind in tensors and kind in received]

    def _shrink(self, group: Tensors, received: Tensors, rng: Stream) -> Tensors:
        start = _single(received)
        moved = {n: group[n] for n in start if n in group and _alike(group[n], start[n])}
        if not start or len(moved) < len(start):
            return group
        generator = rng.generator() if self.stochastic else None
        values, scales = quantise(_vector(moved), _vector(start), self.block, generator)
        return {VALUES: values, SCALES: scales, **{n: t for n, t in group.items() if n not in moved}}

    def _restore(self, group: Tensors, received: Tensors) -> Tensors:
        if VALUES not in group:
            return group
        start = _single(received)
        vector = _vector(start).clone()
        if group[VALUES].shape != vector.shape or len(group[SCALES]) != -(-len(vector) // self.block):
            raise Refused("quantise", "the values were not quantised by this stage; use it once, with one block size")
        dequantise_into(vector, group[VALUES], group[SCALES], self.block)
        pieces = apart(vector.to(next(iter(start.values())).device), list(start.values()))
        rest = {n: t for n, t in group.items() if n not in (VALUES, SCALES)}
        return dict(zip(start, pieces, strict=True)) | rest


def quantise(vector: Tensor, origin: Tensor, block: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """(1) and (2): 8-bit values and the scale of each block; to the nearest where there is no generator."""
    values = torch.empty(len(vector), dtype=torch.int8)
    scales = torch.empty(-(-len(vector) // block))
    room = torch.empty(min(CHUNK, len(vector)))
    for new, old, small, scale in _chunks(block, scales, vector, origin, values):
        moved = torch.sub(new, old, out=room[: len(new)])
        rows = moved.view(len(scale), -1)
        # Not by an infinity norm, nor by aminmax: either takes five times as long.
        torch.maximum(rows.amax(1), rows.amin(1).neg_(), out=scale).div_(LEVELS).clamp_(min=SMALLEST)
        rows.mul_(scale.reciprocal().unsqueeze_(1))
        if generator is not None:
            moved.add_(_noise(len(moved), generator), alpha=2.0**-16)
        small.copy_(moved.round_())
    return values, scales


def dequantise_into(vector: Tensor, values: Tensor, scales: Tensor, block: int) -> None:
    """(3): add the values, times the scales of their blocks, to `vector`."""
    room = torch.empty(min(CHUNK, len(vector)))
    for whole, small, scale in _chunks(block, scales, vector, values):
        rows = room[: len(small)].copy_(small).view(len(scale), -1)
        whole.view(rows.shape).addcmul_(rows, scale.unsqueeze(1))


def _chunks(block: int, scales: Tensor, *vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The vectors and their scales in step: as many whole blocks at a time as fit, then the shorter one at the end."""
    whole, most = len(vectors[0]) // block * block, CHUNK // block
    if whole:
        pieces = (torch.split(v[:whole], most * block) for v in vectors)
        yield from zip(*pieces, torch.split(scales[: whole // block], most), strict=True)
    if whole < len(vectors[0]):
        yield (*(v[whole:] for v in vectors), scales[-1:])


def _noise(count: int, generator: Generator) -> Tensor:
    """Random integers from −2¹⁵ to 2¹⁵ − 1, four from each draw: drawing is what takes time."""
    draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return draws.view(torch.int16)[:count].float()


def _single(group: Tensors) -> Tensors:
    """Single-precision tensors in the order of their names, which is that of a decoded message."""
    return {name: group[name] for name in sorted(group) if group[name].dtype == torch.float32}


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape


def _vector(tensors: Tensors) -> Tensor:
    """The tensors as one vector: without a copy if they lie side by side."""
    vector = side_by_side(list(tensors.values()))
    return torch.cat([t.detach().cpu().reshape(-1) for t in tensors.values()]) if vector is None else vector.cpu()
