"""The audit of a claim: its canaries, the runs that it plays, and mistakes planted in the code that it attacks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from polyclinic import run
from polyclinic.algorithms.representation import feature_bank
from polyclinic.analysis.audit import play
from polyclinic.analysis.audit.canaries import SEATS, CanaryExamples, add_seats
from polyclinic.analysis.audit.play import add_canaries
from polyclinic.analysis.audit.result import AuditResult
from polyclinic.analysis.privacy_audit import attack_claim, audit_recipe
from polyclinic.cli.privacy import audit_command
from polyclinic.core.errors import RecipeError
from polyclinic.core.options import Augment, Private
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Tensors
from polyclinic.data.examples import Images
from polyclinic.federation import site_runner
from polyclinic.federation.engines import stacked as stacked_engine
from polyclinic.federation.secure_aggregation import assembly, site as masking_site
from polyclinic.federation.site_limits import SitePrivacyLimits
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.privacy import releases
from polyclinic.privacy.mechanism import gaussian_noise
from polyclinic.privacy.transforms.clip import Clip
from polyclinic.privacy.transforms.noise import Noise
from polyclinic.runs import privacy_plan
from polyclinic.runs.assemble import RunSetup
from polyclinic.runs.experiment import Experiment
from polyclinic.training import data_order
from polyclinic.training.augment import augment_images
from polyclinic.training.dp import dp_sgd
from polyclinic.training.stacked import dp as stacked_dp
from tests.small import tiny, write_recipe

EXAMPLES, CLASSES, SIDE = 200, 3, 4
IMAGE: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-5}
PHANTOM = {
    "name": "phantom",
    "size": 32,
    "hospitals": [{"name": name, "vendor": "film", "patients": 30, "malignant": 0.5} for name in ("a", "b")],
}
RECIPES: dict[str, dict[str, Any]] = {
    "local": {"privacy": IMAGE},
    "stacked": {"privacy": IMAGE, "engine__name": "stacked"},
    "patient": {"privacy": {"unit": "patient", "noise": 4.0, "delta": 1e-3}, "data": PHANTOM, "training__batch": 16},
    "declared": {"privacy": {"unit": "patient", "group": 3, "noise": 6.0, "delta": 1e-4}},
    "fedmp": {"privacy": IMAGE, "algorithm": "fedmp"},
    "fedmr": {"privacy": IMAGE, "algorithm": {"name": "fedmr", "intra": 0}},
    "automatic clip": {"privacy": {**IMAGE, "clip": "auto"}, "engine__name": "stacked"},
    "adaptive": {"privacy": {"noise": 1.5, "delta": 1e-5}, "algorithm": "adaptive-noise"},
    "jobs": {"privacy": IMAGE, "algorithm": {"name": "pfedcdp", "keep": 0}, "public": {"name": "digits"}},
    "metrics": {"privacy": {**IMAGE, "metrics": "count"}},
    "site": {"privacy": {"unit": "site", "epsilon": 3.0, "delta": 1e-3, "clip": 4.0}},
    "server": {"privacy": {"unit": "site", "epsilon": 3.0, "delta": 1e-3, "clip": 4.0, "noise_at": "server"}},
    "masked": {
        "privacy": {"unit": "site", "epsilon": 3.0, "delta": 1e-3, "clip": 4.0},
        "data__partition": {"by": "quantity", "sites": 5, "alpha": 2.0},
        "stages": [{"name": "mask", "threshold": 4, "colluders": 1}],
    },
}


@cache
def prepared(name: str) -> RunSetup:
    return Experiment(tiny(**RECIPES[name])).setup


def attacked(name: str, secret: int, canaries: int = 1000) -> AuditResult:
    return attack_claim(prepared(name), Stream(secret, ("test",)), canaries)


# Canaries: who moves which weight.


def images(count: int = EXAMPLES) -> Images:
    generator = Stream(0).generator()
    pixels = torch.rand(count, 1, SIDE, SIDE, generator=generator)
    return Images(pixels, torch.randint(0, CLASSES, (count,), generator=generator), tuple(map(str, range(count))))


def network(name: str = "mlp") -> Classifier:
    return build_model(name, classes=CLASSES, channels=1, size=SIDE, seed=Stream(0))


def gradients(watched: Classifier, batch: Batch) -> list[Tensors]:
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
    members = torch.tensor([True, False, True, True, False] * 21)
    seated = CanaryExamples(images(), members, EXAMPLES)

    def watched(self) -> Classifier:
        watched = add_seats(network(), len(self.members), 0.7)
        torch.nn.init.normal_(watched.get_parameter(SEATS), std=100.0)
        return watched

    def test_a_canary_moves_one_weight_of_its_own_and_an_empty_seat_none(self) -> None:
        rows = torch.arange(EXAMPLES, len(self.seated))
        for canary, moved in enumerate(gradients(self.watched(), self.seated.batch(rows))):
            own = moved.pop(SEATS).flatten()
            assert own[canary] == pytest.approx(7.0 if self.members[canary] else 0.0)
            assert own.count_nonzero() == int(self.members[canary])
            assert not any(other.any() for other in moved.values())

    def test_images_are_trained_on_as_without_canaries(self) -> None:
        watched, batch, plain = self.watched(), self.seated.batch(torch.arange(EXAMPLES)), network()
        assert torch.equal(batch[0], images().images)
        assert torch.allclose(watched(batch[0]), plain(batch[0]))
        assert torch.allclose(watched.head(watched.extractor(batch[0])), plain(batch[0]))
        for moved, own in zip(gradients(watched, batch), gradients(plain, batch), strict=True):
            assert not moved.pop(SEATS).any()
            for name, tensor in moved.items():
                assert torch.allclose(tensor, own[name.replace(".inner", "")], atol=1e-6)

    def test_augmentation_leaves_canaries_as_they_are(self) -> None:
        every = Augment(rotation=90, flip=True, brightness=1, contrast=0.5, crop=0.3, blur=1)
        rows = torch.arange(EXAMPLES, len(self.seated))
        pixels, labels = self.seated.batch(rows)
        for canary, moved in enumerate(gradients(self.watched(), (augment_images(pixels, every, Stream(1)), labels))):
            assert moved[SEATS].flatten()[canary] == pytest.approx(7.0 if self.members[canary] else 0.0)

    def test_a_batch_mixes_both_in_the_order_asked(self) -> None:
        rows = torch.tensor([EXAMPLES + 2, 5, EXAMPLES + 1, 0])
        pixels, labels = self.seated.batch(rows)
        assert torch.equal(pixels[[1, 3]], images().images[[5, 0]])
        assert torch.equal(labels, self.seated.labels[rows])
        assert pixels[0].std() == 0

    def test_a_patient_sits_on_one_seat_with_all_images(self) -> None:
        patients = CanaryExamples(images(), self.members, 150, 4)
        assert patients.patients is not None
        assert len(patients) == len(patients.patients) == 150 + 4 * len(self.members)
        rows = torch.arange(150 + 8, 150 + 12)  # of the third canary
        assert {patients.patients[row] for row in rows.tolist()} == {"canary 2"}
        for moved in gradients(self.watched(), patients.batch(rows)):
            assert moved[SEATS].flatten().nonzero().tolist() == [[2]]

    def test_a_blank_site_moves_nothing(self) -> None:
        blank = replace(self.seated, blank=True)
        for moved in gradients(self.watched(), blank.batch(torch.arange(0, len(blank), 7))):
            assert not any(t.any() for t in moved.values())


@pytest.mark.parametrize(("batch", "canaries"), [(7, 100), (64, 1000), (479, 2000), (5000, 300)])
def test_a_run_with_canaries_keeps_rates_steps_and_noise(batch: int, canaries: int) -> None:
    for name, settings in RECIPES.items():
        if name not in ("local", "patient"):
            continue
        privacy = {**settings["privacy"], "epsilon": None, "noise": 2.0, "delta": 1e-4}
        setup = Experiment(tiny(**{**settings, "privacy": privacy, "training__batch": batch})).setup
        run = add_canaries(setup, canaries, Stream(1))
        assert setup.plan is not None
        assert run.plan.noise == setup.plan.noise
        assert sum(map(len, run.members.values())) >= canaries
        for site, jobs in setup.plan.jobs.items():
            left = setup.plan.site_sizes[site].examples % batch
            if left != 1:
                assert run.plan.jobs[site] == jobs
            assert run.plan.round_spends(site)[0].group == setup.plan.round_spends(site)[0].group


# Planted mistakes, each of which an audit must find.


def noise_times(factor: float) -> Callable[[pytest.MonkeyPatch], None]:
    """Less noise in steps that sites compute one after another."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = dp_sgd.add_noise

        def wrong(sums: Tensors, options: Private, *rest: Any) -> Tensors:
            return real(sums, replace(options, noise=options.noise * factor), *rest)

        patch.setattr(dp_sgd, "add_noise", wrong)

    return plant


def halve_stacked_noise(patch: pytest.MonkeyPatch) -> None:
    real = stacked_dp.StackedNoise.__init__

    def wrong(self: stacked_dp.StackedNoise, *given: Any) -> None:
        real(self, *given)
        self.scales = self.scales / 2

    patch.setattr(stacked_dp.StackedNoise, "__init__", wrong)


def clip_per_batch(patch: pytest.MonkeyPatch) -> None:
    """The mean gradient of a batch is clipped, in place of each example's."""
    real = dp_sgd.sum_clipped_gradients

    def wrong(gradients: Any, options: Private, present: Tensor, *rest: Any) -> Any:
        sums, dropped = real(gradients, replace(options, clip=math.inf), present, *rest)
        count = present.sum(1).clamp(min=1)
        norms = torch.stack([t.flatten(1).square().sum(1) for t in sums.values()]).sum(0).sqrt() / count
        share = (options.clip / norms).clamp(max=1)
        return {n: t * share.reshape(-1, *[1] * (t.ndim - 1)) for n, t in sums.items()}, dropped

    patch.setattr(dp_sgd, "sum_clipped_gradients", wrong)


def clip_three_times_as_long(patch: pytest.MonkeyPatch) -> None:
    real = dp_sgd.clip_factors
    patch.setattr(dp_sgd, "clip_factors", lambda norms, clip, *rest: real(norms, 3 * clip, *rest))


def leave_a_bias_without_noise(patch: pytest.MonkeyPatch) -> None:
    real = dp_sgd.add_noise

    def wrong(sums: Tensors, options: Private, expected: int, *rest: Any) -> Tensors:
        bias = {name: t / expected for name, t in sums.items() if name.endswith("bias")}
        return {**real(sums, options, expected, *rest), **bias}

    patch.setattr(dp_sgd, "add_noise", wrong)


def sample_too_often(patch: pytest.MonkeyPatch) -> None:
    real = dp_sgd.draw_poisson_batches
    patch.setattr(data_order, "draw_poisson_batches", lambda n, rate, *rest: real(n, 1.5 * rate, *rest))


def share_noise_between_sites(patch: pytest.MonkeyPatch) -> None:
    real = SitePrivacyLimits.noise_stream

    def wrong(self: SitePrivacyLimits, order: Any, *rest: Any) -> Stream:
        everybody = replace(order, fields={**order.fields, "site": "any"})
        return real(replace(self, secret=Stream(5)), everybody, *rest)

    patch.setattr(SitePrivacyLimits, "noise_stream", wrong)


def share_noise_between_jobs(patch: pytest.MonkeyPatch) -> None:
    real = site_runner.job_streams
    for module in (site_runner, stacked_engine):
        patch.setattr(module, "job_streams", lambda site_round, number: real(site_round, 0))


def forget_the_factor_of_slots(patch: pytest.MonkeyPatch) -> None:
    real = releases.release_rows
    patch.setattr(feature_bank, "release_rows", lambda rows, clip, noise, *rest: real(rows, clip, noise / 2, *rest))


def forget_the_clip_of_sites(patch: pytest.MonkeyPatch) -> None:
    """The deviation of a site's noise is σ in place of σ·C."""
    patch.setattr(privacy_plan, "Noise", lambda std, kinds: Noise(std / 4.0, kinds))


def leave_updates_unclipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(privacy_plan, "Clip", lambda bound, kinds, noise: Clip(1e6, kinds, noise))


def divide_masked_noise(divisor: float) -> Callable[[pytest.MonkeyPatch], None]:
    """Less noise in the integers that are masked."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = assembly.noise_share
        patch.setattr(assembly, "noise_share", lambda *given: real(*given) / divisor)

    return plant


def leave_masked_updates_unclipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(play, "plan_transforms", lambda plan: [Clip(1e6)])


def share_masked_noise_between_sites(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(masking_site, "gaussian_noise", lambda shape, std, _: gaussian_noise(shape, std, Stream(5)))


def tenth_of_metrics_noise(patch: pytest.MonkeyPatch) -> None:
    real = releases.release_metrics
    patch.setattr(
        site_runner, "release_metrics", lambda table, labels, noise, *rest: real(table, labels, noise / 10, *rest)
    )


PLANTED: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "noise × 0.7": ("local", noise_times(0.7)),
    "noise / 2": ("local", noise_times(0.5)),
    "clip per batch": ("local", clip_per_batch),
    "stacked noise / 2": ("stacked", halve_stacked_noise),
    "site noise without its clip": ("site", forget_the_clip_of_sites),
    "slots without their factor": ("fedmp", forget_the_factor_of_slots),
}
"""The bars: each is refuted 20 times of 20."""
OTHERS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "no noise": ("local", noise_times(0.0)),
    "three clips let through": ("local", clip_three_times_as_long),
    "a bias without noise": ("local", leave_a_bias_without_noise),
    "stacked clip per batch": ("stacked", clip_per_batch),
    "rate × 1.5": ("stacked", sample_too_often),
    "sites share noise": ("stacked", share_noise_between_sites),
    "jobs share noise": ("jobs", share_noise_between_jobs),
    "patients' noise / 2": ("patient", noise_times(0.5)),
    "adaptive noise / 2": ("adaptive", noise_times(0.5)),
    "updates unclipped": ("site", leave_updates_unclipped),
    "updates unclipped before the server": ("server", leave_updates_unclipped),
    "metrics' noise / 10": ("metrics", tenth_of_metrics_noise),
    "masked noise / 2": ("masked", divide_masked_noise(2)),
    "masked noise / 10": ("masked", divide_masked_noise(10)),
    "masked updates unclipped": ("masked", leave_masked_updates_unclipped),
    "sites share masked noise": ("masked", share_masked_noise_between_sites),
}
SLOW = ("fedmp",)


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("mistake", PLANTED)
def test_every_planted_mistake_is_refuted_every_time(mistake: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, plant = PLANTED[mistake]
    plant(monkeypatch)
    assert all(attacked(recipe, secret).is_refuted for secret in range(1 if recipe in SLOW and times < 20 else times))


@pytest.mark.parametrize("mistake", OTHERS)
def test_other_planted_mistakes_are_refuted(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, plant = OTHERS[mistake]
    plant(monkeypatch)
    found = attacked(recipe, 0)
    assert found.is_refuted
    assert found.exit_code == 1
    assert "refuted" in found.verdict


@pytest.mark.parametrize("recipe", RECIPES)
def test_honest_runs_are_not_accused(recipe: str) -> None:
    """An honest run is accused with a probability of 5 % at most: 4 % by guesses, 1 % by all tests together."""
    found = attacked(recipe, 0)
    assert not found.is_refuted
    assert not found.not_attacked


@pytest.mark.heavy
@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_honest_runs_are_hardly_accused(recipe: str) -> None:
    """One is expected at most; guesses stay far below the claim, and 0.2 are to be expected."""
    assert sum(attacked(recipe, secret).is_refuted for secret in range(20)) <= 1


# What is said.


def test_what_was_not_attacked_is_said_and_has_a_code_of_its_own() -> None:
    """The second job begins in round 2, so one round says nothing about it."""
    found = attack_claim(prepared("jobs"), Stream(1), rounds=1)
    assert not found.is_refuted
    assert found.not_attacked == ["weights, training job 2"]
    assert found.exit_code == 3
    assert "could not have refuted" in found.verdict
    assert "Not attacked, or without power: weights, training job 2" in found.verdict
    assert "1 of 2 rounds on the engine local" in found.verdict


def test_too_few_values_have_no_power() -> None:
    found = attacked("local", 1)
    none = replace(found, tests=tuple(replace(test, power=0.3) for test in found.tests))
    assert none.exit_code == 3
    assert none.not_attacked == list(none.kinds)
    unmoved = replace(
        found, tests=tuple(test for test in found.tests if "sum" not in test.what and test.what != "sensitivity")
    )
    assert unmoved.exit_code == 3


def test_the_engine_that_ran_is_the_one_that_is_attacked() -> None:
    together = attacked("stacked", 1)
    assert (together.engine, together.stacked) == ("stacked", 3)
    assert "on the engine stacked, 3 sites at once" in together.verdict
    assert attack_claim(prepared("stacked"), Stream(1), rounds=1, engine="ray").engine == "local"
    assert attack_claim(prepared("local"), Stream(1), rounds=1, engine="stacked").stacked == 3


def test_epsilon_as_measured_is_that_of_less_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = attacked("local", 1)
    assert honest.measured == pytest.approx(honest.claimed, rel=0.1)
    assert honest.claimed == pytest.approx(3.0, rel=1e-2)
    noise_times(0.5)(monkeypatch)
    setup = Experiment(tiny(**{**RECIPES["local"], "privacy": {"delta": 1e-5, "noise": honest_noise() / 2}})).setup
    assert setup.plan is not None
    assert attacked("local", 1).measured == pytest.approx(setup.plan.epsilon, rel=0.1)


def honest_noise() -> float:
    plan = prepared("local").plan
    assert plan is not None
    return plan.noise


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(audit_command)
    return app


def test_a_recipe_is_audited_from_the_command_line(tmp_path: Path, command: typer.Typer) -> None:
    recipe, written = write_recipe(tmp_path), tmp_path / "audit.json"
    settings = ["--set", "privacy.epsilon=3", "--set", "training.batch=64", "--attack-seed", "1"]
    said = CliRunner().invoke(command, [str(recipe), *settings, "--out", str(written)])
    assert said.exit_code == 0, said.output
    assert "No contradiction found" in said.output
    told = json.loads(written.read_text())
    assert told["claimed"] == pytest.approx(3.0, rel=1e-2)
    assert told["kinds"] == ["weights, training job 1"]
    assert told["not_attacked"] == []
    assert told["exit_code"] == 0
    assert {test["what"] for test in told["tests"]} >= {"noise", "sensitivity", "normal distribution"}
    assert told["canary_bound"]["bound"] < 3.0


def test_a_claim_that_is_refuted_ends_in_an_error(
    tmp_path: Path, command: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise_times(0.0)(monkeypatch)
    said = CliRunner().invoke(command, [str(write_recipe(tmp_path)), "--set", "privacy.epsilon=3", "--json"])
    assert said.exit_code == 1
    assert json.loads(said.stdout)["refuted"]


def test_a_finished_run_is_audited_on_its_engine_and_its_page_says_so(tmp_path: Path, command: typer.Typer) -> None:
    run(tiny(**RECIPES["stacked"]), tmp_path)
    said = CliRunner().invoke(command, [str(tmp_path), "--attack-seed", "1", "--rounds", "1"])
    assert said.exit_code == 0, said.output
    page = (tmp_path / "privacy.md").read_text(encoding="utf-8")
    assert "1 of 2 rounds on the engine stacked, 3 sites at once" in page
    assert "not audited" not in page


def test_what_makes_no_claim_is_not_audited() -> None:
    for settings in ({}, {"privacy": {"noise": 0.0, "delta": 1e-4}}):
        with pytest.raises(RecipeError, match="no claim"):
            audit_recipe(tiny(**settings))
    with pytest.raises(RecipeError, match="take 1000"):
        audit_recipe(tiny(privacy=IMAGE), canaries=10)
    with pytest.raises(RecipeError, match="says nothing"):
        audit_recipe(tiny(privacy=IMAGE), confidence=95)


def test_the_network_and_the_images_are_left_as_they_were() -> None:
    setup = prepared("local")
    before = {name: tensor.clone() for name, tensor in setup.module.state_dict().items()}
    attacked("local", 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in setup.module.state_dict().items())
    assert not any(isinstance(site.train, CanaryExamples) for site in setup.sites.values())


def test_guesses_do_find_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the bound that canaries prove would never say anything."""
    noise_times(0.1)(monkeypatch)
    found = attacked("stacked", 1).canary_bound
    assert found is not None
    honest_engine = attacked("local", 1).canary_bound
    assert honest_engine is not None
    assert honest_engine.bound > honest_engine.claimed
    assert found.bound < found.claimed  # that engine was left alone
