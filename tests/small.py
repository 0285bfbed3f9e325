"""A recipe that runs in a tenth of a second: three sites, two rounds, 650 weights, real digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from polyclinic import Recipe, RunResult, run

SITES = ("site-1", "site-2", "site-3")
WEIGHTS = 8 * 8 * 10 + 10
TINY: dict[str, Any] = {
    "name": "tiny",
    "rounds": 2,
    "data": {"name": "digits", "partition": {"by": "iid", "sites": 3}},
    "model": {"name": "linear"},
    "algorithm": "fedavg",
    "training": {"batch": 128, "optimiser": {"lr": 0.1}},
    "evaluate": {"bootstrap": 20},
}


def tiny(**settings: Any) -> Recipe:
    """The recipe with some keys set; a double underscore stands for the dot of `--set`."""
    return Recipe.from_values(TINY, {key.replace("__", "."): value for key, value in settings.items()})


def write_recipe(folder: Path, values: Any = None, name: str = "tiny.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(TINY if values is None else values, sort_keys=False), encoding="utf-8")
    return path


NEEDED: dict[str, dict[str, Any]] = {
    "adaptive-noise": {"privacy": {"noise": 1.0, "delta": 1e-4, "randomness": "seed"}},
    "fedmr": {"algorithm": {"name": "fedmr", "intra": 0}},
    "pfedcdp": {"algorithm": {"name": "pfedcdp", "head_epochs": 0, "keep": 0}},
}
"""What a recipe must say beside an algorithm's name, and what it must do without where there is no public set."""


def run_until_the_end(recipe: Recipe, folder: Path) -> RunResult:
    """Run a recipe as if it had been killed before its result was written: nothing is missing for it to go on."""
    with patch("polyclinic.runs.experiment.erase_file"):
        found = run(recipe, folder)
    (folder / "result.json").unlink()
    return found
