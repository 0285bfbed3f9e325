"""Scores of a finished run, from predictions that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, roc_auc_score

from polyclinic.core.errors import DataError
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, Part
from polyclinic.evaluation.assessment import (
    Assessment,
    assess_predictions,
    choose_headline,
    score_predictions,
    summarise_reports,
)
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.rows import EvaluateRow, TrainRow
from polyclinic.evaluation.summary import PartScores, SiteScores, generalisation_gap
from polyclinic.evaluation.task import CLASSIFICATION, confusion_of
from tests.summaries import make_scores

STREAM = Stream(0, ("bootstrap",))


def rows(scores: list[float], labels: list[int], patients: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Two classes: the score is the probability of the second."""
    second = torch.tensor(scores, dtype=torch.float64)
    return {
        "probabilities": torch.stack([1 - second, second], dim=1),
        "labels": torch.tensor(labels),
        "patients": torch.tensor(patients if patients is not None else list(range(len(labels)))),
    }


NORTH: Bundle = {
    "global|train": rows([0.9, 0.8, 0.2, 0.1], [1, 1, 0, 0]),
    "global|validation": rows([0.9, 0.2, 0.6, 0.1], [1, 1, 0, 0]),
    "global|test": rows([0.9, 0.4, 0.6, 0.1], [1, 1, 0, 0]),
}
SOUTH: Bundle = {"global|test": rows([0.7, 0.3], [1, 0])}


def assessed(predictions: dict[str, Bundle], held_out: Predictions | None = None, resamples: int = 50) -> Assessment:
    return assess_predictions(CLASSIFICATION, predictions, held_out, resamples, STREAM)


def test_sites_are_scored_alone_and_together() -> None:
    found = assessed({"north": NORTH, "south": SOUTH})
    assert found.sites["north"]["global"]["test"]["accuracy"].value == 0.5
    assert found.sites["south"]["global"]["test"]["accuracy"].value == 1.0
    merged = found.merged["global"]["test"]
    labels, scores = [1, 1, 0, 0, 1, 0], [0.9, 0.4, 0.6, 0.1, 0.7, 0.3]
    assert merged.n == 6
    assert merged.value("accuracy") == accuracy_score(labels, [score > 0.5 for score in scores])
    assert merged.value("auc") == pytest.approx(roc_auc_score(labels, scores))
    assert confusion_of(merged) == [[2, 1], [1, 2]]


def test_the_gap_is_training_minus_validation_accuracy() -> None:
    found = assessed({"north": NORTH, "south": SOUTH}).sites
    assert generalisation_gap(found["north"]["global"], "accuracy") == 1.0 - 0.5
    gap = generalisation_gap(found["south"]["global"], "accuracy")
    assert gap != gap, "south has neither part"


def test_only_test_parts_carry_intervals_and_they_hold_the_value() -> None:
    found = assessed({"north": NORTH, "south": SOUTH}).merged["global"]
    assert all(metric.low is None for metric in found["validation"].metrics.values())
    assert found["validation"].details == {}
    low, high = found["test"].interval("accuracy")
    assert 0 <= low <= found["test"].value("accuracy") <= high <= 1
    assert low < high
    plain = assessed({"north": NORTH}, resamples=0).merged["global"]["test"]
    assert all(metric.low is None for metric in plain.metrics.values())
    carrying = {name for name, metric in found["test"].metrics.items() if metric.low is not None}
    assert carrying == {"accuracy", "balanced_accuracy", "f1", "auc", "pr_auc"}


def test_patients_of_two_sites_are_different_people() -> None:
    """Each site numbers its patients from 0. Taken for one person, they could not be drawn apart."""
    alike = {"test": rows([0.9, 0.9], [1, 1], [0, 0])}
    unlike = {"test": rows([0.9, 0.9], [0, 0], [0, 0])}
    groups = [{f"global|{part}": found for part, found in site.items()} for site in (alike, unlike)]
    found = assessed({"north": groups[0], "south": groups[1]}, resamples=200).merged["global"]["test"]
    assert found.interval("accuracy") == (0.0, 1.0)


def test_models_of_other_sites_are_transfer() -> None:
    """At north the model of south errs once, at south that of north never; what is at home is left out."""
    home = rows([0.1, 0.9], [1, 0])
    found = assessed(
        {
            "north": {"north|test": home, "south|test": rows([0.9, 0.8], [1, 0])},
            "south": {"north|test": rows([0.9, 0.1], [1, 0]), "south|test": home},
        }
    )
    assert found.sites["north"]["transfer"]["test"].value("accuracy") == 0.5
    assert found.sites["south"]["transfer"]["test"].value("accuracy") == 1.0
    assert found.merged["transfer"]["test"].value("accuracy") == 0.75
    assert found.merged["transfer"]["test"].n == 4
    assert found.sites["north"]["north"]["test"].value("accuracy") == 0.0


def test_there_is_no_transfer_without_models_of_other_sites() -> None:
    found = assessed({"north": NORTH, "south": SOUTH})
    assert "transfer" not in found.merged
    assert "transfer" not in found.sites["north"]


def test_a_held_out_set_is_scored_beside_the_sites() -> None:
    tensors = rows([0.9, 0.1, 0.1], [1, 0, 1])
    held_out = Predictions(tensors["probabilities"].numpy(), tensors["labels"].numpy())
    found = assessed({"north": NORTH}, held_out).merged["held-out"]["test"]
    assert found.value("accuracy") == pytest.approx(2 / 3)
    assert found["accuracy"].low is not None
    assert score_predictions(CLASSIFICATION, held_out).values == found.values


def part(accuracy: float = 0.5) -> PartScores:
    return make_scores(accuracy=accuracy)


@pytest.mark.parametrize(
    ("merged", "model", "where"),
    [
        ({"global": {"validation": part(), "test": part()}, "held-out": {"test": part()}}, "global", "test"),
        ({"personal": {"validation": part(), "test": part()}}, "personal", "test"),
        ({"a": {"test": part()}, "transfer": {"test": part()}}, "transfer", "test"),
        ({"global": {"validation": part()}, "held-out": {"test": part()}}, "held-out", "test"),
        ({"global": {"train": part(), "validation": part()}}, "global", "validation"),
    ],
)
def test_the_headline_is_about_test_images_where_there_are_any(merged: SiteScores, model: str, where: str) -> None:
    found = choose_headline(merged)
    assert (found.model, found.part, found["accuracy"].value) == (model, where, 0.5)


def test_without_any_image_to_judge_by_there_is_no_headline() -> None:
    with pytest.raises(DataError, match="nothing can be reported"):
        choose_headline({"global": {"train": part()}})


def test_the_public_headline_names_the_model_that_was_tested() -> None:
    merged: SiteScores = {"global": {"test": part()}}
    found = choose_headline(merged, {"global": part(0.25), "student": part(0.75)}, "public")
    assert (found.model, found.of, found["accuracy"].value) == ("public", "student", 0.75)
    assert choose_headline(merged, {}, "public").model == "global"


def report(round: int, site: str, n: int, accuracy: float | None, part: Part = "validation") -> EvaluateRow:
    return EvaluateRow(round=round, site=site, model="global", part=part, n=n, accuracy=accuracy)


def test_without_predictions_the_last_reports_count_weighted_by_images() -> None:
    """Sites of unequal size, and figures that differ by round: neither the first round nor a plain mean will do."""
    written: list[Any] = [
        TrainRow(round=1, site="north"),
        report(0, "north", 30, 0.1),
        report(0, "south", 10, 0.2),
        report(1, "north", 30, 0.5),
        report(1, "south", 10, 0.9),
        report(1, "held-out", 99, 0.0, "test"),
    ]
    found = summarise_reports(CLASSIFICATION, written)
    assert set(found.sites) == {"north", "south"}
    assert found.sites["north"]["global"]["validation"].value("accuracy") == 0.5
    merged = found.merged["global"]["validation"]
    assert merged.n == 40
    assert merged.value("accuracy") == pytest.approx((0.5 * 30 + 0.9 * 10) / 40)
    assert merged["auc"].value is None
    assert merged["accuracy"].low is None
    assert summarise_reports(CLASSIFICATION, []).merged == {}


def test_a_metric_that_a_site_did_not_report_leaves_its_images_out_of_the_mean() -> None:
    found = summarise_reports(CLASSIFICATION, [report(1, "north", 30, None), report(1, "south", 10, 0.9)])
    assert found.merged["global"]["validation"].value("accuracy") == pytest.approx(0.9)
