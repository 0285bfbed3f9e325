"""What a finished run says, from predictions that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, roc_auc_score

from polyclinic.core.contract import Bundle, Stream
from polyclinic.core.errors import DataError
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.summary import (
    assess_predictions,
    choose_headline,
    convergence_round,
    describe_test_images,
    headline_at_site,
    mean_drift,
    metric_by_cluster,
    package_versions,
    sum_costs,
)
from polyclinic.federation.round_log import RoundLog, mean_report

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


def assessed(predictions: dict[str, Bundle], held_out: Predictions | None = None, resamples: int = 50) -> Any:
    return assess_predictions(predictions, held_out, resamples, STREAM)


def test_sites_are_judged_alone_and_together() -> None:
    found = assessed({"north": NORTH, "south": SOUTH})
    assert found["sites"]["north"]["global"]["test"]["accuracy"] == 0.5
    assert found["sites"]["south"]["global"]["test"]["accuracy"] == 1.0
    merged = found["merged"]["global"]["test"]
    labels, scores = [1, 1, 0, 0, 1, 0], [0.9, 0.4, 0.6, 0.1, 0.7, 0.3]
    assert merged["n"] == 6
    assert merged["accuracy"] == accuracy_score(labels, [score > 0.5 for score in scores])
    assert merged["auc"] == pytest.approx(roc_auc_score(labels, scores))
    assert merged["confusion"] == [[2, 1], [1, 2]]


def test_the_gap_is_training_minus_validation_accuracy() -> None:
    found = assessed({"north": NORTH, "south": SOUTH})
    assert found["sites"]["north"]["global"]["gap"] == 1.0 - 0.5
    assert "gap" not in found["sites"]["south"]["global"], "it has neither part"


def test_only_test_parts_carry_intervals_and_they_hold_the_figure() -> None:
    found = assessed({"north": NORTH, "south": SOUTH})["merged"]["global"]
    assert "intervals" not in found["validation"]
    low, high = found["test"]["intervals"]["accuracy"]
    assert 0 <= low <= found["test"]["accuracy"] <= high <= 1
    assert low < high
    assert "intervals" not in assessed({"north": NORTH}, resamples=0)["merged"]["global"]["test"]


def test_patients_of_two_sites_are_different_people() -> None:
    """Each site numbers its patients from 0. Taken for one person, they could not be drawn apart."""
    alike = {"test": rows([0.9, 0.9], [1, 1], [0, 0])}
    unlike = {"test": rows([0.9, 0.9], [0, 0], [0, 0])}
    groups = [{f"global|{part}": found for part, found in site.items()} for site in (alike, unlike)]
    found = assessed({"north": groups[0], "south": groups[1]}, resamples=200)["merged"]["global"]["test"]
    assert found["intervals"]["accuracy"] == [0.0, 1.0]


def test_models_of_other_sites_are_transfer() -> None:
    """At north the model of south errs once, at south that of north never; what is at home is left out."""
    home = rows([0.1, 0.9], [1, 0])
    found = assessed(
        {
            "north": {"north|test": home, "south|test": rows([0.9, 0.8], [1, 0])},
            "south": {"north|test": rows([0.9, 0.1], [1, 0]), "south|test": home},
        }
    )
    assert found["sites"]["north"]["transfer"]["test"]["accuracy"] == 0.5
    assert found["sites"]["south"]["transfer"]["test"]["accuracy"] == 1.0
    assert found["merged"]["transfer"]["test"]["accuracy"] == 0.75
    assert found["merged"]["transfer"]["test"]["n"] == 4
    assert found["sites"]["north"]["north"]["test"]["accuracy"] == 0.0


def test_there_is_no_transfer_without_models_of_other_sites() -> None:
    found = assessed({"north": NORTH, "south": SOUTH})
    assert "transfer" not in found["merged"]
    assert "transfer" not in found["sites"]["north"]


def test_a_held_out_set_is_judged_beside_the_sites() -> None:
    tensors = rows([0.9, 0.1, 0.1], [1, 0, 1])
    held_out = Predictions(tensors["probabilities"].numpy(), tensors["labels"].numpy())
    found = assessed({"north": NORTH}, held_out)
    assert found["merged"]["held-out"]["test"]["accuracy"] == pytest.approx(2 / 3)
    assert "intervals" in found["merged"]["held-out"]["test"]


def part(**metrics: float) -> dict[str, float]:
    return {"accuracy": 0.5, "n": 4, **metrics}


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
def test_the_headline_is_about_test_images_where_there_are_any(merged: dict[str, Any], model: str, where: str) -> None:
    found, metrics = choose_headline(merged)
    assert (found, metrics["part"], metrics["accuracy"]) == (model, where, 0.5)


def test_without_any_image_to_judge_by_there_is_no_headline() -> None:
    with pytest.raises(DataError, match="nothing can be reported"):
        choose_headline({"global": {"train": part()}})


def test_the_headline_at_a_site_is_about_the_same_model_and_part() -> None:
    sites = {"north": {"global": {"test": part(accuracy=0.25)}, "x": {"test": part()}}, "south": {"x": {}}}
    summary = {"headline": {"model": "global", "part": "test"}, "sites": sites}
    assert headline_at_site(summary, "north")["accuracy"] == 0.25
    assert headline_at_site(summary, "south") == {}
    assert describe_test_images({"model": "held-out", "part": "test"}) == "held-out test images"
    assert describe_test_images({"model": "global", "part": "validation"}) == "validation images of all hospitals"


def test_cost_adds_up_everything_the_ledger_has_seen() -> None:
    note = {"down": 10, "up": 3, "seconds": 0.5}
    ledger = [
        {"event": "charge", "round": 1, "sites": ["a", "b"]},
        {"event": "round", "seconds": 2.0, "sites": {"a": {**note, "outcome": "accepted"}, "b": {"down": 10}}},
        {
            "event": "failed round",
            "seconds": 1.0,
            "sites": {"a": {**note, "outcome": "refused"}, "b": {"outcome": "dead"}},
        },
        {"event": "resumed", "round": 1},
        {"event": "evaluation", "seconds": 0.25, "sites": {"a": {"down": 7, "up": 5}, "b": {"outcome": "refused"}}},
    ]
    assert sum_costs(ledger) == {
        "bytes_down": 37,
        "bytes_up": 11,
        "seconds": 3.25,
        "site_seconds": 1.0,
        "refused": 1,
        "failed": 1,
        "withheld": 1,
    }


def test_drift_is_a_sites_mean_over_its_rounds() -> None:
    train = {"event": "train", "round": 1}
    found = mean_drift(
        [
            {**train, "site": "a", "drift": 1.0},
            {**train, "site": "a", "drift": 3.0},
            {**train, "site": "b", "outcome": "dead"},
            {**train, "site": "c", "drift": None},
            {**train, "site": "pooled", "drift": 9.0},
            {"event": "evaluate", "site": "b", "round": 1, "drift": 5.0},
        ]
    )
    assert found == {"a": 2.0}


def test_versions_name_what_figures_depend_on() -> None:
    assert {"python", "torch", "polyclinic", "numpy"} <= set(package_versions())
    assert package_versions()["torch"] == torch.__version__


def test_clusters_are_followed_from_round_to_round_also_when_a_site_moves() -> None:
    def trained(round: int, site: str, cluster: str) -> dict[str, Any]:
        return {"round": round, "site": site, "event": "train", "cluster": cluster}

    def judged(round: int, site: str, accuracy: float, n: int, model: str = "personal") -> dict[str, Any]:
        row = {"round": round, "site": site, "event": "evaluate", "part": "validation", "model": model}
        return {**row, "accuracy": accuracy, "n": n}

    rows = [
        *(trained(1, site, "high") for site in "ab"),
        judged(0, "a", 0.5, 10),
        judged(0, "b", 1.0, 30),
        judged(0, "b", 0.0, 30, "global"),
        trained(2, "a", "high"),
        trained(2, "b", "low"),
        judged(1, "a", 0.75, 10),
        judged(1, "b", 0.25, 30),
    ]
    assert metric_by_cluster(rows) == {"high": [(0, 0.875), (1, 0.75)], "low": [(1, 0.25)]}
    assert metric_by_cluster(rows[:1]) == {}
    alone = [{key: value for key, value in row.items() if key != "cluster"} for row in rows]
    assert metric_by_cluster(alone) == {"": [(0, 0.875), (1, 0.375)]}


def test_a_run_has_converged_when_it_is_a_point_from_its_best() -> None:
    points = [(0, 0.2), (1, 0.895), (2, 0.85), (3, 0.9)]
    assert convergence_round({"progress": {"": points}}) == 1
    assert convergence_round({"progress": {"": points[:2]}}) is None, "two points are no curve"
    assert convergence_round({"progress": None}) is None
    assert convergence_round({"progress": {"high": points}}) is None


def test_a_mean_is_of_one_kind_of_model() -> None:
    def told(model: str, accuracy: float) -> dict[str, Any]:
        return {"model": model, "part": "validation", "n": 10, "accuracy": accuracy}

    book = RoundLog(reports={"a": [told("personal", 0.9), told("global", 0.1)], "b": [told("personal", 0.7)]})
    assert mean_report(book, "accuracy") == pytest.approx(0.8)
    assert mean_report(RoundLog(reports={"a": [told("global", 0.1)]}), "accuracy") == 0.1
    assert mean_report(RoundLog(), "accuracy") is None
