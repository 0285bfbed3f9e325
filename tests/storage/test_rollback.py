"""Going back to an earlier round: the same end as if nothing had happened, and nothing that was spent comes back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import polyclinic
from polyclinic.cli.main import app
from polyclinic.core.errors import StoreError
from polyclinic.evaluation.rows import ChargeRow, RollbackRow
from polyclinic.storage.rollback import roll_back
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.snapshots import SnapshotStore

VALUES: dict[str, Any] = {
    "name": "back",
    "rounds": 7,
    "data": {"name": "digits", "partition": {"by": "iid", "sites": 3}},
    "model": "linear",
    "algorithm": "moon",
    "training": {"batch": 8, "optimiser": {"lr": 0.1}},
    "evaluate": {"bootstrap": 0, "train": False},
}


class StoppedError(Exception):
    """Ends a run in the middle."""


def interrupted(folder: Path, after: int, **changes: Any) -> None:
    """Play so many rounds, and leave the folder as an interruption does."""

    def watch(event: str, info: Any) -> None:
        if event == "round" and info["round"] == after + 1:
            raise StoppedError

    with pytest.raises(StoppedError):
        polyclinic.run(polyclinic.Recipe.from_values({**VALUES, **changes}), folder, watch=watch)


def test_going_back_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Sites have kept their memories (MOON has one) as long as there is a snapshot to go back to."""
    straight = polyclinic.run(polyclinic.Recipe.from_values(VALUES), tmp_path / "straight").summary
    folder = tmp_path / "back"
    interrupted(folder, 6)
    assert SnapshotStore(folder / "snapshots").rounds() == [2, 3, 4, 5, 6], "five are kept"
    asked = CliRunner().invoke(app, ["rollback", str(folder), "--to", "3"])
    assert asked.exit_code == 1
    assert "rounds 4 to 6 would be undone, and there is no terminal to ask; give --yes" in " ".join(
        asked.output.split()
    )
    assert SnapshotStore(folder / "snapshots").rounds() == [2, 3, 4, 5, 6], "nothing is undone"
    answer = CliRunner().invoke(app, ["rollback", str(folder), "--to", "3", "--yes"])
    assert answer.exit_code == 0, answer.output
    assert SnapshotStore(folder / "snapshots").rounds() == [2, 3]
    found = polyclinic.run(polyclinic.Recipe.from_values(VALUES), folder).summary
    assert found.sha256 == straight.sha256
    rows = RunFolder(folder).ledger()
    assert [(row.round, row.undone) for row in rows if isinstance(row, RollbackRow)] == [(3, 6)]
    polyclinic.report([folder], tmp_path / "report.html")
    assert "went back from round 6 to round 3" in (tmp_path / "report.html").read_text()


def test_sums_of_undone_masked_rounds_are_not_used_again(tmp_path: Path) -> None:
    """Else the sum with a hostile site's update would be taken from the disk."""
    masked: dict[str, Any] = {"stages": [{"name": "mask"}], "algorithm": "fedavg"}
    straight = polyclinic.run(polyclinic.Recipe.from_values({**VALUES, **masked}), tmp_path / "straight").summary
    folder = tmp_path / "back"
    interrupted(folder, 6, **masked)

    def masked_rounds() -> set[int]:
        return {int(path.name.partition("-")[0]) for path in RunFolder(folder).masks.iterdir()}

    assert max(masked_rounds()) == 6
    roll_back(folder, 3)
    assert max(masked_rounds()) == 3
    ended = polyclinic.run(polyclinic.Recipe.from_values({**VALUES, **masked}), folder).summary
    assert ended.sha256 == straight.sha256


def test_a_person_is_asked_which_rounds_to_undo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One digit too few in --to undoes many rounds, which cannot be brought back."""
    interrupted(tmp_path, 4)
    monkeypatch.setattr("polyclinic.cli.run.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    words, kept = ["rollback", str(tmp_path), "--to", "2"], SnapshotStore(tmp_path / "snapshots")
    answer = CliRunner().invoke(app, words, input="n\n")
    assert answer.exit_code == 1
    assert "Undo rounds 3 to 4?" in answer.output
    assert kept.rounds() == [1, 2, 3, 4]
    (tmp_path / "enrolled.json").write_text("{}")  # as of a run between sites
    answer = CliRunner().invoke(app, words, input="y\n")
    assert answer.exit_code == 0, answer.output
    assert kept.rounds() == [1, 2]
    assert "allows the round, by the command that its refusal names" in " ".join(answer.output.split())


def test_charges_are_never_taken_back(tmp_path: Path) -> None:
    privacy = {"privacy": {"noise": 2.0, "delta": 1e-3, "metrics": "suppress"}, "algorithm": "fedavg"}
    interrupted(tmp_path, 4, **privacy)
    before = [row for row in RunFolder(tmp_path).ledger() if isinstance(row, ChargeRow)]
    roll_back(tmp_path, 2)
    after = [row for row in RunFolder(tmp_path).ledger() if isinstance(row, ChargeRow)]
    assert after == before
    assert {row.round for row in after if row.privacy} >= {1, 2, 3, 4}


def test_what_cannot_be_gone_back_to_is_said(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", 6)
    with pytest.raises(StoreError, match="no snapshot of round 1; choose one of: 2, 3, 4, 5, 6"):
        roll_back(tmp_path / "run", 1)
    with pytest.raises(StoreError, match="holds no run"):
        roll_back(tmp_path, 1)
    polyclinic.run(polyclinic.Recipe.from_values(VALUES), tmp_path / "run")
    with pytest.raises(StoreError, match="has ended"):
        roll_back(tmp_path / "run", 3)


def test_how_many_snapshots_are_kept_does_not_make_another_run(tmp_path: Path) -> None:
    interrupted(tmp_path, 4, keep_snapshots=2)
    assert SnapshotStore(tmp_path / "snapshots").rounds() == [3, 4]
    found = polyclinic.run(polyclinic.Recipe.from_values({**VALUES, "keep_snapshots": 3}), tmp_path)
    assert found.summary.rounds == 7


def test_a_full_disk_keeps_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    interrupted(tmp_path, 5)
    assert SnapshotStore(tmp_path / "snapshots").rounds() == [4, 5]
