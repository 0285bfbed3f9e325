"""A run that is interrupted, at any round, ends as an undisturbed one: every field of the loop's progress survives."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.options import Optimiser, Training
from polyclinic.federation.progress import Outcome, RoundOptions
from polyclinic.federation.robust.rules import Aggregation
from polyclinic.federation.round_log import RoundLog, mean_report, middle_report
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.schedules import EarlyStop, Schedule
from polyclinic.storage.journal import FolderJournal
from tests.federation.mock_engine import MockEngine
from tests.federation.test_schedules import Scripted
from tests.laws.bench import clinics, federation, small


def play(scripted: Scripted, folder: Path, rules: RoundOptions, stop_at: int | None = None) -> Outcome:
    """Play what is left of the script; `stop_at`: the round in which the process ends."""
    algorithm = FedAvg(Training(Optimiser(lr=0.1)))
    known, _ = federation(algorithm, clinics(12, 7), small())

    def watch(event: str, info: Mapping[str, Any]) -> None:
        if event == "round" and info["round"] == stop_at:
            raise KeyboardInterrupt

    engine = MockEngine(scripted.answer)
    return Rounds(known, algorithm, engine, rules, FolderJournal(folder), watch).play_all()


@settings(max_examples=40, deadline=None)
@example(losses=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], stop_at=3, plateau=2, early=3)
@example(losses=[1.0, 0.9, 0.95, 0.95, 0.95, 0.95, 0.95], stop_at=5, plateau=2, early=4)
@given(
    losses=st.lists(st.sampled_from([1.0, 0.9, 0.5, 2.0]), min_size=4, max_size=10),
    stop_at=st.integers(2, 9),
    plateau=st.integers(2, 3),
    early=st.integers(2, 4),
)
def test_plateau_and_early_stop_go_on_where_they_were(
    losses: list[float], stop_at: int, plateau: int, early: int
) -> None:
    schedule = Schedule("plateau", patience=plateau, factor=0.5)
    rules = RoundOptions(len(losses), schedule=schedule, early_stop=EarlyStop(early))
    whole, cut = Scripted(losses), Scripted(losses)
    with tempfile.TemporaryDirectory() as place:
        expected = play(whole, Path(place) / "whole", rules)
        if stop_at > expected.rounds:
            return
        with pytest.raises(KeyboardInterrupt):
            play(cut, Path(place) / "cut", rules, stop_at)
        found = play(cut, Path(place) / "cut", rules)
    assert (found.rounds, found.stopped_early) == (expected.rounds, expected.stopped_early)
    assert cut.rates == whole.rates


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_reported_metrics_are_weighted_by_the_number_of_images(metric: str) -> None:
    log = RoundLog(
        reports={
            "small": [{"model": "global", "part": "validation", "n": 10, metric: 0.9}],
            "large": [{"model": "global", "part": "validation", "n": 90, metric: 0.1}],
        }
    )
    assert mean_report(log, metric) == pytest.approx((10 * 0.9 + 90 * 0.1) / 100)


def test_the_mean_report_is_of_personal_models_where_there_are_some() -> None:
    rows = [
        {"model": model, "part": "validation", "n": 4, "loss": loss} for model, loss in (("global", 9), ("personal", 1))
    ]
    assert mean_report(RoundLog(reports={"a": rows}), "loss") == 1
    assert mean_report(RoundLog(reports={"a": rows[:1]}), "loss") == 9
    assert mean_report(RoundLog(), "loss") is None


def test_a_site_with_many_models_counts_once_in_mean_and_median() -> None:
    """Its value is the mean over its models, or that of its personal one; no other site's rows are left out for it."""
    logged: dict[str, list[tuple[str, float]]] = {
        "many": [(f"site-{number}", float(number)) for number in range(20)],
        "own": [("global", 9.0), ("personal", 1.0)],
        "plain": [("global", 3.0)],
    }
    log = RoundLog(
        reports={
            site: [{"model": model, "part": "validation", "n": 4, "loss": loss} for model, loss in rows]
            for site, rows in logged.items()
        }
    )
    assert mean_report(log, "loss") == pytest.approx((9.5 + 1 + 3) / 3)
    assert middle_report(log, "loss", Aggregation()) == 3
