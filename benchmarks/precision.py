"""What `training.precision: bfloat16` costs in accuracy and saves in time: the same recipes in both precisions.

    python -m benchmarks.precision [--seeds 3] [--rounds N] [--device cpu] [--json FILE]

FedAvg on the phantom demo and on scikit-learn's digits; on 3,000 images of MNIST too where POLYCLINIC_DATA has them.
A seed draws its own data (phantom), division, first weights and order, the same in both precisions, which take turns;
so `difference` is paired: bfloat16 − float32, its mean over seeds ± standard error. Figures are the merged test parts',
mean ± standard deviation over seeds. Evaluation is in float32 on both sides. Seconds: CPU-seconds of the whole run on
the CPU, wall-clock elsewhere; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polyclinic import Recipe, run
from polyclinic.runs.sites import load_sites

PRECISIONS = ("float32", "bfloat16")
METRICS = ("accuracy", "auc")
SHARED: Mapping[str, Any] = {
    "rounds": 12,
    "algorithm": "fedavg",
    "evaluate": {"every": 0, "bootstrap": 0},
}
TASKS: dict[str, dict[str, Any]] = {
    "phantom": {
        "data": {"name": "phantom", "size": 48, "split": {"train": 0.6, "validation": 0.15, "test": 0.25}},
        "model": {"name": "cnn_b", "dropout": 0.2},
        "training": {"epochs": 2, "batch": 16, "optimiser": {"name": "sgd", "lr": 0.05}},
    },
    "digits": {
        "data": {"name": "digits", "size": 16, "partition": {"by": "dirichlet", "sites": 5, "alpha": 0.5}},
        "model": {"name": "cnn_a"},
        "training": {"epochs": 1, "batch": 32, "optimiser": {"name": "sgd", "lr": 0.05}},
    },
    "mnist": {
        "data": {"name": "mnist", "limit": 3000, "partition": {"by": "dirichlet", "sites": 5, "alpha": 0.5}},
        "model": {"name": "groupnorm_cnn"},
        "training": {"epochs": 1, "batch": 32, "optimiser": {"name": "sgd", "lr": 0.05}},
    },
}


def recipe_of(task: str, precision: str, seed: int, rounds: int, device: str) -> Recipe:
    changes = {"training.precision": precision, "seed": seed, "rounds": rounds, "engine.device": device}
    return Recipe.from_values({"name": task, **SHARED, **TASKS[task]}, changes)


def measure(task: str, seeds: int, rounds: int, device: str) -> dict[str, Any]:
    clock = time.process_time if device == "cpu" else time.perf_counter
    found: dict[str, dict[str, list[float]]] = {p: {name: [] for name in (*METRICS, "seconds")} for p in PRECISIONS}
    for seed in range(seeds):
        hospitals = load_sites(recipe_of(task, "float32", seed, rounds, device))
        for precision in PRECISIONS if seed % 2 == 0 else reversed(PRECISIONS):
            begun = clock()
            headline = run(recipe_of(task, precision, seed, rounds, device), dataset=hospitals).headline
            found[precision]["seconds"].append(clock() - begun)
            for name in METRICS:
                found[precision][name].append(headline.scores.value(name))
    return {"task": task, "model": TASKS[task]["model"]["name"], "rounds": rounds, "seeds": seeds, **found}


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def lines(row: Mapping[str, Any]) -> list[str]:
    """A line for each metric, and one for the seconds."""
    one, other = (row[precision] for precision in PRECISIONS)
    made = []
    for name in METRICS:
        difference = [b - a for a, b in zip(one[name], other[name], strict=True)]
        both = "".join(f"{statistics.mean(s[name]):>11.4f} ± {spread(s[name]):.4f}" for s in (one, other))
        error = spread(difference) / len(difference) ** 0.5
        made.append(
            f"{row['task']:<9}{row['model']:<15}{name:<10}{both}{statistics.mean(difference):>+11.4f} ± {error:.4f}"
        )
    seconds = [statistics.median(side["seconds"]) for side in (one, other)]
    both = "".join(f"{value:>20.2f}" for value in seconds)
    return [*made, f"{row['task']:<9}{row['model']:<15}{'seconds':<10}{both}{seconds[1] / seconds[0]:>12.2f} ×"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=SHARED["rounds"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = os.environ.get("POLYCLINIC_DATA")
    tasks = [task for task in TASKS if task != "mnist" or (data and (Path(data) / "mnist").is_dir())]
    print(f"{'data':<9}{'model':<15}{'':<10}{'float32':>20}{'bfloat16':>20}{'difference':>20}")
    rows = []
    for task in tasks:
        rows.append(measure(task, options.seeds, options.rounds, options.device))
        print("\n".join(lines(rows[-1])), flush=True)
    if options.json:
        whole = {"device": options.device, "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
