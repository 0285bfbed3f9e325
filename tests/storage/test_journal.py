"""What the round loop writes down, and where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from polyclinic.core.errors import StoreError
from polyclinic.core.types import Bundle
from polyclinic.evaluation.rounds import sum_costs
from polyclinic.evaluation.rows import ChargeRow, CostRow, ResumeRow, SiteOutcome, TrainRow
from polyclinic.storage.journal import FolderJournal, RamJournal, add_interrupted_rounds
from tests.storage.test_store import somewhere

SITES = ("north", "south")


def state(round: int) -> Bundle:
    return {"model": {"w": torch.full((3,), float(round))}}


def play(journal: FolderJournal, round: int, until: str = "") -> None:
    """A round as the loop writes it down; `until` stops before that step."""
    steps: dict[str, Callable[[], None]] = {
        "charge": lambda: journal.charge_round(round, SITES),
        "metrics": lambda: journal.append_metrics([{"round": round, "site": site, "event": "train"} for site in SITES]),
        "cost": lambda: journal.append_cost("round", round, 2.0, {site: {"down": 10, "up": round} for site in SITES}),
        "snapshot": lambda: journal.save_snapshot(round, state(round), {"round": round}),
    }
    for step, write in steps.items():
        if step == until:
            return
        write()


def events(journal: FolderJournal) -> list[tuple[str, int]]:
    return [(row["event"], row["round"]) for row in journal.ledger.read()]


def test_a_new_folder_has_nothing_to_resume(tmp_path: Path) -> None:
    journal = FolderJournal(tmp_path / "new" / "run")
    assert journal.resume() is None
    assert (journal.rows, journal.costs, journal.oldest_snapshot()) == ([], [], 0)


@given(st.lists(st.sampled_from(["charge", "metrics", "cost", "snapshot", "", "", ""]), max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_run_stopped_anywhere_any_number_of_times(stops: list[str]) -> None:
    """After every stop: the last snapshot's state, exactly its metrics, every charge ever made, and nothing twice."""
    with somewhere() as folder:
        charged: list[tuple[str, int]] = []
        last = 0
        for stop in stops:
            journal = FolderJournal(folder)
            resumed = journal.resume()
            assert (resumed.fields["round"] if resumed else 0) == last
            if resumed:
                assert torch.equal(resumed.tensors["model"]["w"], state(last)["model"]["w"])
                assert resumed.fields["progress"] == {"round": last}
            assert [row.round for row in journal.rows] == [r for r in range(1, last + 1) for _ in SITES]
            play(journal, last + 1, until=stop)
            charged += [("charge", last + 1)] if stop != "charge" else []
            last += stop == ""
            assert [event for event in events(journal) if event[0] == "charge"] == charged
        play(FolderJournal(folder), 99)


def test_what_was_spent_after_the_snapshot_is_not_forgotten(tmp_path: Path) -> None:
    journal = FolderJournal(tmp_path)
    play(journal, 1)
    play(journal, 2, until="snapshot")
    again = FolderJournal(tmp_path)
    assert again.resume() is not None
    play(again, 2)
    assert events(again) == [
        ("charge", 1),
        ("round", 1),
        ("charge", 2),
        ("round", 2),
        ("resumed", 1),
        ("charge", 2),
        ("round", 2),
    ]
    assert [row.round for row in again.rows] == [1, 1, 2, 2]
    assert sum_costs(again.costs).bytes_up == 2 * (1 + 2 + 2)


@pytest.mark.parametrize("until", ["metrics", "cost"])
def test_a_round_cut_short_is_counted_whole(tmp_path: Path, until: str) -> None:
    journal = FolderJournal(tmp_path)
    play(journal, 1)
    play(journal, 2, until=until)
    again = FolderJournal(tmp_path)
    again.resume()
    play(again, 2)
    total = sum_costs(again.costs)
    assert (total.bytes_down, total.bytes_up, total.seconds) == (20 * 3, 2 * (1 + 2 + 2), 6.0)
    assert (total.refused, total.failed) == (0, 0)


def test_what_went_wrong_in_the_repeated_round_is_not_counted_twice() -> None:
    charge, resumed = ChargeRow(round=1, sites=["north"]), ResumeRow(round=0)
    failed = CostRow(event="failed round", round=1, seconds=1.0, sites={"north": SiteOutcome(down=5)})
    refused = SiteOutcome(down=5, outcome="refused")
    played = CostRow(event="round", round=1, seconds=1.0, sites={"north": refused})
    total = sum_costs(add_interrupted_rounds([charge, resumed, charge, failed, resumed, charge, played]))
    assert (total.bytes_down, total.refused) == (15, 1)


def test_a_ledger_that_lost_rows_is_refused(tmp_path: Path) -> None:
    journal = FolderJournal(tmp_path)
    play(journal, 1)
    lines = journal.ledger.path.read_bytes().splitlines(keepends=True)
    journal.ledger.path.write_bytes(lines[0])
    with pytest.raises(StoreError, match="lacks rows that the snapshot of round 1 counts"):
        FolderJournal(tmp_path).resume()


def test_another_run_s_ledger_is_refused(tmp_path: Path) -> None:
    """Sound in itself and long enough, but not what the snapshot has seen."""
    for name, sites in (("one", SITES), ("other", ("east",))):
        journal = FolderJournal(tmp_path / name)
        journal.charge_round(1, sites)
        journal.save_snapshot(1, state(1), {})
    (tmp_path / "other" / "ledger.jsonl").replace(tmp_path / "one" / "ledger.jsonl")
    with pytest.raises(StoreError, match="lacks rows"):
        FolderJournal(tmp_path / "one").resume()


def test_without_a_folder_nothing_is_resumed_but_all_is_counted() -> None:
    journal = RamJournal()
    journal.charge_round(1, SITES)
    journal.append_metrics([{"event": "train", "round": 1, "site": "north"}])
    journal.append_cost("round", 1, 0.5, {"north": {"down": 1, "up": 2}})
    journal.save_snapshot(1, state(1), {})
    assert journal.resume() is None
    assert journal.rows == [TrainRow(round=1, site="north")]
    assert sum_costs(journal.costs).bytes_up == 2
    assert [row.event for row in journal.costs] == ["charge", "round"]
