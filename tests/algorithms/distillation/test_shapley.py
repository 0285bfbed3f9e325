"""Shapley's axioms, his definition by orders of arrival, and what teachers are worth."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from polyclinic.algorithms.distillation.shapley import (
    beats_chance,
    coalition_value,
    likelihood_gain,
    shapley_values,
    shapley_weights,
)
from polyclinic.core.errors import RecipeError
from polyclinic.core.rng import Stream

Game = Callable[[frozenset[str]], float]
PLAYERS = ("a", "b", "c", "d")
numbers = st.floats(-100, 100)
tables = st.lists(numbers, min_size=16, max_size=16)


def game(table: list[float]) -> Game:
    return lambda coalition: table[sum(1 << PLAYERS.index(player) for player in coalition)]


def by_orders(value: Game) -> dict[str, float]:
    """The definition: what a player adds when all arrive in random order."""
    gains = dict.fromkeys(PLAYERS, 0.0)
    for order in permutations(PLAYERS):
        for place, player in enumerate(order):
            gains[player] += value(frozenset(order[: place + 1])) - value(frozenset(order[:place]))
    return {player: gain / math.factorial(len(PLAYERS)) for player, gain in gains.items()}


@given(tables)
def test_it_is_the_mean_over_all_orders_of_arrival(table: list[float]) -> None:
    assert shapley_values(game(table), PLAYERS) == pytest.approx(by_orders(game(table)), abs=1e-9)


@given(tables)
def test_efficiency_everything_is_handed_out(table: list[float]) -> None:
    assert sum(shapley_values(game(table), PLAYERS).values()) == pytest.approx(table[15] - table[0], abs=1e-9)


@given(tables, tables, numbers)
def test_additivity_two_games_are_worth_the_sum(one: list[float], two: list[float], factor: float) -> None:
    both = [a + factor * b for a, b in zip(one, two, strict=True)]
    first, second = shapley_values(game(one), PLAYERS), shapley_values(game(two), PLAYERS)
    wanted = {player: first[player] + factor * second[player] for player in PLAYERS}
    assert shapley_values(game(both), PLAYERS) == pytest.approx(wanted, abs=1e-6)


@given(tables)
def test_a_null_player_gets_nothing(table: list[float]) -> None:
    assert shapley_values(lambda who: game(table)(who - {"d"}), PLAYERS)["d"] == 0


@given(tables)
def test_symmetric_players_get_the_same(table: list[float]) -> None:
    def value(coalition: frozenset[str]) -> float:
        others = coalition - {"a", "b"}
        return game(table)(others | ({"a"} if coalition & {"a", "b"} else set()))

    found = shapley_values(value, PLAYERS)
    assert found["a"] == pytest.approx(found["b"], abs=1e-9)


def test_a_pair_of_gloves() -> None:
    """Two left gloves, one right; a pair is worth 1. The textbook's answer: 1/6, 1/6, 2/3."""
    found = shapley_values(lambda who: float("right" in who and len(who) > 1), ("left", "other left", "right"))
    assert found == pytest.approx({"left": 1 / 6, "other left": 1 / 6, "right": 2 / 3})


def test_every_coalition_is_asked_for_once_and_twelve_players_are_the_limit() -> None:
    asked: list[frozenset[str]] = []
    players = [f"player {number}" for number in range(12)]
    found = shapley_values(lambda who: asked.append(who) or float(len(who)), players)  # type: ignore[func-returns-value]
    assert len(asked) == len(set(asked)) == 2**12
    assert found == pytest.approx(dict.fromkeys(players, 1.0))
    with pytest.raises(RecipeError, match=r"13 teachers .* at most 12 .* finish.shapley: false"):
        shapley_values(lambda _: 0.0, [*players, "one more"])


@given(st.dictionaries(st.text(max_size=3), numbers, min_size=1, max_size=6))
def test_weights_are_shares_of_what_is_positive(values: dict[str, float]) -> None:
    found = shapley_weights(values)
    assert sum(found.values()) == pytest.approx(1)
    if any(value > 0 for value in values.values()):
        assert all((found[name] > 0) == (value > 0) for name, value in values.items() if abs(value) > 1e-300)
    else:
        assert set(found.values()) == {1 / len(values)}


def test_weights_by_hand() -> None:
    assert shapley_weights({"a": 3.0, "b": -9.0, "c": 1.0}) == {"a": 0.75, "b": 0.0, "c": 0.25}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=Stream(seed, ("normal",)).generator())


LABELS = torch.arange(60) % 3


def knowing(certainty: float, seed: int) -> Tensor:
    """Logits that lean towards the right class, with noise of deviation 1."""
    return certainty * torch.nn.functional.one_hot(LABELS, 3) + normal(60, 3, seed=seed)


def test_teachers_share_what_all_know_together() -> None:
    value = coalition_value({"a": knowing(2, 1), "b": knowing(1, 2), "c": knowing(0, 3)}, LABELS)
    found = shapley_values(value, "abc")
    assert value(frozenset()) == 0
    assert sum(found.values()) == pytest.approx(value(frozenset("abc")))
    assert found["a"] > found["b"] > found["c"]
    assert shapley_weights(found)["c"] < 0.1


def test_a_copied_teacher_gets_the_same_value() -> None:
    one, other = knowing(2, 1), knowing(1, 2)
    found = shapley_values(
        coalition_value({"one": one, "other": other, "copy": one.clone()}, LABELS), ("one", "other", "copy")
    )
    assert found["one"] == pytest.approx(found["copy"])


def test_a_teacher_that_says_the_same_of_all_classes_has_no_influence() -> None:
    said = {"a": knowing(2, 1), "b": knowing(1, 2)}
    alone = shapley_values(coalition_value(said, LABELS), "ab")
    undecided = normal(60, 1, seed=9).expand(60, 3)
    found = shapley_values(coalition_value({**said, "c": undecided}, LABELS), "abc")
    assert found == pytest.approx({**alone, "c": 0.0}, abs=1e-9)


def test_a_majority_vote_is_worth_nothing() -> None:
    labels = torch.tensor([0] * 9 + [1])
    always = torch.tensor([[3.0, 0.0]]).expand(10, 2)
    assert coalition_value({"always the first": always}, labels)(frozenset({"always the first"})) == 0


def test_scale_does_not_matter_but_sides_do() -> None:
    said = knowing(2, 1)
    shares = torch.full((60,), 1 / 60, dtype=torch.float64)
    assert likelihood_gain(50 * said, LABELS, shares) == pytest.approx(likelihood_gain(said, LABELS, shares))
    assert likelihood_gain(-said, LABELS, shares) == 0


def test_what_a_teacher_knows_in_closed_form() -> None:
    """Right in 3 of 4 images of either class, always as sure: the best it can say is 3:1, so ln 2 − H(¼)."""
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    said = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 4 + [[1.0, 0.0]])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    value = coalition_value({"a": said}, labels)
    assert value(frozenset("a")) == pytest.approx(math.log(2) - entropy)


def test_a_teacher_that_is_always_right_knows_the_class() -> None:
    sure = torch.nn.functional.one_hot(LABELS, 3).double()
    assert coalition_value({"a": sure}, LABELS)(frozenset("a")) == pytest.approx(math.log(3))


def test_no_scale_does_better_than_the_one_found() -> None:
    said = knowing(1, 5)
    shares = torch.full((60,), 1 / 60, dtype=torch.float64)
    best = likelihood_gain(said, LABELS, shares)
    for beta in torch.logspace(-3, 3, 200, dtype=torch.float64):
        gain = math.log(3) - float(torch.nn.functional.cross_entropy(beta * said, LABELS))
        assert gain <= best + 1e-12


def test_teachers_that_guess_are_told_from_teachers_that_know() -> None:
    """The test of (4) rejects guessing in about 1 case of 40: one side of the 5 % test, as β is not negative."""
    guesses = [likelihood_gain(knowing(0, seed), LABELS, torch.full((60,), 1 / 60).double()) for seed in range(400)]
    assert 1 <= sum(beats_chance(value, LABELS) for value in guesses) <= 22
    assert beats_chance(coalition_value({"a": knowing(1, 1)}, LABELS)(frozenset("a")), LABELS)
