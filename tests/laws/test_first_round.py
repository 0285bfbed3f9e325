"""Local pretraining: a first round of more epochs, whatever the algorithm, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyclinic.algorithms.averaging import Averaging
from polyclinic.algorithms.fedavg import FedAvg
from polyclinic.algorithms.fedmp import FedMP
from polyclinic.algorithms.fedprox import FedProx
from polyclinic.core import Optimiser, Training
from polyclinic.experiment import run
from tests.laws.bench import clinics, play, same, small
from tests.small import tiny

SGD = Training(Optimiser(lr=0.1), batch=5)


@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedMP])
def test_one_round_of_it_is_a_round_of_so_many_epochs(kind: type[Averaging]) -> None:
    sites = clinics(12, 7)
    wanted = play(kind(replace(SGD, epochs=4)), sites, small(), 1).outcome.state
    assert same(play(kind(replace(SGD, first_epochs=4)), sites, small(), 1).outcome.state, wanted)
    stepwise = replace(SGD, epochs=None, steps=2, first_epochs=4)
    assert same(play(kind(stepwise), sites, small(), 1).outcome.state, wanted)
    assert not same(play(kind(SGD), sites, small(), 1).outcome.state, wanted)


def test_later_rounds_are_as_long_as_ever_on_both_engines() -> None:
    local, stacked = (
        run(tiny(training__first_epochs=3, rounds=3, engine__name=engine)).summary for engine in ("local", "stacked")
    )
    assert local["headline"]["loss"] == pytest.approx(stacked["headline"]["loss"], rel=1e-5)
    flat = run(tiny(rounds=3)).summary
    assert local["headline"]["loss"] < flat["headline"]["loss"]
