"""Adaptive noise: what the equation and the text say, what is paid for, and that nothing is claimed where it leaks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from opacus.accountants import PRVAccountant
from torch import Tensor
from typer.testing import CliRunner

from polyclinic import run
from polyclinic.algorithms.optimisation.adaptive_noise import AdaptiveNoise, per_example_losses, scale_noise
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.cli.main import app
from polyclinic.core.errors import RecipeError
from polyclinic.core.jobs import Fit, Fitted, Score, Site, Update
from polyclinic.core.options import Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.data.examples import Images, Selection
from polyclinic.evaluation.rows import TrainRow
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.privacy.plan import PrivacyConfig, PrivacyPlan, SiteSize, Steps
from polyclinic.privacy.releases import release_variance
from polyclinic.runs.experiment import Experiment
from polyclinic.runs.privacy_plan import noise_secret, privacy_limits
from polyclinic.runs.privacy_record import summarise_privacy
from polyclinic.storage.messages import Message
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import task_loss
from polyclinic.training.network import copy_module_weights
from tests.laws.bench import clinics, play, same, small
from tests.small import SITES, TINY, tiny, write_recipe

Rule = Literal["equation", "text"]
Variant = Literal["corrected", "paper"]
SIGMA, BATCH, BOUND, DELTA = 1.1, 5, 4.0, 1e-4
FREE = Training(Optimiser(lr=0.1), batch=BATCH)
TRAINING = replace(FREE, private=Private(clip=1.5, noise=SIGMA))
WEIGHTS = copy_module_weights(small(norm=False).module)
SECRET = Stream(5, ("secret",))
LOSSES = torch.rand(40, generator=torch.Generator().manual_seed(3)) * 2
SPREADS = st.floats(0, 1e6)
WISH: dict[str, Any] = {"noise": SIGMA, "delta": DELTA, "randomness": "seed"}
LOSS_NOISE = 2.0
SOUND = {"name": "adaptive-noise", "loss_noise": LOSS_NOISE}


def asked(algorithm: AdaptiveNoise, losses: Tensor) -> tuple[Fit, Update]:
    """The training that a site with these losses is asked for, and what it hands in."""
    work = algorithm.local(WEIGHTS, None, Site("a", len(losses), 1, 3, 0.1, SECRET), Stream(0))
    look = next(work)
    assert isinstance(look, Score)
    assert (look.function, look.part, look.reduce) == (per_example_losses, "train", "cat")
    assert look.weights is WEIGHTS
    job = work.send({"losses": losses})
    assert isinstance(job, Fit)
    with pytest.raises(StopIteration) as end:
        work.send(Fitted(WEIGHTS, 8, 0.5, {}))
    update, memory = end.value.value
    assert memory is None
    return job, update


def noise_of(algorithm: AdaptiveNoise, losses: Tensor) -> float:
    private = asked(algorithm, losses)[0].training.private
    assert private is not None
    return private.noise


def train_rows(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "train"]


# Equation 3, and the text


@pytest.mark.parametrize(
    ("rule", "sigma", "spread", "expected"),
    [
        ("equation", 1.0, 0.0, 1.0),
        ("equation", 1.0, 0.25, 1.25),
        ("equation", 1.5, 0.5, 2.25),
        ("equation", 2.0, 1.0, 4.0),
        ("equation", 2.0, 7.0, 4.0),
        ("text", 1.0, 0.0, 2.0),
        ("text", 1.0, 1.0, 1.5),
        ("text", 2.0, 3.0, 2.5),
        ("text", 1.5, math.inf, 1.5),
    ],
)
def test_by_hand(rule: Rule, sigma: float, spread: float, expected: float) -> None:
    assert scale_noise(sigma, spread, rule) == pytest.approx(expected, rel=1e-15)


@given(sigma=st.floats(0.1, 100), less=SPREADS, more=SPREADS)
def test_the_two_rules_go_opposite_ways_between_once_and_twice_the_noise(
    sigma: float, less: float, more: float
) -> None:
    less, more = sorted((less, more))
    assert sigma <= scale_noise(sigma, less, "equation") <= scale_noise(sigma, more, "equation") <= 2 * sigma
    assert 2 * sigma >= scale_noise(sigma, less, "text") >= scale_noise(sigma, more, "text") >= sigma


def test_the_loss_of_every_image() -> None:
    network, train = small(norm=False), clinics(9)["clinic-1"].train
    found = score(Score(WEIGHTS, per_example_losses), network, train)["losses"]
    images, labels = train.batch(torch.arange(9))
    logits = network(WEIGHTS, images)
    by_hand = logits.logsumexp(1) - logits.gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(found, by_hand.detach())
    torch.testing.assert_close(found.mean(), F.cross_entropy(logits, labels).detach())


# As FedAvg


@pytest.mark.parametrize("variant", ["corrected", "paper"])
@pytest.mark.parametrize("optimiser", [FREE.optimiser, Optimiser("adam", lr=0.01)], ids=["sgd", "adam"])
def test_without_a_plan_it_is_fedavg(variant: Variant, optimiser: Optimiser) -> None:
    sites, training = clinics(12, 7, 16), replace(FREE, optimiser=optimiser)
    fedavg = play(FedAvg(training), sites, small(), 3).outcome.state
    assert same(play(AdaptiveNoise(training, variant), sites, small(), 3).outcome.state, fedavg)
    once_more = play(AdaptiveNoise(replace(training, epochs=2), variant), sites, small(), 3).outcome.state
    assert not same(once_more, fedavg)


@pytest.mark.parametrize("variant", ["corrected", "paper"])
def test_nothing_but_the_noise_is_adapted(variant: Variant) -> None:
    job, update = asked(AdaptiveNoise(TRAINING, variant), LOSSES)
    assert job.training.private is not None
    assert replace(job.training, private=TRAINING.private) == TRAINING
    assert replace(job.training.private, noise=SIGMA) == TRAINING.private
    assert (job.weights, job.steps, job.full_batch) == (WEIGHTS, task_loss, False)
    assert (update.tensors, update.examples) == (WEIGHTS, len(LOSSES))
    assert update.scalars == {"noise": job.training.private.noise}


# The corrected variant


@pytest.mark.parametrize("rule", ["equation", "text"])
@pytest.mark.parametrize("loss_noise", [0.01, 5.0, 50.0])
def test_sound_noise_is_the_formula_of_the_released_variance(rule: Rule, loss_noise: float) -> None:
    told = float(release_variance(LOSSES, BOUND, loss_noise, SECRET.child("losses")).tensors["variance"]) / BATCH
    more = told if rule == "equation" else 1 / (1 + told)
    found = noise_of(AdaptiveNoise(TRAINING, "corrected", rule, BOUND, loss_noise), LOSSES)
    assert found == pytest.approx(min(SIGMA * (1 + more), 2 * SIGMA), rel=1e-12)


def test_with_hardly_any_noise_the_released_variance_is_that_of_batches() -> None:
    """The mean of a batch of B images has the B-th part of the variance of one."""
    found = noise_of(AdaptiveNoise(TRAINING, "corrected", "equation", BOUND, 1e-9), LOSSES)
    assert found == pytest.approx(SIGMA * (1 + float(LOSSES.double().var(correction=0)) / BATCH), rel=1e-6)


def test_the_paper_s_batches_are_random_however_images_are_stored() -> None:
    """On images stored by class, batches in stored order would be of one class, and their losses far apart."""
    network, rows = small(norm=False), 60
    train = clinics(rows)["clinic-1"].train
    assert isinstance(train, Images | Selection)
    by_class = train.subset(train.labels.argsort(stable=True))
    site = Site("a", rows, 1, 3, 0.1, SECRET)

    def variance(data: Images | Selection, seed: int) -> float:
        job = next(AdaptiveNoise(TRAINING, "paper").local(WEIGHTS, None, site, Stream(seed)))
        assert isinstance(job, Score)
        assert job.order is not None
        assert sorted(job.order.tolist()) == list(range(rows))
        return AdaptiveNoise(TRAINING, "paper").loss_variance(score(job, network, data)["losses"], site)

    whole = float(score(Score(WEIGHTS, per_example_losses), network, train)["losses"].var(correction=0)) / BATCH
    for data in (train, by_class):
        assert fmean(variance(data, seed) for seed in range(60)) == pytest.approx(whole, rel=0.15)


@given(
    losses=st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=20),
    rule=st.sampled_from(["equation", "text"]),
    loss_noise=st.floats(1e-3, 1e3),
)
def test_sound_noise_is_never_less_than_was_priced_nor_more_than_twice(
    losses: list[float], rule: Rule, loss_noise: float
) -> None:
    found = noise_of(AdaptiveNoise(TRAINING, "corrected", rule, BOUND, loss_noise), torch.tensor(losses))
    assert SIGMA <= found <= 2 * SIGMA


def test_sound_never_sees_a_loss_beyond_its_clip() -> None:
    """n values in [0, B], one of which becomes another: their variance moves by less than B²/n."""
    many = LOSSES.repeat(10)

    def with_one(loss: float) -> float:
        losses = many.clone()
        losses[7] = loss
        return noise_of(AdaptiveNoise(TRAINING, "corrected", "equation", BOUND, 1e-9), losses)

    assert with_one(BOUND) == with_one(1e6) == with_one(math.inf)
    assert 0 < abs(with_one(1e6) - with_one(0.0)) <= SIGMA * BOUND**2 / len(many)


def test_sound_names_what_it_releases_and_paper_what_it_lacks() -> None:
    assert AdaptiveNoise(TRAINING, "corrected", loss_noise=7.0).privacy_releases() == {"variance of losses": 7.0}
    assert AdaptiveNoise(TRAINING, "corrected").no_guarantee_reason() == ""
    assert AdaptiveNoise(TRAINING, "paper", loss_noise=7.0).privacy_releases() == {}
    assert "private losses" in AdaptiveNoise(TRAINING, "paper").no_guarantee_reason()


@pytest.mark.parametrize(
    ("options", "words"), [({"largest_loss": 0.0}, "largest_loss"), ({"loss_noise": 0.0}, "paper")]
)
def test_impossible_options_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        AdaptiveNoise(TRAINING, **options)  # type: ignore[arg-type]


# A run of the corrected variant


def test_the_noise_is_told_for_every_round_and_site(tmp_path: Path) -> None:
    found = run(tiny(algorithm=SOUND, privacy=WISH), tmp_path)
    rows = train_rows(tmp_path)
    assert [(row["round"], row["site"]) for row in rows] == [(r, s) for r in (1, 2) for s in SITES]
    told = [row["scalars"]["noise"] for row in rows]
    assert all(SIGMA <= noise <= 2 * SIGMA for noise in told)
    assert len(set(told)) == len(told)
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    charged = {
        s: c
        for row in ledger
        if row["event"] == "charge" and row["privacy"]
        for s, c in row["privacy"]["sites"].items()
    }
    assert charged.keys() == set(SITES)
    assert all((steps[0], loss) == (SIGMA, [LOSS_NOISE, 1.0, 1, 1]) for steps, loss in charged.values())
    paid = max(
        epsilon([Spend(SIGMA, q, 2 * n), Spend(LOSS_NOISE, times=2)], DELTA) for (_, q, n, _), _ in charged.values()
    )
    assert found.summary.privacy is not None
    assert found.summary.privacy.epsilon_by_accountant["pld"] == pytest.approx(paid, rel=1e-6)


def test_a_site_trains_with_the_noise_it_tells(tmp_path: Path) -> None:
    """One site, one round: the model is that of a plain private fit with the noise of the released variance."""
    recipe = tiny(algorithm=SOUND, privacy=WISH, rounds=1, data__partition={"by": "iid", "sites": 1})
    experiment = Experiment(recipe, tmp_path)
    plan, private = experiment.setup.plan, experiment.setup.algorithm.training.private
    assert plan is not None
    assert private is not None
    (name,) = experiment.setup.sites
    train, initial, network = (
        experiment.setup.sites[name].train,
        experiment.setup.federation.initial,
        experiment.setup.networks.first,
    )
    lr = experiment.setup.algorithm.training.optimiser.lr
    fields = {"run": experiment.run_id(), "site": name, "round": 1, "lr": lr, "purpose": "train"}
    order = Message(fields, initial)
    own = noise_secret(experiment.recipe, None).child("site", name, experiment.setup.dataset.fingerprint_of(name))
    secret = privacy_limits(plan, name, own).noise_stream(order)
    losses = score(Score(initial, per_example_losses), network, train)["losses"]
    told = release_variance(losses, BOUND, LOSS_NOISE, secret.child("losses")).tensors["variance"]
    sigma = min(SIGMA * (1 + float(told) / experiment.setup.algorithm.training.batch_size(len(train))), 2 * SIGMA)
    training = replace(experiment.setup.algorithm.training, private=replace(private, noise=sigma))
    site = Site(name, len(train), 1, 1, training.optimiser.lr, secret)
    public = Stream(recipe.seed, ("site", name)).child("job", 1)
    expected = fit(Fit(initial, task_loss, training), network, train, site, public, secret.child("job", 1)).weights
    network.load_weights(initial)
    found = experiment.run()
    assert [row["scalars"]["noise"] for row in train_rows(tmp_path)] == [pytest.approx(sigma, rel=1e-12)]
    assert sigma != SIGMA
    for key, value in expected["model"].items():
        torch.testing.assert_close(found.state["model"][key], value)


# The paper variant


@pytest.mark.parametrize(
    ("losses", "spread"),
    [([0.1, 0.3, 0.5, 0.7], 0.04), ([0.5] * 6, 0.0), ([0.0, 0.0, 4.0, 4.0], 4.0), ([1.0, 2.0, 1.0], 0.0625)],
)
def test_paper_noise_is_that_of_the_losses_of_batches(losses: list[float], spread: float) -> None:
    algorithm = AdaptiveNoise(replace(TRAINING, batch=2), "paper")
    assert noise_of(algorithm, torch.tensor(losses)) == pytest.approx(min(SIGMA * (1 + spread), 2 * SIGMA), rel=1e-6)


def test_paper_noise_gives_a_single_loss_away() -> None:
    """Why there is no guarantee: one image decides whether the noise is doubled."""
    quiet, loud = LOSSES.clone(), LOSSES.clone()
    loud[7] = 1e6
    assert noise_of(AdaptiveNoise(TRAINING, "paper"), quiet) < 1.5 * SIGMA
    assert noise_of(AdaptiveNoise(TRAINING, "paper"), loud) == 2 * SIGMA


def test_a_paper_run_says_everywhere_that_it_guarantees_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {**TINY, "algorithm": {"name": "adaptive-noise", "variant": "paper"}, "privacy": WISH}
    result = CliRunner().invoke(app, ["run", str(write_recipe(tmp_path, values)), "--out", "here"])
    assert result.exit_code == 0, result.output
    assert "privacy: noise 1.1, NO guarantee: the noise depends on private losses" in result.output
    assert "privacy: no guarantee; privacy.md says why" in result.output
    assert "ε =" not in result.output
    page = (tmp_path / "here" / "privacy.md").read_text()
    assert "**No guarantee.** The noise depends on private losses" in page
    assert "**ε" not in page
    assert "paper metric, not a guarantee" in page
    found = json.loads((tmp_path / "here" / "result.json").read_text())["privacy"]
    assert found["no_guarantee_reason"]
    assert f"is {found['paper_metric']:.2f} (paper metric" in page
    assert found["paper_metric"] == pytest.approx(mean_and_sum(tmp_path / "here"), abs=0.05)


def mean_and_sum(folder: Path) -> float:
    """Eq. 4 and 5 by Opacus itself: Σ_t (1/K) Σ_i ε_i^(t), each site's steps as its ledger says."""
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    spends = next(row["privacy"]["sites"] for row in ledger if row["event"] == "charge")
    told: dict[int, list[float]] = {}
    for row in train_rows(folder):
        (_, rate, steps, _), *_ = spends[row["site"]]
        accountant = PRVAccountant()
        accountant.history = [(row["scalars"]["noise"], rate, steps)]
        told.setdefault(row["round"], []).append(accountant.get_epsilon(DELTA))
    return sum(map(fmean, told.values()))


@pytest.mark.parametrize(("noise", "printed"), [(1.02, 1.78), (2.04, 0.66)])
def test_the_papers_own_figures_arise_that_way(noise: float, printed: float) -> None:
    """ε = 1.78 at σ = 1 and 0.66 at σ = 2: ten rounds, 64 of about 45,600 images a step, variances of 0.02."""
    sites = [f"client-{number}" for number in range(5)]
    plan = PrivacyPlan(
        PrivacyConfig(noise=noise / 1.02, delta=1 / 60000),
        noise / 1.02,
        (tuple(sites),) * 10,
        {site: SiteSize(45_600) for site in sites},
        {site: (Steps(64 / 45_600, 713),) for site in sites},
        no_guarantee_reason="as printed",
    )
    rows = [TrainRow(round=r, site=s, scalars={"noise": noise}) for r in range(1, 11) for s in sites]
    found = summarise_privacy(PrivacyBudget(plan, SECRET), False, rows).paper_metric
    assert found == pytest.approx(printed, abs=0.015)
