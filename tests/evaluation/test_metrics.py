"""Metrics against scikit-learn, on predictions with ties, absent classes and weights."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from polyclinic.core.errors import DataError, RecipeError
from polyclinic.evaluation.metrics import (
    METRICS,
    Predictions,
    confusion_matrix,
    finite_or_none,
    measure,
    weighted_metrics,
)

NAN = math.nan


@st.composite
def predictions(draw: st.DrawFn, classes: int | None = None) -> Predictions:
    """Coarse integer scores, so that ties and equal maxima are frequent; labels may lack classes."""
    width = classes or draw(st.integers(2, 5))
    rows = draw(st.integers(1, 30))
    row = st.lists(st.integers(0, 6), min_size=width, max_size=width).filter(any)
    scores = np.array(draw(st.lists(row, min_size=rows, max_size=rows)), dtype=np.float64)
    labels = draw(st.lists(st.integers(0, width - 1), min_size=rows, max_size=rows))
    return Predictions(scores / scores.sum(axis=1, keepdims=True), np.array(labels))


def close(ours: float, theirs: float) -> bool:
    return ours == pytest.approx(theirs, abs=1e-9, nan_ok=True)


def reference(given: Predictions, weights: NDArray[Any]) -> dict[str, float]:
    """scikit-learn's figures under the conventions of polyclinic.evaluation.metrics."""
    p, y, C = given.probabilities, given.labels, given.classes
    present = sorted(set(y[weights > 0].tolist()))
    predicted = p.argmax(axis=1)
    table = sk.confusion_matrix(y, predicted, labels=range(C), sample_weight=weights)
    one = {"y_true": y, "y_pred": predicted, "sample_weight": weights}
    figures = {
        "loss": sk.log_loss(y, p, labels=range(C), sample_weight=weights),
        "accuracy": sk.accuracy_score(**one),
        "f1_weighted": sk.f1_score(**one, labels=range(C), average="weighted", zero_division=0),
        "balanced_accuracy": sk.recall_score(**one, labels=present, average="macro"),
    }
    for name, function in [
        ("precision", sk.precision_score),
        ("recall", sk.recall_score),
        ("f1", sk.f1_score),
    ]:
        macro = function(**one, labels=present, average="macro", zero_division=0)
        figures[f"{name}_macro"] = macro
        figures[name] = macro if C > 2 else function(**one, labels=[1], average="macro", zero_division=NAN)
    judged = [1] if C == 2 else present
    figures["specificity"] = np.mean([_specificity(table, k) for k in judged])
    figures["auc"] = np.mean([_area(sk.roc_auc_score, p, y, k, weights) for k in judged])
    figures["pr_auc"] = np.mean([_area(sk.average_precision_score, p, y, k, weights) for k in judged])
    return figures


def _specificity(table: NDArray[Any], k: int) -> float:
    rest = np.delete(table, k, axis=0)
    return float(np.delete(rest, k, axis=1).sum() / rest.sum()) if rest.sum() else NAN


def _area(function: Any, p: NDArray[Any], y: NDArray[Any], k: int, weights: NDArray[Any]) -> float:
    drawn = weights > 0
    positive = (y == k)[drawn]
    if positive.all() or not positive.any():
        return NAN
    return float(function(positive, p[drawn, k], sample_weight=weights[drawn]))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@given(predictions(), st.data())
@settings(max_examples=50, deadline=None)
def test_every_metric_agrees_with_scikit_learn(given: Predictions, data: st.DataObject) -> None:
    times = st.lists(st.integers(0, 3), min_size=len(given), max_size=len(given)).filter(any)
    weights = np.array([np.ones(len(given)), data.draw(times)], dtype=np.float64)
    ours = weighted_metrics(given, weights, tuple(METRICS))
    for row in range(2):
        for name, figure in reference(given, weights[row]).items():
            assert close(ours[name][row], figure), (name, row)


@given(predictions())
@settings(max_examples=80, deadline=None)
def test_weights_are_repetitions(given: Predictions) -> None:
    times = np.arange(len(given)) % 3 + (len(given) < 2)
    repeated = measure(given.probabilities.repeat(times, axis=0), given.labels.repeat(times))
    for name, values in weighted_metrics(given, times[None].astype(np.float64), tuple(METRICS)).items():
        assert close(float(values[0]), repeated[name]), name


@given(predictions())
@settings(max_examples=80, deadline=None)
def test_calibration_error_agrees_with_scikit_learns_bins(given: Predictions) -> None:
    confidence = given.probabilities.max(axis=1)
    correct = given.probabilities.argmax(axis=1) == given.labels
    # With both outcomes declared, one extra pair at confidence 0 falls into a bin no maximum can reach.
    outcomes, scores = np.append(correct, [False, True]), np.append(confidence, [0.0, 0.0])
    frequency, mean = calibration_curve(outcomes, scores, n_bins=15, strategy="uniform")
    edges = np.linspace(0, 1, 16)
    sizes = [((confidence > low) & (confidence <= high)).sum() for low, high in pairwise(edges)]
    share = np.array([size for size in sizes if size]) / len(given)
    assert close(measure(given.probabilities, given.labels)["ece"], float(share @ np.abs(frequency - mean)[1:]))


def test_calibration_error_closed_forms() -> None:
    sure = np.tile([0.0, 1.0], (4, 1))
    assert measure(sure, np.array([1, 1, 1, 1]))["ece"] == 0
    assert measure(sure, np.array([1, 1, 1, 0]))["ece"] == 0.25
    assert measure(np.full((4, 2), 0.5), np.array([0, 1, 0, 1]))["ece"] == 0


@given(predictions())
def test_confusion_has_a_row_for_every_class(given: Predictions) -> None:
    predicted = given.probabilities.argmax(axis=1)
    theirs = sk.confusion_matrix(given.labels, predicted, labels=range(given.classes))
    assert confusion_matrix(given.probabilities, given.labels) == theirs.tolist()


def test_bytes_as_labels_do_not_overflow() -> None:
    p, y = np.eye(200), np.arange(200, dtype=np.uint8)
    assert confusion_matrix(p, y) == np.eye(200, dtype=int).tolist()
    assert measure(p, y)["accuracy"] == 1


def test_undefined_is_nan_and_becomes_null() -> None:
    healthy_only = measure(np.array([[0.9, 0.1], [0.8, 0.2]]), np.array([0, 0]))
    undefined = {name for name, value in healthy_only.items() if math.isnan(value)}
    assert undefined == {"precision", "recall", "f1", "auc", "pr_auc"}
    assert {name for name, value in finite_or_none(healthy_only).items() if value is None} == undefined
    json.dumps(finite_or_none({**healthy_only, "loss": math.inf}), allow_nan=False)


def test_one_class_of_many_has_neither_specificity_nor_areas() -> None:
    values = measure(np.array([[0.2, 0.5, 0.3], [0.1, 0.2, 0.7]]), np.array([2, 2]))
    assert {name for name, value in values.items() if math.isnan(value)} == {"specificity", "auc", "pr_auc"}


def test_no_examples_have_no_metrics() -> None:
    empty = np.zeros((0, 3)), np.zeros(0, dtype=np.int64)
    assert all(math.isnan(value) for value in measure(*empty).values())
    assert confusion_matrix(*empty) == [[0] * 3] * 3


def test_impossible_truth_has_a_finite_loss() -> None:
    assert measure(np.array([[1.0, 0.0]]), np.array([1]))["loss"] == pytest.approx(-math.log(np.finfo(float).eps))


@given(predictions(classes=2))
def test_swapping_the_two_classes_swaps_recall_and_specificity(given: Predictions) -> None:
    distinct = given.probabilities[:, 0] != given.probabilities[:, 1]
    p, y = given.probabilities[distinct], given.labels[distinct]
    here, there = measure(p, y), measure(p[:, ::-1], 1 - y)
    for one, other in [
        ("recall", "specificity"),
        ("specificity", "recall"),
        ("auc", "auc"),
        ("f1_macro", "f1_macro"),
    ]:
        assert close(here[one], there[other])


@pytest.mark.parametrize(
    ("probabilities", "labels", "says"),
    [
        (np.ones(3), np.array([0, 1, 0]), "two classes"),
        (np.ones((3, 1)), np.array([0, 0, 0]), "two classes"),
        (np.array([[NAN, 1.0]]), np.array([0]), "diverged"),
        (np.array([[3.0, -2.0]]), np.array([0]), "softmax"),
        (np.array([[3.0, 1.0]]), np.array([0]), "softmax"),
        (np.array([[0.5, 0.5]]), np.array([2]), "outside 0 to 1"),
        (np.array([[0.5, 0.5]]), np.array([-1]), "outside 0 to 1"),
        (np.array([[0.5, 0.5]]), np.array([1.0]), "integers"),
        (np.array([[0.5, 0.5]]), np.array([[1]]), "flat array"),
    ],
)
def test_bad_input_is_named(probabilities: NDArray[Any], labels: NDArray[Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        measure(probabilities, labels)


def test_unknown_metric_is_named() -> None:
    one = Predictions(np.array([[0.5, 0.5]]), np.array([1]))
    with pytest.raises(RecipeError, match=r"'acuracy'.*accuracy"):
        weighted_metrics(one, np.ones((1, 1)), ["acuracy"])


def test_merge_keeps_rows_and_patients_in_order() -> None:
    p, y = np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([0, 1])
    both = Predictions.merge([Predictions(p, y, ("ann", "bob")), Predictions(p[:1], y[:1], ("ann",))])
    assert both.patients == ("ann", "bob", "ann")
    assert np.array_equal(both.probabilities, p[[0, 1, 0]])
    assert np.array_equal(both.labels, y[[0, 1, 0]])
    assert Predictions.merge([Predictions(p, y)] * 2).patients is None


def test_merged_images_without_a_name_are_patients_of_their_own() -> None:
    p, y = np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([0, 1])
    unnamed = Predictions(p, y)
    once = Predictions.merge([unnamed, Predictions(p, y, ("ann", "ann"))])
    twice = Predictions.merge([unnamed, once])
    assert twice.patients is not None
    assert len(set(twice.patients)) == 5
    assert twice.patients[-2:] == ("ann", "ann")


def test_merge_refuses_nothing_and_different_tasks() -> None:
    two, three = (Predictions(np.full((1, c), 1 / c), np.array([0])) for c in (2, 3))
    for parts in ([], [two, three]):
        with pytest.raises(DataError, match="merge"):
            Predictions.merge(parts)
    with pytest.raises(DataError, match="one per image"):
        Predictions(np.array([[0.5, 0.5]]), np.array([0]), ("ann", "bob"))


def test_measuring_a_small_site_is_quick() -> None:
    rng = np.random.default_rng(0)
    score, y = rng.random(100), rng.integers(0, 2, 100)
    p = np.stack([1 - score, score], axis=1)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        measure(p, y)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.003
