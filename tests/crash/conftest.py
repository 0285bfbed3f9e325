"""One driver and one uninterrupted run of each recipe for all tests of this folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.runs import KILLED, RAM, RECIPES, Driver
from tests.driving import driving

SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@pytest.fixture(scope="package")
def driver(ram: Path) -> Iterator[Driver]:
    if not hasattr(os, "fork"):
        pytest.skip("these tests fork and kill processes, which this system cannot")
    warm = json.dumps({**RECIPES["scaffold"], "rounds": 1})
    with driving("tests.crash.driver", warm, environment=SINGLE) as ask:
        ask(do="ready")  # some tests look at the clock
        yield Driver(ask, ram / "report")


@pytest.fixture(scope="package")
def ram() -> Iterator[Path]:
    """A folder for all runs."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


@pytest.fixture
def place(ram: Path) -> Iterator[Path]:
    """An empty folder of the test's own."""
    with tempfile.TemporaryDirectory(dir=ram) as folder:
        yield Path(folder)


@pytest.fixture(scope="package")
def whole(driver: Driver, ram: Path) -> Callable[[str], Path]:
    """The folder of an uninterrupted run, by recipe."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = ram / "whole" / name
            assert driver.run(RECIPES[name], made[name]).code == 0
        return made[name]

    return of


@pytest.fixture(scope="package")
def stopped(driver: Driver, ram: Path) -> Callable[[str, Path], Path]:
    """A copy, in the given place, of a run that was killed in its fourth and last round."""
    made: dict[str, Path] = {}

    def copy(name: str, place: Path) -> Path:
        if name not in made:
            made[name] = ram / "stopped" / name
            assert driver.run(RECIPES[name], made[name], fault=("aggregated", 4)).code == KILLED
        return Path(shutil.copytree(made[name], place / name))

    return copy
