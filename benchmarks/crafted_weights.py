"""What a hostile server reads out of honest updates: `python -m benchmarks.crafted_weights [--quick] [--out FILE]`.

Plays recipes as `polyclinic attack RECIPE --by crafted-weights` does; writes docs/results/data/crafted-weights.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyclinic import Recipe
from polyclinic.analysis.attack.hostile_server import attack_recipe
from polyclinic.analysis.attack.recovery import View

OUT = Path(__file__).parents[1] / "docs" / "results" / "data" / "crafted-weights.json"
HALF = {"train": 0.5, "validation": 0.1, "test": 0.4}
BUSI = {"name": "busi", "size": 32, "partition": {"by": "iid", "sites": 5}, "split": HALF}
LUNGS = {
    "name": "medmnist",
    "channels": 1,
    "limit": 1000,
    "partition": {"by": "iid", "sites": 5},
    "split": {**HALF, "official": False},
}
SMALLEST = [{"name": name, "vendor": "film", "patients": 42, "malignant": 0.5} for name in ("harbour", "hill", "dune")]
PHANTOM = {"name": "phantom", "size": 32, "hospitals": SMALLEST, "split": HALF}
SGD = {"name": "sgd", "lr": 0.05}
BASE: dict[str, Any] = {
    "name": "hostile server",
    "rounds": 20,
    "data": BUSI,
    "model": {"name": "cnn_c"},
    "algorithm": "fedavg",
    "training": {"epochs": 2, "batch": 16, "optimiser": SGD},
}
CASES: dict[str, dict[str, Any]] = {
    "BUSI, cnn_c": {},
    "BUSI, cnn_c, momentum": {"training.optimiser": {**SGD, "momentum": 0.9}},
    "BUSI, cnn_c, Adam": {"training.optimiser": {"name": "adam", "lr": 0.001}},
    "BUSI, small_cnn, batch 32": {"model.name": "small_cnn", "training.batch": 32},
    "BUSI, mlp": {"model.name": "mlp"},
    "PneumoniaMNIST, cnn_c": {"data": LUNGS},
    "phantom, 65 images or so a site": {"data": PHANTOM},
    "BUSI, 5 rounds": {"rounds": 5},
}
PRIVATE: dict[str, dict[str, Any]] = {
    "BUSI, cnn_c, ε = 8": {"privacy": {"epsilon": 8}},
    "PneumoniaMNIST, cnn_c, ε = 8": {"data": LUNGS, "privacy": {"epsilon": 8}},
    "BUSI, cnn_c, no noise to speak of": {"privacy": {"noise": 0.0001}},
}


def measure_cases(seeds: int, quick: bool) -> Iterator[tuple[str, dict[str, object]]]:
    views: tuple[View, View] = ("each", "sum")
    settings = {"rounds": 3} if quick else {}
    for name, changes in CASES.items():
        recipe = Recipe.from_values(BASE, changes | settings)
        yield name, {view: attack_recipe(recipe, view).as_json() for view in views}
    for name, changes in PRIVATE.items():
        recipes = [Recipe.from_values(BASE, changes | settings | {"seed": seed}) for seed in range(seeds)]
        yield name, {f"seed {recipe.seed}": attack_recipe(recipe, "each").as_json() for recipe in recipes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three rounds and one seed")
    parser.add_argument("--seeds", type=int, default=5, help="of runs with a privacy plan")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name, row in measure_cases(1 if options.quick else options.seeds, options.quick):
        found[name] = row
        print(name, json.dumps(row), flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
