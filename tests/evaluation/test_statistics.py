"""Intervals against scipy and scikit-learn, by simulation, and by what a cluster bootstrap must do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats as scipy_stats
from sklearn.metrics import accuracy_score, roc_auc_score

from polyclinic.core.errors import DataError, RecipeError
from polyclinic.core.rng import Stream
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.statistics import (
    bootstrap_intervals,
    compare_paired,
    correct_bonferroni,
    correct_holm,
    summarise_sample,
)


def binormal(rng: np.random.Generator, n: int, patients: tuple[str, ...] | None = None) -> Predictions:
    """Scores half N(0, 1), half N(1, 1): the true AUC is Φ(1/√2), the accuracy at the midpoint Φ(1/2)."""
    labels = np.arange(n) % 2
    logit = rng.normal(labels, 1.0) - 0.5
    positive = 1 / (1 + np.exp(-logit))
    return Predictions(np.stack([1 - positive, positive], axis=1), labels, patients)


TRUTH = {"auc": scipy_stats.norm.cdf(1 / math.sqrt(2)), "accuracy": scipy_stats.norm.cdf(0.5)}


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, simulations = np.random.default_rng(1), 200
    covered = dict.fromkeys(TRUTH, 0)
    for number in range(simulations):
        intervals = bootstrap_intervals(binormal(rng, 120), list(TRUTH), resamples=400, stream=Stream(1, (number,)))
        for name, (low, high) in intervals.items():
            covered[name] += low <= TRUTH[name] <= high
    for name, times in covered.items():
        assert times / simulations == pytest.approx(0.95, abs=0.05), name


def test_the_interval_agrees_with_scikit_learn_on_real_resamples() -> None:
    """A plain loop over drawn rows, with scikit-learn's metrics, has the same distribution."""
    given, rng = binormal(np.random.default_rng(2), 200), np.random.default_rng(3)
    figures = []
    for _ in range(600):
        rows = rng.integers(0, 200, 200)
        score, labels = given.probabilities[rows, 1], given.labels[rows]
        figures.append((roc_auc_score(labels, score), accuracy_score(labels, score > 0.5)))
    theirs = np.quantile(figures, [0.025, 0.975], axis=0).T
    ours = bootstrap_intervals(given, ["auc", "accuracy"], resamples=4000, stream=Stream(4))
    assert np.allclose([ours["auc"], ours["accuracy"]], theirs, atol=0.012)


def test_copies_of_an_image_do_not_make_us_surer() -> None:
    single = binormal(np.random.default_rng(5), 100)
    p, y = single.probabilities.repeat(4, axis=0), single.labels.repeat(4)
    names = tuple(np.arange(100).repeat(4).astype(str))
    widths = [
        high - low
        for given in (single, Predictions(p, y, names), Predictions(p, y))
        for low, high in [bootstrap_intervals(given, ["auc"], resamples=2000, stream=Stream(6))["auc"]]
    ]
    assert widths[1] == pytest.approx(widths[0], rel=0.08)
    assert widths[2] == pytest.approx(widths[0] / 2, rel=0.15)


def test_equal_streams_give_equal_intervals_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    given = binormal(np.random.default_rng(7), 50)
    first = bootstrap_intervals(given, ["auc", "ece"], resamples=100, stream=Stream(8))
    monkeypatch.setattr("polyclinic.evaluation.statistics.BLOCK", 7 * 50)
    assert bootstrap_intervals(given, ["auc", "ece"], resamples=100, stream=Stream(8)) == first
    assert bootstrap_intervals(given, ["auc", "ece"], resamples=100, stream=Stream(9)) != first


def test_a_higher_level_is_wider() -> None:
    given = binormal(np.random.default_rng(10), 80)
    (low, high), (lower, higher) = (
        bootstrap_intervals(given, ["auc"], level=level, stream=Stream(11))["auc"] for level in (0.8, 0.99)
    )
    assert lower < low < high < higher


def test_rarely_defined_metrics_have_no_interval() -> None:
    """One ill among three patients is drawn in 1 − (2/3)³ = 70 % of resamples; none among three never."""
    p, ill, names = np.array([[0.8, 0.2], [0.6, 0.4], [0.3, 0.7]]), np.array([0, 0, 1]), ("a", "b", "c")
    assert bootstrap_intervals(Predictions(p, ill, names), ["recall"], stream=Stream(12))["recall"] == (1, 1)
    nobody = bootstrap_intervals(Predictions(p, 0 * ill, names), ["recall", "accuracy"], stream=Stream(12))
    assert all(math.isnan(bound) for bound in nobody["recall"])
    assert not any(math.isnan(bound) for bound in nobody["accuracy"])


@pytest.mark.parametrize("names", [("ann",) * 4, ()])
def test_one_patient_says_nothing_about_others(names: tuple[str, ...]) -> None:
    given = Predictions(np.full((len(names), 2), 0.5), np.zeros(len(names), dtype=np.int64), names)
    assert all(math.isnan(bound) for bound in bootstrap_intervals(given, ["accuracy"], stream=Stream(0))["accuracy"])


@pytest.mark.parametrize(("resamples", "level"), [(0, 0.95), (10, 0.0), (10, 1.0), (10, 95.0)])
def test_impossible_bootstraps_are_refused(resamples: int, level: float) -> None:
    given = binormal(np.random.default_rng(0), 4)
    with pytest.raises(RecipeError, match=r"1000 and 0\.95"):
        bootstrap_intervals(given, ["auc"], resamples=resamples, level=level, stream=Stream(0))


def test_a_thousand_resamples_take_less_than_a_second() -> None:
    given = binormal(np.random.default_rng(13), 500)
    start = time.perf_counter()
    bootstrap_intervals(given, ["accuracy", "balanced_accuracy", "auc"], stream=Stream(14))
    assert time.perf_counter() - start < 1


def test_summary_agrees_with_scipy() -> None:
    values = [0.81, 0.84, 0.79, 0.88, 0.83]
    ours, theirs = summarise_sample(values), scipy_stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))
    assert ours.mean == pytest.approx(np.mean(values))
    assert ours.std == pytest.approx(math.sqrt(scipy_stats.describe(values).variance))
    assert ours.n == 5


def test_summary_of_one_value_of_equal_values_and_of_nan() -> None:
    alone = summarise_sample([0.5])
    assert alone.mean == 0.5
    assert all(math.isnan(figure) for figure in (alone.std, alone.low, alone.high))
    equal = summarise_sample([0.5, 0.5, 0.5])
    assert (equal.std, equal.low, equal.high) == (0, 0.5, 0.5)
    assert math.isnan(summarise_sample([0.5, math.nan]).mean)
    with pytest.raises(DataError, match="no values"):
        summarise_sample([])


def test_paired_agrees_with_scipy() -> None:
    a, b = [0.81, 0.84, 0.79, 0.88], [0.80, 0.80, 0.78, 0.83]
    ours, theirs = compare_paired(a, b), scipy_stats.ttest_rel(a, b)
    assert ours.p == pytest.approx(theirs.pvalue)
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    assert ours.difference == pytest.approx(np.mean(a) - np.mean(b))
    assert ours.n == 4
    assert ours.wilcoxon_p == pytest.approx(scipy_stats.wilcoxon(a, b).pvalue) == pytest.approx(2 ** (1 - 4))
    assert ours.cohens_d == pytest.approx(theirs.statistic / math.sqrt(4)), "t = d √n"


@pytest.mark.parametrize(("correct", "name"), [(correct_holm, "holm"), (correct_bonferroni, "bonferroni")])
def test_corrections_agree_with_statsmodels(correct: Callable[[list[float]], list[float]], name: str) -> None:
    from statsmodels.stats.multitest import multipletests

    rng = np.random.default_rng(3)
    for n in (1, 2, 7, 30):
        p = (rng.random(n) ** 3).tolist()
        assert correct(p) == pytest.approx(multipletests(p, method=name)[1])


def test_students_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(8)
    found = [summarise_sample(rng.normal(0.8, 0.05, 5).tolist()) for _ in range(2000)]
    assert np.mean([one.low <= 0.8 <= one.high for one in found]) == pytest.approx(0.95, abs=0.02)


def test_a_paired_interval_covers_the_difference_where_seeds_are_shared() -> None:
    rng = np.random.default_rng(9)
    inside = []
    for _ in range(2000):
        seed = rng.normal(0, 0.1, 5)  # what both methods share
        one = compare_paired(
            (0.80 + seed + rng.normal(0, 0.02, 5)).tolist(), (0.77 + seed + rng.normal(0, 0.02, 5)).tolist()
        )
        inside.append(one.low <= 0.03 <= one.high)
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)


def test_paired_excludes_zero_exactly_when_p_is_small() -> None:
    rng = np.random.default_rng(15)
    for shift in np.linspace(0, 2, 40):
        result = compare_paired(rng.normal(shift, 1, 6).tolist(), rng.normal(0, 1, 6).tolist())
        assert (result.p < 0.05) == (result.low > 0 or result.high < 0)


def test_paired_degenerate_cases_do_not_warn() -> None:
    assert math.isnan(compare_paired([0.5, 0.6], [0.5, 0.6]).p)
    assert math.isnan(compare_paired([0.5, 0.6], [0.5, 0.6]).wilcoxon_p)
    assert math.isnan(compare_paired([0.5, 0.6], [0.5, 0.6]).cohens_d)
    assert math.isnan(compare_paired([0.5], [0.4]).p)
    constant = compare_paired([0.75, 0.5, 0.25], [0.5, 0.25, 0.0])
    assert (constant.difference, constant.low, constant.high, constant.p) == (0.25, 0.25, 0.25, 0)
    with pytest.raises(DataError, match="missing seeds"):
        compare_paired([0.5], [0.5, 0.6])
