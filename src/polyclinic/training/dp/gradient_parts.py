"""One parameter's gradients, an example each: how long they are, what they add up to, and their squares' sum."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ParameterGradients(Protocol):
    """One parameter's gradients, an example each."""

    def squared_norms(self) -> Tensor:
        """‖gradient‖² of every example."""
        ...

    def weighted_sum(self, factors: Tensor, nonfinite: Tensor | None) -> Tensor:
        """Σ factor·gradient, by site (`factors`: sites × examples); those that are `bad` may hold anything."""
        ...

    def sum_of_squares(self) -> Tensor:
        """Σ gradient², weight by weight, over all examples."""
        ...


class FullGradients(NamedTuple):
    """Every gradient in memory."""

    per_example: Tensor
    """n × `shape`"""
    shape: tuple[int, ...]

    def squared_norms(self) -> Tensor:
        return _row_norms(self.per_example).square()

    def sum_of_squares(self) -> Tensor:
        return self.per_example.square().sum(0).reshape(self.shape)

    def weighted_sum(self, factors: Tensor, nonfinite: Tensor | None) -> Tensor:
        rows = _zero_nonfinite(at_least_float32(self.per_example.flatten(1)), nonfinite).reshape(*factors.shape, -1)
        return torch.bmm(factors.to(rows.dtype)[:, None], rows).reshape(len(factors), *self.shape)


class OuterProducts(NamedTuple):
    """Gradients gᵀa of a matrix, never written down."""

    a: Tensor
    """n × places × inputs"""
    g: Tensor
    """n × places × outputs"""

    def squared_norms(self) -> Tensor:
        if self.a.shape[1] == 1:
            return _row_norms(self.a).square() * _row_norms(self.g).square()
        # Terms of either sign cancel: in float32 the sum could come out too small, and the clip too long.
        a, g = (t.to(_widest_dtype(t)) for t in (self.a, self.g))
        return ((a @ a.mT) * (g @ g.mT)).sum((1, 2)).clamp(min=0)

    def sum_of_squares(self) -> Tensor:
        if self.a.shape[1] == 1:  # (g·a)² = g²·a²
            return self.g[:, 0].square().mT @ self.a[:, 0].square()
        return torch.bmm(self.g.mT, self.a).square().sum(0)

    def weighted_sum(self, factors: Tensor, nonfinite: Tensor | None) -> Tensor:
        a, g = (_zero_nonfinite(at_least_float32(t), nonfinite) for t in (self.a, self.g))
        g = g * factors.to(g.dtype).reshape(-1, 1, 1)
        a, g = (t.reshape(len(factors), -1, t.shape[-1]) for t in (a, g))
        return torch.bmm(g.mT, a)


def _row_norms(rows: Tensor) -> Tensor:
    """By pieces, whose squares are added in float64: over a long row float32 would be off by more than 1e-6."""
    flat = at_least_float32(rows.flatten(1))
    pieces = flat.reshape(len(flat), -1, math.gcd(flat.shape[1], 512))
    found: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(pieces, dim=2).to(_widest_dtype(rows)), dim=1)
    return found


def at_least_float32(values: Tensor) -> Tensor:
    """At least in float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _widest_dtype(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64


def _zero_nonfinite(rows: Tensor, nonfinite: Tensor | None) -> Tensor:
    """With zeros for what is bad: even nought times NaN is NaN."""
    return rows if nonfinite is None else rows.masked_fill(nonfinite.reshape(-1, *[1] * (rows.ndim - 1)), 0)


class ConvolutionGradients(NamedTuple):
    """A convolution's matrix (filters × kernel·channels), as the convolution has it."""

    matrix: ParameterGradients
    shape: tuple[int, ...]

    def squared_norms(self) -> Tensor:
        return self.matrix.squared_norms()

    def sum_of_squares(self) -> Tensor:
        return self.matrix.sum_of_squares().reshape(self.shape).permute(0, 3, 1, 2)

    def weighted_sum(self, factors: Tensor, nonfinite: Tensor | None) -> Tensor:
        return self.matrix.weighted_sum(factors, nonfinite).reshape(-1, *self.shape).permute(0, 1, 4, 2, 3)


class ConcatenatedGradients(NamedTuple):
    """The gradients of one site's examples, some after some."""

    pieces: tuple[ParameterGradients, ...]
    piece_size: int

    def squared_norms(self) -> Tensor:
        return torch.cat([part.squared_norms() for part in self.pieces])

    def sum_of_squares(self) -> Tensor:
        return torch.stack([part.sum_of_squares() for part in self.pieces]).sum(0)

    def weighted_sum(self, factors: Tensor, nonfinite: Tensor | None) -> Tensor:
        shares = torch.split(factors, self.piece_size, 1)
        worse = [None] * len(shares) if nonfinite is None else torch.split(nonfinite, self.piece_size)
        totals = [part.weighted_sum(f, b) for part, f, b in zip(self.pieces, shares, worse, strict=True)]
        return torch.stack(totals).sum(0)
