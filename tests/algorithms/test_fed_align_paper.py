"""Fed-Align as printed, all sites in one process: what moves in a step, and where it is FedAvg."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyclinic.algorithms.base import classifier_weights
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.fed_align import FedAlign
from polyclinic.algorithms.representation.fed_align_losses import DISCRIMINATOR, initial_discriminator
from polyclinic.algorithms.representation.fed_align_pooled import PooledFit
from polyclinic.core.errors import EngineError, RecipeError
from polyclinic.core.jobs import Site
from polyclinic.core.names import POOLED
from polyclinic.core.options import Augment, Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import AUX_PREFIX, Bundle
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.runs.experiment import Experiment, run
from polyclinic.storage.messages import Message
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, with_auxiliary
from tests.algorithms.test_fed_align import told_and_right
from tests.laws.bench import CLASSES, clinics, play, same, small
from tests.small import tiny

SGD = Training(Optimiser(lr=0.1), batch=5)
ADAM = Training(Optimiser("adam", lr=0.01), batch=5, epochs=2, weights="uniform")
STEPS = Training(Optimiser(lr=0.1, momentum=0.5), batch=None, batches=3, epochs=None, steps=2)
CHANGED = replace(SGD, augment=Augment(flip=True, brightness=0.2), oversample=True)
KINDS: dict[str, tuple[Callable[[], LiveNetwork], Training]] = {
    "batchnorm": (small, SGD),
    "adam": (lambda: small(norm=False), ADAM),
    "steps and dropout": (lambda: small(dropout=0.4), STEPS),
    "augmented": (small, CHANGED),
}


def paper(training: Training = SGD, warmup: int = 0, **options: Any) -> FedAlign:
    return FedAlign(training, variant="paper", warmup=warmup, **options)


# Where it is FedAvg


@pytest.mark.parametrize("kind", KINDS)
def test_without_alignment_and_while_it_warms_up_it_is_fedavg(kind: str) -> None:
    network, training = KINDS[kind]
    fedavg = play(FedAvg(training), clinics(12, 7, 16), network(), 3).outcome.state
    assert same(play(paper(training, align=0.0), clinics(12, 7, 16), network(), 3).outcome.state, fedavg)
    warming = play(paper(training, warmup=3), clinics(12, 7, 16), network(), 3).outcome.state
    assert same(warming, fedavg)
    aligned = play(paper(training, warmup=2), clinics(12, 7, 16), network(), 3).outcome.state
    assert aligned.keys() == fedavg.keys()
    assert not same(aligned, fedavg)


# One step of two sites


def one_step(**options: Any) -> tuple[LiveNetwork, Bundle, Bundle]:
    """A network, where all start (with both discriminators), and where they end; a batch is all that a site holds."""
    algorithm = paper()
    network = with_auxiliary(small(norm=False), algorithm.auxiliary, (16,), CLASSES, Stream(1))
    shape = {"values": torch.zeros(1, 1, 16)}
    named = {
        f"{DISCRIMINATOR}@{name}": initial_discriminator(shape, 4, Stream(3, (name,)))["model"] for name in ("a", "b")
    }
    held = {"a": clinics(8)["clinic-1"].train, "b": clinics(1, 6)["clinic-2"].train}
    start = classifier_weights(network.copy_weights())
    training = Training(Optimiser(lr=0.1), batch=8)
    job = PooledFit(start, task_loss, training, named, **{"align": 1.0, **options})
    found = job.fit_sites(network, held, Site(POOLED, 14, 1, 1, 0.1), Stream(0, ("site", POOLED))).weights
    return network, {**start, **named}, found


def by_hand(network: LiveNetwork, start: Bundle) -> dict[str, dict[str, Tensor]]:
    """Algorithm 1 for two sites and one step, written with sigmoids, logarithms and plain gradients."""
    images = {"a": clinics(8)["clinic-1"].train, "b": clinics(1, 6)["clinic-2"].train}
    weights = {
        name: {n: t.clone().requires_grad_() for n, t in {**start["model"], **start[f"{DISCRIMINATOR}@{name}"]}.items()}
        for name in images
    }

    def down(loss: Tensor, *moving: tuple[str, str]) -> None:
        places = [(s, n) for s, prefix in moving for n in weights[s] if n.startswith(tuple(prefix.split()))]
        for (s, n), gradient in zip(places, torch.autograd.grad(loss, [weights[s][n] for s, n in places]), strict=True):
            assert float(gradient.abs().max()) > 0, (s, n)
            weights[s][n] = (weights[s][n] - 0.1 * gradient).detach().requires_grad_()

    def features(name: str) -> Tensor:
        return network.features(
            {"model": weights[name], "buffers": {}}, images[name].batch(torch.arange(len(images[name])))[0]
        )

    def judged(name: str, u: Tensor) -> Tensor:
        return torch.sigmoid(network.auxiliary({"model": weights[name], "buffers": {}}, DISCRIMINATOR, u))

    for k, j in (("a", "b"), ("b", "a")):
        everything = images[k].batch(torch.arange(len(images[k])))
        down(network.loss({"model": weights[k], "buffers": {}}, everything), (k, "extractor. head."))
        u, v = features(k).detach(), features(j).detach()
        down(-judged(k, u).log().mean() - (1 - judged(k, v)).log().mean(), (k, AUX_PREFIX))  # Eq. 2
        loss = -judged(k, features(k)).log().mean() - judged(k, features(j)).log().mean()
        down(loss, (k, "extractor."), (j, "extractor."))  # Eq. 3: `down` sees that both have a gradient
    return weights


def test_a_step_is_that_of_algorithm_1_and_its_eq_3_moves_both_extractors() -> None:
    network, start, found = one_step()
    for name, weights in by_hand(network, start).items():
        for path, wanted in weights.items():
            torch.testing.assert_close(found[f"model@{name}"][path], wanted.detach(), rtol=1e-4, atol=1e-6)


def test_who_moves_what() -> None:
    """Without alignment nobody's discriminator moves; with it others' classifiers stay as they are."""
    _, start, still = one_step(align=0.0)
    _, _, aligned = one_step()
    for name in ("a", "b"):
        for path, before in start[f"{DISCRIMINATOR}@{name}"].items():
            assert torch.equal(still[f"model@{name}"][path], before)
            assert not torch.equal(aligned[f"model@{name}"][path], before)
    moved = {path for path, t in aligned["model@a"].items() if not torch.equal(t, still["model@a"][path])}
    assert {path.split(".")[0] for path in moved} == {"extractor", "auxiliary"}  # a's lesson comes before all alignment


def test_noise_on_what_is_shown_is_drawn_anew_and_repeated_with_the_seed() -> None:
    plain, noisy, again = (one_step(variance=v)[2] for v in (0.0, 0.5, 0.5))
    assert same(noisy, again)
    assert not same(noisy, plain)
    start = one_step(variance=0.0, align=0.0)[2]
    assert same(start, one_step(variance=0.5, align=0.0)[2])


# A run


def test_equal_seeds_give_equal_bits_and_every_site_keeps_its_discriminator() -> None:
    one, other = (play(paper(STEPS, variance=0.01), clinics(12, 7, 16), small(dropout=0.3), 3) for _ in range(2))
    assert one.sha256 == other.sha256
    assert set(one.outcome.state) == {"model", "buffers"}
    assert not any(name.startswith(AUX_PREFIX) for name in one.model)
    kept = one.remembered(POOLED)
    assert kept is not None
    assert set(kept) == {f"{DISCRIMINATOR}@clinic-{number}" for number in (1, 2, 3)}
    enters = [group[f"{AUX_PREFIX}{DISCRIMINATOR}.enter.weight"] for group in kept.values()]
    assert not torch.equal(enters[0], enters[1])
    assert play(paper(STEPS, variance=0.01), clinics(12, 7, 16), small(), 3, seed=1).sha256 != one.sha256


def test_it_runs_from_a_recipe_the_same_in_a_process_of_its_own_and_stacked(caplog: pytest.LogCaptureFixture) -> None:
    """Sites' images are rows of one collection there, mixed where they are pooled."""
    options = {"name": "fed-align", "variant": "paper", "warmup": 1}
    engines: tuple[dict[str, Any], ...] = ({}, {"engine__workers": 1}, {"engine__name": "stacked"})
    found = [run(tiny(algorithm=options, model="mlp", rounds=3, **engine)).summary for engine in engines]
    assert len({summary.sha256 for summary in found}) == 1
    assert "all sites train in this process" in caplog.text
    fedavg, warming = (
        run(tiny(algorithm=algorithm, model="mlp", rounds=3)) for algorithm in ("fedavg", {**options, "warmup": 3})
    )
    assert warming.summary.sha256 == fedavg.summary.sha256
    assert found[0].sha256 != fedavg.summary.sha256


def test_a_run_that_was_stopped_goes_on_with_its_discriminators(tmp_path: Any) -> None:
    options = {"name": "fed-align", "variant": "paper", "warmup": 0}
    whole = run(tiny(algorithm=options, model="mlp", rounds=3), tmp_path / "whole").summary.sha256
    begun = Experiment(tiny(algorithm=options, model="mlp", rounds=3), tmp_path / "stopped")

    def stop(event: str, note: Any) -> None:
        if event == "round" and note["round"] == 3:
            raise KeyboardInterrupt

    begun.watch = stop
    with pytest.raises(KeyboardInterrupt):
        begun.run()
    assert run(tiny(algorithm=options, model="mlp", rounds=3), tmp_path / "stopped").summary.sha256 == whole


# What it is refused


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quorum": 2}, "set quorum: 1"),
        ({"cohort": 2}, "set cohort: null"),
        ({"training__curriculum__by": "forgotten"}, "set training.curriculum.by: random"),
        ({"evaluate__forgetting": True}, "set evaluate.forgetting: false"),
        ({"ensemble": True}, "set ensemble: false"),
        ({"algorithm__bank": 3}, "algorithm.bank has no effect in variant paper"),
        ({"clusters": {"all": {"min_score": 0, "model": "linear"}}}, "set clusters: {}"),
    ],
)
def test_what_one_place_cannot_do_is_told_before_anything_runs(settings: dict[str, Any], told: str) -> None:
    base = {"algorithm": {"name": "fed-align", "variant": "paper"}}
    with pytest.raises(RecipeError, match=told):
        tiny(**base, **settings)
    if "algorithm__bank" not in settings:
        tiny(**{**base, "algorithm": {"name": "fed-align"}}, **{"quorum": 1, **settings})


@pytest.mark.parametrize(("unit", "told"), [("image", "algorithm.align: 0"), ("site", "this algorithm sends more")])
def test_a_privacy_plan_is_refused(unit: str, told: str) -> None:
    plan = {"unit": unit, "epsilon": 5, "delta": 1e-3, "clip": 1.0, "randomness": "seed"}
    with pytest.raises(RecipeError, match=told):
        run(tiny(algorithm={"name": "fed-align", "variant": "paper"}, privacy=plan))


def test_a_hospital_by_itself_says_that_it_cannot() -> None:
    algorithm, sites = paper(), clinics(12, 7)
    assert algorithm.pooled
    assert not paper(align=0.0).pooled
    assert not FedAlign().pooled
    played = play(algorithm, sites, small(), 1)
    network = with_auxiliary(small(), algorithm.auxiliary, (16,), CLASSES, Stream(1))
    runner = SiteRunner("clinic-1", sites["clinic-1"], algorithm, network, RamMemory())
    outbox = played.rounds.prepare_outbox("train", 1, algorithm.init(played.rounds.federation), ["clinic-1"], [])
    order = outbox.in_process_message("clinic-1")
    with pytest.raises(EngineError, match=r"all their images in one process; set algorithm\.variant: corrected"):
        runner.reply(Message(copy.deepcopy(order.fields), order.tensors))


# What it is for


def test_features_of_two_scanners_are_harder_to_tell_apart_than_after_fedavg() -> None:
    """It costs accuracy, unlike the corrected variant; FedAvg stopped at equal accuracy tells them as well as ever."""
    training = Training(Optimiser(lr=0.1), batch=32, epochs=None, steps=5)
    told, right = told_and_right(paper(training, warmup=10, hidden=16), 60)
    assert told < told_and_right(FedAvg(training), 60)[0] - 0.04
    assert right > 0.7
