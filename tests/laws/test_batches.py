"""`training.batches`: as many batches an epoch at a small site as at a large one, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.elastic import Elastic
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.optimisation.fednova import FedNova
from polyclinic.algorithms.optimisation.fedsgd import FedSGD
from polyclinic.algorithms.wrappers.curriculum import wrap_with_curriculum
from polyclinic.core.errors import RecipeError
from polyclinic.core.jobs import Fit
from polyclinic.core.options import CurriculumOptions, Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.privacy.sampling import rate_and_sums
from polyclinic.runs.experiment import Experiment, run
from polyclinic.training.data_order import batches_per_epoch, draw_epoch_batches
from polyclinic.training.losses import task_loss
from tests.laws.bench import as_json, clinics, play, same, small, tapped
from tests.laws.test_stacked import assert_close, on_the_stack
from tests.small import tiny

SGD = Training(Optimiser(lr=0.1), batch=None, batches=3)


def by_hand(examples: int, training: Training = SGD) -> Training:
    return replace(training, batch=max(2, examples // 3), batches=None)


@given(examples=st.integers(1, 3000), wanted=st.integers(1, 200), seed=st.integers(0, 9))
def test_the_batch_is_the_sites_share(examples: int, wanted: int, seed: int) -> None:
    training = Training(batch=None, batches=wanted)
    cut = draw_epoch_batches(torch.zeros(examples), training, Stream(seed))
    size = max(2, math.floor(examples / wanted))
    assert training.batch_size(examples) == size
    assert {len(index) for index in cut[:-2]} <= {size}
    assert sorted(torch.cat(cut).tolist()) == list(range(examples))
    assert len(cut) == batches_per_epoch(examples, size)
    if examples >= 2 * wanted:  # else 2 images a batch are more than their share
        assert wanted <= len(cut) <= wanted + math.ceil(wanted / size)
    if examples % wanted == 0 and examples >= 2 * wanted:
        assert len(cut) == wanted


def handed_in(algorithm: Algorithm, sizes: tuple[int, ...]) -> list[Any]:
    _, letters = tapped(algorithm, clinics(*sizes), small())
    return [letter.answer.tensors for letter in letters]


def test_every_site_trains_as_if_its_batch_were_given_by_hand() -> None:
    sizes = (12, 7, 30, 4)
    found = handed_in(FedAvg(SGD), sizes)
    for place, examples in enumerate(sizes):
        assert same(found[place], handed_in(FedAvg(by_hand(examples)), sizes)[place])
    assert not same(found[0], handed_in(FedAvg(by_hand(30)), sizes)[0])


PACES = [
    {"epochs": 2},
    {"epochs": None, "steps": 2},
    {"oversample": True},
    {"epochs": None, "steps": 2, "curriculum": CurriculumOptions(by="hard")},
]


@pytest.mark.parametrize("kind", [FedAvg, FedNova, Elastic, FedSGD])
@pytest.mark.parametrize("pace", PACES, ids=["epochs", "steps", "oversampled", "ordered"])
def test_whatever_the_algorithm_and_the_pace(kind: type[Algorithm], pace: dict[str, Any]) -> None:
    ends = []
    for training in (replace(SGD, **pace), by_hand(14, replace(SGD, **pace))):
        ends.append(
            play(
                wrap_with_curriculum(kind(training), reports_forgetting=False), clinics(14, 14), small(), 3
            ).outcome.state
        )
    assert same(*ends)


def test_stacks_hold_the_sites_whose_batches_are_alike() -> None:
    sites = clinics(12, 12, 30, dtype=torch.float64)
    alone = play(FedAvg(SGD), sites, small(dtype=torch.float64), 2).outcome.state
    stacked = play(FedAvg(SGD), sites, small(dtype=torch.float64), 2, on_the_stack())
    assert_close(stacked.outcome.state, alone, 1e-12)
    notes = next(row["sites"] for row in as_json(stacked.journal.costs) if row["event"] == "round")
    assert [notes[name].get("stack_size", 1) for name in sites] == [2, 2, 1]
    assert notes["clinic-3"]["unstacked_reason"] == "no other site's job was like it"


def test_a_plan_prices_each_sites_own_batch() -> None:
    for sampling in ("poisson", "shuffle"):
        private = replace(SGD, private=Private(1.0, 1.0, sampling), epochs=2)
        for examples in (5, 30, 31, 100):
            jobs = [Fit({}, task_loss, training) for training in (private, by_hand(examples, private))]
            assert rate_and_sums(jobs[0], examples) == rate_and_sums(jobs[1], examples)
    plan = {"epsilon": 5, "delta": 1e-4, "randomness": "seed"}
    recipe = tiny(training__batch=None, training__batches=10, privacy=plan)
    experiment = Experiment(recipe)
    assert experiment.setup.plan is not None
    for name, [steps] in experiment.setup.plan.jobs.items():
        examples = experiment.setup.federation.sites[name]
        assert steps.rate == pytest.approx((examples // 10) / examples, rel=0.01)
    spent = experiment.run().summary.privacy
    assert spent is not None
    assert float(spent.epsilon_by_accountant["pld"] or 9) <= 5


def test_a_run_says_what_a_step_at_the_largest_site_costs() -> None:
    by_number = tiny(training__batch=None, training__batches=3, rounds=1)
    most = max(Experiment(by_number).setup.federation.sites.values())
    found = [run(recipe).summary.model for recipe in (by_number, tiny(training__batch=most // 3, rounds=1))]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"training__batches": 5}, "either batch or batches: for Q batches an epoch write `batch: null`"),
        ({"training__batch": None}, "either batch or batches"),
        ({"training__batch": None, "training__batches": 0}, "training.batches is 0, but should be greater"),
    ],
)
def test_one_of_the_two_is_given(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        tiny(**settings)
