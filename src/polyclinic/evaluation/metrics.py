"""Metrics of classification from predicted probabilities.

Everything is computed for many weightings of the same examples at once: `measure` uses one weighting of ones,
and the bootstrap (`statistics.py`) passes how often each example was drawn. So a point estimate and its interval
cannot follow different conventions:

- Precision, recall, specificity, F1 and both areas are those of class 1 of two, and macro averages of more.
- Macro averages run over the classes that occur among the labels, so a site that lacks a class is not judged
  on it. A class that occurs but is never predicted has precision 0 there, as in scikit-learn.
- What is undefined is NaN: a ratio of 0 to 0, and both areas unless positives and negatives occur.
- The calibration error follows Guo et al. (ICML 2017): 15 bins of equal width, closed on the right, on the
  confidence in the predicted class. Of two classes that is at least 1/2, so the lower bins stay empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyclinic.core import DataError, RecipeError

Floats: TypeAlias = NDArray[np.float64]

BINS = 15
SMALLEST = float(np.finfo(np.float64).eps)
"""Probabilities below this count as this in the loss, as in scikit-learn's log_loss."""
RANGE_TOLERANCE = 1e-6
"""Beyond the range of a metric, for rounding."""
SUM_TOLERANCE = 1e-2
"""Wide enough for a softmax in half precision, narrow enough to catch logits."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Class probabilities (examples × classes), true labels and, where known, whom each image shows."""

    probabilities: NDArray[np.floating[Any]]
    labels: NDArray[np.integer[Any]]
    patients: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_probabilities(self.probabilities)
        _check_labels(self.labels, *self.probabilities.shape)
        if self.patients is not None and len(self.patients) != len(self):
            raise DataError(f"There are {len(self.patients)} patient names for {len(self)} images: give one per image.")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        return int(self.probabilities.shape[1])

    @cached_property
    def patient_numbers(self) -> tuple[NDArray[np.intp], int]:
        """The number of each image's patient, and how many patients there are; unnamed ones count by image."""
        if self.patients is None:
            return np.arange(len(self)), len(self)
        names, patient_of = np.unique(np.asarray(self.patients), return_inverse=True)
        return patient_of, len(names)

    def has_same_images(self, other: Predictions) -> bool:
        return self.patients == other.patients and np.array_equal(self.labels, other.labels)

    @staticmethod
    def merge(parts: Sequence[Predictions]) -> Predictions:
        """Pool the predictions of several sites. Equal names mean the same patient, whatever the site.

        If only some parts name their patients, each image of the others counts as a patient of its own.
        """
        widths = {part.classes for part in parts}
        if len(widths) != 1:
            raise DataError(
                f"Predictions to merge must have one number of classes, and these have {sorted(widths)}: "
                "merge at least one part, all from one task."
            )
        return Predictions(
            np.concatenate([part.probabilities for part in parts]),
            np.concatenate([part.labels for part in parts]),
            _merge_patients(parts),
        )


def measure(probabilities: NDArray[np.floating[Any]], labels: NDArray[np.integer[Any]]) -> dict[str, float]:
    """All metrics of `METRICS`, NaN where undefined."""
    predictions = Predictions(probabilities, labels)
    values = weighted_metrics(predictions, np.ones((1, len(predictions))), tuple(METRICS))
    return {name: float(value[0]) for name, value in values.items()}


def weighted_metrics(predictions: Predictions, weights: Floats, names: Sequence[str]) -> dict[str, Floats]:
    """The named metrics, one value for each row of `weights` (weightings × examples)."""
    if unknown := [name for name in names if name not in METRICS]:
        raise RecipeError(f"There is no metric named {unknown[0]!r}: choose from {', '.join(METRICS)}.")
    tally = _WeightedCounts(predictions, weights)
    return {name: METRICS[name](tally) for name in names}


def confusion_matrix(probabilities: NDArray[np.floating[Any]], labels: NDArray[np.integer[Any]]) -> list[list[int]]:
    """Counts by true class (rows) and predicted class (columns), always classes × classes."""
    classes = Predictions(probabilities, labels).classes
    cells = labels.astype(np.int64) * classes + probabilities.argmax(axis=1)
    table: list[list[int]] = np.bincount(cells, minlength=classes**2).reshape(classes, classes).tolist()
    return table


def finite_or_none(values: Mapping[str, float]) -> dict[str, float | None]:
    """For JSON, which knows neither NaN nor infinity: both become None."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


class _WeightedCounts:
    """The weighted sums the metrics share. First axis: weightings; second, where there is one: classes."""

    def __init__(self, predictions: Predictions, weights: Floats) -> None:
        self.probabilities = predictions.probabilities.astype(np.float64)
        self.labels = predictions.labels.astype(np.int64)
        self.weights = weights
        self.classes = predictions.classes
        self.predicted = self.probabilities.argmax(axis=1)
        self.truth = self.labels[:, None] == np.arange(self.classes)
        called = self.predicted[:, None] == np.arange(self.classes)
        self.total: Floats = weights.sum(axis=1)
        self.support: Floats = weights @ self.truth
        self.called: Floats = weights @ called
        self.hits: Floats = weights @ (self.truth & called)

    @property
    def precision(self) -> Floats:
        return _ratio(self.hits, self.called)

    @property
    def recall(self) -> Floats:
        return _ratio(self.hits, self.support)

    @property
    def f1(self) -> Floats:
        return _ratio(2 * self.hits, self.called + self.support)

    @property
    def specificity(self) -> Floats:
        negatives = self.total[:, None] - self.support
        return _ratio(negatives - (self.called - self.hits), negatives)

    @cached_property
    def curve_areas(self) -> tuple[Floats, Floats]:
        """ROC area and average precision of each class against the rest; of two, only of class 1."""
        wanted = [1] if self.classes == 2 else range(self.classes)
        nobody = np.full((2, len(self.weights)), np.nan)
        both = [
            _curve_areas(self.probabilities[:, k], self.truth[:, k], self.weights) if self.truth[:, k].any() else nobody
            for k in wanted
        ]
        return np.stack([roc for roc, _ in both], axis=1), np.stack([pr for _, pr in both], axis=1)

    def weighted_mean(self, per_example: Floats) -> Floats:
        return _ratio(self.weights @ per_example, self.total)

    def macro_average(self, per_class: Floats) -> Floats:
        present = self.support > 0
        return _ratio(np.where(present, per_class, 0.0).sum(axis=1), present.sum(axis=1))

    def default_average(self, per_class: Floats) -> Floats:
        """The figure that papers print without a qualifier: class 1's of two classes, the macro average of more."""
        return per_class[:, -1] if self.classes == 2 else self.macro_average(per_class)


def _accuracy(tally: _WeightedCounts) -> Floats:
    return _ratio(tally.hits.sum(axis=1), tally.total)


def _loss(tally: _WeightedCounts) -> Floats:
    of_truth = tally.probabilities[np.arange(len(tally.labels)), tally.labels]
    return tally.weighted_mean(-np.log(of_truth.clip(SMALLEST, 1.0)))


def _precision_macro(tally: _WeightedCounts) -> Floats:
    return tally.macro_average(np.nan_to_num(tally.precision))


def _precision(tally: _WeightedCounts) -> Floats:
    return tally.default_average(tally.precision) if tally.classes == 2 else _precision_macro(tally)


def _f1_weighted(tally: _WeightedCounts) -> Floats:
    return _ratio((tally.support * np.nan_to_num(tally.f1)).sum(axis=1), tally.total)


def _calibration_error(tally: _WeightedCounts) -> Floats:
    confidence = tally.probabilities.max(axis=1)
    excess = confidence - (tally.predicted == tally.labels)
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], confidence)
    by_bin = tally.weights @ np.where(bins[:, None] == np.arange(BINS), excess[:, None], 0.0)
    return _ratio(np.abs(by_bin).sum(axis=1), tally.total)


METRICS: Mapping[str, Callable[[_WeightedCounts], Floats]] = {
    "loss": _loss,
    "accuracy": _accuracy,
    "balanced_accuracy": lambda tally: tally.macro_average(tally.recall),
    "precision": _precision,
    "recall": lambda tally: tally.default_average(tally.recall),
    "specificity": lambda tally: tally.default_average(tally.specificity),
    "f1": lambda tally: tally.default_average(tally.f1),
    "precision_macro": _precision_macro,
    "recall_macro": lambda tally: tally.macro_average(tally.recall),
    "f1_macro": lambda tally: tally.macro_average(tally.f1),
    "f1_weighted": _f1_weighted,
    "auc": lambda tally: tally.default_average(tally.curve_areas[0]),
    "pr_auc": lambda tally: tally.default_average(tally.curve_areas[1]),
    "ece": _calibration_error,
}
"""scikit-learn has most of these, at some fifty times the cost for one small site; the tests compare."""


def is_possible(name: str, value: float) -> bool:
    """Return whether a metric can have this value: none is negative, and only the loss can exceed 1."""
    largest = -math.log(SMALLEST) if name == "loss" else 1.0
    return -RANGE_TOLERANCE <= value <= largest + RANGE_TOLERANCE


def _curve_areas(score: Floats, positive: NDArray[np.bool_], weights: Floats) -> tuple[Floats, Floats]:
    """Area under the ROC curve and average precision of each weighting, from one sort; ties move as one."""
    order = np.argsort(-score, kind="stable")
    starts = np.flatnonzero(np.diff(score[order], prepend=np.inf))
    ranked = weights[:, order]
    everyone = np.add.reduceat(ranked, starts, axis=1)
    positives = np.add.reduceat(ranked * positive[order], starts, axis=1)
    negatives = everyone - positives
    above, called = positives.cumsum(axis=1), everyone.cumsum(axis=1)
    pairs = positives.sum(axis=1) * negatives.sum(axis=1)
    roc = _ratio((negatives * (above - positives / 2)).sum(axis=1), pairs)
    purity = above / np.where(called > 0, called, 1.0)
    average = _ratio((positives * purity).sum(axis=1), positives.sum(axis=1))
    return roc, np.where(pairs > 0, average, np.nan)


def _ratio(part: Floats, whole: NDArray[Any]) -> Floats:
    ratio: Floats = np.full(part.shape, np.nan)
    np.divide(part, whole, out=ratio, where=whole > 0)
    return ratio


def _check_probabilities(probabilities: NDArray[Any]) -> None:
    if probabilities.ndim != 2 or probabilities.shape[1] < 2:
        raise DataError(
            f"Probabilities must be examples × classes with at least two classes, and have shape "
            f"{probabilities.shape}: give one column per class, also when there are two."
        )
    if not np.isfinite(probabilities).all():
        raise DataError("Some probabilities are NaN or infinite, so the network has diverged: lower its learning rate.")
    sums = probabilities.sum(axis=1, dtype=np.float64)
    if (probabilities < 0).any() or (np.abs(sums - 1) > SUM_TOLERANCE).any():
        raise DataError("Some rows of probabilities are negative or do not sum to 1: apply the softmax to the logits.")


def _check_labels(labels: NDArray[Any], examples: int, classes: int) -> None:
    if labels.shape != (examples,) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"Labels must be {examples} integers, one per row of probabilities, and are {labels.dtype} of "
            f"shape {labels.shape}: give class numbers in one flat array."
        )
    if examples and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"Labels run from {labels.min()} to {labels.max()}, outside 0 to {classes - 1}: number classes "
            "as the columns of the probabilities."
        )


def _merge_patients(parts: Sequence[Predictions]) -> tuple[str, ...] | None:
    if all(part.patients is None for part in parts):
        return None
    named = {name for part in parts for name in part.patients or ()}
    fresh = (name for number in count() if (name := f"unnamed {number}") not in named)
    return tuple(name for part in parts for name in part.patients or islice(fresh, len(part)))
