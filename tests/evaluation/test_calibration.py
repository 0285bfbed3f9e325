"""Temperature scaling: what it may not change, a planted temperature, and when there is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.special import softmax

from polyclinic.evaluation.calibration import (
    FEWEST,
    HIGHEST,
    LOWEST,
    Calibration,
    Uncalibrated,
    apply_temperature,
    calibrate,
    fit_temperature,
    log_probabilities,
    merge_part,
)
from polyclinic.evaluation.metrics import Floats, Predictions, measure

Labels = np.ndarray[tuple[int], np.dtype[np.int64]]


def drawn(images: int, classes: int, seed: int, spread: float = 2.0) -> tuple[Floats, Labels]:
    """Logits, and labels that are drawn from their softmax: calibrated by construction."""
    rng = np.random.default_rng(seed)
    logits = spread * rng.standard_normal((images, classes))
    chance = softmax(logits, axis=1).cumsum(axis=1)
    return logits, (rng.random((images, 1)) > chance).sum(axis=1).clip(0, classes - 1)


@given(st.integers(2, 6), st.floats(LOWEST, HIGHEST), st.integers(0, 999))
def test_a_temperature_changes_neither_the_order_nor_the_accuracy(classes: int, by: float, seed: int) -> None:
    logits, labels = drawn(50, classes, seed)
    before, after = softmax(logits, axis=1), apply_temperature(logits, by)
    np.testing.assert_allclose(after.sum(axis=1), 1)
    np.testing.assert_array_equal(before.argsort(axis=1), after.argsort(axis=1))
    assert measure(after, labels)["accuracy"] == measure(before, labels)["accuracy"]


@given(st.floats(0.3, 5), st.integers(2, 5), st.integers(0, 99))
@settings(max_examples=20)
def test_a_planted_temperature_is_found(planted: float, classes: int, seed: int) -> None:
    logits, labels = drawn(20_000, classes, seed)
    assert fit_temperature(logits * planted, labels) == pytest.approx(planted, rel=0.08)


def test_where_frequencies_are_the_probabilities_nothing_changes() -> None:
    """8 of 10 right at a probability of 0.8, 6 of 10 at 0.6: the loss has its minimum at 1 exactly."""
    chance = np.repeat([[0.8, 0.2], [0.6, 0.4]], 20, axis=0)
    labels = np.array([0] * 16 + [1] * 4 + [0] * 12 + [1] * 8)
    assert fit_temperature(np.log(chance), labels) == pytest.approx(1, abs=1e-4)


def test_two_classes_of_one_certainty_have_a_closed_form() -> None:
    """All logits are ±a, a share r is right: σ(2a / T) = r, so T = 2a / log(r / (1 − r))."""
    a, right = 1.5, 0.75
    logits = np.tile([a, -a], (40, 1))
    labels = np.array([0] * 30 + [1] * 10)
    assert fit_temperature(logits, labels) == pytest.approx(2 * a / np.log(right / (1 - right)), rel=1e-4)


@given(st.floats(2, 5), st.integers(0, 99))
@settings(max_examples=20)
def test_the_error_of_an_overconfident_model_falls_on_images_it_was_not_fitted_on(times: float, seed: int) -> None:
    said = [
        Predictions(softmax(logits * times, axis=1), labels)
        for logits, labels in (drawn(3000, 3, seed + 1000 * part) for part in range(2))
    ]
    found = calibrate(*said)
    assert isinstance(found, Calibration)
    assert found.test_ece is not None
    assert found.temperature > 1.5
    for before, after in (found.ece, found.test_ece, found.loss):
        assert after < before
    assert found.ece[0] == pytest.approx(measure(said[0].probabilities, said[0].labels)["ece"])
    assert (found.images, found.test_images) == (3000, 3000)


def test_log_probabilities_are_as_good_as_logits() -> None:
    logits, labels = drawn(500, 4, 3)
    assert fit_temperature(log_probabilities(softmax(logits, axis=1)), labels) == pytest.approx(
        fit_temperature(logits, labels)
    )
    shifted = logits + np.random.default_rng(0).standard_normal((500, 1))
    np.testing.assert_allclose(
        apply_temperature(shifted, 2.5), apply_temperature(log_probabilities(softmax(logits, axis=1)), 2.5), rtol=1e-9
    )


def test_probabilities_that_were_rounded_to_zero_have_a_finite_logarithm() -> None:
    assert np.isfinite(log_probabilities(np.array([[1.0, 0.0]], dtype=np.float32))).all()


@pytest.mark.parametrize(
    ("chance", "labels", "why"),
    [
        (
            np.tile([0.9, 0.1], (FEWEST - 1, 1)),
            np.zeros(FEWEST - 1, int),
            f"{FEWEST - 1} validation images are too few",
        ),
        (np.tile([0.9, 0.1], (50, 1)), np.zeros(50, int), "right on all its 50 validation images"),
        (np.tile([0.9, 0.1], (50, 1)), np.ones(50, int), "tell no more than guesses"),
    ],
)
def test_without_a_best_temperature_there_is_none(chance: Floats, labels: Labels, why: str) -> None:
    found = calibrate(Predictions(chance, labels))
    assert isinstance(found, Uncalibrated)
    assert why in found.reason


def test_sites_are_merged_by_model_and_part() -> None:
    def said(images: int) -> Predictions:
        return Predictions(np.tile([0.5, 0.5], (images, 1)), np.zeros(images, int))

    kept = {("a", "global", "test"): said(1), ("a", "global", "validation"): said(2), ("b", "global", "test"): said(4)}
    together = merge_part(kept, ("a", "b", "c"), "global", "test")
    assert together is not None
    assert len(together) == 5
    assert merge_part(kept, ("b",), "global", "validation") is None
    assert merge_part(kept, ("a",), "personal", "test") is None
