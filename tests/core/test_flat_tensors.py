"""Tensors as one vector: only where they lie so, and a distance to be trusted either way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch

from polyclinic.core.flat_tensors import (
    FlatDifference,
    FlatTensors,
    contiguous_vector,
    copy_tensors,
    l2_distance,
    split_vector,
)
from polyclinic.core.types import Tensors
from polyclinic.storage import messages

BUFFER = torch.arange(24.0)


def test_neighbours_become_one_vector_without_a_copy() -> None:
    tensors = [BUFFER[2:8].view(2, 3), BUFFER[8:8], BUFFER[8:9].view(()), BUFFER[9:20], torch.empty(0)]
    vector = contiguous_vector(tensors)
    assert vector is not None
    assert vector.data_ptr() == tensors[0].data_ptr()
    assert vector.tolist() == list(range(2, 20))
    for piece, tensor in zip(split_vector(vector, tensors), tensors, strict=True):
        assert piece.shape == tensor.shape
        assert torch.equal(piece, tensor)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [BUFFER[:0]],
        [BUFFER[:3], BUFFER[4:8]],
        [BUFFER[4:8], BUFFER[:4]],
        [BUFFER[:4], BUFFER[:4]],
        [BUFFER[:4], BUFFER[3:8]],
        [BUFFER[:4], BUFFER[4:10].view(2, 3).T],
        [BUFFER[0:4:2], BUFFER[4:8]],
        [BUFFER[:4], BUFFER[4:8].view(torch.int32)],
        [BUFFER[:4], BUFFER[4:8].view(torch.float64)],
        [BUFFER.view(torch.bfloat16)[:4], BUFFER.view(torch.bfloat16)[4:8]],
        [torch.empty(4, device="meta"), torch.empty(4, device="meta")],
    ],
)
def test_anything_else_does_not(tensors: list[torch.Tensor]) -> None:
    assert contiguous_vector(tensors) is None


def pair(size: float) -> list[Tensors]:
    generator = torch.Generator().manual_seed(1)
    lengths = {"a": 7, "b": 300_000}
    return [{n: torch.randn(length, generator=generator) * size for n, length in lengths.items()} for _ in range(2)]


def decoded(tensors: Tensors) -> Tensors:
    return messages.decode(messages.encode({}, {"m": tensors})).tensors["m"]


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("shared", [True, False])
def test_the_distance_is_that_of_double_precision(size: float, shared: bool) -> None:
    one, other = map(decoded, pair(size)) if shared else pair(size)
    assert (contiguous_vector(list(one.values())) is not None) == shared
    exact = math.sqrt(sum(float(((one[n].double() - other[n].double()) ** 2).sum()) for n in one))
    alone = math.sqrt(sum(float((t.double() ** 2).sum()) for t in one.values()))
    assert l2_distance(one, other) == pytest.approx(exact, rel=1e-5)
    assert l2_distance(one, {}) == pytest.approx(alone, rel=1e-5)
    assert l2_distance(one, dict(one)) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_the_distance(bad: float) -> None:
    tensors = {"a": BUFFER.clone(), "b": BUFFER.clone()}
    tensors["b"][5] = bad
    assert not math.isfinite(l2_distance(decoded(tensors), decoded({"a": BUFFER, "b": BUFFER})))
    assert l2_distance({"n": torch.tensor(3)}, {}) == 0.0


def a_row(*values: float) -> FlatTensors:
    found = copy_tensors({"a": torch.tensor(values[:1]), "b": torch.tensor(values[1:])})
    assert isinstance(found, FlatTensors)
    return found


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "set": lambda row: row.__setitem__("a", torch.zeros(1)),
    "delete": lambda row: row.__delitem__("a"),
    "update": lambda row: row.update(a=torch.zeros(1)),
    "or": lambda row: row.__ior__({"a": torch.zeros(1)}),
    "pop": lambda row: row.pop("a"),
    "popitem": lambda row: row.popitem(),
    "setdefault": lambda row: row.setdefault("c", torch.zeros(1)),
    "clear": lambda row: row.clear(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_flat_tensors_are_immutable(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Else its vector would speak of tensors that it no longer holds."""
    row = a_row(1.0, 2.0, 3.0)
    with pytest.raises(TypeError, match="make a new dict"):
        change(row)
    assert torch.equal(torch.cat(list(row.values())), row.vector)
    assert type(row | {"a": torch.zeros(1)}) is dict


def test_a_way_that_is_known_counts_only_from_where_it_was_measured() -> None:
    start, other = a_row(0.0, 0.0, 0.0), a_row(1.0, 2.0, 1.0)
    end = a_row(1.0, 2.0, 2.0)
    known = FlatTensors(end.items(), end.vector, difference=FlatDifference(start.vector, 3.0))
    assert l2_distance(known, start) == l2_distance(end, start) == 3.0
    assert l2_distance(known, other) == l2_distance(end, other) == 1.0
    assert l2_distance(known, dict(start)) == 3.0


def test_a_way_is_measured_again_once_a_tensor_was_changed() -> None:
    start, end = a_row(0.0, 0.0, 0.0), a_row(1.0, 2.0, 2.0)
    known = FlatTensors(end.items(), end.vector, difference=FlatDifference(start.vector, 3.0))
    known["a"].mul_(math.nan)
    assert math.isnan(l2_distance(known, start))


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, dict], ids=["copy", "deepcopy", "dict"])
def test_copies_of_a_row_are_free(make: Callable[[FlatTensors], Tensors]) -> None:
    row = a_row(1.0, 2.0, 3.0)
    free = make(row)
    assert type(free) is dict
    assert all(torch.equal(free[name], row[name]) for name in row)
    free["a"] = torch.zeros(1)
