"""Statistics: intervals over patients and over seeds, tests between methods, corrections for several tests."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from polyclinic.core import DataError, RecipeError, Stream
from polyclinic.evaluation.metrics import Floats, Predictions, weighted_metrics

LEVEL = 0.05
"""A p-value below this counts as a finding."""
FLIPS, RESAMPLES = 9999, 2000
MAX_EXACT = 12
"""Up to so many patients that differ, every pattern of signs is tried."""
Z = NormalDist().inv_cdf(0.975)
BLOCK = 2**19
"""Multiplicities held at once: 32 MiB, however many images and resamples there are."""


@dataclass(frozen=True)
class SampleSummary:
    """One figure over several seeds; `low` to `high` is Student's 95 % interval for the mean."""

    mean: float
    std: float
    n: int
    low: float
    high: float


@dataclass(frozen=True)
class PairedTest:
    """Two methods on the same seeds: the mean of a − b, its 95 % interval, the paired t-test's p-value."""

    difference: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    n: int = 0
    wilcoxon_p: float = math.nan
    """p of Wilcoxon's signed-rank test, which assumes no distribution; with n pairs it is never below 2^(1 − n)."""
    cohens_d: float = math.nan
    """Cohen's d of pairs: the mean difference in units of the differences' standard deviation."""


def bootstrap_intervals(
    predictions: Predictions,
    metrics: Sequence[str],
    *,
    stream: Stream,
    resamples: int = 1000,
    level: float = 0.95,
    measure: Callable[[Predictions, Floats, Sequence[str]], Mapping[str, Floats]] = weighted_metrics,
) -> dict[str, tuple[float, float]]:
    """Percentile intervals, drawing patients with all their images, or images where patients are unknown.

    `measure`: the metrics of the task, for each row of weights (resamples × examples).
    Resamples in which a metric is undefined are left out. If fewer than half are defined, or if there are not
    two patients to draw from, the interval is (NaN, NaN).
    """
    if resamples < 1 or not 0 < level < 1:
        raise RecipeError(
            f"A bootstrap needs resamples ≥ 1 and a level between 0 and 1, not {resamples} and {level}: "
            "take 1000 and 0.95."
        )
    patient_of, patients = predictions.patient_numbers
    if patients < 2:
        return dict.fromkeys(metrics, (math.nan, math.nan))
    blocks = [
        measure(predictions, drawn, metrics) for drawn in _resample_counts(patient_of, patients, resamples, stream)
    ]
    return {name: _percentile_interval(np.concatenate([block[name] for block in blocks]), level) for name in metrics}


def summarise_sample(values: Sequence[float]) -> SampleSummary:
    """Mean, sample standard deviation and t-interval. A single value has only a mean; NaN spreads."""
    n = len(values)
    if n == 0:
        raise DataError("There are no values to summarise: finish at least one run.")
    mean = float(np.mean(values))
    if n == 1:
        return SampleSummary(mean, math.nan, n, math.nan, math.nan)
    from scipy import stats  # takes a second to load, and most runs do without

    std = float(np.std(values, ddof=1))
    half = float(stats.t.ppf(0.975, n - 1)) * std / math.sqrt(n)
    return SampleSummary(mean, std, n, mean - half, mean + half)


def compare_paired(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """Compare two methods seed by seed. `p` is NaN for a single pair and where all differences are zero."""
    if len(a) != len(b):
        raise DataError(
            f"A paired comparison needs the same seeds on both sides, not {len(a)} and {len(b)} values: "
            "run the missing seeds."
        )
    from scipy import stats

    spread = summarise_sample([first - second for first, second in zip(a, b, strict=True)])
    apart = np.subtract(a, b)
    with warnings.catch_warnings():
        # scipy warns of one pair, of ties and of differences that do not vary; the NaN or 0 it returns says as much.
        warnings.simplefilter("ignore")
        ranked = float(stats.wilcoxon(apart).pvalue) if np.isfinite(apart).all() and apart.any() else math.nan
        p = float(stats.ttest_rel(a, b).pvalue)
    d = spread.mean / spread.std if spread.std else math.nan
    return PairedTest(spread.mean, spread.low, spread.high, p, spread.n, ranked, d)


def sign_flip_p(gained: NDArray[np.int64], stream: Stream) -> float:
    """The p-value of the sum of paired differences, if either sign of each were equally likely.

    All patterns of signs are tried for few differences that are not zero, else `FLIPS` random ones, of which the
    observed pattern counts as one more (so p is never 0).
    """
    moved = gained[gained != 0]
    if len(moved) == 0:
        return 1.0
    if len(moved) <= MAX_EXACT:
        sums = np.asarray(list(product((-1, 1), repeat=len(moved)))) @ moved
        return float(np.mean(np.abs(sums) >= abs(moved.sum())))
    rng = np.random.default_rng(stream.integer())
    sums = (2 * rng.integers(0, 2, size=(FLIPS, len(moved)), dtype=np.int8) - 1) @ moved
    return float((1 + np.count_nonzero(np.abs(sums) >= abs(moved.sum()))) / (1 + FLIPS))


def paired_bootstrap_interval(
    gained: NDArray[np.int64], images: NDArray[np.int64], stream: Stream
) -> tuple[float, float]:
    """95 % percentile interval of a difference per image, over patients with all their images.

    `gained`: each patient's images that the first method has right beyond the second; `images`: each patient's images.
    """
    if len(images) < 2:
        return math.nan, math.nan
    rng = np.random.default_rng(stream.child("interval").integer())
    drawn = rng.multinomial(len(images), np.full(len(images), 1 / len(images)), size=RESAMPLES)
    low, high = np.quantile((drawn @ gained) / (drawn @ images), [0.025, 0.975])
    return float(low), float(high)


def welch_test(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, tuple[float, float]]:
    """t and p of Welch's t-test of two independent samples, and the 95 % interval of the difference of means."""
    from scipy import stats

    found = stats.ttest_ind(a, b, equal_var=False)
    low, high = found.confidence_interval()
    return float(found.statistic), float(found.pvalue), (float(low), float(high))


def one_way_anova(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """F and p of a one-way analysis of variance."""
    from scipy import stats

    found = stats.f_oneway(*groups)
    return float(found.statistic), float(found.pvalue)


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `n` images."""
    if n <= 0:
        return math.nan, math.nan
    share = min(max(share, 0.0), 1.0)  # noised counts may claim more than all
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return middle - half, middle + half


def correct_holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979), in the order given."""
    order = np.argsort(values, kind="stable")
    adjusted = np.minimum(1, np.maximum.accumulate(np.asarray(values)[order] * np.arange(len(values), 0, -1)))
    return [float(adjusted[place]) for place in np.argsort(order, kind="stable")]


def correct_bonferroni(values: Sequence[float]) -> list[float]:
    """p-values times their number."""
    return [min(1.0, value * len(values)) for value in values]


def _resample_counts(patient_of: NDArray[np.intp], patients: int, resamples: int, stream: Stream) -> Iterator[Floats]:
    """How often each image was drawn (resamples × images), in blocks that fit in memory."""
    rng = np.random.default_rng(stream.integer())
    chances = np.full(patients, 1 / patients)
    block = max(1, BLOCK // len(patient_of))
    for done in range(0, resamples, block):
        yield rng.multinomial(patients, chances, size=min(block, resamples - done))[:, patient_of].astype(np.float64)


def _percentile_interval(values: Floats, level: float) -> tuple[float, float]:
    defined = values[~np.isnan(values)]
    if 2 * len(defined) < len(values):
        return math.nan, math.nan
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
