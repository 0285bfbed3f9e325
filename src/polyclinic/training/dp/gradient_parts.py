"""One parameter's gradients, an example each: how long they are, what they add up to, and their squares' sum."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ParameterGradients(Protocol):
    """One parameter's gradients, an example each."""

    def squares(self) -> Tensor:
        """‖gradient‖² of every example."""
        ...

    def total(self, factors: Tensor, bad: Tensor | None) -> Tensor:
        """Σ factor·gradient, by site (`factors`: sites × examples); those that are `bad` may hold anything."""
        ...

    def energy(self) -> Tensor:
        """Σ gradient², weight by weight, over all examples."""
        ...


class FullGradients(NamedTuple):
    """Every gradient in memory."""

    each: Tensor
    """n × `shape`"""
    shape: tuple[int, ...]

    def squares(self) -> Tensor:
        return _lengths(self.each).square()

    def energy(self) -> Tensor:
        return self.each.square().sum(0).reshape(self.shape)

    def total(self, factors: Tensor, bad: Tensor | None) -> Tensor:
        rows = _whole(exact(self.each.flatten(1)), bad).reshape(*factors.shape, -1)
        return torch.bmm(factors.to(rows.dtype)[:, None], rows).reshape(len(factors), *self.shape)


class OuterProducts(NamedTuple):
    """Gradients gᵀa of a matrix, never written down."""

    a: Tensor
    """n × places × inputs"""
    g: Tensor
    """n × places × outputs"""

    def squares(self) -> Tensor:
        if self.a.shape[1] == 1:
            return _lengths(self.a).square() * _lengths(self.g).square()
        # Terms of either sign cancel: in float32 the sum could come out too small, and the clip too long.
        a, g = (t.to(_finest(t)) for t in (self.a, self.g))
        return ((a @ a.mT) * (g @ g.mT)).sum((1, 2)).clamp(min=0)

    def energy(self) -> Tensor:
        if self.a.shape[1] == 1:  # (g·a)² = g²·a²
            return self.g[:, 0].square().mT @ self.a[:, 0].square()
        return torch.bmm(self.g.mT, self.a).square().sum(0)

    def total(self, factors: Tensor, bad: Tensor | None) -> Tensor:
        a, g = (_whole(exact(t), bad) for t in (self.a, self.g))
        g = g * factors.to(g.dtype).reshape(-1, 1, 1)
        a, g = (t.reshape(len(factors), -1, t.shape[-1]) for t in (a, g))
        return torch.bmm(g.mT, a)


def _lengths(rows: Tensor) -> Tensor:
    """By pieces, whose squares are added in float64: over a long row float32 would be off by more than 1e-6."""
    flat = exact(rows.flatten(1))
    pieces = flat.reshape(len(flat), -1, math.gcd(flat.shape[1], 512))
    found: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(pieces, dim=2).to(_finest(rows)), dim=1)
    return found


def exact(values: Tensor) -> Tensor:
    """At least in float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _finest(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64


def _whole(rows: Tensor, bad: Tensor | None) -> Tensor:
    """With zeros for what is bad: even nought times NaN is NaN."""
    return rows if bad is None else rows.masked_fill(bad.reshape(-1, *[1] * (rows.ndim - 1)), 0)


class Reordered(NamedTuple):
    """A convolution's matrix (filters × kernel·channels), as the convolution has it."""

    matrix: ParameterGradients
    shape: tuple[int, ...]

    def squares(self) -> Tensor:
        return self.matrix.squares()

    def energy(self) -> Tensor:
        return self.matrix.energy().reshape(self.shape).permute(0, 3, 1, 2)

    def total(self, factors: Tensor, bad: Tensor | None) -> Tensor:
        return self.matrix.total(factors, bad).reshape(-1, *self.shape).permute(0, 1, 4, 2, 3)


class Joined(NamedTuple):
    """The gradients of one site's examples, some after some."""

    parts: tuple[ParameterGradients, ...]
    some: int

    def squares(self) -> Tensor:
        return torch.cat([part.squares() for part in self.parts])

    def energy(self) -> Tensor:
        return torch.stack([part.energy() for part in self.parts]).sum(0)

    def total(self, factors: Tensor, bad: Tensor | None) -> Tensor:
        shares = torch.split(factors, self.some, 1)
        worse = [None] * len(shares) if bad is None else torch.split(bad, self.some)
        totals = [part.total(f, b) for part, f, b in zip(self.parts, shares, worse, strict=True)]
        return torch.stack(totals).sum(0)
