"""The streaming mean: exact where it can be, close where it cannot, and nobody else's memory."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyclinic.algorithms import RunningMean

VALUES = st.floats(-1e6, 1e6, allow_subnormal=False)
WEIGHTS = st.floats(1e-3, 1e6)
SUMMANDS = st.lists(st.tuples(VALUES, WEIGHTS), min_size=1, max_size=12)


def mean_of(tensors: list[Tensor], weights: list[float] | None = None) -> Tensor:
    mean = RunningMean()
    for tensor, weight in zip(tensors, weights or [1.0] * len(tensors), strict=True):
        mean.add({"t": tensor}, weight)
    return mean.value()["t"]


@settings(max_examples=200, deadline=None)
@given(summands=SUMMANDS)
def test_it_is_the_weighted_mean(summands: list[tuple[float, float]]) -> None:
    """Against exact rational arithmetic; each of the n steps may round by one unit of the largest value."""
    total = sum((Fraction(w) for _, w in summands), Fraction())
    exact = sum((Fraction(v) * Fraction(w) for v, w in summands), Fraction()) / total
    found = mean_of([torch.tensor([v], dtype=torch.float64) for v, _ in summands], [w for _, w in summands])
    room = 4e-16 * len(summands) * max(abs(v) for v, _ in summands)
    assert abs(Fraction(found.item()) - exact) <= Fraction(room)


@settings(max_examples=100, deadline=None)
@given(value=st.floats(width=32, allow_nan=False), weights=st.lists(WEIGHTS, min_size=1, max_size=8))
def test_one_summand_and_equal_summands_come_out_bit_for_bit(value: float, weights: list[float]) -> None:
    if value in (float("inf"), float("-inf")):
        weights = weights[:1]
    for dtype in (torch.float32, torch.float64):
        tensor = torch.tensor([value, -value], dtype=dtype)
        found = mean_of([tensor] * len(weights), weights)
        assert found.dtype == dtype
        assert torch.equal(found, tensor)
        if len(weights) == 1:  # the sign of a zero does not always survive an addition
            assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@settings(max_examples=100, deadline=None)
@given(summands=st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**4)), min_size=1, max_size=8))
def test_integers_are_averaged_and_rounded(summands: list[tuple[int, int]]) -> None:
    """To the nearest, give or take the rounding of the mean itself where it lies half-way."""
    exact = Fraction(sum(v * w for v, w in summands), sum(w for _, w in summands))
    found = mean_of([torch.tensor(v) for v, _ in summands], [float(w) for _, w in summands])
    assert found.dtype == torch.int64
    assert abs(int(found) - exact) <= Fraction(1, 2) + Fraction(1, 10**5)
    if len({v for v, _ in summands}) == 1:
        assert int(found) == summands[0][0]


def test_it_neither_changes_nor_keeps_its_summands() -> None:
    first, second = {"t": torch.ones(3), "n": torch.tensor(3)}, {"t": torch.full((3,), 5.0), "n": torch.tensor(7)}
    mean = RunningMean()
    mean.add(first)
    mean.add(second, 3.0)
    assert (first["t"].tolist(), second["t"].tolist()) == ([1.0] * 3, [5.0] * 3)
    for tensors in (first, second):
        tensors["t"].fill_(99)
        tensors["n"].fill_(99)
    assert mean.value()["t"].tolist() == [4.0] * 3
    assert mean.value()["n"].item() == 6


def test_a_single_summand_is_a_copy() -> None:
    only = torch.ones(3)
    found = mean_of([only])
    only.fill_(99)
    assert found.tolist() == [1.0] * 3


def test_it_counts_summands_and_weights() -> None:
    mean = RunningMean()
    for weight in (1.0, 2.5):
        mean.add({}, weight)
    assert (mean.count, mean.total, mean.value()) == (2, 3.5, {})
