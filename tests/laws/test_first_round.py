"""Local pretraining: a first round of more epochs, whatever the algorithm, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.optimisation.fedprox import FedProx
from polyclinic.algorithms.representation.fedmp import FedMP
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.runs.experiment import run
from polyclinic.training.data_order import iterate_steps
from tests.laws.bench import clinics, play, same, small
from tests.small import tiny

SGD = Training(Optimiser(lr=0.1), batch=5)


@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedMP])
def test_one_round_of_it_is_a_round_of_so_many_epochs(kind: type[Algorithm]) -> None:
    sites = clinics(12, 7)
    wanted = play(kind(replace(SGD, epochs=4)), sites, small(), 1).outcome.state
    assert same(play(kind(replace(SGD, first_epochs=4)), sites, small(), 1).outcome.state, wanted)
    stepwise = replace(SGD, epochs=None, steps=2, first_epochs=4)
    assert same(play(kind(stepwise), sites, small(), 1).outcome.state, wanted)
    assert not same(play(kind(SGD), sites, small(), 1).outcome.state, wanted)


@pytest.mark.parametrize("later", [{"epochs": 1}, {"epochs": None, "steps": 2}], ids=["epochs", "steps"])
def test_no_epoch_comes_twice(later: dict[str, int | None]) -> None:
    """Epochs are numbered over the run: a long first round, then short ones, is one walk through the images."""
    labels, stream = torch.arange(12) % 3, Stream(4)
    plain = [step for number in range(1, 8) for step in iterate_steps(labels, SGD, stream, number, full_batch=False)]
    longer = replace(SGD, first_epochs=3, **later)  # type: ignore[arg-type]
    found = [step for number in range(1, 4) for step in iterate_steps(labels, longer, stream, number, full_batch=False)]
    assert len(found) == 3 * 3 + 2 * (later.get("steps") or 3)
    for (number, [batch]), (wanted, [other]) in zip(found, plain, strict=False):
        assert number == wanted
        assert torch.equal(batch, other)


def test_later_rounds_are_as_long_as_ever_on_both_engines() -> None:
    local, stacked = (
        run(tiny(training__first_epochs=3, rounds=3, engine__name=engine)).summary for engine in ("local", "stacked")
    )
    assert local.headline.scores.value("loss") == pytest.approx(stacked.headline.scores.value("loss"), rel=1e-5)
    flat = run(tiny(rounds=3)).summary
    assert local.headline.scores.value("loss") < flat.headline.scores.value("loss")
