"""One driver and one uninterrupted run of each recipe for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.runs import KILLED, RAM, RECIPES, Driver
from tests.driving import Ask


@pytest.fixture(scope="session")
def driver(ask: Ask, ram: Path) -> Driver:
    ask(do="load", recipe={**RECIPES["scaffold"], "rounds": 1})  # some tests look at the clock
    return Driver(ask, ram / "report")


@pytest.fixture(scope="session")
def _privacy_loaded(driver: Driver) -> None:
    """What reckons privacy takes a second to load, which children need not."""
    driver.ask(do="load", recipe={**RECIPES["private"], "rounds": 1})


@pytest.fixture(scope="session")
def ram() -> Iterator[Path]:
    """A folder for all runs."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


@pytest.fixture
def place(ram: Path) -> Iterator[Path]:
    """An empty folder of the test's own."""
    with tempfile.TemporaryDirectory(dir=ram) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def whole(driver: Driver, ram: Path) -> Callable[[str], Path]:
    """The folder of an uninterrupted run, by recipe."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = ram / "whole" / name
            assert driver.run(RECIPES[name], made[name]).code == 0
        return made[name]

    return of


@pytest.fixture(scope="session")
def stopped(driver: Driver, ram: Path) -> Callable[[str, Path], Path]:
    """A copy, in the given place, of a run that was killed in its fourth and last round."""
    made: dict[str, Path] = {}

    def copy(name: str, place: Path) -> Path:
        if name not in made:
            made[name] = ram / "stopped" / name
            assert driver.run(RECIPES[name], made[name], fault=("aggregated", 4)).code == KILLED
        return Path(shutil.copytree(made[name], place / name))

    return copy
