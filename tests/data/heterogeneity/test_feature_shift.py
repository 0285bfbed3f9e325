"""The domain classifier and MMD: at chance where nothing but labels differs, certain where features do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from polyclinic.core.rng import Stream
from polyclinic.data.heterogeneity import feature_shift
from polyclinic.data.heterogeneity.feature_shift import PatientSample
from polyclinic.evaluation.metrics import Floats
from polyclinic.evaluation.statistics import correct_holm


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every refit trains five classifiers; the p-value's resolution is all that suffers."""
    monkeypatch.setattr(feature_shift, "REFITS", 20)


def cohort(seed: int, shares: tuple[float, float] = (0.3, 0.7), moved: float = 0.0) -> tuple[PatientSample, Floats]:
    """Two sites; the images of a patient resemble each other, classes lie far apart, and sites `moved`."""
    rng = np.random.default_rng(seed)
    of_site = np.repeat([0, 1], [60, 80])
    label = (rng.random(140) < np.array(shares)[of_site]).astype(np.int64)
    of_image = np.repeat(np.arange(140), rng.integers(1, 4, 140))
    features = rng.normal(size=(140, 4))[of_image] + rng.normal(size=(len(of_image), 4))
    features[:, :2] += 4 * label[of_image, None]
    features[:, 2:] += moved * of_site[of_image, None]
    return PatientSample(of_site, label, np.arange(140), of_image), feature_shift.standardise(features)


def mmd(people: PatientSample, features: Floats, times: int = 200) -> tuple[float, float]:
    rng = np.random.default_rng(len(features))
    kernel = feature_shift.patient_kernel(features, people)
    found = feature_shift.measure_discrepancy(kernel, (people.site == 0).astype(np.int64), people.label, times, rng)
    assert found is not None
    return found


def test_mmd_is_the_textbook_double_sum() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 3)), rng.normal(1, 1, size=(7, 3))
    both = np.concatenate([x, y])
    width = np.median([((a - b) ** 2).sum() for i, a in enumerate(both) for b in both[:i]])

    def mean(first: Floats, second: Floats) -> float:
        pairs = [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if first is not second or i != j]
        return float(np.mean([np.exp(-((a - b) ** 2).sum() / (2 * width)) for a, b in pairs]))

    people = PatientSample(np.repeat([0, 1], [5, 7]), np.zeros(12, dtype=np.int64), np.arange(12), np.arange(12))
    assert mmd(people, both)[0] == pytest.approx(mean(x, x) + mean(y, y) - 2 * mean(x, y))


def test_mmd_is_unbiased_and_its_p_uniform_although_labels_are_skewed_and_images_cluster() -> None:
    found = [mmd(*cohort(seed)) for seed in range(100)]
    values = np.array([value for value, _ in found])
    assert abs(values.mean()) < 3 * values.std() / 10
    assert stats.kstest([p for _, p in found], "uniform").pvalue > 0.01


def test_mmd_sees_a_shift() -> None:
    assert mmd(*cohort(0, moved=1.5))[1] == 1 / 201
    assert mmd(*cohort(0, moved=1.5))[0] > mmd(*cohort(0, moved=0.8))[0] > 0


def test_sites_without_a_common_class_are_not_compared() -> None:
    people, features = cohort(0, shares=(0.0, 1.0))
    rng = np.random.default_rng(0)
    assert (
        feature_shift.measure_discrepancy(
            feature_shift.patient_kernel(features, people), people.site, people.label, 200, rng
        )
        is None
    )


def test_a_patient_counts_once_however_many_images_there_are() -> None:
    people, features = cohort(0)
    kernel = feature_shift.patient_kernel(features, people)
    sizes = np.bincount(people.of_image)
    first, second = (people.of_image == number for number in (np.argmax(sizes), np.argmin(sizes)))
    pairs = ((features[:, None] - features) ** 2).sum(axis=2)
    images = np.exp(-pairs / (2 * np.median(pairs[np.triu_indices(len(pairs), 1)])))
    assert kernel[np.argmax(sizes), np.argmin(sizes)] == pytest.approx(images[np.ix_(first, second)].mean())


def domain(people: PatientSample, features: Floats, seed: int = 0) -> feature_shift.SiteClassifierResult:
    found = feature_shift.classify_sites(features, people, ("north", "south"), Stream(seed))
    assert found is not None
    return found


def test_the_domain_classifier_stays_at_chance_when_only_labels_differ() -> None:
    found = [domain(*cohort(seed, shares=(0.2, 0.8)), seed) for seed in range(6)]
    assert all(one.balanced for one in found)
    assert {one.sites for one in found} == {("north", "south")}
    assert np.mean([one.accuracy for one in found]) == pytest.approx(0.5, abs=0.06)
    assert np.mean([one.accuracy - one.chance for one in found]) == pytest.approx(0, abs=0.06)
    assert all(0.4 < one.chance < 0.53 for one in found)
    assert sum(one.p <= 0.05 for one in found) <= 2


def test_the_labels_alone_would_give_the_site_away() -> None:
    """Without balanced classes, the same patients are assigned to sites by their class alone."""
    people, features = cohort(0, shares=(0.2, 0.8))
    assert domain(replace(people, label=np.zeros(140, dtype=np.int64)), features).accuracy > 0.68
    assert domain(people, features).accuracy < 0.62


def test_where_no_balance_is_possible_chance_is_what_labels_give_away() -> None:
    found = domain(*cohort(0, shares=(0.0, 1.0)))
    assert not found.balanced
    assert found.accuracy > 0.9
    assert found.chance == pytest.approx(found.accuracy)
    assert found.p == 1
    assert found.excess == pytest.approx(0)


def test_the_domain_classifier_recognises_a_shift() -> None:
    found = domain(*cohort(0, shares=(0.5, 0.5), moved=6.0))
    assert found.accuracy > 0.95
    assert found.low <= found.accuracy <= found.high
    assert found.p == 1 / 21


def test_holm_is_the_textbook_example() -> None:
    assert correct_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert correct_holm([0.9, 0.8]) == [1, 1]
    assert correct_holm([]) == []
