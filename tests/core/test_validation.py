"""Ranges that types declare hold for recipes and for Python callers alike, and the error names the key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import NonNegativeFloat, PositiveInt

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.errors import RecipeError
from polyclinic.core.validation import PositiveShare, Share, check_options, validate_as


@dataclass(frozen=True)
class Options:
    share: Share = 0.5
    above: PositiveShare = 0.5
    weight: NonNegativeFloat = 0.0
    count: PositiveInt | None = None
    free: object = None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"share": -0.1}, "somewhere.share is -0.1, but should be greater than or equal to 0"),
        ({"share": 1.1}, "somewhere.share is 1.1, but should be less than or equal to 1"),
        ({"above": 0.0}, "somewhere.above is 0.0, but should be greater than 0"),
        ({"weight": -1.0}, "somewhere.weight is -1.0"),
        ({"weight": math.inf}, "somewhere.weight is inf, but should be a finite number"),
        ({"weight": math.nan}, "somewhere.weight is nan"),
        ({"count": 0}, "somewhere.count is 0"),
        ({"count": 1.5}, "somewhere.count is 1.5"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_its_key(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        check_options(Options(**values), "somewhere.")
    assert str(refusal.value).startswith(sentence)
    if all(map(math.isfinite, values.values())):
        with pytest.raises(RecipeError) as refusal:
            validate_as(Options, values, "somewhere.")
        assert str(refusal.value).startswith(sentence)


def test_values_at_the_ends_of_their_ranges_pass() -> None:
    check_options(Options(0.0, 1.0, 0.0, 1, print), "somewhere.")
    check_options(Options(1.0, 1e-9, 1e9, None), "somewhere.")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedprox", {"mu": -0.1}),
        ("fedsgd", {"steps_per_round": 0}),
        ("scaffold", {"global_lr": 0.0}),
        ("elastic", {"tau": 11.0}),
        ("adaptive-noise", {"largest_loss": 0.0}),
        ("moon", {"tau": 0.0}),
        ("fedmr", {"margin": 1.5}),
        ("fedmp", {"mu_client": 0.0}),
        ("fedmp", {"sample": 0}),
        ("fedmp", {"variant": "printed"}),
        ("fraug", {"momentum": 0.0}),
        ("fed-align", {"bank": 0}),
        ("pfedcdp", {"keep": 1.5}),
    ],
)
def test_python_callers_of_an_algorithm_are_refused_as_well(name: str, options: dict[str, Any]) -> None:
    (key,) = options
    with pytest.raises(RecipeError, match=rf"^algorithm\.{key} is "):
        ALGORITHMS[name](**options)


def test_an_algorithm_that_is_no_more_than_a_dataclass_is_checked_too() -> None:
    @dataclass(frozen=True)
    class Scaled(FedAvg):
        scale: PositiveShare = 1.0

    with pytest.raises(RecipeError, match=r"^algorithm\.scale is 2"):
        Scaled(scale=2.0)
