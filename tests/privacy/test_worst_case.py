"""The price of the record that is charged most, where it is not known which sites of which runs held it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, combinations, product
from pathlib import Path

import numpy as np
import pytest

from polyclinic.core import Fit, Private, RecipeError, Refused, Step, Training
from polyclinic.deploy.site.policy import Budget
from polyclinic.deploy.site.privacy_account import PrivacyAccount, price_site_ledger
from polyclinic.privacy import worst_case
from polyclinic.privacy.accounting import Accountant, Neighbours, Spend, epsilon, rdp_curve
from polyclinic.privacy.plan import PrivacyConfig, PrivacyPlan, SiteSize, Steps, make_plan, steps_of
from polyclinic.privacy.shared_ledger import SharedLedger
from polyclinic.privacy.worst_case import Composition, add_up, run_cost, worst_epsilon
from polyclinic.training.data_order import batches_per_epoch
from polyclinic.training.losses import task_loss

DELTA = 1e-5


def enumerate_worst(
    runs: Sequence[Sequence[Composition]], neighbours: Neighbours = "add or remove", most: int | None = None
) -> float:
    """Price every choice of one candidate from each run. `most`: only so many that Rényi divergences find dearest."""
    choices = {add_up(chain.from_iterable(chosen)) for chosen in product(*runs)}
    if most is not None:
        choices = set(sorted(choices, key=renyi_cost)[-most:])
    return max(epsilon(one, DELTA, "pld", neighbours) for one in choices)


@lru_cache(maxsize=1000)
def renyi_curve(one: Spend) -> np.ndarray:
    found = rdp_curve([one], "add or remove")
    assert found is not None
    return np.array(found)


def renyi_cost(one: Composition) -> float:
    """ε by the plain conversion of Rényi divergences (Mironov 2017), to rank compositions."""
    orders = renyi_curve(Spend(1.0))[0]
    total = sum(renyi_curve(replace(spend, times=1))[1] * spend.times for spend in one)
    return float((total + math.log(1 / DELTA) / (orders - 1))[orders > 1].min())


def sets_of_sites(sites: Iterable[Composition], most: int) -> list[Composition]:
    return [add_up(chain.from_iterable(chosen)) for chosen in combinations(list(sites), most)]


# One run


def test_the_worst_three_of_five_hospitals_are_enumerated() -> None:
    """The demo federation, unnamed patients of up to four images: a bound by numbers alone would say 10.15."""
    sizes = {"harbour": 278, "hillside": 222, "lakeview": 160, "northfield": 111, "riverside": 73}
    plan = make_plan(
        PrivacyPlan(
            PrivacyConfig(unit="patient", noise=8.0, delta=1e-3, group=4),
            noise=1.0,
            rounds=(tuple(sizes),) * 6,
            site_sizes={site: SiteSize(n, 4, 4, unnamed=n) for site, n in sizes.items()},
            jobs={site: (Steps(16 / n, 2 * batches_per_epoch(n, 16)),) for site, n in sizes.items()},
            max_sites_per_record=3,
        )
    )
    exact = max(epsilon(one, 1e-3) for one in sets_of_sites(plan.run_spends().values(), 3))
    assert exact == pytest.approx(4.06, rel=0.01)
    assert exact <= plan.epsilon <= 1.01 * exact


@pytest.mark.parametrize("accountant", ["pld", pytest.param("rdp", marks=pytest.mark.heavy)])
def test_every_set_of_sites_is_covered(accountant: Accountant) -> None:
    draw = random.Random(3)
    for _ in range(8):
        sites = [
            (Spend(draw.choice([0.9, 1.1, 2.2]), draw.choice([0.02, 0.05, 0.1]), draw.randint(1, 30)),)
            for _ in range(draw.randint(1, 5))
        ]
        most = draw.randint(1, len(sites))
        found = worst_epsilon([run_cost(sites, most)], DELTA, accountant)
        assert found == pytest.approx(max(epsilon(one, DELTA, accountant) for one in sets_of_sites(sites, most)))


def test_sets_of_nearly_all_sites_are_found_at_once() -> None:
    """Without looking at the 2⁵⁰ sets of 50 sites."""
    sites = [(Spend(1.0 + k / 100, 1.0),) for k in range(50)]
    assert worst_epsilon([run_cost(sites, 50)], DELTA, "rdp") == epsilon(chain.from_iterable(sites), DELTA, "rdp")
    without_least = epsilon(chain.from_iterable(sites[:49]), DELTA, "rdp")
    assert worst_epsilon([run_cost(sites, 49)], DELTA, "rdp") == without_least


def test_sets_that_are_too_many_are_bounded_from_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 16 unlike sites: the bound is above what any set found by exchanging sites pays, and hardly above."""
    sites = [(Spend(1.0 + k / 40, 0.02 + k / 1000, 20 + 3 * (k % 7)),) for k in range(16)]
    bound = worst_epsilon([run_cost(sites, 8)], DELTA)
    by_cost = sorted(sites, key=lambda one: epsilon(one, DELTA, "rdp"))
    dearest = epsilon(chain.from_iterable(by_cost[8:]), DELTA)
    assert dearest <= bound <= 1.15 * dearest
    few = [run_cost(sites[:6], 2)]
    exact = worst_epsilon(few, DELTA)
    monkeypatch.setattr(worst_case, "MOST_PRICED", 0)
    assert exact <= worst_epsilon(few, DELTA) <= 1.2 * exact


def test_a_release_without_noise_has_no_finite_price() -> None:
    assert worst_epsilon([run_cost([[Spend(0.0)]])], DELTA) == math.inf
    assert worst_epsilon([run_cost([[Spend(math.inf)], []])], DELTA) == 0


# Several runs


def ledger_of(path: Path, plans: Sequence[PrivacyPlan]) -> SharedLedger:
    """Charge all rounds of these runs to a ledger."""
    for number, plan in enumerate(plans):
        ledger = SharedLedger(path, f"run-{number}", plan.config.unit)
        for round, cohort in enumerate(plan.rounds, 1):
            spends = {site: [list(vars(s).values()) for s in plan.round_spends(site)] for site in cohort}
            metrics = [list(vars(s).values()) for s in plan.validation_spends(1)]
            ledger.enter_charge(
                round, plan, {"of": f"{number}-{round}", "sites": spends, "metrics": metrics}, bool_true
            )
    return SharedLedger(path, "reader", plans[0].config.unit)


def bool_true(_: object) -> bool:
    return True


def candidates(plan: PrivacyPlan, group: int = 1) -> list[Composition]:
    """The releases of a training image at each site, and of a validation image, in one run."""
    found = [*plan.run_spends().values(), plan.validation_spends(len(plan.rounds))]
    return [tuple(replace(spend, group=group * spend.group) for spend in one) for one in found]


def random_plan(draw: random.Random, rounds: int) -> PrivacyPlan:
    """Two sites whose releases are unlike: few steps on all images, or many sampled ones; and noised metrics."""
    jobs = {}
    for site in ("a", "b"):
        rate = draw.choice([0.01, 0.05, 0.2, 1.0])
        jobs[site] = (Steps(rate, draw.randint(1, 6) if rate == 1 else draw.randint(5, 60)),)
    return PrivacyPlan(
        PrivacyConfig(noise=draw.choice([0.7, 1.0, 2.0, 4.0]), delta=DELTA),
        noise=draw.choice([0.7, 1.0, 2.0, 4.0]),
        rounds=(("a", "b"),) * rounds,
        site_sizes={site: SiteSize(1000) for site in jobs},
        jobs=jobs,
        metrics_noise=draw.choice([math.inf, 3.0, 6.0]),
    )


def check_lifetimes(folder: Path, sequences: int, seed: int, most: int | None) -> None:
    draw = random.Random(seed)
    for number in range(sequences):
        kinds = [random_plan(draw, draw.randint(1, 3)) for _ in range(draw.randint(1, 3))]
        plans = [draw.choice(kinds) for _ in range(draw.randint(1, 4))]
        printed = worst_epsilon(ledger_of(folder / f"{number}.jsonl", plans).earlier_runs(), DELTA)
        exact = enumerate_worst([candidates(plan) for plan in plans], most=most)
        assert exact * (1 - 1e-9) <= printed <= 1.02 * exact


def test_the_price_of_a_sequence_of_runs_is_that_of_the_worst_consistent_choice(tmp_path: Path) -> None:
    check_lifetimes(tmp_path, 12, seed=1, most=2)


@pytest.mark.heavy
def test_200_sequences_of_runs(tmp_path: Path) -> None:
    check_lifetimes(tmp_path, 200, seed=2, most=None)


def test_many_unlike_runs_are_bounded_within_two_percent() -> None:
    """Nine runs of two unlike candidates have 512 combinations, too many to price one by one."""
    runs = [[(Spend(1.0 + k / 50, 1.0, 1),), (Spend(0.8 + k / 70, 0.02, 60 + k),)] for k in range(9)]
    printed = worst_epsilon([run_cost(sites) for sites in runs], DELTA)
    exact = enumerate_worst(runs, most=4)
    assert exact * (1 - 1e-6) <= printed <= 1.02 * exact


def test_a_candidate_that_is_cheaper_alone_may_be_the_dearer_one_together() -> None:
    """Ten runs of many sampled steps cost more than their dearest candidates would let one think."""
    sampled, whole = (Spend(0.5, 0.01, 1000),), (Spend(0.9, 1.0, 1),)
    one = max((sampled, whole), key=lambda each: epsilon(each, DELTA))
    alone = epsilon([spend.repeated(10) for spend in one], DELTA)
    printed = worst_epsilon([run_cost([sampled, whole])] * 10, DELTA)
    mixed = max(epsilon([sampled[0].repeated(k), whole[0].repeated(10 - k)], DELTA) for k in range(1, 10))
    both = max(epsilon([each[0].repeated(10)], DELTA) for each in (sampled, whole))
    assert printed == pytest.approx(max(mixed, both))
    assert printed >= alone


def test_a_patient_pays_for_its_images_and_a_replaced_record_for_both(tmp_path: Path) -> None:
    image = random_plan(random.Random(5), 2)
    image = replace(image, site_sizes={"a": SiteSize(1000, 3, 2), "b": SiteSize(1000, 2, 2)}, metrics_noise=math.inf)
    patient = replace(image, config=replace(image.config, unit="patient"))
    both = ledger_of(tmp_path / "both.jsonl", [image, patient])
    as_patient = SharedLedger(both.path, "reader", "patient").earlier_runs()
    assert worst_epsilon(as_patient, DELTA) == pytest.approx(
        enumerate_worst([sets_of_sites(candidates(image, group=3)[:2], 2), candidates(patient)[:2]]), rel=0.02
    )
    as_image = SharedLedger(both.path, "reader", "image").earlier_runs()
    assert worst_epsilon(as_image, DELTA) <= worst_epsilon(as_patient, DELTA)
    with pytest.raises(RecipeError, match="no bound on a site"):
        SharedLedger(both.path, "reader", "site").earlier_runs()
    swapped = replace(image, config=replace(image.config, neighbours="replace"))
    mixed = ledger_of(tmp_path / "mixed.jsonl", [image, swapped]).earlier_runs()
    assert worst_epsilon(mixed, DELTA) == pytest.approx(
        enumerate_worst([candidates(image)[:2]] * 2, neighbours="replace"), rel=0.02
    )


def refusal_of(account: PrivacyAccount) -> Refused | None:
    try:
        account.check_whole_run()
    except Refused as refusal:
        return refusal
    return None


def test_a_site_admits_no_run_beyond_its_budget(tmp_path: Path) -> None:
    """Runs of ε = 3 with noised metrics against a budget of 10: what a validation image has paid counts, too."""
    budget, paid = Budget(epsilon=10, delta=DELTA), 0
    draft = PrivacyPlan(
        PrivacyConfig(epsilon=3, delta=DELTA, metrics="count"),
        noise=1.0,
        rounds=(("a",),) * 4,
        site_sizes={"a": SiteSize(2000, 1, 1)},
        jobs={"a": (Steps(0.02, 125),)},
    )
    plan = make_plan(draft)
    refused = None
    while refused is None and paid < 12:
        account = PrivacyAccount(tmp_path, "a", f"run-{paid}", plan, budget)
        refused = refusal_of(account)
        for round in range(1, 5 if refused is None else 1):
            account.charge_round(round, f"{paid}-{round}", account.round_releases(1))
        paid += refused is None
    assert "privacy budget" in str(refused)
    train, validation = plan.run_spends()["a"], plan.validation_spends(4)
    exact = max(
        epsilon([*(s.repeated(k) for s in train), *(s.repeated(paid - k) for s in validation)], DELTA)
        for k in range(paid + 1)
    )
    said = account.epsilon_spent()
    assert 6 <= paid < 9
    assert exact * (1 - 1e-9) <= said <= 1.02 * exact <= 10.2
    assert said <= 10
    by_unit = price_site_ledger(tmp_path, DELTA)
    assert by_unit["image"] == pytest.approx(said)
    assert by_unit["patient"] == pytest.approx(said), "here every patient has one image"
    assert isinstance(by_unit["site"], str)


def test_a_unit_within_another_may_have_been_at_all_sites_of_a_run(tmp_path: Path) -> None:
    """A run for whole sites does not say how many hold an image; one sum moves by all of them."""
    whole = replace(random_plan(random.Random(7), 3), metrics_noise=math.inf)
    whole = replace(whole, config=replace(whole.config, unit="site"), noise=5.0)
    at_sites = SharedLedger(ledger_of(tmp_path / "sites.jsonl", [whole]).path, "reader", "image").earlier_runs()
    assert worst_epsilon(at_sites, DELTA) == pytest.approx(epsilon([Spend(5.0, times=6)], DELTA))
    server = replace(whole, config=replace(whole.config, noise_at="server"))
    for name, plan in (("server", server), ("masked", replace(whole, masked=True))):
        one_sum = SharedLedger(ledger_of(tmp_path / name, [plan]).path, "reader", "image").earlier_runs()
        assert worst_epsilon(one_sum, DELTA) == pytest.approx(epsilon([Spend(5.0, times=3, group=2)], DELTA))
        by_site = SharedLedger(tmp_path / name, "reader", "site").earlier_runs()
        assert worst_epsilon(by_site, DELTA) == pytest.approx(epsilon([Spend(5.0, times=3)], DELTA))


def test_a_patient_pays_for_all_test_images_that_were_scored(tmp_path: Path) -> None:
    """Runs for images, and a site that then asks what they cost its patients, one of whom has thirty test images."""
    config = PrivacyConfig(epsilon=3, delta=DELTA, metrics="count")
    size = SiteSize(400, largest=3, largest_validation=3, largest_test=30)
    plan = make_plan(PrivacyPlan(config, 1.0, (("a",),), {"a": size}, {"a": (Steps(0.05, 20),)}))
    account = PrivacyAccount(tmp_path, "a", "run", plan, None)
    account.charge_round(1, "1", account.round_releases(1))
    account.charge_round(2, "last", account.final_releases(1, 30))
    spent = price_site_ledger(tmp_path, DELTA)
    assert spent["patient"] == pytest.approx(epsilon([Spend(plan.metrics_noise, group=30)], DELTA))
    assert spent["image"] == pytest.approx(3, rel=0.01)
    nameless = replace(plan, site_sizes={"a": replace(size, unnamed_test=1)})
    other = PrivacyAccount(tmp_path, "a", "other", nameless, None)
    other.charge_round(2, "last", other.final_releases(1, 30))
    assert "whose images are not known" in str(price_site_ledger(tmp_path, DELTA)["patient"])


def test_an_image_may_train_at_one_site_and_validate_at_another() -> None:
    """With records at two sites, the worst mix of training and noised metrics stays within ε."""
    config = PrivacyConfig(epsilon=8, delta=DELTA, metrics="count", max_sites_per_record=2)
    jobs = {site: (Steps(0.05, 2),) for site in ("a", "b")}
    sizes = {site: SiteSize(1000) for site in jobs}
    plan = make_plan(PrivacyPlan(config, 1.0, (("a", "b"),), sizes, jobs, max_sites_per_record=2))
    mixed = [*plan.run_spends()["a"], *plan.validation_spends(1)]
    both = [*plan.validation_spends(1), *plan.validation_spends(1)]
    assert max(epsilon(mixed, DELTA), epsilon(both, DELTA)) <= plan.epsilon <= 8


def test_metrics_are_charged_in_every_round_whether_asked_for_or_not(tmp_path: Path) -> None:
    """A server may ask for a round without metrics, and then for the same round with them."""
    plan = make_plan(
        PrivacyPlan(
            PrivacyConfig(noise=30.0, delta=DELTA, metrics="count"),
            noise=1.0,
            rounds=(("a",),),
            site_sizes={"a": SiteSize(2000)},
            jobs={"a": (Steps(0.02, 25),)},
        )
    )
    plan = replace(plan, metrics_noise=0.45)
    account = PrivacyAccount(tmp_path, "a", "run", plan, Budget(epsilon=10, delta=DELTA))
    with pytest.raises(Refused, match="budget"):
        account.charge_round(1, "1", account.round_releases(0))


def test_several_steps_on_one_random_batch_are_not_priced_as_if_sampled_apart() -> None:
    steps = Step(task_loss), Step(task_loss)
    job = Fit({}, steps, Training(batch=10, private=Private(1.0, 1.0)))
    with pytest.raises(RecipeError, match="not sampled independently"):
        steps_of(job, 100, PrivacyConfig(noise=1.0))
    assert steps_of(job, 100, PrivacyConfig(noise=1.0, amplification=False)).rate == 1


def test_a_site_without_a_budget_goes_on_when_the_unit_changes_and_one_with_a_budget_does_not(tmp_path: Path) -> None:
    """What runs of unit image released of a whole site is unknown, and counts as without end."""
    image = replace(random_plan(random.Random(7), 1), metrics_noise=math.inf)
    whole = replace(image, config=replace(image.config, unit="site"), rounds=(("a",),), site_sizes={"a": SiteSize(9)})
    before = PrivacyAccount(tmp_path, "a", "before", replace(image, rounds=(("a",),)), None)
    before.charge_round(1, "1", before.round_releases())
    after = PrivacyAccount(tmp_path, "a", "after", whole, None)
    after.check_whole_run()
    after.charge_round(1, "1", after.round_releases())
    assert after.epsilon_spent() == math.inf
    assert refusal_of(PrivacyAccount(tmp_path, "a", "third", whole, Budget(unit="site", epsilon=1e6))) is not None
