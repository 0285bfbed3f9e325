"""C1: a run that is killed, wherever it is, goes on to the uninterrupted run's end."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

import polyclinic
from polyclinic.core import failpoints
from tests.crash.driver import INTERRUPTED
from tests.crash.masked import OF_SERVERS, OF_SITES
from tests.crash.runs import KILLED, RECIPES, Driver, assert_same_end, ledger_rows, summary

Whole = Callable[[str], Path]
PER_SITE = {"site-received", "site-evaluated", "site-trained", "memory-half-written", "memory-saved", "reply-accepted"}
OF_KEYS = {"key-overwritten", "run-key-written", "chain-key-moved", "approval-bound", "run-begun", "order-recorded"}
"""Points of private runs and real sites: `test_keys.py` is about them."""
POINTS = [point for point in failpoints.FAILPOINTS if point not in {*OF_KEYS, *OF_SITES, *OF_SERVERS}]
SNAPSHOT = {point for point in failpoints.FAILPOINTS if point.startswith("snapshot")}
AT_THE_END = {"finished", "evaluated", "model-written", "result-written"}


def mid_run(point: str) -> int:
    """How often a point is reached before the kill, so that it lands in the middle of four rounds."""
    if point in AT_THE_END:
        return 1
    return 2 if point in SNAPSHOT else 5 if point in PER_SITE else 3


@pytest.mark.parametrize("name", ["scaffold", "single"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_fault_point(driver: Driver, whole: Whole, place: Path, name: str, point: str) -> None:
    wanted, folder = whole(name), place / "run"
    assert driver.run(RECIPES[name], folder, fault=(point, mid_run(point))).code == KILLED
    assert (folder / "result.json").exists() == (point == "result-written")
    assert driver.run(RECIPES[name], folder).code == 0
    assert_same_end(folder, wanted)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["scaffold", "single"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_every_time_a_fault_point_is_reached(
    driver: Driver, whole: Whole, place: Path, name: str, point: str
) -> None:
    """Not in mid-run only: the first time, the second, … until it is reached no more."""
    wanted = whole(name)
    for n in count(1):
        folder = place / str(n)
        code = driver.run(RECIPES[name], folder, fault=(point, n)).code
        if code == 0:
            assert n > 1, "the point was never reached"
            return
        assert code == KILLED
        assert driver.run(RECIPES[name], folder).code == 0
        assert_same_end(folder, wanted)


def test_killed_at_one_point_after_another(driver: Driver, whole: Whole, place: Path) -> None:
    """Each resume is killed in its turn: what a resume does must be as safe as the first run."""
    folder, deaths = place / "run", []
    for point in failpoints.FAILPOINTS:
        deaths.append(driver.run(RECIPES["scaffold"], folder, fault=(point, 1)).code)
    assert set(deaths) <= {KILLED, 0}
    assert deaths.count(KILLED) >= 12
    assert driver.run(RECIPES["scaffold"], folder).code == 0
    assert_same_end(folder, whole("scaffold"))


def test_killed_from_outside_at_random_moments(driver: Driver, whole: Whole, place: Path) -> None:
    began = time.perf_counter()
    assert driver.run(RECIPES["single"], place / "timed").code == 0
    takes = time.perf_counter() - began
    moments, deaths = random.Random(2024), 0
    for attempt in range(40):
        if deaths >= 6:
            return
        folder = place / str(attempt)
        for _ in range(3):  # up to three times in one run
            pid = driver.start(RECIPES["single"], folder)
            time.sleep(moments.uniform(0.05, 0.95) * takes)
            os.kill(pid, signal.SIGKILL)
            code = driver.wait(pid).code
            assert code in (KILLED, 0)
            deaths += code == KILLED
        assert driver.run(RECIPES["single"], folder).code == 0
        assert_same_end(folder, whole("single"))
    pytest.fail(f"only {deaths} of the kills came before the run had ended")


@pytest.mark.parametrize("name", ["scaffold", "single"])
def test_ctrl_c_leaves_a_folder_that_resumes(driver: Driver, whole: Whole, place: Path, name: str) -> None:
    folder = place / "run"
    assert driver.run(RECIPES[name], folder, act="interrupt").code == INTERRUPTED
    assert list(folder.rglob("*.tmp")) == []
    assert driver.run(RECIPES[name], folder).code == 0
    assert_same_end(folder, whole(name))


def test_a_real_ctrl_c(driver: Driver, whole: Whole, place: Path) -> None:
    folder = place / "run"
    pid = driver.start(RECIPES["single"], folder)
    while not (folder / "snapshots" / "round-000001.pcl").exists():
        time.sleep(0.005)
    os.kill(pid, signal.SIGINT)
    assert driver.wait(pid).code in (INTERRUPTED, 0)
    assert list(folder.rglob("*.tmp")) == []
    assert driver.run(RECIPES["single"], folder).code == 0
    assert_same_end(folder, whole("single"))


def test_a_finished_run_is_read_back_and_not_repeated(driver: Driver, whole: Whole) -> None:
    folder = whole("fedavg")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert driver.run(RECIPES["fedavg"], folder).code == 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_a_crash_cost_is_counted(driver: Driver, whole: Whole, place: Path) -> None:
    """Two rounds are lost and played again, the second of them cut short: four rounds are paid as six."""
    recipe, folder = {**RECIPES["fedavg"], "snapshot_every": 2}, place / "run"
    assert driver.run(recipe, folder, fault=("site-trained", 11)).code == KILLED
    assert driver.run(recipe, folder).code == 0
    rounds = [row["round"] for row in ledger_rows(folder) if row["event"] == "charge"]
    assert rounds == [1, 2, 3, 4, 3, 4, 5]
    played = [row for row in ledger_rows(whole("fedavg")) if row["event"] == "round"]
    evaluation = [row for row in ledger_rows(whole("fedavg")) if row["event"] == "evaluation"]
    sent = [sum(note["down"] for note in row["sites"].values()) for row in played + evaluation]
    assert summary(folder)["cost"]["bytes_down"] == pytest.approx(sum(sent) + sent[2] + sent[3], rel=0.02)


def test_every_point_is_in_the_source_and_every_place_has_a_name() -> None:
    files = Path(polyclinic.__file__).parent.rglob("*.py")
    source = "\n".join(path.read_text() for path in files if path.name != "faults.py")
    assert len(failpoints.FAILPOINTS) >= 12
    assert set(re.findall(r'\breach\("([a-z-]+)"\)', source)) <= set(failpoints.FAILPOINTS)
    assert [point for point in failpoints.FAILPOINTS if f'"{point}"' not in source] == []


def test_the_environment_variable_arms_a_point() -> None:
    """As a person would do it: POLYCLINIC_FAULT=finished:2 lets the first pass and dies at the second."""
    spec = importlib.util.find_spec("polyclinic.core.failpoints")
    assert spec is not None
    script = f"import runpy; reach = runpy.run_path({spec.origin!r})['failpoint']; "
    script += "reach('finished'); print('once', flush=True); "
    for name, code in (("finished", KILLED), ("evaluated", 0)):
        ended = subprocess.run(
            [sys.executable, "-c", script + f"reach({name!r})"],
            env={**os.environ, "POLYCLINIC_FAULT": "finished:2"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ended.returncode, ended.stdout) == (code, "once\n")


def test_a_misspelt_point_is_an_error() -> None:
    with pytest.raises(ValueError, match="no fault point 'finish'; there are: round-begun, "):
        failpoints.arm_failpoint("finish")
