"""Tests between methods: closed forms, other libraries' figures, and how often chance is called a finding."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from polyclinic.core.rng import Stream
from polyclinic.evaluation.statistics import (
    FLIPS,
    MAX_EXACT,
    correct_holm,
    one_way_anova,
    paired_bootstrap_interval,
    sign_flip_p,
)
from tests.reporting.drawn import data_of, method_of

STREAM = Stream(0, ("test",))


@pytest.mark.parametrize(("ahead", "behind"), [(5, 1), (7, 0), (3, 3), (11, 1)])
def test_with_patients_of_one_image_sign_flips_are_mcnemars_exact_test(ahead: int, behind: int) -> None:
    assert ahead + behind <= MAX_EXACT
    gained = np.array([1] * ahead + [-1] * behind + [0] * 9)
    assert sign_flip_p(gained, STREAM) == pytest.approx(stats.binomtest(ahead, ahead + behind).pvalue)


def test_many_patients_come_close_to_the_exact_test() -> None:
    gained = np.array([1] * 40 + [-1] * 22)
    assert sign_flip_p(gained, STREAM) == pytest.approx(stats.binomtest(40, 62).pvalue, abs=0.01)


def test_a_drawn_p_counts_the_observed_pattern_and_is_never_zero() -> None:
    assert sign_flip_p(np.ones(60, dtype=np.int64), STREAM) == 1 / (1 + FLIPS)


def test_where_nothing_differs_nothing_is_found() -> None:
    assert sign_flip_p(np.zeros(30, dtype=np.int64), STREAM) == 1.0


def test_chance_is_called_a_finding_as_often_as_allowed() -> None:
    rng = np.random.default_rng(3)
    draws = rng.choice([-2, -1, 0, 1, 2], size=(400, 40), p=[0.05, 0.15, 0.6, 0.15, 0.05])
    found = np.mean([sign_flip_p(drawn, Stream(n)) < 0.05 for n, drawn in enumerate(draws)])
    assert 0.02 <= found <= 0.08


def test_intervals_of_differences_cover_the_truth() -> None:
    rng = np.random.default_rng(4)
    images = np.full(60, 2)
    covered = []
    for n in range(200):
        gained = rng.choice([-2, -1, 0, 1, 2], size=60, p=[0.05, 0.1, 0.5, 0.25, 0.1])
        low, high = paired_bootstrap_interval(gained, images, Stream(n))
        covered.append(low <= (-0.1 - 0.1 + 0.25 + 0.2) / 2 <= high)
    assert 0.91 <= np.mean(covered) <= 0.98


def test_one_seed_is_tested_over_patients_with_all_their_images(tmp_path: Path) -> None:
    a = method_of("a", tmp_path, {"x": [True] * 40}, per_patient=4)
    b = method_of("b", tmp_path, {"x": [True] * 16 + [False] * 24}, per_patient=4)
    one = data_of(a, b).comparison.compare_pair("a", "b", "x")
    assert one.over == "10 patients"
    assert one.difference == pytest.approx(0.6)
    assert one.p == pytest.approx(2 / 2**6)  # six patients differ, all the same way
    other = data_of(a, b).comparison.compare_pair("b", "a", "x")
    assert (other.difference, other.p) == (-one.difference, one.p)


def test_three_seeds_are_tested_as_scipy_does(tmp_path: Path) -> None:
    shares = [[30, 34, 29, 36], [25, 31, 27, 28]]
    a, b = (
        method_of(name, tmp_path, *({"x": [n < right for n in range(40)]} for right in rights))
        for name, rights in zip("ab", shares, strict=True)
    )
    one = data_of(a, b).comparison.compare_pair("a", "b")
    ours, theirs = (np.array(rights) / 40 for rights in shares)
    assert one.over == "4 seeds"
    assert one.p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert one.wilcoxon_p == pytest.approx(stats.wilcoxon(ours, theirs).pvalue)
    assert one.cohens_d == pytest.approx((ours - theirs).mean() / (ours - theirs).std(ddof=1))
    c = method_of("c", tmp_path, *({"x": [n < 20 + right for n in range(40)]} for right in range(4)))
    known = stats.f_oneway(ours, theirs, np.array([20, 21, 22, 23]) / 40)
    groups = [[run.headline.scores.value("accuracy") for run in method.summaries] for method in (a, b, c)]
    assert one_way_anova(groups) == pytest.approx((known.statistic, known.pvalue))


def test_verdicts_hold_after_correction_only(tmp_path: Path) -> None:
    """Six patients that differ give p = 1/32: enough for one test, not for three."""
    a = method_of("a", tmp_path, {"x": [True] * 20})
    b = method_of("b", tmp_path, {"x": [False] * 6 + [True] * 14})
    c = method_of("c", tmp_path, {"x": [False] * 5 + [True] * 15})
    assert [one.verdict for one in data_of(a, b).pairs] == [1]
    pairs = data_of(a, b, c).pairs
    assert [one.corrected_p for one in pairs] == pytest.approx(correct_holm([one.p for one in pairs]))
    assert [one.verdict for one in pairs] == [0, 0, 0]
    (test,) = data_of(a, b).comparison.compare_pairs([("b", "a", "x")])
    assert test.verdict == -1


def test_other_images_or_none_are_not_tested(tmp_path: Path) -> None:
    a = method_of("a", tmp_path, {"x": [True] * 20})
    b = method_of("b", tmp_path, {"x": [False] * 22})
    assert math.isnan(data_of(a, b).comparison.compare_pair("a", "b").p)
    c, d = (method_of(name, tmp_path, {"x": [name == "c"] * 22}) for name in "cd")
    assert d.first.files is not None
    d.first.files.predictions_file.unlink()
    (lost,) = data_of(c, d).pairs
    assert math.isnan(lost.p)
    assert lost.verdict == 0
    assert lost.difference == 1.0


def test_a_pair_is_tested_once(tmp_path: Path) -> None:
    a = method_of("a", tmp_path, {"x": [True] * 40})
    b = method_of("b", tmp_path, {"x": [True] * 20 + [False] * 20})
    comparison = data_of(a, b).comparison
    assert comparison.compare_pair("a", "b") is comparison.compare_pair("a", "b")
