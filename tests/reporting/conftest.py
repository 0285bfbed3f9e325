"""Runs and comparisons that reports are made of: real ones, of seconds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyclinic.experiments.compare import compare
from polyclinic.reporting.html.pdf import BROWSERS
from polyclinic.runs.experiment import run
from tests.reporting.drawn import Page, report_page
from tests.small import tiny

TWO_CLASSES = {"name": "phantom", "size": 32}
METHODS = {"Together": {}, "Alone": {"algorithm": "local"}, "Pooled": {"algorithm": "centralised"}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, BROWSERS))), args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, two classes, five sites, one seed."""
    folder = tmp_path_factory.mktemp("compared")
    compare([tiny(data=TWO_CLASSES, methods=METHODS)], 1, folder)
    return folder


@pytest.fixture(scope="session")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods of ten classes, three seeds, one private, with its noise from the seed."""
    folder = tmp_path_factory.mktemp("seeds")
    private = {"privacy": {"noise": 2.0, "delta": 1e-3, "randomness": "seed"}}
    compare([tiny(seed=8731873, methods={"Open": {}, "Private": private})], 3, folder)
    return folder


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of ten classes that measures forgetting and refuses some updates."""
    folder = tmp_path_factory.mktemp("single") / "run"
    partition = {"by": "quantity", "sites": 4, "alpha": 0.7, "minimum": 30}
    run(tiny(data__partition=partition, max_norm=0.2, evaluate__forgetting=True), folder)
    return folder


@pytest.fixture(scope="session")
def pages(compared: Path, seeds: Path, single: Path) -> dict[str, str]:
    one = compared / "together" / "seed-0"
    return {
        name: report_page([place])
        for name, place in (("two", compared), ("seeds", seeds), ("run", single), ("one", one))
    }


@pytest.fixture(scope="session")
def parsed(pages: dict[str, str]) -> dict[str, Page]:
    return {name: Page(text) for name, text in pages.items()}
