"""Predictions made for many sites at once are those that each would make alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyclinic.algorithms import ALGORITHMS
from polyclinic.core.names import HELD_OUT
from polyclinic.core.options import Optimiser, Training
from polyclinic.data.examples import Images, Selection, SiteData
from polyclinic.federation.engines import batched_evaluation
from tests.laws.bench import Played, as_json, clinics, play, small
from tests.laws.test_stacked import on_the_stack


def sharing(*sizes: int) -> dict[str, SiteData]:
    """Sites whose images lie in one place."""
    (whole,) = clinics(sum(sizes), dtype=torch.float64).values()
    shared, start, found = whole.train, 0, {}
    assert isinstance(shared, Images)
    for number, size in enumerate(sizes):
        part = Selection.from_rows(shared, torch.arange(start, start + size))
        found[f"clinic-{number}"] = SiteData(f"clinic-{number}", part, part, part)
        start += size
    return found


def reported(played: Played) -> list[dict[str, Any]]:
    rows = [row for row in as_json(played.journal.rows) if row["event"] == "evaluate" and row["site"] != HELD_OUT]
    return sorted(rows, key=lambda row: (row["round"], row["site"], row["model"]))


@pytest.mark.parametrize("name", ["fedavg", "local"])
def test_sites_report_what_they_would_report_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    honest = batched_evaluation.predict_batched

    def counted(runners: Any, *rest: Any) -> Any:
        passes.append(len(runners))
        return honest(runners, *rest)

    monkeypatch.setattr(batched_evaluation, "predict_batched", counted)
    algorithm = ALGORITHMS[name](training=Training(Optimiser("sgd", 0.1), batch=4))
    sites = sharing(9, 6, 12, 4)
    alone = play(algorithm, sites, small(dtype=torch.float64), 3, evaluate_every=1)
    stacked = play(algorithm, sites, small(dtype=torch.float64), 3, on_the_stack(), evaluate_every=1)
    assert len(reported(alone)) == len(reported(stacked)) == 3 * 4
    for one, other in zip(reported(alone), reported(stacked), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert other[key] == (pytest.approx(value, abs=1e-9) if isinstance(value, float) else value)
    # all but the first site at once, in every round; models of one's own are never asked for twice
    assert passes == ([3] * 3 if name == "fedavg" else [3])


def test_weights_that_were_forgotten_are_never_mixed_up_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites' own models come and go, and a new tensor may take the identity of one that is gone."""
    monkeypatch.setattr(batched_evaluation, "RECENT", 1)
    asked: list[torch.Tensor] = []

    class Site:
        name = "a"

        def predict(self, weights: Any, part: Any) -> Any:
            asked.append(weights["model"]["w"])
            return {"w": weights["model"]["w"]}

    one = batched_evaluation.BatchedEvaluation([])
    for value in range(20):
        mine = {"model": {"w": torch.tensor(float(value))}}
        assert one.predict(Site(), mine, "test")["w"] == value  # type: ignore[arg-type]
    assert len(asked) == 20
    assert len(one._asked) == 1
