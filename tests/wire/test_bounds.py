"""Every bound of a message, just inside and just outside, for every kind of tensor that any algorithm exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyclinic.algorithms import ALGORITHMS
from polyclinic.core.errors import Refused
from polyclinic.core.types import Bundle, Part
from polyclinic.evaluation.metrics import METRICS
from polyclinic.federation.update_check import (
    LARGEST_COUNT,
    LARGEST_NUMBER,
    CheckedUpdate,
    ExpectedUpdate,
    check_update,
)
from polyclinic.storage import messages

KINDS = sorted({exchange.kind for algorithm in ALGORITHMS.values() for exchange in algorithm().exchanges()})
NORM = 8.0
FIELDS: dict[str, Any] = {"run": "r", "round": 1, "site": "s", "examples": 5}


def expected(tensors: Bundle, received: Bundle | None = None, max_norm: float = NORM) -> ExpectedUpdate:
    like = {kind: {name: torch.zeros_like(t) for name, t in group.items()} for kind, group in tensors.items()}
    reports: list[tuple[str, Part]] = [("m", "validation")]
    return ExpectedUpdate("r", 1, "s", received or {}, like, examples=5, reports=reports, max_norm=max_norm)


def checked(tensors: Bundle, received: Bundle | None = None, **fields: Any) -> CheckedUpdate:
    return check_update(messages.encode({**FIELDS, **fields}, tensors), expected(tensors, received))


def refusal(tensors: Bundle, received: Bundle | None = None, **fields: Any) -> str:
    with pytest.raises(Refused) as error:
        checked(tensors, received, **fields)
    return error.value.kind


def test_more_than_weights_are_exchanged() -> None:
    assert {"model", "buffers", "control"} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sent", [True, False], ids=["received", "new"])
def test_no_kind_may_move_further_than_max_norm(kind: str, sent: bool) -> None:
    """Of what was received, or from zero where nothing of this kind was sent."""
    start = torch.tensor([3.0, -4.0, 0.0])
    received = {kind: {"w": start}} if sent else {}
    origin = start if sent else torch.zeros(3)
    direction = torch.tensor([0.0, 0.0, 1.0])
    inside, outside = ({kind: {"w": origin + step * direction}} for step in (NORM, NORM * 1.001))
    assert torch.equal(checked(inside, received).update.tensors[kind]["w"], inside[kind]["w"])
    assert refusal(outside, received) == "norm"


@pytest.mark.parametrize("kind", KINDS)
def test_max_norm_is_over_all_tensors_of_a_kind_together(kind: str) -> None:
    part = NORM / 2**0.5
    assert checked({kind: {"a": torch.tensor([part * 0.999]), "b": torch.tensor([part * 0.999])}})
    assert refusal({kind: {"a": torch.tensor([part * 1.001]), "b": torch.tensor([part * 1.001])}}) == "norm"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_counts_are_exact_in_every_kind(kind: str, sign: int) -> None:
    def count(value: int) -> Bundle:
        return {kind: {"a": torch.tensor([1, 2]), "count": torch.tensor(value)}}

    def check(value: int) -> CheckedUpdate:
        return check_update(messages.encode(FIELDS, count(value)), expected(count(value), count(0), max_norm=1e300))

    assert check(sign * LARGEST_COUNT).update.tensors[kind]["count"] == sign * LARGEST_COUNT
    for value in (sign * (LARGEST_COUNT + 1), sign * 2**62):
        with pytest.raises(Refused, match="counts beyond"):
            check(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_no_kind_may_hold_what_is_not_finite(kind: str, value: float) -> None:
    assert refusal({kind: {"w": torch.tensor([0.0, value])}}) == "finite"


@pytest.mark.parametrize("kind", KINDS)
def test_only_tensors_that_were_agreed_are_accepted(kind: str) -> None:
    tensors: Bundle = {kind: {"w": torch.zeros(2, 3)}}
    wanted = expected(tensors)

    def kind_of_refusal(found: Bundle) -> str:
        with pytest.raises(Refused) as error:
            check_update(messages.encode(FIELDS, found), wanted)
        return error.value.kind

    assert kind_of_refusal({kind: {}}) == "missing"
    assert kind_of_refusal({kind: {"w": torch.zeros(2, 3), "v": torch.zeros(1)}}) == "extra"
    assert kind_of_refusal({kind: {"w": torch.zeros(3, 2)}}) == "shape"
    assert kind_of_refusal({kind: {"w": torch.zeros(2, 3).double()}}) == "dtype"
    assert kind_of_refusal({**tensors, f"{kind}-more": {"w": torch.zeros(1)}}) == "kind"


MODEL: Bundle = {"model": {"w": torch.zeros(3)}}


@pytest.mark.parametrize("examples", [1, 5])
def test_examples_up_to_those_registered_are_accepted(examples: int) -> None:
    assert checked(MODEL, examples=examples).update.examples == examples


@pytest.mark.parametrize("examples", [0, 6, -1, 1.0, True, None])
def test_other_numbers_of_examples_are_refused(examples: object) -> None:
    assert refusal(MODEL, examples=examples) == "examples"


def test_scalars_and_metrics_lie_within_what_can_be_weighed() -> None:
    row = {"model": "m", "part": "validation", "n": LARGEST_COUNT, "loss": 36.0, "accuracy": 1.0, "auc": 0.0}
    found = checked(MODEL, scalars={"a": LARGEST_NUMBER, "b": -LARGEST_NUMBER}, report=[row])
    assert found.update.scalars == {"a": LARGEST_NUMBER, "b": -LARGEST_NUMBER}
    assert found.report == [row]
    for value in (1.001 * LARGEST_NUMBER, -1.001 * LARGEST_NUMBER, 10**101):
        assert refusal(MODEL, scalars={"a": value}) == "scalars"
    for n in (LARGEST_COUNT + 1, -1, 1.0, True):
        assert refusal(MODEL, report=[{**row, "n": n}]) == "report"
    assert checked(MODEL, report=[{**row, "n": 0}])


def test_metrics_lie_in_their_ranges() -> None:
    """The loss of one prediction is at most −log of the smallest probability that is told from 0: 36.04."""
    row = {"model": "m", "part": "validation", "n": 1}
    for name in METRICS:
        most = 36.05 if name == "loss" else 1.0
        assert checked(MODEL, report=[{**row, name: 0.0}]).report
        assert checked(MODEL, report=[{**row, name: most - 0.02}]).report
        for value in (-0.01, most + 0.01, 1e99):
            assert refusal(MODEL, report=[{**row, name: value}]) == "report"


def test_a_site_reports_on_no_more_images_than_it_registered() -> None:
    row = {"model": "m", "part": "validation", "loss": 0.5}
    wanted = replace(expected(MODEL), held={"train": 5, "validation": 6})
    replies = [messages.encode({**FIELDS, "report": [{**row, "n": n}]}, MODEL) for n in (6, 7)]
    assert check_update(replies[0], wanted).report
    with pytest.raises(Refused, match="7 'validation' images where 6 are registered"):
        check_update(replies[1], wanted)


def test_a_variance_below_zero_is_refused() -> None:
    like = {"buffers": {"norm.running_var": torch.ones(3)}}
    assert checked(like).update
    assert refusal({"buffers": {"norm.running_var": torch.tensor([1.0, -1e-9, 1.0])}}) == "norm"


def test_a_message_may_be_as_large_as_announced_and_not_a_byte_larger() -> None:
    wanted = expected(MODEL)
    plain = len(messages.encode({**FIELDS, "pad": ""}, MODEL))
    room = wanted.max_bytes - plain

    def padded(size: int) -> bytes:
        return messages.encode({**FIELDS, "pad": "x" * size}, MODEL)

    fitting = next(padded(size) for size in range(room, 0, -1) if len(padded(size)) <= wanted.max_bytes)
    assert check_update(fitting, wanted)
    with pytest.raises(Refused) as error:
        check_update(fitting + b"x" * (wanted.max_bytes + 1 - len(fitting)), wanted)
    assert error.value.kind == "oversize"


def test_the_table_of_tensors_has_a_bound_of_its_own() -> None:
    data = messages.encode(FIELDS, MODEL)
    length = int.from_bytes(messages.encode_body(MODEL).data[:8], "little")
    assert messages.decode(data, max_table_bytes=length).fields["run"] == "r"
    with pytest.raises(Refused) as error:
        messages.decode(data, max_table_bytes=length - 1)
    assert error.value.kind == "tensors"


def test_a_header_has_a_bound() -> None:
    def with_header(size: int) -> bytes:
        plain = messages.encode({"pad": ""}, {})
        _, length, _ = messages.PREFIX.unpack_from(plain)
        return messages.encode({"pad": "x" * (size - length)}, {})

    inside = messages.MAX_HEADER - (messages.PREFIX.size + messages.MAX_HEADER) % messages.ALIGNMENT
    assert messages.decode(with_header(inside))
    with pytest.raises(Refused) as error:
        messages.decode(with_header(inside + messages.ALIGNMENT))
    assert error.value.kind == "header"


@pytest.mark.parametrize(("shape", "fits"), [((0,) + (1,) * 15, True), ((0,) + (1,) * 16, False)])
def test_shapes_have_sixteen_dimensions_at_most(shape: tuple[int, ...], fits: bool) -> None:
    tensor: Tensor = torch.zeros(shape)
    data = messages.encode(FIELDS, {"model": {"w": tensor}})
    if fits:
        assert messages.decode(data).tensors["model"]["w"].shape == shape
        return
    with pytest.raises(Refused) as error:
        messages.decode(data)
    assert error.value.kind == "shape"


def test_an_update_of_another_run_round_or_site_is_refused() -> None:
    wanted = expected(MODEL)
    for name, value in (("run", "other"), ("round", 2), ("site", "t")):
        changed: dict[str, Any] = {name: value}
        with pytest.raises(Refused) as error:
            check_update(messages.encode(FIELDS, MODEL), replace(wanted, **changed))
        assert error.value.kind == name
