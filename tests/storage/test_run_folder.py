"""A run's folder: its state, its rows, and the runs that a folder holds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from polyclinic.core.errors import StoreError
from polyclinic.evaluation.rows import ChargeRow, CostRow, SiteOutcome, TrainRow
from polyclinic.storage.files import lock_folder
from polyclinic.storage.journal import FolderJournal
from polyclinic.storage.run_folder import RunFolder, find_runs
from tests.summaries import make_summary


def play(path: Path, event: str = "round") -> RunFolder:
    journal = FolderJournal(path)
    journal.charge_round(1, ["a"])
    journal.append_metrics([{"event": "train", "round": 1, "site": "a", "down": 3}])
    journal.append_cost(event, 1, 0.5, {"a": {"down": 3, "up": 4, "outcome": "accepted"}})
    return RunFolder(path)


def test_rows_come_back_typed(tmp_path: Path) -> None:
    folder = play(tmp_path)
    assert folder.metrics() == [TrainRow(round=1, site="a", down=3)]
    outcome = SiteOutcome(down=3, up=4, outcome="accepted")
    cost = CostRow(event="round", round=1, seconds=0.5, sites={"a": outcome})
    assert folder.ledger() == [ChargeRow(round=1, sites=["a"], privacy=None), cost]
    assert folder.metrics()[0].to_json() == {"event": "train", "round": 1, "site": "a", "down": 3}


def test_a_half_written_row_is_left_out_and_a_bad_one_is_damage(tmp_path: Path) -> None:
    folder = play(tmp_path)
    whole = folder.metrics_file.read_bytes()
    folder.metrics_file.write_bytes(whole + whole[:10])
    assert len(folder.metrics()) == 1
    folder.metrics_file.write_bytes(whole + b"{\n" + whole)
    with pytest.raises(StoreError, match=r"metrics\.jsonl is damaged in line 2"):
        folder.metrics()
    assert len(folder.metrics(tolerant=True)) == 1


def test_a_file_is_parsed_again_only_when_it_has_changed(tmp_path: Path) -> None:
    folder = play(tmp_path)
    first = folder.ledger()
    assert folder.ledger() is first
    FolderJournal(tmp_path).charge_round(2, ["a"])
    assert len(folder.ledger()) == len(first) + 1


def test_the_state_follows_the_files(tmp_path: Path) -> None:
    empty = RunFolder(tmp_path / "empty")
    assert (empty.state, empty.exists, empty.summary) == ("waiting", False, None)
    assert play(tmp_path / "failed", "failed round").state == "failed"
    folder = play(tmp_path / "run")
    assert folder.state == "stopped"
    with pytest.raises(StoreError, match="has not ended"):
        folder.read_summary()
    folder.write_summary(make_summary())
    assert RunFolder(folder.path).state == "finished"
    folder.result.write_text("{")
    assert RunFolder(folder.path).state == "unreadable"


def test_a_run_is_at_work_while_another_process_holds_its_lock(tmp_path: Path) -> None:
    folder = play(tmp_path)
    if (child := os.fork()) == 0:
        with lock_folder(tmp_path):
            time.sleep(30)
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        while folder.is_locked is False and time.monotonic() < deadline:
            time.sleep(0.01)
        assert folder.state == "running"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert folder.is_locked is False


def test_runs_are_found_in_order_and_not_within_runs(tmp_path: Path) -> None:
    for name in ("b/seed-0", "a/seed-1", "a/seed-0", "a/seed-0/inner", ".hidden/run"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "recipe.yaml").touch()
    found = [run.path.relative_to(tmp_path).as_posix() for run in find_runs(tmp_path)]
    assert found == ["a/seed-0", "a/seed-1", "b/seed-0"]
    assert [run.path for run in find_runs(tmp_path / "a" / "seed-0")] == [tmp_path / "a" / "seed-0"]
    assert len(list(find_runs(tmp_path, most=2))) == 2
    assert list(find_runs(tmp_path, deepest=1)) == []
