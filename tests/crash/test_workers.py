"""Worker processes: none outlives a killed run, and a run outlives its workers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.crash.driver import INTERRUPTED
from tests.crash.runs import KILLED, RECIPES, Driver, Values, assert_same_end, measured, summary

Whole = Callable[[str], Path]
RECIPE: Values = {**RECIPES["single"], "engine": {"workers": 2}}


def survivors(group: int) -> list[int]:
    """Processes of a dead run that still live after five seconds; a zombie is dead, whoever has not noticed."""
    deadline = time.monotonic() + 5
    while (left := living(group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def living(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def play(driver: Driver, folder: Path, recipe: Values = RECIPE, **how: object) -> int:
    """Run, let nobody survive, and return the exit code."""
    pid = driver.start(recipe, folder, **how)
    code = driver.wait(pid).code
    left = survivors(pid)
    for orphan in left:
        os.kill(orphan, signal.SIGKILL)
    assert left == [], "worker processes outlive the run"
    return code


def test_workers_end_with_the_run_and_at_once(driver: Driver, whole: Whole, place: Path) -> None:
    began = time.perf_counter()
    assert play(driver, place / "run") == 0
    assert time.perf_counter() - began < 5
    assert_same_end(place / "run", whole("single"))


@pytest.mark.parametrize(
    ("point", "n"), [("charge-written", 3), ("reply-accepted", 5), ("snapshot-half-written", 2), ("finished", 1)]
)
def test_a_killed_run_leaves_no_orphans(driver: Driver, whole: Whole, place: Path, point: str, n: int) -> None:
    assert play(driver, place / "run", fault=(point, n)) == KILLED
    assert play(driver, place / "run") == 0
    assert_same_end(place / "run", whole("single"))


def test_killed_from_outside_while_workers_work(driver: Driver, whole: Whole, place: Path) -> None:
    moments, folder = random.Random(7), place / "run"
    for _ in range(3):
        pid = driver.start(RECIPE, folder)
        time.sleep(moments.uniform(0.1, 0.5))
        os.kill(pid, signal.SIGKILL)
        assert driver.wait(pid).code in (KILLED, 0)
        assert survivors(pid) == []
    assert play(driver, folder) == 0
    assert_same_end(folder, whole("single"))


def test_ctrl_c_ends_the_workers(driver: Driver, whole: Whole, place: Path) -> None:
    assert play(driver, place / "run", act="interrupt") == INTERRUPTED
    assert play(driver, place / "run") == 0
    assert_same_end(place / "run", whole("single"))


def outcomes(folder: Path) -> dict[int, list[str]]:
    """What became of the sites, by round."""
    found: dict[int, list[str]] = {}
    for row in measured(folder):
        if row["event"] == "train":
            found.setdefault(row["round"], []).append(row["outcome"])
    return found


def test_a_worker_that_dies_at_work_costs_its_site_the_round(driver: Driver, place: Path) -> None:
    recipe: Values = {**RECIPES["fedavg"], "engine": {"workers": 2}}
    assert play(driver, place / "run", recipe, act="kill busy worker") == 0
    found = outcomes(place / "run")
    assert sorted(found.pop(2)) == ["accepted", "accepted", "dead"]
    assert list(found.values()) == [["accepted"] * 3] * 3
    assert summary(place / "run")["cost"]["failed"] == 1


def test_a_worker_that_dies_idle_costs_nothing(driver: Driver, whole: Whole, place: Path) -> None:
    assert play(driver, place / "run", act="kill idle worker") == 0
    assert_same_end(place / "run", whole("single"))


def test_without_workers_the_round_fails_and_can_be_resumed(driver: Driver, whole: Whole, place: Path) -> None:
    ended = driver.run(RECIPE, place / "run", act="kill all workers")
    assert (ended.code, ended.error) == (1, "RoundFailed")
    assert "round 2 had 0 acceptable updates" in ended.sentence
    assert "no worker process is left" in ended.sentence
    assert play(driver, place / "run") == 0
    assert_same_end(place / "run", whole("single"))
