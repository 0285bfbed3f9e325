"""Adding an algorithm touches one file and one line: here is one, complete, and it runs from a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from polyclinic import Recipe, run
from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.base import Algorithm
from polyclinic.core.errors import RecipeError
from polyclinic.core.jobs import Fit, Site, Update, Work
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.runs.experiment import build_network, load_sites
from polyclinic.training.losses import task_loss
from polyclinic.training.network import copy_module_weights


@dataclass(frozen=True)
class SignVote(Algorithm):
    """Every site votes on the direction of every weight; the majority moves it by `stride`."""

    stride: float = 0.01

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield Fit(received, task_loss, self.training)
        return Update(fitted.weights, site.examples), None

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        votes = {name: torch.zeros_like(w) for name, w in state["model"].items()}
        for update in updates:
            for name, w in state["model"].items():
                votes[name] += torch.sign(update.tensors["model"][name] - w)
        moved = {name: w + self.stride * torch.sign(votes[name]) for name, w in state["model"].items()}
        return {**state, "model": moved}


RECIPE = {
    "name": "toy",
    "rounds": 2,
    "data": {"name": "digits", "partition": {"by": "iid", "sites": 3}},
    "model": {"name": "linear"},
    "algorithm": {"name": "sign-vote", "stride": 0.25},
    "training": {"optimiser": {"name": "adam", "lr": 0.01}},
    "evaluate": {"bootstrap": 0},
}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "sign-vote", SignVote)


@pytest.mark.usefixtures("registered")
def test_a_new_algorithm_runs_from_a_recipe() -> None:
    recipe = Recipe.from_values(RECIPE)
    result = run(recipe)
    start = copy_module_weights(build_network(recipe, load_sites(recipe)))["model"]
    strides = torch.cat([(result.state["model"][n] - w).flatten() / 0.25 for n, w in start.items()])
    torch.testing.assert_close(strides, strides.round(), rtol=0, atol=1e-5)
    assert set(strides.round().abs().tolist()) <= {0.0, 1.0, 2.0}
    assert strides.abs().max() > 1.5
    assert result.summary.algorithm == "sign-vote"
    assert result.headline.scores.value("accuracy") > 0.5, "a vote of three learns to read digits, if roughly"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "options",
    [
        {"stride": "far"},
        {"strides": 0.1},
    ],
)
def test_its_options_are_checked_like_everybodys(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="stride"):
        Recipe.from_values({**RECIPE, "algorithm": {"name": "sign-vote", **options}})


def test_it_is_unknown_without_its_line() -> None:
    with pytest.raises(RecipeError, match="sign-vote"):
        Recipe.from_values(RECIPE)


def test_it_is_short() -> None:
    assert len(inspect.getsource(SignVote).splitlines()) <= 25
