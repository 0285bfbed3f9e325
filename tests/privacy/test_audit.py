"""The attack on our own claim: its statistics against closed forms, its canaries, and mistakes planted in real code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from polyclinic.analysis.privacy_audit import audit_recipe
from polyclinic.cli.privacy import audit_command
from polyclinic.core.errors import RecipeError
from polyclinic.core.options import Augment, Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch
from polyclinic.data.examples import Images
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.privacy.audit import (
    AuditResult,
    CanaryExamples,
    CanaryNetwork,
    adjust_batches,
    best_bound,
    lower_bound,
    p_value,
    run_audit,
)
from polyclinic.runs.experiment import Experiment
from polyclinic.training.augment import augment_images
from polyclinic.training.data_order import batches_per_epoch
from polyclinic.training.dp import dp_sgd, secure_random
from tests.privacy.scale_attack import is_louder, scale_epsilon
from tests.small import tiny, write_recipe


def response(canaries: int, epsilon: float, delta: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Randomised response: each coin is told truly with probability e^ε/(1 + e^ε), and for certain with probability δ.

    Scores are what was told, certain answers first, in an order that has nothing else to say.
    """
    members = rng.random(canaries) < 0.5
    certain = rng.random(canaries) < delta
    told = np.where(certain | (rng.random(canaries) < 1 / (1 + math.exp(-epsilon))), members, ~members)
    scores = (2.0 * told - 1) * (1 + certain) + rng.random(canaries) / 2
    return torch.from_numpy(scores), torch.from_numpy(members)


def attack(
    canaries: int, epsilon: float, delta: float, rng: np.random.Generator, confidence: float = 0.95
) -> AuditResult:
    scores, members = response(canaries, epsilon, delta, rng)
    return best_bound({"answer": scores}, members, claimed=epsilon, delta=delta, confidence=confidence, steps=1)


@pytest.mark.parametrize(("right", "guesses"), [(0, 7), (9, 12), (20, 20), (31, 40)])
def test_without_delta_it_is_the_binomial_tail(right: int, guesses: int) -> None:
    chance = Fraction(3, 4)
    exact = sum(math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k) for k in range(right, guesses + 1))
    assert p_value(right, guesses, 50, math.log(3), 0.0) == pytest.approx(float(exact), rel=1e-12)


def test_with_delta_it_is_the_theorem_written_out() -> None:
    right, guesses, canaries, chance, delta = 16, 20, 30, 0.6, 1e-3
    mass = [math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k) for k in range(guesses + 1)]
    steepest = max(sum(mass[right - i : right]) / i for i in range(1, right + 1))
    exact = sum(mass[right:]) + 2 * canaries * delta * steepest
    assert p_value(right, guesses, canaries, math.log(chance / (1 - chance)), delta) == pytest.approx(exact, rel=1e-12)


def test_the_bound_is_where_the_p_value_crosses() -> None:
    bound = lower_bound(180, 200, 1000, 1e-5, 0.05)
    assert p_value(180, 200, 1000, bound, 1e-5) == pytest.approx(0.05, rel=1e-3)
    assert lower_bound(100, 200, 1000, 1e-5, 0.05) == 0.0
    assert lower_bound(0, 0, 1000, 1e-5, 0.05) == 0.0


def test_p_values_rise_with_epsilon() -> None:
    """Or the largest ε refuted would not be a bound."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        canaries = int(rng.integers(10, 2000))
        guesses = int(rng.integers(1, canaries + 1))
        right = int(rng.integers(guesses // 2, guesses + 1))
        delta = 10 ** rng.uniform(-7, -3)
        values = [p_value(right, guesses, canaries, e, delta) for e in np.linspace(0, 10, 60)]
        small = [v for v in values if v < 0.5]
        assert small == sorted(small)
        assert all(v >= 0.5 for v in values[len(small) :])


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 0.0), (3.0, 0.0), (1.0, 0.005)])
def test_no_honest_mechanism_is_refuted_more_often_than_allowed(epsilon: float, delta: float) -> None:
    """Randomised response is the mechanism the theorem is tight for, so this is as near to a false alarm as can be."""
    rng = np.random.default_rng(1)
    alarms = sum(attack(400, epsilon, delta, rng, confidence=0.9).is_refuted for _ in range(300))
    assert alarms <= 30 + 3 * math.sqrt(300 * 0.1 * 0.9)


def test_the_bound_wastes_little_where_every_coin_is_guessed() -> None:
    """A bound of zero would never raise a false alarm; this one does, and about as often as it may."""
    told = np.random.default_rng(5).binomial(400, 1 / (1 + math.exp(-1.0)), 4000)
    alarms = np.mean([p_value(int(right), 400, 400, 1.0, 0.0) < 0.1 for right in told])
    assert 0.07 < alarms < 0.1 + 3 * math.sqrt(0.1 * 0.9 / 4000)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_approaches_the_truth_as_canaries_grow(epsilon: float) -> None:
    rng = np.random.default_rng(2)
    bounds = [np.mean([attack(m, epsilon, 0.0, rng).bound for _ in range(5)]) for m in (100, 1000, 10_000, 100_000)]
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(epsilon, abs=0.06)


def test_it_says_when_it_could_not_have_refuted() -> None:
    audit = attack(200, 9.0, 1e-6, np.random.default_rng(3))
    assert not audit.is_refuted
    assert audit.bound <= audit.reach < 9.0
    assert "could not have refuted" in audit.verdict
    assert "no proof" in attack(200, 1.0, 0.0, np.random.default_rng(3)).verdict


def test_noise_scaled_by_private_losses_gives_the_data_away() -> None:
    """Eq. 3 of the adaptive-noise paper, σ·(1 + Var(losses)), on a site of 600 with and without one odd image.

    The paper prints ε = 1.78. The length of 62,006 numbers of noise, the size of its network's gradient, tells the two
    data sets apart every time.
    """
    rng = np.random.default_rng(4)
    losses = rng.exponential(0.3, 599)
    quiet, loud = (float(1.02 * (1 + np.var(data))) for data in (losses, np.append(losses, 8.0)))
    coordinates, runs = 62_006, 300
    with_it = torch.from_numpy(rng.random(runs) < 0.5)
    scale = quiet + (loud - quiet) * with_it.float()
    released = scale[:, None] * torch.randn(runs, coordinates, generator=Stream(4).generator())
    right = int((is_louder(released, quiet, loud) == with_it).sum())
    assert lower_bound(right, runs, runs, 1e-5, 0.05) > 2 * 1.78
    assert scale_epsilon(quiet, loud, coordinates, 1e-5) > 20 * 1.78
    assert scale_epsilon(quiet, quiet, coordinates, 1e-5) == 0.0


def test_the_price_of_a_scale_is_that_of_its_densities() -> None:
    """One number: δ(ε) = ∫ (p − e^ε·q)₊, integrated."""
    quiet, loud, delta = 1.0, 1.3, 1e-3
    epsilon = scale_epsilon(quiet, loud, 1, delta)
    x = np.linspace(-20, 20, 400_001)
    p, q = (np.exp(-(x**2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi)) for s in (loud, quiet))
    worst = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() * (x[1] - x[0]) for a, b in ((p, q), (q, p)))
    assert worst == pytest.approx(delta, rel=1e-3)
    assert scale_epsilon(loud, quiet, 1, delta) == epsilon


CANARIES, EXAMPLES, CLASSES, SIDE = 3000, 200, 3, 4
NOISE, RATE, STEPS, DELTA = 1.2, 0.05, 30, 1e-5
"""Where an audit has power: many canaries, and a claim below what so many can show."""


def images(count: int = EXAMPLES, seed: int = 0) -> Images:
    generator = Stream(seed).generator()
    pixels = torch.rand(count, 1, SIDE, SIDE, generator=generator)
    return Images(pixels, torch.randint(0, CLASSES, (count,), generator=generator))


def network(name: str = "linear") -> Classifier:
    return build_model(name, classes=CLASSES, channels=1, size=SIDE, seed=Stream(0))


def training(**options: Any) -> Training:
    usual = {"batch": int(RATE * EXAMPLES), "epochs": None, "steps": STEPS, "private": Private(0.7, NOISE)}
    return replace(Training(Optimiser(lr=0.1)), **(usual | options))


@pytest.fixture(scope="module")
def claimed() -> float:
    return epsilon([Spend(NOISE, RATE, STEPS)], DELTA)


def audited(claimed: float, seed: int, **options: Any) -> AuditResult:
    given = {"canaries": CANARIES, "rounds": 1, **options}
    how = given.pop("training", training())
    return run_audit(network(), images(), how, claimed=claimed, delta=DELTA, stream=Stream(seed), **given)


def gradients(watched: CanaryNetwork, batch: Batch) -> list[dict[str, Tensor]]:
    """One example at a time, by autograd."""
    found = []
    for image, label in zip(*batch, strict=True):
        watched.zero_grad()
        torch.nn.functional.cross_entropy(watched(image[None]), label[None]).backward()  # type: ignore[no-untyped-call]
        found.append(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in watched.named_parameters()}
        )
    return found


class TestCanaries:
    """What the attack rests on: who moves which weight."""

    members = torch.tensor([True, False, True, True, False] * 21)
    seated = CanaryExamples(images(), members)

    def watched(self, name: str = "mlp") -> CanaryNetwork:
        watched = CanaryNetwork(network(name), len(self.members), 7.0)
        torch.nn.init.normal_(watched.seats.weight, std=100.0)
        return watched

    def test_a_canary_moves_one_weight_of_its_own_and_an_empty_seat_none(self) -> None:
        rows = torch.arange(EXAMPLES, len(self.seated))
        for canary, moved in enumerate(gradients(self.watched(), self.seated.batch(rows))):
            own = moved.pop("seats.weight").flatten()
            assert own[canary] == pytest.approx(7.0 if self.members[canary] else 0.0)
            assert own.count_nonzero() == int(self.members[canary])
            assert not any(other.any() for other in moved.values())

    def test_images_are_trained_on_as_without_canaries(self) -> None:
        watched, rows = self.watched(), torch.arange(EXAMPLES)
        batch = self.seated.batch(rows)
        plain = network("mlp")
        assert torch.equal(batch[0], images().batch(rows)[0])
        assert torch.allclose(watched(batch[0]), plain(batch[0]))
        for moved in gradients(watched, batch):
            assert not moved["seats.weight"].any()

    def test_augmentation_leaves_canaries_as_they_are(self) -> None:
        every = Augment(rotation=90, flip=True, brightness=1, contrast=0.5, crop=0.3, blur=1)
        rows = torch.arange(EXAMPLES, len(self.seated))
        pixels, labels = self.seated.batch(rows)
        for canary, moved in enumerate(gradients(self.watched(), (augment_images(pixels, every, Stream(1)), labels))):
            own = moved["seats.weight"].flatten()
            assert own[canary] == pytest.approx(7.0 if self.members[canary] else 0.0)

    def test_a_batch_mixes_both_in_the_order_asked(self) -> None:
        rows = torch.tensor([EXAMPLES + 2, 5, EXAMPLES + 1, 0])
        pixels, labels = self.seated.batch(rows)
        assert torch.equal(pixels[[1, 3]], images().batch(torch.tensor([5, 0]))[0])
        assert torch.equal(labels, self.seated.labels[rows])
        assert pixels[0].std() == 0

    def test_a_site_that_has_grown_keeps_rates_and_steps(self) -> None:
        for batch in (1, 7, 50, 60, 100):
            planned = Training(batch=batch, epochs=3, private=Private(1.0, 1.0))
            grown = adjust_batches(planned, 60, 1060)
            assert grown.batch_size(1060) / 1060 <= min(1.0, batch / 60)
            assert grown.batch_size(1060) / 1060 == pytest.approx(min(1.0, batch / 60), abs=1 / 1060)
            assert grown.steps == 3 * batches_per_epoch(60, batch)


NORMALS, CLIP = secure_random.draw_normals, dp_sgd.clip_factors


def scaled(by: float) -> Callable[..., Tensor]:
    return lambda *given: NORMALS(*given) * by


PLANTED: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "no noise": ("secure_random.draw_normals", scaled(0.0)),
    "noise divided by the batch": ("secure_random.draw_normals", scaled(1 / (RATE * EXAMPLES))),
    "noise divided by three": ("secure_random.draw_normals", scaled(1 / 3)),
    "noise reused": ("secure_random.draw_normals", lambda s, *given: NORMALS([Stream(n.seed) for n in s], *given)),
    "three clips let through": ("dp_sgd.clip_factors", lambda norms, clip: CLIP(norms, 3 * clip)),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_every_planted_mistake_is_caught_every_time(
    mistake: str, claimed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, planted = PLANTED[mistake]
    monkeypatch.setattr(f"polyclinic.training.dp.{place}", planted)
    found = [audited(claimed, seed) for seed in range(20)]
    assert [audit.is_refuted for audit in found] == [True] * 20
    assert "refuted" in found[0].verdict


def test_honest_training_is_not_accused(claimed: float) -> None:
    """A hundred runs: each bound stays below the claim, but for one in twenty at most."""
    found = [audited(claimed, seed) for seed in range(100)]
    assert sum(audit.is_refuted for audit in found) <= 5
    assert max(audit.bound for audit in found) > 0  # the attack does see something
    assert "No contradiction" in found[0].verdict


def test_noise_that_comes_again_in_the_next_round_is_caught(claimed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = training(steps=STEPS // 3)
    assert not audited(claimed, 1, training=plan, rounds=3).is_refuted
    again = Stream(9)
    monkeypatch.setattr(
        dp_sgd.PrivateGradients, "noise_stream", lambda _, number, which: again.child(number % (STEPS // 3))
    )
    caught = audited(claimed, 1, training=plan, rounds=3)
    assert caught.is_refuted
    assert "between rounds" in caught.statistic


@pytest.mark.parametrize("optimiser", [Optimiser("adam"), Optimiser("sgd", momentum=0.9)])
def test_whatever_trains_is_audited(optimiser: Optimiser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any optimiser, and steps on all images at once: honest passes, noiseless does not."""
    how = training(optimiser=replace(optimiser, lr=0.1))
    in_whole = replace(how, steps=None, epochs=2, private=Private(0.7, 4.0))
    price, whole_price = (epsilon([s], DELTA) for s in (Spend(NOISE, RATE, STEPS), Spend(4.0, times=2)))
    for noise in (1.0, 0.0):
        monkeypatch.setattr(secure_random, "draw_normals", scaled(noise))
        assert audited(price, 1, training=how, canaries=1000).is_refuted == (noise == 0)
        assert audited(whole_price, 1, training=in_whole, canaries=1000, whole=True).is_refuted == (noise == 0)


def test_the_network_handed_in_is_left_as_it_was(claimed: float) -> None:
    module = network()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run_audit(
        module, images(), training(steps=2), rounds=1, delta=DELTA, claimed=claimed, stream=Stream(1), canaries=100
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_what_makes_no_claim_is_not_audited(claimed: float) -> None:
    for options in (None, Private(1.0, 0.0), Private(math.inf, 1.0)):
        with pytest.raises(RecipeError, match="no claim"):
            audited(claimed, 1, training=training(private=options))
    with pytest.raises(RecipeError, match="take 1000"):
        audited(claimed, 1, canaries=10)
    with pytest.raises(RecipeError, match="says nothing"):
        audited(claimed, 1, confidence=95)


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(audit_command)
    return app


PRIVATE = {"privacy.epsilon": 3.0, "training.batch": 64}


def test_a_recipe_is_audited_at_the_site_that_pays_most(tmp_path: Path, command: typer.Typer) -> None:
    recipe, written = write_recipe(tmp_path), tmp_path / "audit.json"
    settings = [part for key, value in PRIVATE.items() for part in ("--set", f"{key}={value}")]
    said = CliRunner().invoke(command, [str(recipe), *settings, "--out", str(written)])
    assert said.exit_code == 0, said.output
    assert "No contradiction found" in said.output
    told = json.loads(written.read_text())
    assert told["bound"] < told["claimed"] <= 3.0
    assert told["claimed"] == pytest.approx(3.0, rel=1e-2)
    assert told["steps"] == 2 * batches_per_epoch(Experiment(tiny()).setup.federation.sites[told["site"]], 64)


def test_a_claim_that_is_refuted_ends_in_an_error(
    tmp_path: Path, command: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_random, "draw_normals", scaled(0.0))
    said = CliRunner().invoke(command, [str(write_recipe(tmp_path)), "--set", "privacy.epsilon=3", "--json"])
    assert said.exit_code == 1
    assert json.loads(said.stdout)["refuted"]


@pytest.mark.parametrize("name", ["fedprox", "fedsgd", "scaffold"])
def test_other_algorithms_are_audited_for_the_steps_they_plan(name: str) -> None:
    recipe = tiny(privacy={"epsilon": 3.0}, algorithm=name)
    _, found = audit_recipe(recipe, canaries=500)
    assert found.claimed == pytest.approx(3.0, rel=1e-2)
    assert not found.is_refuted
    _, shorter = audit_recipe(recipe, canaries=500, rounds=1)
    assert shorter.claimed < found.claimed
    assert 2 * shorter.steps == found.steps


def test_a_recipe_without_a_claim_is_refused() -> None:
    for settings in ({}, {"privacy": {"epsilon": 3.0, "unit": "site", "delta": 1e-3}}):
        with pytest.raises(RecipeError, match="makes no claim"):
            audit_recipe(tiny(**settings))
