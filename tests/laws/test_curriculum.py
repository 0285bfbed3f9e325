"""The order of cases: exact probabilities, the same on every engine, and nothing else of an algorithm changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, Literal

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.personalisation.pfedcdp import PFedCDP
from polyclinic.algorithms.representation.fedmp import FedMP
from polyclinic.algorithms.wrappers.base import Wrapper
from polyclinic.algorithms.wrappers.curriculum import (
    CASES,
    SCORES,
    Curriculum,
    case_preference,
    fractional_ranks,
    wrap_with_curriculum,
)
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.core.jobs import Fit, Score, Site, Update, Work
from polyclinic.core.options import CurriculumOptions, Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, SiteId
from polyclinic.data.examples import Images
from polyclinic.federation.site_runner import drive_jobs
from polyclinic.models.classifier import Classifier
from polyclinic.training.data_order import draw_epoch_order, schedule_steps
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork
from tests.laws.bench import Played, as_json, clinics, play, small
from tests.laws.test_stacked import assert_close, on_the_stack, together

DRAWS = 10_000
SGD = Training(Optimiser(lr=0.3), batch=4)
ORDERS: tuple[Literal["forgotten", "hard", "easy"], ...] = ("forgotten", "hard", "easy")
SIZES = (12, 7, 16, 9)
TRAINED = sorted(set(ALGORITHMS) - {"fedsgd", "centralised"})


# The draw


def epochs(weights: Tensor, count: int = DRAWS, labels: Tensor | None = None, **training: Any) -> list[tuple[int, ...]]:
    labels = torch.zeros(len(weights), dtype=torch.int64) if labels is None else labels
    drawn = (draw_epoch_order(labels, Training(**training), Stream(5, ("epoch", k)), weights) for k in range(count))
    return [tuple(epoch.tolist()) for epoch in drawn]


def chance(places: tuple[int, ...], weights: Tensor) -> float:
    """Of this very order: each in proportion to its weight among those that are left."""
    left, found = float(weights.sum()), 1.0
    for place in places:
        found *= float(weights[place]) / left
        left -= float(weights[place])
    return found


def p_value(seen: Mapping[Any, int], wanted: Mapping[Any, float]) -> float:
    assert seen.keys() <= wanted.keys()
    return float(chisquare([seen.get(k, 0) for k in wanted], [DRAWS * p for p in wanted.values()]).pvalue)


def test_an_epoch_is_drawn_with_the_probabilities_of_equation_4() -> None:
    """Two of four cases were forgotten: all 24 orders, the first place, and who of two comes first."""
    weights = torch.tensor([1.0, 2.0, 1.0, 2.0], dtype=torch.float64)
    drawn = epochs(weights)
    whole = {places: chance(places, weights) for places in permutations(range(4))}
    assert sum(whole.values()) == pytest.approx(1)
    assert p_value(Counter(drawn), whole) > 1e-3
    assert p_value(Counter(drawn), dict.fromkeys(whole, 1 / 24)) < 1e-9, "the test can tell other weights apart"
    first = {case: float(weights[case] / weights.sum()) for case in range(4)}
    assert p_value(Counter(places[0] for places in drawn), first) > 1e-3
    for one, other in permutations(range(4), 2):
        earlier = Counter(places.index(one) < places.index(other) for places in drawn)
        share = float(weights[one] / (weights[one] + weights[other]))
        assert p_value(earlier, {True: share, False: 1 - share}) > 1e-3


def test_a_forgotten_case_comes_earlier_and_every_case_once() -> None:
    weights = torch.ones(9, dtype=torch.float64)
    weights[4] = 2
    drawn = epochs(weights, 3000)
    assert {tuple(sorted(places)) for places in drawn} == {tuple(range(9))}
    place = torch.tensor([[places.index(case) for case in range(9)] for places in drawn]).double().mean(0)
    assert place[4] == pytest.approx(8 / 3, abs=0.15)  # each of eight others precedes it with probability 1/3
    assert place[torch.arange(9) != 4].mean() == pytest.approx(7 / 2 + 2 / 3, abs=0.05)


def test_copies_of_a_case_are_drawn_each_by_itself_with_its_weight() -> None:
    labels = torch.tensor([0, 0, 0, 1])
    weights = torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    drawn = epochs(weights, labels=labels, oversample=True)
    assert {tuple(sorted(places)) for places in drawn} == {(0, 1, 2, 3, 3, 3)}
    first = Counter(places[0] for places in drawn)
    assert p_value(first, {0: 1 / 9, 1: 1 / 9, 2: 1 / 9, 3: 6 / 9}) > 1e-3


# The scores


def test_preferences_by_hand() -> None:
    before = torch.tensor([True, True, False, False])
    after = {"right": torch.tensor([True, False, True, False]), "loss": torch.tensor([0.1, 3.0, 1.0, 1.0])}
    assert case_preference("forgotten", after, before).tolist() == [0, 1, 0, 0]
    assert case_preference("hard", after, None).tolist() == [0, 1, 0.5, 0.5]
    assert case_preference("easy", after, None).tolist() == [1, 0, 0.5, 0.5]
    assert fractional_ranks(torch.tensor([2.0, torch.nan, torch.inf, 1.0])).tolist() == pytest.approx(
        [1 / 3, 5 / 6, 5 / 6, 0]
    )
    assert fractional_ranks(torch.tensor([7.0])).tolist() == [0]


def test_with_much_emphasis_an_epoch_is_sorted() -> None:
    weights = 1e6 ** fractional_ranks(torch.tensor([0.5, 4.0, 1.0]))
    sorted_ones = Counter(epochs(weights, 1000))[1, 2, 0]
    assert sorted_ones / 1000 == pytest.approx(1e6 / (1e6 + 1e3 + 1) * (1e3 / (1e3 + 1)), abs=0.02)


class Bench:
    """A site with four cases x, and models that say class 1 where a·x + b > 0."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.network = LiveNetwork(Classifier(nn.Flatten(), nn.Linear(1, 2)))
        images = torch.tensor([1.0, 2.0, -1.0, -2.0]).reshape(4, 1, 1, 1)
        self.data = Images(images, torch.tensor([1, 1, 0, 1]))
        self.memory: Bundle | None = None
        self.jobs: list[Fit | Score] = []

    def round(self, number: int, a: float, b: float, rounds: int = 9) -> Update:
        received = {"model": {"head.weight": torch.tensor([[0.0], [a]]), "head.bias": torch.tensor([0.0, b])}}
        site = Site("only", 4, number, rounds, self.algorithm.training.optimiser.lr)
        self.jobs = []
        work = self.algorithm.local({**received, "buffers": {}}, self.memory, site, Stream(0))
        update, self.memory = drive_jobs(work, lambda job, number: self.run(job, site))
        return update

    def run(self, job: Fit | Score, site: Site) -> Any:
        self.jobs.append(job)
        if isinstance(job, Score):
            return score(job, self.network, self.data)
        return fit(job, self.network, self.data, site, Stream(0))

    def weights(self) -> Tensor | None:
        (job,) = (job for job in self.jobs if isinstance(job, Fit))
        return job.sampling_weights[0]

    def weighs(self) -> list[float]:
        found = self.weights()
        assert found is not None
        return [float(weight) for weight in found]


def bench(by: Any, telling: bool = False, **options: Any) -> Bench:
    curriculum = CurriculumOptions(by, **options)
    still = Training(Optimiser(lr=1e-12), batch=2, curriculum=curriculum)  # training leaves a model as it was
    return Bench(wrap_with_curriculum(FedAvg(still), telling))


def test_what_a_deployment_made_wrong_weighs_twice() -> None:
    site = bench("forgotten", telling=True)
    assert not site.round(1, a=1.0, b=0.0).scalars
    assert site.weights() is None, "nothing was deployed yet"
    told = site.round(2, a=-1.0, b=1.5)  # right before: x = 1, 2, −1; right now: 1 (0.5 > 0), −2 (3.5 > 0)
    assert site.weighs() == [1, 2, 2, 1]
    assert told.scalars == {"forgotten": 0.5, "gained": 0.25, "cases": 4.0}
    assert site.memory is not None
    assert site.memory[SCORES]["before"].tolist() == [True, True, True, False]
    assert site.memory[SCORES]["after"].tolist() == [True, False, False, True]
    assert site.round(3, a=-1.0, b=1.5).scalars == {"forgotten": 0.0, "gained": 0.0, "cases": 4.0}
    assert site.weighs() == [1, 1, 1, 1]


@pytest.mark.parametrize("order", ["hard", "easy"])
def test_hard_and_easy_go_by_the_loss_of_the_received_model(order: str) -> None:
    site = bench(order, strength=8.0)
    site.round(1, 1.0, 0.0)
    assert site.weights() is None
    site.round(2, -1.0, 1.2)  # x·a + b = 0.2, −0.8 (wrong), 2.2 (wrong), 3.2: losses 0.60, 1.17, 2.31, 0.04
    assert site.weighs() == pytest.approx([2, 4, 8, 1] if order == "hard" else [4, 2, 1, 8])


def test_looking_costs_one_pass_before_and_one_after_training_and_none_in_vain() -> None:
    def looks(order: str, telling: bool, number: int) -> list[type]:
        site = bench(order, telling)
        for turn in range(1, number + 1):
            site.round(turn, 1.0, 0.0, rounds=3)
        return [type(job) for job in site.jobs]

    assert looks("forgotten", False, 1) == [Fit, Score]
    assert looks("forgotten", False, 2) == [Score, Fit, Score]
    assert looks("forgotten", False, 3) == [Score, Fit]  # after the last round nothing is deployed to train on
    assert looks("hard", False, 2) == [Score, Fit]
    assert looks("hard", True, 2) == looks("random", True, 2) == [Score, Fit, Score]


def test_the_first_rounds_are_in_random_order_if_wished() -> None:
    site = bench("forgotten", warmup_rounds=2)
    weighed = []
    for number, a in enumerate((1.0, -1.0, 1.0, -1.0), 1):
        site.round(number, a, 0.0)
        weighed.append(site.weights() is not None)
    assert weighed == [False, False, True, True]


# Nothing else changes


def algorithm(name: str, training: Training) -> Algorithm:
    if name == "pfedcdp":
        return PFedCDP(training, keep=0.3)
    return FedMP(training, fewest=1) if name == "fedmp" else ALGORITHMS[name](training)


def test_random_order_is_the_algorithm_itself() -> None:
    plain = FedAvg(SGD)
    assert wrap_with_curriculum(plain, reports_forgetting=False) is plain


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_measuring_forgetting_changes_no_bit(name: str) -> None:
    plain = algorithm(name, SGD)
    sites = clinics(*SIZES)
    alone, watched = (
        play(a, sites, small(dropout=0.2), 3) for a in (plain, wrap_with_curriculum(plain, reports_forgetting=True))
    )
    assert watched.sha256 == alone.sha256
    rows = [row for row in as_json(watched.journal.rows) if row["event"] == "train"]
    shares = {"forgotten", "gained", "cases"}
    assert all((shares <= row.get("scalars", {}).keys()) == (row["round"] > 1) for row in rows)
    if name in ("local", "centralised", "single", "cross-site"):
        assert {row["scalars"]["forgotten"] for row in rows if row["round"] > 1} == {0.0}, "nothing was deployed"
    elif name in ("fedavg", "scaffold", "fedmp"):
        assert max(row["scalars"]["forgotten"] for row in rows if row["round"] > 1) > 0


def test_an_order_changes_bits_and_only_from_the_second_round_on() -> None:
    sites, network = clinics(*SIZES), small()
    for kind in ORDERS:
        curriculum = wrap_with_curriculum(
            FedAvg(replace(SGD, curriculum=CurriculumOptions(kind))), reports_forgetting=False
        )
        for rounds, same in ((1, True), (2, False)):
            one, other = (play(a, sites, network, rounds).sha256 for a in (FedAvg(SGD), curriculum))
            assert (one == other) == same


# Engines


@pytest.mark.parametrize(("name", "kind"), [*((name, "forgotten") for name in TRAINED), ("fedavg", "hard")])
def test_every_algorithm_gives_the_same_on_both_engines(name: str, kind: Any) -> None:
    training = Training(Optimiser(lr=0.1), batch=4, curriculum=CurriculumOptions(kind))
    curriculum = wrap_with_curriculum(algorithm(name, training), reports_forgetting=True)
    sites = clinics(*SIZES, dtype=torch.float64)
    alone = play(curriculum, sites, small(dtype=torch.float64), 3)
    stacked = play(curriculum, sites, small(dtype=torch.float64), 3, on_the_stack())
    assert_close(stacked.outcome.state, alone.outcome.state, 1e-8 if name == "fraug" else 1e-10)
    for site in sites:
        one, other = (played.memory.load(site, 3) for played in (alone, stacked))  # after the last there is no next
        assert one is not None
        assert other is not None
        assert torch.equal(one[CASES]["right"], other[CASES]["right"])
        assert SCORES not in one, "filed, not remembered"
    assert together(stacked) == {len(SIZES)}


# Averaging within an epoch


@dataclass(frozen=True)
class Noted(Wrapper):
    """Writes down what is trained on, by site."""

    seen: dict[SiteId, list[tuple[int, Fit]]] = field(default_factory=dict)

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        work, answer = self.inner.local(received, memory, site, rng), None
        while True:
            try:
                job = work.send(answer)
            except StopIteration as end:
                update, kept = end.value
                return update, kept
            if isinstance(job, Fit):
                self.seen.setdefault(site.name, []).append((site.round, job))
            answer = yield job


def walked(played: Played, noted: Noted, name: SiteId, labels: Tensor) -> dict[int, list[int]]:
    """The site's cases by epoch, in the order it saw them."""
    stream, found = Stream(played.rounds.rules.seed, ("site", name)), dict[int, list[int]]()
    training = noted.training
    per_epoch = len(
        schedule_steps(Fit({}, task_loss, replace(training, epochs=1, steps=None)), labels, stream, None, 1)
    )
    for round, job in noted.seen[name]:
        for number, (index,) in schedule_steps(job, labels, stream, None, round):
            found.setdefault(number // per_epoch, []).extend(index.tolist())
    return found


@pytest.mark.parametrize("oversample", [False, True])
@pytest.mark.parametrize("kind", ORDERS)
def test_an_epoch_of_several_rounds_keeps_the_order_it_began_with(kind: Any, oversample: bool) -> None:
    pace = Training(
        Optimiser(lr=0.5), batch=4, epochs=None, steps=2, curriculum=CurriculumOptions(kind), oversample=oversample
    )
    noted = Noted(pace, inner=wrap_with_curriculum(FedAvg(pace), reports_forgetting=False))
    sites = clinics(27, 18)
    played = play(noted, sites, small(), 16)
    changed = 0
    for name, held in sites.items():
        labels = held.train.labels
        counts = labels.bincount()
        copies = int(counts.max()) * len(counts) if oversample else len(labels)
        whole = list(walked(played, noted, name, labels).values())[:-1]
        assert len(whole) >= 2
        for epoch in whole:
            assert len(epoch) == copies
            assert set(epoch) == set(range(len(labels)))
            assert oversample or len(set(epoch)) == len(epoch)
        orders = [job.sampling_weights for _, job in noted.seen[name]]
        changed += sum(a is not None and b is not None and not torch.equal(a, b) for a, b in orders)
    assert changed, "an epoch went on in its order while the scores had changed"
    stacked = play(replace(noted, seen={}), sites, small(), 16, on_the_stack())
    assert_close(stacked.outcome.state, played.outcome.state, 1e-3)


def test_sites_that_sit_rounds_out_go_on() -> None:
    pace = Training(Optimiser(lr=0.5), batch=4, epochs=None, steps=2, curriculum=CurriculumOptions("forgotten"))
    curriculum, sites = wrap_with_curriculum(FedAvg(pace), reports_forgetting=True), clinics(27, 18, 20)
    first, again = (play(curriculum, sites, small(), 8, cohort=2) for _ in range(2))
    assert first.sha256 == again.sha256
    assert len({tuple(cohort) for cohort in first.cohorts()}) > 1


# Refusals


def test_a_private_step_takes_no_order() -> None:
    site = bench("forgotten")
    job = Fit(
        site.network.copy_weights(),
        task_loss,
        Training(private=Private(1.0, 1.0)),
        sampling_weights=(torch.ones(4, dtype=torch.float64), None),
    )
    with pytest.raises(RecipeError, match=r"training\.curriculum uses images outside the steps"):
        fit(job, site.network, site.data, Site("only", 4, 1, 1, 0.1), Stream(0), Stream(1))


@pytest.mark.parametrize(
    "told",
    [
        {"forgotten": -0.1, "gained": 0.0, "cases": 4.0},
        {"forgotten": 0.6, "gained": 0.6, "cases": 4.0},
        {"forgotten": 0.5, "gained": 0.0, "cases": 5.0},
        {"forgotten": 1e300, "gained": 0.0, "cases": 1.0},
    ],
)
def test_shares_that_cannot_be_are_refused(told: dict[str, float]) -> None:
    curriculum = Curriculum(SGD, inner=FedAvg(SGD), reports_forgetting=True)
    curriculum.check_update(Update({}, 4, scalars={"forgotten": 0.5, "gained": 0.5, "cases": 4.0}))
    curriculum.check_update(Update({}, 4))
    with pytest.raises(Refused, match="cases forgotten and gained"):
        curriculum.check_update(Update({}, 4, scalars=told))
