"""FRAug: what is shared and what never leaves, FedAvg with nothing made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyclinic import run
from polyclinic.algorithms.base import classifier_weights
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.fraug import OWN, FRAug
from polyclinic.algorithms.representation.fraug_losses import (
    FeatureGenerator,
)
from polyclinic.core.errors import RecipeError
from polyclinic.core.jobs import Fit, Fitted, Job, Site
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import AUX_PREFIX, Bundle, SiteId
from polyclinic.data.examples import SiteData
from polyclinic.federation.site_runner import drive_jobs
from polyclinic.runs.experiment import Experiment
from polyclinic.training.network import LiveNetwork, copy_auxiliary_weights
from tests.laws.bench import clinics, play, same, small, tapped
from tests.laws.test_stacked import SIZES, same_on_both, together
from tests.small import tiny

SGD = Training(Optimiser(lr=0.1), batch=5)
MOMENTUM = Training(Optimiser(lr=0.1, momentum=0.9), batch=5, epochs=2)
ADAM = Training(Optimiser("adam", lr=0.01), batch=5)
NETWORKS: list[Callable[[], LiveNetwork]] = [small, lambda: small(norm=False), lambda: small(dropout=0.4)]
WITH_EACH_NETWORK = pytest.mark.parametrize("network", NETWORKS, ids=["batchnorm", "plain", "dropout"])

# Where it is FedAvg


@WITH_EACH_NETWORK
@pytest.mark.parametrize("training", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_where_nothing_is_made_up_it_is_fedavg(network: Callable[[], LiveNetwork], training: Training) -> None:
    sites = clinics(12, 7, 16)
    fedavg = play(FedAvg(training), sites, network(), 3).outcome.state
    assert same(play(FRAug(training, most=0.0), sites, network(), 3).outcome.state, fedavg)
    assert not same(play(FRAug(training), sites, network(), 3).outcome.state, fedavg)


@WITH_EACH_NETWORK
def test_while_lambda_is_zero_the_model_is_fedavgs_and_the_generator_trains(network: Callable[[], LiveNetwork]) -> None:
    """A ramp so steep that ρ is 0 but in the last round."""
    _, fedavg = tapped(FedAvg(MOMENTUM), clinics(12, 7, 16), network(), 3)
    _, fraug = tapped(FRAug(MOMENTUM, ramp=1e5), clinics(12, 7, 16), network(), 3)
    for one, other in zip(fedavg, fraug, strict=True):
        assert same(one.answer.tensors, classifier_weights(other.answer.tensors)) is (one.round < 3)
        sent, trained = (m.tensors["model"]["auxiliary.generator.enter.weight"] for m in (other.sent, other.answer))
        assert not torch.equal(sent, trained)


# Who has what


def test_the_generator_is_averaged_and_what_is_a_sites_own_never_travels() -> None:
    played, letters = tapped(FRAug(SGD), clinics(12, 7, 16), small(), 2)
    for letter in letters:
        for message in (letter.sent, letter.answer):
            names = {name for group in message.tensors.values() for name in group if name.startswith(AUX_PREFIX)}
            assert names
            assert all(name.startswith("auxiliary.generator.") for name in names)
    first, second = (letters[:3], letters[3:])
    for kind in ("model", "buffers"):
        for name, tensor in second[0].sent.tensors[kind].items():
            answers = [letter.answer.tensors[kind][name].double() for letter in first]
            mean = torch.stack([n * answer for n, answer in zip((12, 7, 16), answers, strict=True)]).sum(0) / 35
            wanted = mean if tensor.is_floating_point() else mean.round()
            torch.testing.assert_close(tensor, wanted.to(tensor.dtype))
    assert not any(name.startswith(AUX_PREFIX) for group in played.outcome.state.values() for name in group)
    own = [played.remembered(f"clinic-{number}") for number in (1, 2, 3)]
    assert all(bundle and {n for g in bundle.values() for n in g} for bundle in own)
    assert all(name.startswith(OWN) for bundle in own if bundle for group in bundle.values() for name in group)


def asked(method: FRAug, state: Bundle, memory: Bundle | None, name: SiteId, round: int = 1) -> tuple[Fit, Bundle]:
    """A site's job, and what it remembers if training changes nothing."""
    jobs: list[Fit] = []

    def answer(job: Job, number: int) -> Fitted:
        assert isinstance(job, Fit)
        jobs.append(job)
        return Fitted(job.weights, 1, 0.0, {})

    work = method.local(state, memory, Site(name, 12, round, 4, 0.1), Stream(0, ("site", name)))
    _, kept = drive_jobs(work, answer)
    assert kept is not None
    return jobs[0], kept


def test_a_site_draws_its_first_transformation_itself_and_goes_on_with_its_own() -> None:
    method = FRAug(SGD)
    state = method.init(Experiment(tiny(algorithm="fraug")).setup.federation)
    assert not any(name.startswith(OWN) for group in state.values() for name in group)
    (one, kept), (other, _) = (asked(method, state, None, name) for name in ("a", "b"))
    name = "auxiliary.transform.enter.weight"
    assert one.weights["model"][name].shape == (32, 64 + 10)
    assert not torch.equal(one.weights["model"][name], other.weights["model"][name])
    assert same(asked(method, state, None, "a")[0].weights, one.weights), "the same if the round is played again"
    assert same(asked(method, state, None, "a", 2)[0].weights, one.weights), "or comes late"
    trained = {kind: {n: t + 1 for n, t in group.items()} for kind, group in kept.items()}
    again, still = asked(method, state, trained, "a", 2)
    assert torch.equal(again.weights["model"][name], one.weights["model"][name] + 1)
    assert same(still, trained)


def test_lambda_and_rho_rise_and_every_round_draws_its_own() -> None:
    method = FRAug(SGD, ramp=3.0)
    state = method.init(Experiment(tiny(algorithm="fraug")).setup.federation)
    found = [asked(method, state, None, "a", round)[0].reference["scalars"] for round in (1, 2, 3, 4)]
    rho = [math.exp(0.75 * (round - 4)) for round in (1, 2, 3, 4)]
    assert [float(scalars["rho"]) for scalars in found] == pytest.approx(rho)
    assert [float(scalars["lambda"]) for scalars in found] == pytest.approx([min(0.5, r) for r in rho])
    assert len({int(scalars["key"]) for scalars in found}) == 4


def test_no_two_steps_make_up_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, ...]] = []
    honest = FeatureGenerator.forward

    def noted(self: FeatureGenerator, noise: Tensor, classes: Tensor) -> Tensor:
        seen.append(tuple(noise[0].tolist()))
        return honest(self, noise, classes)

    monkeypatch.setattr(FeatureGenerator, "forward", noted)
    play(FRAug(SGD), clinics(12, 7), small(), 2)
    assert len(seen) == len(set(seen)) == 3 * 2 * (3 + 2), "three calls a step; three and two steps a round"


# Engines, sizes, sites


@pytest.mark.parametrize("training", [SGD, replace(SGD, fine_tune=0.3)], ids=["all", "fine-tuned"])
def test_it_stacks_with_dropout(training: Training) -> None:
    sites = clinics(*SIZES, dtype=torch.float64)
    played = same_on_both(FRAug(training), sites, 1e-8, torch.float64, dropout=0.5)
    assert together(played) == {len(SIZES)}


@pytest.mark.parametrize("batch", [1, 5])
def test_a_site_may_have_one_image(batch: int) -> None:
    """Networks beside normalise over the batch; the model itself does not here."""
    sites: dict[SiteId, SiteData] = clinics(1, 6)
    played = play(FRAug(replace(SGD, batch=batch)), sites, small(norm=False), 3)
    assert all(bool(t.isfinite().all()) for t in played.model.values())


def test_what_is_sent_is_the_model_and_the_generator_to_the_byte() -> None:
    fedavg, fraug = (run(tiny(algorithm=name)) for name in ("fedavg", "fraug"))
    generator = copy_auxiliary_weights("generator", FeatureGenerator(32, 10, 64))
    size = sum(t.nbytes for group in generator.values() for t in group.values())
    for way in ("bytes_up", "bytes_down"):
        more = getattr(fraug.summary.cost, way) - getattr(fedavg.summary.cost, way)
        assert 0 <= more - 3 * 2 * size < 3 * 2 * 2000, "six messages, and names in them"
    assert fraug.summary.model == fedavg.summary.model


def test_it_learns_to_read_digits() -> None:
    settings: dict[str, Any] = {"model": "mlp", "rounds": 8, "training__batch": 32, "evaluate__every": 0}
    found = run(tiny(algorithm="fraug", engine__name="stacked", **settings))
    assert found.headline.scores.value("accuracy") > 0.85
    assert set(found.summary.merged) == {"global"}


# What cannot be


@pytest.mark.parametrize(
    ("name", "value"),
    [("most", -0.1), ("most", 1.5), ("ramp", -1.0), ("away", -1.0), ("near", -1.0), ("momentum", 0.0), ("latent", 0)],
)
def test_impossible_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=f"algorithm.{name}"):
        FRAug(SGD, **{name: value})


@pytest.mark.parametrize(
    ("unit", "sentence"), [("image", "private steps take images one by one"), ("site", "no plan protects")]
)
def test_no_privacy_plan_protects_it(unit: str, sentence: str) -> None:
    wish = {"unit": unit, "epsilon": 30.0, "delta": 1e-4, "randomness": "seed"}
    with pytest.raises(RecipeError, match=sentence):
        Experiment(tiny(algorithm="fraug", privacy=wish))


def test_features_that_are_images_are_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"flat features, and this network's are 32 × \d+ × \d+; leave out model\.split_after"
    ):
        Experiment(tiny(algorithm="fraug", model={"name": "cnn_a", "split_after": 1}))
