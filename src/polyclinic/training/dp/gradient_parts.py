"""Per-example gradients of one parameter: their norms, their weighted sums, and the sums of their squares.

For dense layers and convolutions these follow from the layer's inputs and output gradients, without ever writing the
examples' gradients down.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ParameterGradients(Protocol):
    """One parameter's gradients, one for each example."""

    def squared_norms(self) -> Tensor:
        """Return ‖gradient‖² of every example."""
        ...

    def weighted_sum(self, factors: Tensor, nonfinite: Tensor | None) -> Tensor:
        """Return Σ factor·gradient of each site.

        Args:
            factors: Sites × examples; the examples of all sites lie one after another.
            nonfinite: Marks the examples whose gradients are not finite and count as zero; None if there are none.
        """
        ...

    def sum_of_squares(self) -> Tensor:
        """Return Σ gradient², weight by weight, over all examples."""
        ...


class FullGradients(NamedTuple):
    """Gradients that are kept in memory."""

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
    """Gradients gᵀa of a dense layer's matrix, from its inputs a and output gradients g."""

    a: Tensor
    """n × places × inputs"""
    g: Tensor
    """n × places × outputs"""

    def squared_norms(self) -> Tensor:
        if self.a.shape[1] == 1:
            return _row_norms(self.a).square() * _row_norms(self.g).square()
        # Terms of either sign cancel: in float32 the norm could come out too small, and the clipped gradient too long.
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
    """Return ‖row‖, piece by piece with a sum in float64: float32 would be off by more than 1e-6 over a long row."""
    flat = at_least_float32(rows.flatten(1))
    pieces = flat.reshape(len(flat), -1, math.gcd(flat.shape[1], 512))
    found: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(pieces, dim=2).to(_widest_dtype(rows)), dim=1)
    return found


def at_least_float32(values: Tensor) -> Tensor:
    """Cast half precision to float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _widest_dtype(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64


def _zero_nonfinite(rows: Tensor, nonfinite: Tensor | None) -> Tensor:
    """Replace marked rows by zeros, as a factor of 0 is not enough: 0·NaN is NaN."""
    return rows if nonfinite is None else rows.masked_fill(nonfinite.reshape(-1, *[1] * (rows.ndim - 1)), 0)


class ConvolutionGradients(NamedTuple):
    """Gradients of a convolution's weight, from those of its matrix (filters × kernel·channels)."""

    matrix: ParameterGradients
    shape: tuple[int, ...]

    def squared_norms(self) -> Tensor:
        return self.matrix.squared_norms()

    def sum_of_squares(self) -> Tensor:
        return self.matrix.sum_of_squares().reshape(self.shape).permute(0, 3, 1, 2)

    def weighted_sum(self, factors: Tensor, nonfinite: Tensor | None) -> Tensor:
        return self.matrix.weighted_sum(factors, nonfinite).reshape(-1, *self.shape).permute(0, 1, 4, 2, 3)


class ConcatenatedGradients(NamedTuple):
    """Gradients of one site's examples that were computed piece by piece."""

    pieces: tuple[ParameterGradients, ...]
    piece_size: int

    def squared_norms(self) -> Tensor:
        return torch.cat([piece.squared_norms() for piece in self.pieces])

    def sum_of_squares(self) -> Tensor:
        return torch.stack([piece.sum_of_squares() for piece in self.pieces]).sum(0)

    def weighted_sum(self, factors: Tensor, nonfinite: Tensor | None) -> Tensor:
        weights = torch.split(factors, self.piece_size, 1)
        masks = [None] * len(weights) if nonfinite is None else torch.split(nonfinite, self.piece_size)
        sums = [piece.weighted_sum(w, mask) for piece, w, mask in zip(self.pieces, weights, masks, strict=True)]
        return torch.stack(sums).sum(0)
