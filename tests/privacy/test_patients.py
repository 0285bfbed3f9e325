"""Claims about patients (D7, D8): refused where nobody knows them, priced where they are declared, sampled."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from scipy.optimize import brentq
from scipy.signal import fftconvolve
from scipy.special import logsumexp
from scipy.stats import binom, norm

from polyclinic import Recipe, run
from polyclinic.core.errors import EngineError, RecipeError
from polyclinic.core.jobs import Fit, Site
from polyclinic.core.rng import Stream
from polyclinic.data.patients import spread_group
from polyclinic.deploy.serve import run_deployed
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.federation.engines import RemoteExecution
from polyclinic.federation.site_limits import limit_to_plan
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.plan import PrivacyConfig, PrivacyPlan, SiteSize, Steps, make_plan
from polyclinic.runs.experiment import Experiment
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.losses import task_loss
from tests.commands import call, refused
from tests.deploy.example_sites import EACH, SITES, TABLE, Crossing, desks, recipe, simulation, write_hospitals
from tests.federation.mock_engine import MockEngine
from tests.small import tiny, write_recipe

PATIENT: dict[str, Any] = {"unit": "patient", "delta": 1e-3}
SHOTS: dict[str, Any] = {
    "name": "shots",
    "rounds": 2,
    "data": {"name": "folder", "levels": ["site", "label"], "size": 8, "channels": 1, "cache": False},
    "model": {"name": "linear"},
    "algorithm": "fedavg",
    "training": {"batch": 16},
    "evaluate": {"bootstrap": 0},
}
VIEWS: dict[str, Any] = {
    "name": "phantom",
    "size": 32,
    "views": [1, 4],
    "hospitals": [{"name": name, "vendor": "film", "patients": 20, "malignant": 0.5} for name in ("a", "b")],
}


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites of 80 patients with three shots each, whom nothing but file names tells apart; 192 images train."""
    folder = tmp_path_factory.mktemp("shots")
    for number in range(480):
        place, patient, shot = number // 240, number % 240 // 3, number % 3
        home = folder / f"site-{place}" / ("benign", "malignant")[patient % 2]
        home.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(home / f"p{patient:03}_{shot}.png")
    return folder


def asking(folder: Path, to: Path, **privacy: Any) -> Path:
    values = {**SHOTS, "data": {**SHOTS["data"], "path": str(folder)}, "privacy": {**PATIENT, **privacy}}
    to.write_text(yaml.safe_dump(values))
    return to


def least_epsilon(noise: float, rate: float, steps: int, group: int, delta: float) -> float:
    """ε of a group of images that each join by themselves: by integrals over the mixture of Gaussians of one step.

    Losses are rounded down to a grid, so that this is a lower bound, and a fine one.
    """
    width, count = 2e-4, np.arange(group + 1)
    x = np.linspace(-9 * noise, group + 9 * noise, 2_000_001)
    edges = (x[:-1] + x[1:]) / 2
    log_odds = binom.logpmf(count, group, rate)
    loss = logsumexp([o + (2 * k * x - k * k) / (2 * noise**2) for o, k in zip(log_odds, count, strict=True)], axis=0)
    below = sum(math.exp(o) * norm.cdf(edges, k, noise) for o, k in zip(log_odds, count, strict=True))
    mass = np.diff(below, prepend=0.0, append=1.0)
    bins = np.floor(np.minimum(loss, np.append(loss[0], loss[:-1])) / width).astype(int)
    lowest = int(bins.min())
    one = np.bincount(bins - lowest, mass)
    one = one[: int(np.searchsorted(one.cumsum(), 1 - 1e-13)) + 1]
    total, start = np.array([1.0]), 0
    for _ in range(steps):
        total, start = fftconvolve(total, one).clip(0), start + lowest
        keep = int(np.searchsorted(total.cumsum(), total.sum() - 1e-11)) + 1
        total = total[:keep]
    losses = (np.arange(len(total)) + start) * width

    def excess(target: float) -> float:
        above = losses > target
        return float((total[above] * -np.expm1(target - losses[above])).sum()) - delta

    return float(brentq(excess, 0.0, losses[-1]))


def test_the_yardstick_is_right_for_one_image() -> None:
    """Without sampling, 4 steps are one with half the noise, whose δ(ε) has a closed form (Balle and Wang 2018)."""
    exact = brentq(lambda e: norm.cdf(0.5 - e) - math.exp(e) * norm.cdf(-0.5 - e) - 1e-3, 0.1, 9)
    assert least_epsilon(2.0, 1 - 1e-12, 4, 1, 1e-3) == pytest.approx(exact, rel=2e-3)


# Refused where patients are not named


def test_shots_without_patients_are_refused_by_plan_and_run_with_the_way_out(shots: Path, tmp_path: Path) -> None:
    path = asking(shots, tmp_path / "r.yaml", epsilon=3)
    for command in (("plan", path), ("run", path, "--out", tmp_path / "out")):
        told = refused(*command)
        for word in ("384 training images name no patient", "name the patient of every image", "privacy.group"):
            assert word in told
        assert "privacy.unit: image" in told
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_public_set_without_patients_is_refused() -> None:
    with pytest.raises(RecipeError, match="name no patient"):
        Experiment(tiny(privacy={**PATIENT, "noise": 1.0}))


def hospital(folder: Path, nameless: Sequence[int]) -> SiteMessageHandler:
    """A site, and the same as a simulation; the patient column is empty in these rows."""
    write_hospitals(folder, SITES[:1])
    for path in folder.glob(f"*/{TABLE}"):
        head, *lines = path.read_text().splitlines()
        cut = [line.rpartition(",")[0] + "," if n in nameless else line for n, line in enumerate(lines)]
        path.write_text("\n".join([head, *cut]) + "\n")
    return desks(folder, "state", SITES[:1])[SITES[0]]


@pytest.mark.parametrize("nameless", [range(10_000), [5]], ids=["no patients", "one empty cell"])
def test_a_real_site_refuses_what_it_cannot_promise(nameless: Sequence[int], tmp_path: Path) -> None:
    desk, whole = hospital(tmp_path, nameless), {"train": 0.98, "validation": 0.01, "test": 0.01}
    found = recipe(privacy={**PATIENT, "noise": 2.0}, data__split=whole)
    with pytest.raises(RecipeError, match="training images name no patient"):
        desk.preview_releases(found)
    with pytest.raises(RecipeError, match="training images name no patient"):
        simulation(found, tmp_path)
    declared = recipe(privacy={**PATIENT, "noise": 2.0, "group": EACH}, data__split=whole)
    (priced, *_) = desk.preview_releases(declared)
    plan = simulation(declared, tmp_path).setup.plan
    assert plan is not None
    assert priced.epsilon == plan.epsilon
    assert {spend.group for spend in plan.round_spends(SITES[0])} == {EACH}


def test_a_server_refuses_sites_whose_profiles_name_no_patients(tmp_path: Path) -> None:
    desk = hospital(tmp_path, range(10_000))
    crossing = Crossing({SITES[0]: desk})
    with pytest.raises(RecipeError, match="training images name no patient"):
        run_deployed(
            recipe(privacy={**PATIENT, "noise": 2.0}),
            RemoteExecution(MockEngine(crossing.answer), "mock"),
            SITES[:1],
            tmp_path / "run",
        )


def test_metrics_are_charged_to_patients_who_are_known() -> None:
    """Validation images count only where something is released of them."""
    nameless = {"a": SiteSize(400, 3, 1, unnamed_validation=9)}
    draft = PrivacyPlan(PrivacyConfig(unit="patient", noise=2.0), 1.0, (("a",),), nameless, {"a": (Steps(0.05, 20),)})
    make_plan(draft)
    with pytest.raises(RecipeError, match="9 validation images name no patient"):
        make_plan(replace(draft, config=replace(draft.config, metrics="count")))


def test_the_images_of_a_patient_are_counted_in_every_part() -> None:
    setup = Experiment(tiny(data=VIEWS, privacy={"noise": 2.0, "delta": 1e-3})).setup
    assert setup.plan is not None
    for name, size in setup.plan.site_sizes.items():
        site = setup.sites[name]
        most = [max(Counter(part.patients or ()).values()) for part in (site.train, site.validation, site.test)]
        assert [size.largest, size.largest_validation, size.largest_test] == most
        assert (size.with_tests().largest, size.unnamed_test) == (max(most[0], most[2]), 0)


def test_a_group_is_for_patients() -> None:
    for unit in ("image", "site"):
        with pytest.raises(RecipeError, match=f"the unit is {unit}; set privacy.unit: patient"):
            tiny(privacy={"unit": unit, "noise": 1.0, "group": 3})


# Declared: priced as a group


def test_the_page_s_epsilon_is_at_least_the_exact_one_of_a_declared_group(shots: Path, tmp_path: Path) -> None:
    """The review's case: σ = 0.8143, q = 16/192, 24 steps, three shots a patient, where the page once said 3."""
    exact = least_epsilon(0.8143, 16 / 192, 24, 3, 1e-3)
    assert exact == pytest.approx(11.29, rel=2e-3)
    found = run(Recipe.load(asking(shots, tmp_path / "r.yaml", noise=0.8143, group=3)), tmp_path / "out")
    assert [site.train for site in found.summary.site_sizes] == [192, 192]
    told = (tmp_path / "out" / "privacy.md").read_text()
    (shown,) = re.findall(r"\*\*ε = ([\d.]+) at δ", told)
    assert exact <= float(shown) <= exact * 1.02
    planned = " ".join(call("plan", tmp_path / "r.yaml").stdout.split())
    assert "384 images name no patient: privacy.group: 3 is declared, not checked" in planned
    assert "384 training images name no patient, so privacy.group: 3 is declared for them and not checked" in told
    assert "every image joins every step by itself" in told


@pytest.mark.heavy
def test_noise_is_solved_for_a_declared_group(shots: Path, tmp_path: Path) -> None:
    told = call("plan", asking(shots, tmp_path / "r.yaml", epsilon=3, group=3), "--json")
    (plan,) = json.loads(told.stdout).values()
    assert plan["epsilon"] <= 3
    assert least_epsilon(plan["noise"], 16 / 192, 24, 3, 1e-3) == pytest.approx(3, rel=0.02)


def test_a_ledger_knows_no_bound_on_patients_who_were_not_named(tmp_path: Path) -> None:
    ledger = str(tmp_path / "ours.jsonl")
    run(tiny(privacy={"noise": 3.0, "delta": 1e-3, "ledger": ledger}))
    with pytest.raises(RecipeError, match="no bound on a patient whose images are not known"):
        Experiment(tiny(privacy={**PATIENT, "noise": 3.0, "group": 1, "ledger": ledger}))


# Named: images beyond the group are left out, and patients are sampled


def test_which_images_are_left_out_depends_on_their_own_patient_alone() -> None:
    owners = list("abcaabcabaa")
    kept = spread_group(owners, 2)
    assert [owners[row] for row in kept].count("a") == 2
    assert sorted(kept) == list(kept)
    for gone in "abc":
        rows = [row for row, owner in enumerate(owners) if owner != gone]
        left = spread_group([owners[row] for row in rows], 2)
        assert [rows[row] for row in left] == [row for row in kept if owners[row] != gone]
    assert spread_group(owners, 6).tolist() == list(range(len(owners)))


def test_images_beyond_the_group_are_left_out_and_counted(tmp_path: Path) -> None:
    whole = Experiment(tiny(data=VIEWS, privacy={**PATIENT, "noise": 2.0})).setup.sites
    beyond = sum(
        max(0, (s.train.patients or ()).count(p) - 2) for s in whole.values() for p in set(s.train.patients or ())
    )
    assert beyond > 0
    asked = tiny(data=VIEWS, privacy={**PATIENT, "noise": 2.0, "group": 2}, training__batch=8)
    told = " ".join(call("plan", write_recipe(tmp_path, yaml.safe_load(asked.to_yaml()))).stdout.split())
    assert f"{beyond} images beyond privacy.group are left out" in told
    summary = run(asked, tmp_path / "out").summary
    assert sum(site.train for site in summary.site_sizes) == sum(len(s.train) for s in whole.values()) - beyond
    assert f"{beyond} images beyond privacy.group: 2 were left out" in (tmp_path / "out" / "privacy.md").read_text()
    assert summary.privacy is not None
    assert summary.privacy.largest_group == 2
    assert not any("name" in warning for warning in summary.warnings)


def test_a_patient_of_four_images_needs_the_noise_of_one_image() -> None:
    four = {**VIEWS, "views": [4, 4]}
    noise = {}
    for unit in ("image", "patient"):
        plan = Experiment(
            tiny(data=four, training__batch=8, privacy={**PATIENT, "unit": unit, "epsilon": 3})
        ).setup.plan
        assert plan is not None
        assert {size.largest for size in plan.site_sizes.values()} == {4}
        noise[unit] = plan.noise
    assert noise["patient"] <= 1.1 * noise["image"]


def test_sampled_patients_are_charged_as_one_image_and_shuffled_ones_as_a_group() -> None:
    draft = PrivacyPlan(PrivacyConfig(unit="patient", noise=2.0), 1.0, (("a",),), {"a": SiteSize(400, 4)}, {})
    draft = replace(draft, jobs={"a": (Steps(0.05, 20),)})
    assert draft.round_spends("a") == (Spend(1.0, 0.05, 20),)
    shuffled = replace(draft, config=replace(draft.config, sampling="shuffle"), jobs={"a": (Steps(1.0, 1),)})
    assert shuffled.round_spends("a") == (Spend(1.0, 1.0, 1, 4),)
    mixed = replace(draft, site_sizes={"a": SiteSize(400, 4, unnamed=1)}, config=replace(draft.config, group=4))
    assert mixed.round_spends("a") == (Spend(1.0, 0.05, 20, 4),)


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_other_releases_cost_a_patient_m_times_the_sensitivity(sampling: Any) -> None:
    """With hardly anything released by training, ε is the closed form of a Gaussian with µ = m √rounds / σ."""
    m, rounds, sigma = 4, 9, 30.0
    wish = PrivacyConfig(unit="patient", noise=1e6, delta=1e-3, sampling=sampling)
    plan = PrivacyPlan(
        wish, 1.0, (("a",),) * rounds, {"a": SiteSize(400, m)}, {"a": (Steps(0.05, 20),)}, {"features": sigma}
    )
    mu = m * math.sqrt(rounds) / sigma
    exact = brentq(lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - 1e-3, 0, 50)
    assert make_plan(plan).epsilon == pytest.approx(exact, rel=2e-3)


def test_a_job_that_samples_images_is_beyond_a_plan_for_patients() -> None:
    experiment = Experiment(tiny(data=VIEWS, training__batch=8, privacy={**PATIENT, "noise": 2.0}))
    setup, secret = experiment.setup, Stream(1, ("secret",))
    runner = setup.make_runner("a", RamMemory(), secret)
    assert setup.plan is not None
    private = setup.plan.private_options("a")
    assert private is not None
    assert runner.limits is not None
    assert runner.algorithm.training.private == private
    assert private.unit == "patient"
    site = Site("a", len(setup.sites["a"].train), 1, 2, 0.1, secret)
    for options, allowed in ((private, True), (replace(private, unit="image"), False)):
        job = Fit({}, task_loss, replace(runner.algorithm.training, private=options))

        def work() -> Any:
            yield job  # noqa: B023

        with nullcontext() if allowed else pytest.raises(EngineError, match="has not priced"):
            next(limit_to_plan(work(), runner.limits, site))


def test_engines_agree_and_say_why_patients_are_not_stacked(tmp_path: Path) -> None:
    wish = {**PATIENT, "noise": 2.0, "randomness": "seed"}
    sums = {}
    for name in ("local", "stacked"):
        found = run(tiny(data=VIEWS, training__batch=8, privacy=wish, engine__name=name), tmp_path / name)
        sums[name] = found.summary.sha256
    assert sums["local"] == sums["stacked"]
    ledger = (tmp_path / "stacked" / "ledger.jsonl").read_text()
    assert "patients have different numbers of images" in ledger


# Said wherever figures are shown


def test_a_split_by_image_is_remarked_once_wherever_figures_are_shown(
    shots: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sentence = "images of one patient may lie in two parts, and figures may be too good"
    path = asking(shots, tmp_path / "r.yaml", unit="image", noise=2.0)
    result = call("run", path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert [sentence in told for told in caplog.messages].count(True) == 1
    assert call("report", tmp_path / "out", "--out", tmp_path / "report.html").exit_code == 0
    for page in (tmp_path / "out" / "privacy.md", tmp_path / "report.html"):
        assert sentence in page.read_text()
    summary = RunFolder(tmp_path / "out").read_summary()
    assert [sentence in warning for warning in summary.warnings] == [True]
    assert summary.warnings[0].startswith("no image names its patient")
