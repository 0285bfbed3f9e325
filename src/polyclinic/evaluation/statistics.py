"""How sure we can be: intervals over patients, over seeds, and between two methods."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyclinic.core.contract import Stream
from polyclinic.core.errors import DataError, RecipeError
from polyclinic.evaluation.metrics import Floats, Predictions, weighted_metrics

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
    low: float
    high: float
    p: float
    n: int
    wilcoxon_p: float
    """p of Wilcoxon's signed ranks, which takes no distribution for granted; of n pairs never below 2^(1 − n)."""
    cohens_d: float
    """Cohen's d of pairs: the mean difference in units of the differences' standard deviation."""


def bootstrap_intervals(
    predictions: Predictions,
    metrics: Sequence[str],
    *,
    stream: Stream,
    resamples: int = 1000,
    level: float = 0.95,
) -> dict[str, tuple[float, float]]:
    """Percentile intervals, drawing patients with all their images, or images where patients are unknown.

    Resamples in which a metric is undefined are left out. If fewer than half are defined, or if there are not
    two patients to draw from, the interval is (NaN, NaN).
    """
    if resamples < 1 or not 0 < level < 1:
        raise RecipeError(
            f"A bootstrap needs resamples ≥ 1 and a level between 0 and 1, not {resamples} and {level}: "
            "take 1000 and 0.95."
        )
    patient_of, patients = _number_patients(predictions)
    if patients < 2:
        return dict.fromkeys(metrics, (math.nan, math.nan))
    draws = _resample_counts(patient_of, patients, resamples, stream)
    blocks = [weighted_metrics(predictions, drawn, metrics) for drawn in draws]
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
    spread = summarise_sample([first - second for first, second in zip(a, b, strict=True)])
    d = spread.mean / spread.std if spread.std else math.nan
    p, ranked = _paired_p(a, b)
    return PairedTest(spread.mean, spread.low, spread.high, p, spread.n, ranked, d)


def correct_holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979), in the order given."""
    order = np.argsort(values, kind="stable")
    factors = len(values) - np.arange(len(values))
    adjusted = np.minimum(1, np.maximum.accumulate(np.asarray(values)[order] * factors))
    return [float(adjusted[place]) for place in np.argsort(order, kind="stable")]


def correct_bonferroni(values: Sequence[float]) -> list[float]:
    """p-values times their number."""
    return [min(1.0, value * len(values)) for value in values]


def _paired_p(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Of the paired t-test and of Wilcoxon's signed ranks."""
    from scipy import stats

    known = bool(np.isfinite(apart := np.subtract(a, b)).all() and apart.any())
    with warnings.catch_warnings():
        # scipy warns of one pair, of ties and of differences that do not vary; the NaN or 0 it returns says as much.
        warnings.simplefilter("ignore")
        ranked = float(stats.wilcoxon(apart).pvalue) if known else math.nan
        return float(stats.ttest_rel(a, b).pvalue), ranked


def _number_patients(predictions: Predictions) -> tuple[NDArray[np.intp], int]:
    """The number of each image's patient, and how many patients there are."""
    if predictions.patients is None:
        return np.arange(len(predictions)), len(predictions)
    names, patient_of = np.unique(np.asarray(predictions.patients), return_inverse=True)
    return patient_of, len(names)


def _resample_counts(patient_of: NDArray[np.intp], patients: int, resamples: int, stream: Stream) -> Iterator[Floats]:
    """How often each image was drawn (resamples × images), in blocks that fit in memory."""
    rng = np.random.default_rng(stream.integer())
    chances = np.full(patients, 1 / patients)
    block = max(1, BLOCK // len(patient_of))
    for done in range(0, resamples, block):
        times = rng.multinomial(patients, chances, size=min(block, resamples - done))
        yield times[:, patient_of].astype(np.float64)


def _percentile_interval(values: Floats, level: float) -> tuple[float, float]:
    defined = values[~np.isnan(values)]
    if 2 * len(defined) < len(values):
        return math.nan, math.nan
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
