"""The streaming mean: exact where it can be, close where it cannot, and nobody else's memory."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from polyclinic.algorithms.base import RunningMean
from polyclinic.core.flat_tensors import FlatTensors
from polyclinic.core.types import Tensors
from polyclinic.storage import messages

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


SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (3, 5), (0,), (2, 3, 3), (33,)]
DTYPES = [torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]
KINDS = st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), max_size=8)


def drawn(layout: list[tuple[tuple[int, ...], torch.dtype]], generator: torch.Generator) -> Tensors:
    values = [(torch.randn(shape, generator=generator) * 100).to(dtype) for shape, dtype in layout]
    return {f"t{i}": value for i, value in enumerate(values)}


def decoded(tensors: Tensors) -> Tensors:
    """As a message brings them: one after the other in one buffer."""
    found = messages.decode(messages.encode({}, {"model": tensors})).tensors
    return found.get("model", {})


def turned(tensors: Tensors) -> Tensors:
    """The same values in memory that runs the other way: neighbours, but not in the order of their values."""
    return {name: t.T.contiguous().T if t.ndim == 2 else t.clone() for name, t in tensors.items()}


FORMS = {"decoded": decoded, "apart": lambda tensors: dict(tensors), "turned": turned}


def one_by_one(updates: list[Tensors], weights: list[float]) -> Tensors:
    """What the mean is defined to be, tensor by tensor."""
    mean = {n: t.clone() if t.is_floating_point() else t.double() for n, t in updates[0].items()}
    total = weights[0]
    for update, weight in zip(updates[1:], weights[1:], strict=True):
        total += weight
        mean = {n: torch.lerp(mean[n], t.to(mean[n].dtype), weight / total) for n, t in update.items()}
    return {n: t if updates[0][n].is_floating_point() else t.round().long() for n, t in mean.items()}


@settings(max_examples=100, deadline=None)
@given(
    layout=KINDS,
    arriving=st.lists(st.tuples(st.sampled_from(sorted(FORMS)), WEIGHTS), min_size=1, max_size=4),
    seed=st.integers(0, 999),
)
def test_however_the_tensors_lie_in_memory_the_bits_are_the_same(
    layout: list[tuple[tuple[int, ...], torch.dtype]], arriving: list[tuple[str, float]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    updates = [drawn(layout, generator) for _ in arriving]
    mean = RunningMean()
    for update, (form, weight) in zip(updates, arriving, strict=True):
        mean.add(FORMS[form](update), weight)
    expected, found = one_by_one(updates, [weight for _, weight in arriving]), mean.value()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_decoded_message_is_averaged_as_one_vector() -> None:
    """Else the test above would compare one way with itself."""
    update = {"a": torch.ones(5), "b": torch.ones(2, 3)}
    mean = RunningMean()
    mean.add(decoded(update))
    mean.add(decoded({n: 3 * t for n, t in update.items()}))
    found = mean.value()
    assert isinstance(found, FlatTensors)
    assert {n: t.flatten().tolist() for n, t in found.items()} == {"a": [2.0] * 5, "b": [2.0] * 6}


def test_tensors_of_another_shape_are_not_averaged_by_their_memory() -> None:
    mean = RunningMean()
    mean.add(decoded({"a": torch.zeros(2, 3), "b": torch.zeros(4)}))
    with pytest.raises(RuntimeError, match="size"):
        mean.add(decoded({"a": torch.zeros(3, 2), "b": torch.zeros(4)}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_tensors_on_a_gpu_are_averaged_there() -> None:
    mean = RunningMean()
    for value in (1.0, 4.0):
        both = torch.full((8,), value, device="cuda")
        mean.add({"a": both[:3], "b": both[3:]}, value)
    assert mean.value()["a"].device.type == "cuda"
    assert mean.value()["b"].tolist() == pytest.approx([3.4] * 5)
