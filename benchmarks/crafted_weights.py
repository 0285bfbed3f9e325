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
    "BUSI, `cnn_c`, batch 16": {},
    "the same, momentum 0.9": {"training.optimiser": {**SGD, "momentum": 0.9}},
    "the same, Adam": {"training.optimiser": {"name": "adam", "lr": 0.001}},
    "BUSI, `small_cnn`, batch 32": {"model.name": "small_cnn", "training.batch": 32},
    "BUSI, `mlp`": {"model.name": "mlp"},
    "BUSI, `cnn_b` with dropout 0.5": {"model.name": "cnn_b"},
    "BUSI, `groupnorm_cnn` without dropout, 5 rounds (features)": {
        "model": {"name": "groupnorm_cnn", "dropout": 0},
        "rounds": 5,
    },
    "PneumoniaMNIST, `cnn_c`": {"data": LUNGS},
    "phantom, `cnn_c`, 3 sites of 64 images": {"data": PHANTOM},
    "BUSI, `cnn_c`, 5 rounds": {"rounds": 5},
}
PRIVATE: dict[str, dict[str, Any]] = {
    "BUSI, `cnn_c`, ε = 8": {"privacy": {"epsilon": 8}},
    "PneumoniaMNIST, `cnn_c`, ε = 8": {"data": LUNGS, "privacy": {"epsilon": 8}},
    "BUSI, `cnn_c`, noise 0.0001: no protection": {"privacy": {"noise": 0.0001}},
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


def format_tables(found: dict[str, Any]) -> list[str]:
    """Return the rows of the two tables of docs/attack.md."""
    rows = []
    for name in CASES:
        each, total = found[name]["each"], found[name]["sum"]
        cells = [f"{view['recovered']} ({view['recovered_held_out']})" for view in (each, total)]
        rows.append(f"| {name} | {each['trained_images']} | {cells[0]} | {cells[1]} |")
    for name in PRIVATE:
        seeds = list(found[name].values())
        recovered = sorted({one["recovered"] for one in seeds})
        p_values = sorted(one["p_value"] for one in seeds)
        told = [" to ".join(dict.fromkeys(map(str, (few[0], few[-1])))) for few in (recovered, p_values)]
        rows.append(f"| {name} | {len(seeds)} | {seeds[0]['guesses']} | {told[0]} | {told[1]} |")
    return rows


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
    print(*format_tables(found), sep="\n")


if __name__ == "__main__":
    main()
