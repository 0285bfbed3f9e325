"""The plan: priced before round 1, kept to, and refused where it could not be true."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from polyclinic import run
from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.config.bundled import bundled_recipes
from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import RecipeError, Refused, RoundFailed, StoreError
from polyclinic.core.jobs import Score, Site, Update, Work
from polyclinic.core.options import Private
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, Part, Tensors
from polyclinic.evaluation.rows import ChargeRow, CostRow
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.federation.site_limits import SitePrivacyLimits
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.models import build_model
from polyclinic.models.modifications import replace_batch_norm
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.privacy.plan import (
    PrivacyConfig,
    PrivacyPlan,
    SiteSize,
    Steps,
    least_metrics_noise,
    make_plan,
    round_up,
)
from polyclinic.runs.experiment import Experiment
from polyclinic.storage.messages import Message
from polyclinic.training.losses import predict_probabilities
from tests.small import NEEDED, run_until_the_end, tiny

IMAGE: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-4}
SITE: dict[str, Any] = {"unit": "site", "epsilon": 30.0, "delta": 1e-3}
DELTA = 1e-4


def draft(wish: PrivacyConfig, rounds: int = 3, sites: dict[str, int] | None = None, holders: int = 1) -> PrivacyPlan:
    sizes = sites or {"a": 400, "b": 200}
    holdings = {name: SiteSize(n) for name, n in sizes.items()}
    jobs = {name: (Steps(20 / n, n // 20),) for name, n in sizes.items()}
    return PrivacyPlan(wish, 1.0, (tuple(sizes),) * rounds, holdings, jobs, max_sites_per_record=holders)


# What a plan costs


def test_disjoint_sites_take_the_maximum_never_a_mean_or_a_sum() -> None:
    plan = make_plan(draft(PrivacyConfig(noise=1.0, delta=DELTA)))
    alone = [epsilon([Spend(1.0, 20 / n, 3 * n // 20)], DELTA) for n in (400, 200)]
    assert plan.epsilon == max(alone) > min(alone)


def test_a_record_at_m_sites_composes_m_times() -> None:
    """D4, exactly: equal sites, so that the bound over sets of sites is the composition itself."""
    for m in (1, 2, 3):
        plan = make_plan(draft(PrivacyConfig(noise=1.0, delta=DELTA), sites=dict.fromkeys("abc", 400), holders=m))
        assert plan.epsilon == epsilon([Spend(1.0, 0.05, 60 * m)], DELTA)


def test_a_site_pays_for_its_own_rounds_only() -> None:
    whole = draft(PrivacyConfig(noise=1.0, delta=DELTA), sites={"a": 400, "b": 400})
    plan = make_plan(replace(whole, rounds=(("a",), ("a", "b"), ("a",))))
    assert {s: found[0].times for s, found in plan.run_spends().items()} == {"a": 60, "b": 20}


def test_patients_cost_as_groups() -> None:
    """D7: where patients cannot be sampled, the figure of a declared number of images, by the mixture of Gaussians."""
    wish = PrivacyConfig(unit="patient", noise=2.0, delta=DELTA, group=3)
    one = draft(wish, sites={"a": 400})
    plan = make_plan(replace(one, site_sizes={"a": SiteSize(400, largest=3, unnamed=400)}))
    assert plan.epsilon == epsilon([Spend(2.0, 0.05, 60, 3)], DELTA)
    assert plan.epsilon > make_plan(one).epsilon


@pytest.mark.parametrize("wanted", [0.5, 3.0, 20.0])
@pytest.mark.parametrize("unit", ["image", "site"])
def test_solved_noise_keeps_within_what_is_wished(wanted: float, unit: Any) -> None:
    plan = make_plan(draft(PrivacyConfig(unit=unit, epsilon=wanted, delta=DELTA)))
    assert 0.98 * wanted < plan.epsilon <= wanted


def test_every_site_pays_the_same_by_noise_of_its_own() -> None:
    plan = make_plan(draft(PrivacyConfig(epsilon=3.0, delta=DELTA), sites={"a": 1600, "b": 400, "c": 100}))
    paid = {site: plan.epsilon_of(spends) for site, spends in plan.run_spends().items()}
    assert all(0.995 * 3.0 < value <= 3.0 for value in paid.values())
    assert plan.noise == plan.noise_of("a") < plan.noise_of("b") < plan.noise_of("c")
    alike = make_plan(
        draft(PrivacyConfig(epsilon=3.0, delta=DELTA, noise_per_site=False), sites={"a": 1600, "b": 400, "c": 100})
    )
    assert not alike.site_noise
    assert alike.noise == pytest.approx(plan.noise_of("c"), rel=1e-3), "one noise for all is that of the smallest site"
    assert alike.epsilon_of(alike.run_spends()["a"]) < 2.0


@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.heavy)])
def test_a_record_at_several_sites_pays_the_whole_at_its_worst_set_of_sites(most: int) -> None:
    """Against the enumeration of all sets of sites, with noise by site."""
    sizes = {"a": 1600, "b": 800, "c": 200}
    plan = make_plan(draft(PrivacyConfig(epsilon=3.0, delta=DELTA), sites=sizes, holders=most))
    spends = plan.run_spends()
    exact = max(epsilon([s for site in chosen for s in spends[site]], DELTA) for chosen in combinations(sizes, most))
    assert exact == pytest.approx(plan.epsilon, rel=0.01)
    assert 0.99 * 3.0 < exact <= 3.0
    alone = [plan.epsilon_of(one) for one in spends.values()]
    assert max(alone) < 1.02 * min(alone)


def test_sites_train_with_their_own_noise_and_pay_for_it(tmp_path: Path) -> None:
    """A run's ledger holds each site's σ, and its result says the range."""
    by = {"data__partition": {"by": "dirichlet", "sites": 3, "alpha": 1.0, "minimum": 60}}
    found = run(tiny(privacy=IMAGE, **by), tmp_path).summary.privacy
    assert found is not None
    assert len(set(found.site_noise.values())) == 3
    assert all(2.98 < (value or 0) <= 3 for value in found.site_epsilon.values())
    row = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])
    assert {site: rows[0][0] for site, rows in row["privacy"]["sites"].items()} == found.site_noise
    assert "by site" in (tmp_path / "privacy.md").read_text()


def test_automatic_clipping_trains_and_is_said(tmp_path: Path) -> None:
    recipe = {"privacy": {**IMAGE, "clip": "auto", "randomness": "seed"}, "rounds": 1}
    found, stacked = run(tiny(**recipe), tmp_path), run(tiny(**recipe, engine__name="stacked"))
    assert "scaled to length 1" in (tmp_path / "privacy.md").read_text()
    for name, value in found.state["model"].items():
        torch.testing.assert_close(stacked.state["model"][name], value, rtol=1e-5, atol=1e-6)
    with pytest.raises(RecipeError, match="unit site clips updates; give a number"):
        Experiment(tiny(privacy={**SITE, "clip": "auto"}))


@given(rate=st.floats(1e-9, 1), digits=st.integers(3, 5))
def test_rates_are_rounded_up_and_hardly(rate: float, digits: int) -> None:
    assert rate <= round_up(rate, digits) * (1 + 1e-12)
    assert round_up(rate, digits) <= min(1.0, rate * (1 + 10 ** (1 - digits)))


def test_other_charges_are_part_of_the_price() -> None:
    plain, charged = (
        make_plan(replace(draft(PrivacyConfig(noise=1.0, delta=DELTA)), other_releases=c))
        for c in ({}, {"a mean": 5.0})
    )
    assert charged.epsilon > plain.epsilon
    assert charged.run_spends()["a"][1] == Spend(5.0, times=3)


# What a run does with it


def test_every_round_is_charged_before_it_is_played(tmp_path: Path) -> None:
    found = run(tiny(privacy=IMAGE), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    kinds = [row["event"] for row in rows]
    assert kinds[:4] == ["charge", "round", "charge", "round"]
    charged = [row["privacy"]["sites"]["site-1"] for row in rows[:4:2]]
    assert charged[0] == charged[1]
    noise, rate, times, group = charged[0][0]
    paid = epsilon([Spend(noise, rate, 2 * times, group)], 1e-4)
    assert found.summary.epsilon == pytest.approx(paid)
    assert paid <= IMAGE["epsilon"]


def test_the_run_stops_before_it_overspends(tmp_path: Path) -> None:
    wish = {"noise": 2.0, "epsilon": 2.0, "delta": 1e-4}
    found = run(tiny(privacy=wish, rounds=40), tmp_path)
    played, paid = found.summary.rounds, found.summary.epsilon
    assert 1 <= played < 40
    assert found.summary.privacy is not None
    assert found.summary.privacy.stopped_by_budget
    assert paid is not None
    assert paid <= 2.0
    plan = Experiment(tiny(privacy={**wish, "epsilon": None}, rounds=played + 1)).setup.plan
    assert plan is not None
    assert plan.epsilon > 2.0, "one more round could have been paid"


def test_the_same_round_from_the_same_state_is_paid_once_from_another_again() -> None:
    plan = make_plan(draft(PrivacyConfig(noise=1.0, delta=DELTA)))
    guard = PrivacyBudget(plan, Stream(0))
    here: Bundle = {"model": {"w": torch.zeros(2)}}
    other: Bundle = {"model": {"w": torch.ones(2)}}
    for state, times in ((here, 1), (here, 1), (other, 2), (here, 2)):
        guard.charge_round(1, ["a"], state)
        assert sum(s.times for s in guard.total_spends()["a"]) == times * 20
    again = PrivacyBudget(plan, Stream(0))
    again.load_charges(
        [ChargeRow(round=1, sites=["a"], privacy=guard.charge_round(1, ["a"], here)), CostRow(event="round", round=1)]
    )
    assert sum(s.times for s in again.total_spends()["a"]) == 20


@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize("unit", ["image", "site"])
def test_a_round_that_is_charged_again_counts_before_it_is_allowed(unit: Any, rounds: int) -> None:
    """The last round is cut off again and again: every attempt is another release, here for noise at the server and
    for sites with a memory. What is spent stays within what was promised."""
    at: Literal["site", "server"] = "server" if unit == "site" else "site"
    promised = PrivacyConfig(unit=unit, epsilon=3.0, delta=DELTA, noise_at=at)
    state: Bundle = {"model": {"w": torch.zeros(3)}}
    noise = make_plan(draft(promised, rounds)).noise_of("b")
    for config in (promised, replace(promised, noise=1.3 * noise)):
        guard = PrivacyBudget(make_plan(draft(config, rounds)), Stream(1))
        for round in range(1, rounds + 1):
            assert guard.can_afford(round, ["a", "b"], state)
            guard.charge_round(round, ["a", "b"], state, remembered=True)
        repeats = 0
        while repeats < 9 and guard.can_afford(rounds, ["a", "b"], state):
            guard.charge_round(rounds, ["a", "b"], state, remembered=True)
            repeats += 1
        assert guard.plan.worst_epsilon(guard.total_spends()) <= 3.0
        once_more = {site: spend.times for site in "ab" for spend in guard.plan.round_spends(site)}
        dearer = {
            site: [replace(s, times=s.times + once_more[site]) for s in spends]
            for site, spends in guard.total_spends().items()
        }
        assert guard.plan.worst_epsilon(dearer) > 3.0, "one more could have been paid"
        assert repeats or config is promised or rounds == 1
        assert not repeats or config is not promised


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"cross-site", "elastic", "fed-align", "fraug"}))
def test_every_algorithm_trains_privately(algorithm: str) -> None:
    method = NEEDED.get(algorithm, {}).get("algorithm", algorithm)
    found = run(tiny(algorithm=method, privacy=IMAGE, training__optimiser__lr=0.05))
    assert (found.summary.epsilon or math.inf) <= 3.0
    free = run(tiny(algorithm=method, training__optimiser__lr=0.05)) if algorithm != "adaptive-noise" else None
    assert free is None or free.summary.merged != found.summary.merged


@pytest.mark.parametrize("at", ["site", "server"])
def test_whole_sites_are_protected(at: str) -> None:
    free = run(tiny()).state["model"]
    near = run(tiny(privacy={"unit": "site", "noise": 0.0, "clip": 1e6, "delta": 1e-3, "noise_at": at})).state["model"]
    assert all(torch.equal(free[name], near[name]) for name in free), "no clip and no noise change nothing"
    far = run(tiny(privacy={**SITE, "noise_at": at})).state["model"]
    assert not any(torch.equal(free[name], far[name]) for name in free)


def test_metrics_stay_at_the_sites_unless_told_otherwise(tmp_path: Path) -> None:
    def told(**wish: Any) -> list[dict[str, Any]]:
        folder = tmp_path / wish.get("metrics", "suppress")
        run(tiny(privacy={**IMAGE, **wish}), folder)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if row["event"] == "evaluate"]

    assert not told()
    noised, plain = told(metrics="count"), told(metrics="open")
    assert len(noised) == len(plain) > 0
    assert noised[0].keys() >= {"accuracy", "loss"}
    assert "auc" not in noised[0]
    assert noised[0]["accuracy"] != plain[0]["accuracy"]


def test_noise_from_a_secret_is_another_every_time_and_survives_a_resume(tmp_path: Path) -> None:
    recipe = tiny(privacy={**IMAGE, "randomness": "secret"})
    first, second = run_until_the_end(recipe, tmp_path / "1"), run(recipe, tmp_path / "2")
    assert first.summary.sha256 != second.summary.sha256
    assert (tmp_path / "1" / "secret").stat().st_mode & 0o077 == 0
    assert run(recipe, tmp_path / "1").summary.sha256 == first.summary.sha256


# What is refused, before anything is trained


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": {**IMAGE, "sampling": "shuffle", "amplification": True}}, "shuffled loader is not Poisson"),
        ({"privacy": IMAGE, "training__oversample": True}, "oversample draws some images more often"),
        ({"privacy": {"epsilon": 1e-6, "delta": 1e-12}}, "even a noise of"),
        ({"privacy": {**IMAGE, "delta": 0.01}}, "privacy.delta is 0.01, but there are"),
        ({"privacy": {"delta": 1e-5}}, "needs epsilon"),
        ({"privacy": {**IMAGE, "noise_at": "server"}}, "noise_at: server is for unit site"),
        ({"privacy": {**SITE, "amplification": True}}, "cohorts are drawn in public"),
        ({"privacy": {**SITE, "noise_at": "server"}, "algorithm": "scaffold"}, "takes a weighted mean"),
        ({"privacy": {**SITE, "metrics": "count"}}, "protects single images, not a whole site"),
        ({"privacy": {**IMAGE, "augmentation_multiplicity": 4}}, "copies of one image"),
        ({"privacy": {**IMAGE, "max_sites_per_record": 0}}, "privacy.max_sites_per_record is 0"),
        ({"privacy": IMAGE, "schedule": "plateau"}, "privacy.metrics: count"),
        ({"algorithm": "adaptive-noise"}, "add for example"),
        ({"algorithm": {"name": "adaptive-noise", "loss_noise": 0}, "privacy": IMAGE}, "nothing charges for"),
        ({"algorithm": {"name": "adaptive-noise", "variant": "paper"}, "privacy": IMAGE}, "cannot be promised"),
        ({"training__private": {"clip": 1.0, "noise": 1.0}}, "follows from privacy"),
        ({"privacy": {**IMAGE, "epsilom": 1}}, "there is no key 'privacy.epsilom'"),
    ],
)
def test_what_cannot_be_true_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        Experiment(tiny(**changes))
    assert "\n" not in str(caught.value)


def test_batch_normalisation_is_refused_with_its_replacement() -> None:
    wish = {"privacy": {**IMAGE, "delta": 1e-6}, "model": {"name": "resnet18"}}
    with pytest.raises(RecipeError, match=r"model\.norm: group"):
        Experiment(phantom(**wish))
    assert Experiment(phantom(**{**wish, "model": {"name": "resnet18", "norm": "group"}})).setup.plan is not None


def phantom(**changes: Any) -> Recipe:
    keys = {"data.size": 32, "rounds": 1, "methods": {}, "claims": [], "paper": {}}
    return Recipe.load(bundled_recipes()["demo"], keys | {k.replace("__", "."): v for k, v in changes.items()})


def test_dp_safe_leaves_no_layer_that_mixes_images() -> None:
    module = replace_batch_norm(
        build_model("mobilenet_v2", classes=3, channels=3, size=32, dropout=0.0, seed=Stream(0))
    )
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
    module.train()
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    alone, together = module(images[:1]), module(images)[:1]
    torch.testing.assert_close(alone, together)


def test_an_overlap_that_the_data_has_cannot_be_denied() -> None:
    by = {"data__partition": {"by": "admixture", "sites": 3, "primary": 4, "admixture": 0.7}}
    plan = Experiment(tiny(privacy=IMAGE, **by)).setup.plan
    assert plan is not None
    assert plan.max_sites_per_record == 3
    with pytest.raises(RecipeError, match="at 3 sites of this federation"):
        Experiment(tiny(privacy={**IMAGE, "max_sites_per_record": 1}, **by))


class Looking(FedAvg):
    """Looks at every training image before it trains, as a curriculum does."""

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        yield Score(received, predict_probabilities)
        return (yield from super().local(received, memory, site, rng))


class Eager(FedAvg):
    """Trains more often than it lets on: only a rehearsal starts from round 2 with nothing but zeros to learn from."""

    secretly: ClassVar[bool] = False

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        update, kept = yield from super().local(received, memory, site, rng)
        if self.secretly:
            update, kept = yield from super().local(update.tensors, memory, site, rng)
        return Update(update.tensors, update.examples), kept


def test_a_look_that_nobody_pays_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A curriculum orders images by what the model says of them: no accountant's sampling, and no charge."""
    monkeypatch.setitem(ALGORITHMS, "fedavg", Looking)
    with pytest.raises(RecipeError, match="which the privacy plan does not pay for"):
        Experiment(tiny(privacy=IMAGE))


def test_training_beyond_the_plan_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "fedavg", Eager)
    experiment = Experiment(tiny(privacy=IMAGE))
    monkeypatch.setattr(Eager, "secretly", True)
    with pytest.raises(RoundFailed, match="which the privacy plan has not priced"):
        experiment.run()


def test_less_noise_than_was_priced_ends_in_an_error() -> None:
    experiment = Experiment(tiny(privacy=IMAGE))
    own = experiment.setup.algorithm.training.private
    assert own is not None
    quieter = replace(experiment.setup.algorithm.training, private=Private(own.clip, own.noise / 2))
    algorithm = replace(experiment.setup.algorithm, training=quieter)
    experiment.setup = replace(experiment.setup, algorithm=algorithm)
    with pytest.raises(RoundFailed, match="has not priced"):
        experiment.run()


def test_noise_is_named_by_run_site_round_purpose_permission_and_what_was_received() -> None:
    def named(seed: int = 1, weight: float = 0.0, sigma: float = 1.0, allowed: str = "", **fields: Any) -> Stream:
        order = {"run": "r", "site": "a", "round": 1, "purpose": "train", **fields}
        limits = SitePrivacyLimits(Stream(seed, ("secret",)), (), sigma, read_permission=lambda _: allowed)
        return limits.noise_stream(Message(order, {"model": {"w": torch.tensor([weight])}}))

    ways: list[dict[str, Any]] = [
        {},
        {"run": "s"},
        {"site": "b"},
        {"round": 2},
        {"lr": 0.2},
        {"seed": 2},
        {"weight": 1.0},
        {"purpose": "evaluate"},
        {"allowed": "2026-01-01"},
    ]
    ways.append({"sigma": 1.1})  # from the same numbers under another scale noise could be taken off
    assert len({named(**way).integer() for way in ways}) == len(ways)
    assert named() == named()


def test_a_plan_says_what_an_infinite_price_is() -> None:
    plan = make_plan(draft(PrivacyConfig(noise=0.0, delta=DELTA)))
    assert plan.epsilon == math.inf


def test_a_site_refuses_what_its_plan_does_not_have() -> None:
    held = SitePrivacyLimits(Stream(1), (), 1.0, parts=(), rounds=2)
    order = {"purpose": "train", "parts": [], "round": 2}
    held.check_order(Message(order, {}), "a")
    for more in ({"parts": ["validation"]}, {"parts": ["train"]}, {"round": 3}, {"purpose": "evaluate", "round": 4}):
        with pytest.raises(Refused, match="privacy plan"):
            held.check_order(Message({**order, **more}, {}), "a")


def test_one_bad_image_does_not_end_a_private_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an image that the network makes nothing of, nothing is known in the end: the run ends like any other."""
    usual = SiteRunner.predict

    def bad(self: SiteRunner, weights: Bundle, part: Part) -> Tensors:
        found = usual(self, weights, part)
        return {**found, "probabilities": found["probabilities"].index_fill(0, torch.tensor([0]), math.nan)}

    monkeypatch.setattr(SiteRunner, "predict", bad)
    assert run(tiny(privacy={**IMAGE, "metrics": "count"})).headline.scores.value("accuracy") >= 0
    with pytest.raises(RoundFailed, match="NaN or infinite"):
        run(tiny())


def test_a_lost_secret_is_not_replaced(tmp_path: Path) -> None:
    recipe = tiny(privacy={**IMAGE, "randomness": "secret"})
    run_until_the_end(recipe, tmp_path)
    (tmp_path / "secret").unlink()
    with pytest.raises(StoreError, match="is gone"):
        run(recipe, tmp_path)


def test_training_images_are_not_evaluated_and_drift_before_noise_is_not_told(tmp_path: Path) -> None:
    found = run(tiny(privacy={**SITE, "noise_at": "server"}), tmp_path)
    assert not any("train" in parts for models in found.summary.sites.values() for parts in models.values())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not any("drift" in row for row in rows)


def test_the_server_s_noise_is_another_where_other_sites_answered() -> None:
    """Of two means over the same start, with the same noise, the difference would be what one site sent."""
    guard = PrivacyBudget(
        make_plan(draft(PrivacyConfig(unit="site", noise=1.0, delta=DELTA, noise_at="server"))), Stream(0)
    )
    before: Bundle = {"model": {"w": torch.zeros(1000)}}
    both: Bundle = {"model": {"w": torch.ones(1000)}}
    one: Bundle = {"model": {"w": torch.full((1000,), 2.0)}}
    drawn = [
        guard.add_server_noise(1, before, after, [1.0, 1.0])["model"]["w"] - after["model"]["w"]
        for after in (both, one)
    ]
    assert abs(float(torch.corrcoef(torch.stack(drawn))[0, 1])) < 0.2
    assert torch.equal(guard.add_server_noise(1, before, both, [1.0, 1.0])["model"]["w"] - both["model"]["w"], drawn[0])
    for attempts in (1, 2):
        guard.charge_round(1, ["a"], before)
        assert guard.total_spends()["a"] == (Spend(1.0, times=attempts),), (
            "every attempt may have ended in another mean"
        )


def test_every_site_can_compute_how_much_noise_its_metrics_need() -> None:
    """Where the recipe names no ε: none needs more than the plan of all has, however many they are."""
    for count in (3, 20):
        sizes = {f"s{number:02}": 40 + 137 * number for number in range(count)}
        wish = PrivacyConfig(noise=1.1, metrics="count", delta=1e-5)
        whole = draft(wish, sites=sizes)
        rates = {site: round_up(10 / images, 5 if count == 3 else 3) for site, images in sizes.items()}
        plan = make_plan(replace(whole, jobs={site: (Steps(rate, 20),) for site, rate in rates.items()}))
        alone = {
            site: replace(
                plan,
                site_sizes={site: SiteSize(images)},
                jobs={site: (Steps(round_up(10 / images, 5), 20),)},
                rounds=((site,),) * len(plan.rounds),
            )
            for site, images in sizes.items()
        }
        needs = [least_metrics_noise(own, count) for own in alone.values()]
        assert plan.metrics_noise == pytest.approx(max(needs), rel=1e-3)
        assert min(needs) < 0.9 * max(needs)


def test_metrics_of_a_repeated_round_are_paid_by_the_validation_images() -> None:
    """Here they are all that has no ε to spare: the noise of training is far more than is needed."""
    config = PrivacyConfig(epsilon=3.0, delta=DELTA, metrics="count")
    plan = make_plan(draft(config, sites={"a": 400}))
    guard = PrivacyBudget(replace(plan, noise=4 * plan.noise), Stream(1))
    state: Bundle = {"model": {"w": torch.zeros(3)}}
    for round in (1, 2, 3):
        assert guard.can_afford(round, ["a"], state)
        guard.charge_round(round, ["a"], state, remembered=True)
    assert not guard.can_afford(3, ["a"], state)
    silent = PrivacyBudget(replace(guard.plan, metrics_noise=math.inf), Stream(1))
    silent.charged_attempts = guard.charged_attempts
    assert silent.can_afford(3, ["a"], state)
