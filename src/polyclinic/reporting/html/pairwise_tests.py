"""One method against another, tested: over seeds where there are enough, else over the test patients of one seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from polyclinic.core.contract import SiteId, Stream
from polyclinic.evaluation.claims import LEVEL, pair_by_seed
from polyclinic.evaluation.comparison import metric_value
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.statistics import compare_paired, correct_holm
from polyclinic.reporting.html.report_data import Method, Run
from polyclinic.reporting.markdown.comparison import FEWEST_SEEDS

UNTESTED = "there are neither three seeds in common nor predictions of the same images"
FLIPS = 9999
RESAMPLES = 2000
EXACT = 12
"""Up to so many patients that differ, every pattern of signs is tried."""


@dataclass(frozen=True)
class Difference:
    """Accuracy of a − b. `p` is NaN where nothing could be tested; `corrected` by Holm for all that stand together."""

    a: str
    b: str
    site: SiteId | None
    value: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    corrected: float = math.nan
    wilcoxon: float = math.nan
    effect: float = math.nan
    """Mean difference in units of the standard deviation of differences (Cohen's d_z), over seeds."""
    over: str = ""
    """What the test is over, as "5 seeds" or "97 patients"."""

    @property
    def verdict(self) -> int:
        """1: a is better; −1: b is; 0: not decided."""
        return int(math.copysign(1, self.value)) if self.corrected < LEVEL and self.value else 0


def all_pairs(methods: Sequence[Method]) -> list[Difference]:
    """Every method against every other, corrected together, so that the best may be picked afterwards."""
    return corrected([difference(a, b) for a, b in combinations(methods, 2)])


def at_sites(methods: Sequence[Method], alone: Method, sites: Sequence[SiteId]) -> list[Difference]:
    """Every method against training alone, at every site."""
    return corrected([difference(method, alone, site) for method, site in product(methods, sites)])


def corrected(found: Sequence[Difference]) -> list[Difference]:
    chances = iter(correct_holm([one.p for one in found if not math.isnan(one.p)]))
    return [one if math.isnan(one.p) else replace(one, corrected=next(chances)) for one in found]


def difference(a: Method, b: Method, site: SiteId | None = None) -> Difference:
    ours, theirs = pair_by_seed(a.summaries, b.summaries, "accuracy", site)
    known = [pair for pair in zip(ours, theirs, strict=True) if not any(map(math.isnan, pair))]
    if len(known) >= FEWEST_SEEDS:
        return _over_seeds(Difference(a.name, b.name, site, 0.0), np.asarray(known))
    runs = _same_seed(a, b)
    plain = Difference(a.name, b.name, site, _mean(a, site) - _mean(b, site))
    return plain if runs is None else _over_patients(plain, *runs)


def _mean(method: Method, site: SiteId | None) -> float:
    return float(np.mean([metric_value(summary, "accuracy", site) for summary in method.summaries]))


def _same_seed(a: Method, b: Method) -> tuple[Run, Run] | None:
    """The first seed that both have run with."""
    theirs = {run.recipe.seed: run for run in b.runs}
    return next(((run, theirs[run.recipe.seed]) for run in a.runs if run.recipe.seed in theirs), None)


def _over_seeds(plain: Difference, pairs: NDArray[np.float64]) -> Difference:
    found = compare_paired(pairs[:, 0].tolist(), pairs[:, 1].tolist())
    return replace(
        plain,
        value=found.difference,
        low=found.low,
        high=found.high,
        p=1.0 if math.isnan(found.p) else found.p,
        wilcoxon=found.wilcoxon_p,
        effect=found.cohens_d,
        over=f"{found.n} seeds",
    )


def _over_patients(plain: Difference, a: Run, b: Run) -> Difference:
    ours, theirs = a.judged(plain.site), b.judged(plain.site)
    if ours is None or theirs is None or not _same_images(ours, theirs):
        return plain
    gained, images = by_patient(ours, theirs)
    stream = Stream(0, ("report", plain.a, plain.b, plain.site or ""))
    low, high = interval(gained, images, stream)
    p, over = sign_flips(gained, stream), f"{len(images)} patients"
    return replace(plain, value=float(gained.sum() / images.sum()), low=low, high=high, p=p, over=over)


def _same_images(a: Predictions, b: Predictions) -> bool:
    return a.patients == b.patients and np.array_equal(a.labels, b.labels)


def by_patient(a: Predictions, b: Predictions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each patient: images that a has right beyond b, and images."""
    right = [(found.probabilities.argmax(axis=1) == found.labels).astype(np.int64) for found in (a, b)]
    names = a.patients if a.patients is not None else tuple(map(str, range(len(a))))
    _, whose = np.unique(np.asarray(names), return_inverse=True)
    gained = np.zeros(int(whose.max()) + 1, dtype=np.int64)
    np.add.at(gained, whose, right[0] - right[1])
    return gained, np.bincount(whose)


def sign_flips(gained: NDArray[np.int64], stream: Stream) -> float:
    """How often chance alone gives as large a sum, were either sign of a patient's difference as likely."""
    moved = gained[gained != 0]
    if len(moved) == 0:
        return 1.0
    if len(moved) <= EXACT:
        sums = np.asarray(list(product((-1, 1), repeat=len(moved)))) @ moved
        return float(np.mean(np.abs(sums) >= abs(moved.sum())))
    rng = np.random.default_rng(stream.integer())
    sums = (2 * rng.integers(0, 2, size=(FLIPS, len(moved)), dtype=np.int8) - 1) @ moved
    return float((1 + np.count_nonzero(np.abs(sums) >= abs(moved.sum()))) / (1 + FLIPS))


def interval(gained: NDArray[np.int64], images: NDArray[np.int64], stream: Stream) -> tuple[float, float]:
    """Percentile bootstrap over patients, with all their images."""
    if len(images) < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(stream.child("interval").integer())
    drawn = rng.multinomial(len(images), np.full(len(images), 1 / len(images)), size=RESAMPLES)
    low, high = np.quantile((drawn @ gained) / (drawn @ images), [0.025, 0.975])
    return float(low), float(high)


def anova(methods: Sequence[Method]) -> tuple[float, float] | None:
    """F and p of one-way ANOVA over methods; None with too few methods or seeds."""
    from scipy import stats

    values = [[metric_value(summary, "accuracy") for summary in method.summaries] for method in methods]
    if len(values) < 3 or min(map(len, values)) < FEWEST_SEEDS or all(np.ptp(found) == 0 for found in values):
        return None
    found = stats.f_oneway(*values)
    return float(found.statistic), float(found.pvalue)
