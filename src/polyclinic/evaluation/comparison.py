"""Methods side by side: the figures of each over seeds, and the paired tests between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from polyclinic.core import SiteId, Stream
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.rounds import convergence_round
from polyclinic.evaluation.rows import group_pairs
from polyclinic.evaluation.statistics import (
    LEVEL,
    PairedTest,
    compare_paired,
    correct_holm,
    paired_bootstrap_interval,
    sign_flip_p,
    summarise_sample,
)
from polyclinic.evaluation.summary import RunSummary, generalisation_gap, nan_if_none
from polyclinic.evaluation.task import Task, task_of

if TYPE_CHECKING:
    from polyclinic.evaluation.claims import Claim

Runs: TypeAlias = Sequence[RunSummary]
"""The summaries of one method, one for each seed."""
PredictionSource: TypeAlias = Callable[[str, int, SiteId | None], Predictions | None]
"""By method, seed and site (None: all sites): the predictions of the headline's model, where they were kept."""
SITE_CLASSIFIER_ACCURACY = "site_classifier_accuracy"
"""Measured only where a claim asks for it: every test image goes through the network once more."""
MIN_SEEDS = 3
"""With fewer seeds, a paired test has no power."""
UNTESTED = "there are neither three seeds in common nor predictions of the same images"


@dataclass(frozen=True)
class MetricEstimate:
    """A metric of one method: its mean over seeds, their spread, and a 95 % interval.

    With several seeds the interval is Student's, over seeds; with one it is the bootstrap's, over test patients.
    """

    mean: float
    low: float
    high: float
    std: float | None = None

    @staticmethod
    def estimate(runs: Runs, metric: str) -> MetricEstimate:
        values = [run.headline.scores.value(metric) for run in runs]
        if len(values) == 1:
            return MetricEstimate(values[0], *runs[0].headline.scores.interval(metric))
        spread = summarise_sample(values)
        return MetricEstimate(spread.mean, max(0.0, spread.low), min(1.0, spread.high), spread.std)


@dataclass(frozen=True)
class MethodSummary:
    """One method in the table of a comparison."""

    name: str
    seeds: int
    figures: Mapping[str, MetricEstimate]
    worst_site: str
    worst_score: float
    """At that site, by the task's ranking metric."""
    drift: float
    megabytes: float
    seconds: float
    pools_images: bool
    lost: int
    """Updates that were refused or never arrived, over all rounds and seeds."""
    judged_on: str
    judged_by: str


@dataclass(frozen=True, kw_only=True)
class PairwiseTest(PairedTest):
    """The difference a − b of a metric. `p` is NaN where nothing could be tested; `corrected_p` is corrected for all
    tests that are shown together."""

    a: str
    b: str
    site: SiteId | None
    corrected_p: float = math.nan
    over: str = ""
    """What the test is over: "5 seeds" or "97 patients"."""

    @property
    def verdict(self) -> int:
        """1: a is better; −1: b is better; 0: not decided."""
        return int(np.sign(self.difference)) if self.corrected_p < LEVEL else 0


@dataclass(frozen=True)
class Comparison:
    """Methods side by side. `results` holds, by method, the summary of every seed."""

    title: str
    lines: tuple[MethodSummary, ...]
    results: Mapping[str, Runs]
    folder: Path | None
    about: str = ""
    paper: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    """Runs that did not finish, and why."""
    claims: Sequence[Claim] = ()
    """The paper's claims about these methods."""
    predictions: PredictionSource = field(default=lambda *_: None, compare=False)
    _tests: dict[tuple[str, str, SiteId | None, str], PairwiseTest] = field(default_factory=dict, compare=False)

    @property
    def task(self) -> Task:
        return task_of(next(iter(self.results.values()))[0])

    @property
    def judged_on(self) -> str:
        """The images that the figures were measured on: the same for all methods, unless only some have held-out."""
        return ", or ".join(dict.fromkeys(line.judged_on for line in self.lines))

    @property
    def judged_by(self) -> str:
        """The models that the figures are of, with the methods' names where they differ."""
        methods = group_pairs((line.judged_by, line.name) for line in self.lines)
        if len(methods) == 1:
            return next(iter(methods))
        return "; ".join(f"{model} ({', '.join(names)})" for model, names in methods.items())

    @property
    def interval_description(self) -> str:
        counts = {line.seeds for line in self.lines}
        patients, seeds = "test patients (bootstrap)", "seeds (Student)"
        if counts == {1}:
            return patients
        return f"{counts.pop()} {seeds}" if len(counts) == 1 else f"{seeds}, or with one seed over {patients}"

    def compare_pair(self, a: str, b: str, site: SiteId | None = None, metric: str | None = None) -> PairwiseTest:
        """Test a − b over the seeds that both methods have, or, with fewer than three, over the test patients of one
        seed (main metric only). Each pair is tested once and kept."""
        key = a, b, site, metric or self.task.main_metric
        if key not in self._tests:
            self._tests[key] = self._test_pair(*key)
        return self._tests[key]

    def compare_pairs(
        self,
        pairs: Iterable[tuple[str, str, SiteId | None]] | None = None,
        metric: str | None = None,
        correct: Callable[[Sequence[float]], Sequence[float]] = correct_holm,
    ) -> list[PairwiseTest]:
        """Test several pairs and correct their p-values together; by default every method against every other."""
        if pairs is None:
            pairs = [(a, b, None) for a, b in combinations(self.results, 2)]
        tests = [self.compare_pair(*pair, metric=metric) for pair in pairs]
        corrected = iter(correct([test.p for test in tests if not math.isnan(test.p)]))
        return [test if math.isnan(test.p) else replace(test, corrected_p=next(corrected)) for test in tests]

    def _test_pair(self, a: str, b: str, site: SiteId | None, metric: str) -> PairwiseTest:
        pairs = pair_by_seed(self.results[a], self.results[b], metric, site)
        known = [pair for pair in zip(*pairs, strict=True) if not any(map(math.isnan, pair))]
        if len(known) >= MIN_SEEDS:
            found = compare_paired([one for one, _ in known], [other for _, other in known])
            known_p = {"p": 1.0 if math.isnan(found.p) else found.p}
            return PairwiseTest(**vars(found) | known_p, a=a, b=b, site=site, over=f"{found.n} seeds")
        ours, theirs = (np.mean([metric_value(run, metric, site) for run in self.results[name]]) for name in (a, b))
        plain = PairwiseTest(float(ours - theirs), a=a, b=b, site=site)
        return self._test_over_patients(plain) if metric == self.task.main_metric else plain

    def _test_over_patients(self, plain: PairwiseTest) -> PairwiseTest:
        """By the predictions of the first seed that both methods have."""
        others = {run.seed for run in self.results[plain.b]}
        seed = next((run.seed for run in self.results[plain.a] if run.seed in others), None)
        if seed is None:
            return plain
        ours, theirs = (self.predictions(name, seed, plain.site) for name in (plain.a, plain.b))
        if ours is None or theirs is None or not ours.has_same_images(theirs):
            return plain
        right, also_right = self.task.successes(ours), self.task.successes(theirs)
        if right is None or also_right is None:
            return plain
        patient_of, patients = ours.patient_numbers
        gained = np.zeros(patients, dtype=np.int64)
        np.add.at(gained, patient_of, right - also_right)
        images = np.bincount(patient_of)
        stream = Stream(0, ("report", plain.a, plain.b, plain.site or ""))
        low, high = paired_bootstrap_interval(gained, images, stream)
        p, over = sign_flip_p(gained, stream), f"{len(images)} patients"
        return replace(plain, difference=float(gained.sum() / images.sum()), low=low, high=high, p=p, over=over)

    def to_json(self) -> JsonValue:
        found: JsonValue = to_jsonable_python({"title": self.title, "methods": self.lines}, inf_nan_mode="null")
        return found


RUN_METRICS: Mapping[str, Callable[[RunSummary], float]] = {
    "converged": lambda run: nan_if_none(convergence_round(run.progress.get("", []))),
    "forgotten": lambda run: mean_of_known([share for _, share in run.forgetting.get("forgotten", [])]),
    "megabytes": lambda run: run.cost.megabytes,
    "seconds": lambda run: run.cost.seconds,
    SITE_CLASSIFIER_ACCURACY: lambda run: nan_if_none(run.site_classifier_accuracy),
}
"""Figures of a run as a whole, which no site has by itself."""


def metric_value(run: RunSummary, metric: str, site: SiteId | None = None) -> float:
    """One figure of one run, over all sites or at one; NaN where it has none."""
    if metric in RUN_METRICS:
        return RUN_METRICS[metric](run)
    if metric == "gap":
        models = run.sites.get(site, {}) if site else run.merged
        return generalisation_gap(models.get(run.headline.model, {}), task_of(run).main_metric)
    if metric == "drift":
        moved = {} if run.headline.model == "transfer" else run.drift  # then there is no mean to drift from
        return moved.get(site, math.nan) if site else mean_of_known(list(moved.values()))
    scores = run.headline_at(site) if site else run.headline.scores
    return scores.value(metric) if scores else math.nan


def pair_by_seed(a: Runs, b: Runs, metric: str, site: SiteId | None = None) -> tuple[list[float], list[float]]:
    """The figures of two methods on the seeds that both have finished, in the same order."""
    one, other = ({run.seed: metric_value(run, metric, site) for run in runs} for runs in (a, b))
    shared = sorted(one.keys() & other.keys())
    return [one[seed] for seed in shared], [other[seed] for seed in shared]


def summarise_methods(results: Mapping[str, Runs]) -> tuple[MethodSummary, ...]:
    """The line of each method in the table of a comparison."""
    return tuple(_summarise_method(name, runs) for name, runs in results.items())


def _summarise_method(name: str, runs: Runs) -> MethodSummary:
    task = task_of(runs[0])
    worst_site, worst = _worst_site(runs, task.ranking_metric)
    return MethodSummary(
        name=name,
        seeds=len(runs),
        figures={metric: MetricEstimate.estimate(runs, metric) for metric in task.shown_metrics},
        worst_site=worst_site,
        worst_score=worst,
        drift=mean_of_known([metric_value(run, "drift") for run in runs]),
        megabytes=mean_of_known([run.cost.megabytes for run in runs]),
        seconds=mean_of_known([run.cost.seconds for run in runs]),
        pools_images=runs[0].pooled,
        lost=sum(run.cost.lost for run in runs),
        judged_on=runs[0].headline.images,
        judged_by=runs[0].headline.model_description,
    )


def _worst_site(runs: Runs, metric: str) -> tuple[str, float]:
    """The site with the lowest mean of the metric, by the headline's model."""
    values = group_pairs((site, metric_value(run, metric, site)) for run in runs for site in run.sites)
    known = {site: mean for site, found in values.items() if not math.isnan(mean := mean_of_known(found))}
    return min(known.items(), key=lambda item: item[1]) if known else ("", math.nan)


def mean_of_known(values: Sequence[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan
