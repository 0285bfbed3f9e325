"""Metrics, drift, forgetting and cost over rounds, from rows written by hand."""

from __future__ import annotations

import pytest

from polyclinic.core.types import Part
from polyclinic.evaluation.rounds import (
    convergence_round,
    final_rows,
    forgetting_by_round,
    mean_drift,
    mean_over_sites,
    metric_by_cluster,
    metric_over_rounds,
    sum_costs,
)
from polyclinic.evaluation.rows import (
    ChargeRow,
    CostRow,
    EvaluateRow,
    LedgerRow,
    MetricRow,
    ResumeRow,
    SiteOutcome,
    TrainRow,
)
from polyclinic.evaluation.summary import Cost
from tests.summaries import make_scores, make_summary


def report(
    round: int, site: str, accuracy: float | None, n: int, model: str = "personal", part: Part = "validation"
) -> EvaluateRow:
    return EvaluateRow(round=round, site=site, model=model, part=part, n=n, accuracy=accuracy)


def test_cost_adds_up_everything_the_ledger_has_seen() -> None:
    spent = SiteOutcome(down=10, up=3, seconds=0.5)
    accepted, refused = (spent.model_copy(update={"outcome": kind}) for kind in ("accepted", "refused"))
    ledger: list[LedgerRow] = [
        ChargeRow(round=1, sites=["a", "b"]),
        CostRow(event="round", round=1, seconds=2.0, sites={"a": accepted, "b": SiteOutcome(down=10)}),
        CostRow(event="failed round", round=2, seconds=1.0, sites={"a": refused, "b": SiteOutcome(outcome="dead")}),
        ResumeRow(round=1),
        CostRow(
            event="evaluation",
            round=3,
            seconds=0.25,
            sites={"a": SiteOutcome(down=7, up=5), "b": SiteOutcome(outcome="refused")},
        ),
    ]
    assert sum_costs(ledger) == Cost(
        bytes_down=37, bytes_up=11, seconds=3.25, site_seconds=1.0, refused=1, failed=1, withheld=1
    )


def test_drift_is_a_sites_mean_over_its_rounds() -> None:
    found = mean_drift(
        [
            TrainRow(round=1, site="a", drift=1.0),
            TrainRow(round=2, site="a", drift=3.0),
            TrainRow(round=1, site="b", outcome="dead"),
            TrainRow(round=1, site="c", drift=None),
            TrainRow(round=1, site="pooled", drift=9.0),
            report(1, "b", 0.5, 3),
        ]
    )
    assert found == {"a": 2.0}


def test_clusters_are_followed_from_round_to_round_also_when_a_site_moves() -> None:
    rows: list[MetricRow] = [
        *(TrainRow(round=1, site=site, cluster="high") for site in "ab"),
        report(0, "a", 0.5, 10),
        report(0, "b", 1.0, 30),
        report(0, "b", 0.0, 30, "global"),
        TrainRow(round=2, site="a", cluster="high"),
        TrainRow(round=2, site="b", cluster="low"),
        report(1, "a", 0.75, 10),
        report(1, "b", 0.25, 30),
    ]
    assert metric_by_cluster(rows, "accuracy") == {"high": [(0, 0.875), (1, 0.75)], "low": [(1, 0.25)]}
    assert metric_by_cluster(rows[:1], "accuracy") == {}
    alone = [r.model_copy(update={"cluster": ""}) if isinstance(r, TrainRow) else r for r in rows]
    assert metric_by_cluster(alone, "accuracy") == {"": [(0, 0.875), (1, 0.375)]}


def test_a_mean_is_of_one_kind_of_model_and_weighted_by_images() -> None:
    rows = [report(0, "a", 0.9, 10), report(0, "a", 0.1, 10, "global"), report(0, "b", 0.6, 20)]
    assert mean_over_sites(rows, "accuracy") == pytest.approx(0.7)
    assert mean_over_sites(rows[1:2], "accuracy") == 0.1
    assert mean_over_sites([report(0, "a", None, 9)], "accuracy") is None
    assert mean_over_sites([], "accuracy") is None


def test_other_parts_do_not_enter_a_curve() -> None:
    rows: list[MetricRow] = [
        report(2, "a", 0.5, 4),
        report(1, "a", 0.25, 4),
        report(1, "a", 1.0, 40, part="train"),
        report(1, "held-out", 1.0, 40, "global", "test"),
    ]
    assert metric_over_rounds(rows, "accuracy") == {1: 0.25, 2: 0.5}
    assert list(metric_over_rounds(rows, "accuracy")) == [1, 2]
    assert metric_over_rounds(rows, "accuracy", "test") == {1: 1.0}


def test_a_validation_curve_ends_with_the_final_model_weighted_by_images() -> None:
    """Sites of unequal size: a mean that is not weighted gives 0.6 and 0.7."""
    sites = {
        "a": {"global": {"validation": make_scores(30, accuracy=0.9), "test": make_scores(7, accuracy=0.0)}},
        "b": {"global": {"validation": make_scores(10, accuracy=0.5)}, "c": {"validation": make_scores(99)}},
    }
    summary = make_summary(sites=sites, rounds=5)
    rows: list[MetricRow] = [report(4, "a", 0.8, 30, "global"), report(4, "b", 0.4, 10, "global")]
    assert [(row.round, row.site, row.n) for row in final_rows(summary)] == [(5, "a", 30), (5, "b", 10)]
    curve = metric_over_rounds(rows, "accuracy") | metric_over_rounds(final_rows(summary), "accuracy")
    assert curve == {4: pytest.approx(0.7), 5: pytest.approx(0.8)}


def test_a_run_has_converged_when_it_is_a_point_from_its_best() -> None:
    points = [(0, 0.2), (1, 0.895), (2, 0.85), (3, 0.9)]
    assert convergence_round(points) == 1
    assert convergence_round(points[:2]) is None, "two points are no curve"
    assert convergence_round([]) is None


def test_forgetting_is_weighted_by_training_images() -> None:
    rows = [
        TrainRow(round=2, site="a", scalars={"forgotten": 0.5, "gained": 0.0, "cases": 30}),
        TrainRow(round=2, site="b", scalars={"forgotten": 0.1, "gained": 1.0, "cases": 10}),
        TrainRow(round=2, site="c"),
    ]
    found = forgetting_by_round(rows)
    assert {kind: points[0][0] for kind, points in found.items()} == {"forgotten": 1, "gained": 1}
    assert [points[0][1] for points in found.values()] == pytest.approx([0.4, 0.25])
    assert forgetting_by_round([]) == {}
