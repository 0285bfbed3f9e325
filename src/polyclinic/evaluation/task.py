"""Tasks: their targets, losses, predictions and metrics, and the metrics that reports show.

`Classification` is the only one so far. Another one subclasses `Task` and joins `TASKS`; summaries, intervals, tables
and comparisons then find its metrics by name.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import JsonValue, TypeAdapter
from torch import Tensor

from polyclinic.core import SiteId, Tensors
from polyclinic.evaluation.metrics import SMALLEST, Floats, Predictions, confusion_matrix, weighted_metrics
from polyclinic.evaluation.summary import PartScores, RunSummary

_STRINGS = TypeAdapter(list[str])
_COUNTS = TypeAdapter(list[list[int]] | None)


@dataclass(frozen=True)
class MetricInfo:
    """A metric's name in files and recipes, its label in tables, and how to read it."""

    name: str
    label: str
    higher_is_better: bool = True
    has_interval: bool = False
    """Whether its bootstrap interval is computed on test images."""
    pooled_by: Literal["counts", "images", "sites"] = "counts"
    """How sites that keep their predictions give it for all images together: from their added counts, as a mean over
    images, or only as a mean of the sites' own figures, which is another figure than that of all images."""
    largest: float = 1.0
    """The largest value that it can have; the smallest is 0."""


class Task(ABC):
    """The loss and the metrics of one kind of target, and the details that a summary keeps of it."""

    name: ClassVar[str]
    metrics: ClassVar[tuple[MetricInfo, ...]]
    main_metric: ClassVar[str]
    """Of curves over rounds, of the gap between training and validation, of pairwise tests."""
    ranking_metric: ClassVar[str]
    """The site with the lowest value of this metric is reported as the worst."""
    shown_metrics: ClassVar[tuple[str, ...]]
    """The columns of a comparison."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """The training loss of a batch, or each example's with `reduction="none"`."""

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensors:
        """Turn a network's outputs into predictions by name, one row for each example."""

    @abstractmethod
    def read_predictions(self, tensors: Tensors, site: SiteId) -> Predictions:
        """Read and check a site's predictions of one part; patients of different sites are different people."""

    @abstractmethod
    def measure_weighted(self, predictions: Predictions, weights: Floats, names: Sequence[str]) -> Mapping[str, Floats]:
        """The named metrics, one value for each row of `weights` (weightings × examples)."""

    @abstractmethod
    def details(self, predictions: Predictions) -> dict[str, JsonValue]:
        """Return what the summary of a test part holds beside its metrics."""

    @abstractmethod
    def measure_counts(self, counts: Sequence[Sequence[int]]) -> dict[str, float]:
        """The metrics that follow from the counts in `details` alone (`pooled_by: counts`); NaN where undefined."""

    def successes(self, predictions: Predictions) -> NDArray[np.int64] | None:
        """1 for each image that the main metric counts as right, else 0; None where it is no mean over images."""
        return None

    def measure(self, predictions: Predictions) -> dict[str, float]:
        """All metrics of this task; NaN where undefined."""
        values = self.measure_weighted(predictions, np.ones((1, len(predictions))), self.metric_names)
        return {name: float(value[0]) for name, value in values.items()}

    @property
    def metric_names(self) -> tuple[str, ...]:
        return tuple(info.name for info in self.metrics)

    def info(self, name: str) -> MetricInfo:
        return next(info for info in self.metrics if info.name == name)


class Classification(Task):
    """One class of several for each image; networks return logits."""

    name = "classification"
    metrics = (
        MetricInfo("loss", "loss", higher_is_better=False, pooled_by="images", largest=-math.log(SMALLEST)),
        MetricInfo("accuracy", "accuracy", has_interval=True),
        MetricInfo("balanced_accuracy", "balanced accuracy", has_interval=True),
        MetricInfo("precision", "precision"),
        MetricInfo("recall", "recall"),
        MetricInfo("specificity", "specificity"),
        MetricInfo("f1", "F1", has_interval=True),
        MetricInfo("precision_macro", "precision (macro)"),
        MetricInfo("recall_macro", "recall (macro)"),
        MetricInfo("f1_macro", "F1 (macro)"),
        MetricInfo("f1_weighted", "F1 (weighted)"),
        MetricInfo("auc", "AUC", has_interval=True, pooled_by="sites"),
        MetricInfo("pr_auc", "PR-AUC", has_interval=True, pooled_by="sites"),
        MetricInfo("ece", "calibration error (ECE)", higher_is_better=False, pooled_by="sites"),
    )
    main_metric = "accuracy"
    ranking_metric = "auc"
    shown_metrics = ("accuracy", "balanced_accuracy", "auc")

    def loss(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(outputs, targets, reduction=reduction)

    def predict(self, outputs: Tensor) -> Tensors:
        return {"probabilities": torch.softmax(outputs, -1)}

    def read_predictions(self, tensors: Tensors, site: SiteId) -> Predictions:
        return Predictions(
            tensors["probabilities"].double().numpy(),
            tensors["labels"].numpy(),
            tuple(f"{site}:{number}" for number in tensors["patients"].tolist()),
        )

    def measure_weighted(self, predictions: Predictions, weights: Floats, names: Sequence[str]) -> Mapping[str, Floats]:
        return weighted_metrics(predictions, weights, names)

    def successes(self, predictions: Predictions) -> NDArray[np.int64]:
        return np.asarray(predictions.probabilities.argmax(axis=1) == predictions.labels, dtype=np.int64)

    def measure_counts(self, counts: Sequence[Sequence[int]]) -> dict[str, float]:
        """`counts`: by true class (rows) and predicted class (columns). Each cell is an example of that weight."""
        table = np.asarray(counts, dtype=np.float64)
        truth, called = np.divmod(np.arange(table.size), len(table))
        cells = Predictions(np.eye(len(table))[called], truth)
        names = [info.name for info in self.metrics if info.pooled_by == "counts"]
        return {name: float(value[0]) for name, value in weighted_metrics(cells, table.reshape(1, -1), names).items()}

    def details(self, predictions: Predictions) -> dict[str, JsonValue]:
        return {"confusion": _COUNTS.dump_python(confusion_matrix(predictions.probabilities, predictions.labels))}


CLASSIFICATION = Classification()
TASKS: Mapping[str, Task] = {CLASSIFICATION.name: CLASSIFICATION}


def task_of(summary: RunSummary) -> Task:
    return TASKS[summary.task]


def class_names(summary: RunSummary) -> tuple[str, ...]:
    """The classes of a classification; () for another task."""
    return tuple(_STRINGS.validate_python(summary.details.get("classes", [])))


def confusion_of(scores: PartScores) -> list[list[int]] | None:
    """Counts by true class (rows) and predicted class (columns), if they were kept."""
    return _COUNTS.validate_python(scores.details.get("confusion"))
