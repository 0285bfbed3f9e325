"""The log of releases: every reply has its row before it leaves, none is pushed out, and a changed one is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from polyclinic.cli.privacy import spent_command
from polyclinic.cli.site import site_app
from polyclinic.core.errors import StoreError
from polyclinic.deploy.site.release_log import ReleaseLog


def record(log: ReleaseLog, data: bytes, round: int = 1) -> None:
    log.record_release(data, {"model": len(data)}, run="r", round=round, purpose="train", epsilon=None)


def test_a_server_that_repeats_an_order_pushes_no_row_out(tmp_path: Path) -> None:
    log = ReleaseLog(tmp_path)
    record(log, b"first")
    for _ in range(5000):
        record(log, b"again", 2)
    assert (tmp_path / "releases.jsonl").stat().st_size < 10_000
    rows = log.read_entries()
    assert rows[0]["round"] == 1
    assert [row.get("times", 1) for row in rows[1:]] == [2**power for power in range(13)]
    record(ReleaseLog(tmp_path), b"again", 2)
    assert len(log.read_entries()) == len(rows), "another process goes on counting"
    record(log, b"other", 3)
    assert log.read_entries()[-1]["round"] == 3
    assert log.verify_chain()[0] == len(rows) + 1


@pytest.mark.parametrize("what", ["change", "remove", "swap", "insert"])
def test_a_row_that_was_changed_is_found(what: str, tmp_path: Path) -> None:
    log, path = ReleaseLog(tmp_path), tmp_path / "releases.jsonl"
    for number in range(6):
        record(log, bytes([number]), number)
    assert log.verify_chain()[0] == 6
    lines = path.read_text().splitlines()
    if what == "change":
        lines[2] = lines[2].replace('"round": 2', '"round": 7')
    elif what == "remove":
        del lines[2]
    elif what == "swap":
        lines[2], lines[3] = lines[3], lines[2]
    else:
        lines.insert(2, lines[1])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(StoreError, match=r"changed or damaged at row \d") as caught:
        log.verify_chain()
    assert "\n" not in str(caught.value)
    with pytest.raises(StoreError, match="changed or damaged"):
        record(ReleaseLog(tmp_path), b"more")
    assert len(path.read_text().splitlines()) == len(lines), "nothing leaves, and nothing is written"


def test_two_processes_that_take_turns_keep_one_chain(tmp_path: Path) -> None:
    first, second = ReleaseLog(tmp_path), ReleaseLog(tmp_path)
    for number in range(6):
        record((first, second)[number % 2], bytes([number]), number)
    assert first.verify_chain()[0] == 6


def test_runs_without_a_plan_are_told_beside_what_was_spent(tmp_path: Path) -> None:
    """They have no ε, so a ledger that knows nothing of them would show 0."""
    log, path = ReleaseLog(tmp_path / "state"), tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump({"federation": "f", "site": "hill"}))
    (app := typer.Typer()).command()(spent_command)
    run = CliRunner()

    def spent(*more: str) -> str:
        return run.invoke(app, [str(path), *more]).stdout

    log.record_release(b"card", {"card": 4}, run="", round=0, purpose="enrol", epsilon=None)
    log.record_release(b"one", {"model": 3}, run="paid", round=1, purpose="train", epsilon=2.0)
    log.record_release(b"end", {"metrics": 3}, run="paid", round=2, purpose="evaluate", epsilon=None)
    assert "without a plan" not in spent()
    assert json.loads(spent("--json"))["without_plan"] == {"runs": 0, "updates": 0}
    for name in ("free", "other"):
        for number in range(3):
            for _ in range(5):
                log.record_release(bytes([number]), {"model": 1}, run=name, round=1, purpose="train", epsilon=None)
    assert "2 runs left without a plan (6 updates); no epsilon bounds them" in spent()
    assert json.loads(spent("--json"))["without_plan"] == {"runs": 2, "updates": 6}


def test_the_command_shows_the_log_and_checks_it(tmp_path: Path) -> None:
    log, path = ReleaseLog(tmp_path / "state"), tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump({"federation": "f", "site": "hill"}))
    for number in range(3):
        record(log, bytes([number]), number)
    run = CliRunner()
    shown = run.invoke(site_app, ["log", str(path), "--verify"])
    assert shown.exit_code == 0, shown.output
    assert f"3 rows, none changed or missing before the last; the chain ends in {log.verify_chain()[1]}" in shown.stdout
    found = json.loads(run.invoke(site_app, ["log", str(path), "--last", "2", "--json"]).stdout)
    assert [row["round"] for row in found["rows"]] == [1, 2]
    book = tmp_path / "state" / "releases.jsonl"
    with open(book, "ab") as torn:
        torn.write(b'{"time": "20')
    assert run.invoke(site_app, ["log", str(path), "--verify"]).exit_code == 0
    assert book.read_bytes().endswith(b'{"time": "20'), "looking changes nothing, a site may be writing"
    book.write_text(book.read_text().replace('"round": 1', '"round": 5'))
    assert isinstance(run.invoke(site_app, ["log", str(path), "--verify"]).exception, StoreError)
