"""How a run grows with the number of sites, with the cohort, and with the size of the model.

    python -m benchmarks.scaling [--sites 10,100,1000,10000] [--cohorts 10,100] [--rounds 10]
                                 [--models mlp,small_cnn,groupnorm_cnn,mobilenet_v2] [--repeats 3] [--json FILE]

First: sites of 20 images 1×28×28 that lie once in memory, small CNN, batch 32, one epoch SGD, `polyclinic.run` as a
user calls it, its folder written, evaluation of the cohort in every round and of all sites at the end, on one core.
Each run has a process of its own. `divide`: dividing the images among the sites; `set-up`: from there to the first
round; `s/round`: the median from round to round, snapshot included; `end`: predictions of all sites, their metrics with
intervals, the result's files. CPU-seconds; `peak` is the process's resident memory at its highest, in MB.
`per site` is the round per site of the cohort, which must not grow with the number of sites.

Second: one round of 10 sites × 96 images for each model, ours against the bare loop (see benchmarks.overhead).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead import LR, Workload, measure
from polyclinic.config.recipe import Recipe
from polyclinic.core.rng import Stream
from polyclinic.data.examples import Collection
from polyclinic.data.partitioning.partitions import PARTITIONS
from polyclinic.data.partitioning.site_data import build_site_data
from polyclinic.data.splits import Fractions
from polyclinic.runs.experiment import FederatedDataset, run

IMAGES, SIZE = 20, 28
MOST_BYTES = 8e9
"""The bar: 10 rounds with 10,000 sites stay below this."""
MODELS = {"mlp": 28, "small_cnn": 28, "groupnorm_cnn": 28, "mobilenet_v2": 32}
"""Pixels of a side for each model."""


def recipe(sites: int, cohort: int, rounds: int) -> Recipe:
    return Recipe.from_values(
        {
            "name": "scaling",
            "rounds": rounds,
            "data": {"name": "digits", "partition": {"by": "iid", "sites": sites}},
            "model": "small_cnn",
            "algorithm": "fedavg",
            "training": {"batch": 32, "optimiser": {"lr": LR}},
            "cohort": min(sites, cohort),
        }
    )


def consortium(sites: int) -> FederatedDataset:
    """Random images, divided as those of a data set are."""
    generator, count = torch.Generator().manual_seed(0), sites * IMAGES
    images = torch.randint(256, (count, 1, SIZE, SIZE), generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (count,), generator=generator)
    patients = tuple(f"patient-{number}" for number in range(count))
    collection = Collection(images, labels, tuple("0123456789"), patients)
    partition = PARTITIONS["iid"].model_validate({"sites": sites})
    divided = build_site_data(collection, partition, Fractions(), Stream(0), allow_single_class=True)
    return FederatedDataset(collection.classes, divided, None, 1, SIZE)


def peak_bytes() -> int:
    """The most memory this process ever held; unlike `getrusage`, not what its parent once held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def one(sites: int, cohort: int, rounds: int) -> dict[str, Any]:
    """One run, in this process."""
    torch.set_num_threads(1)
    base, moments = peak_bytes(), [time.process_time()]
    gathered = consortium(sites)
    moments.append(time.process_time())
    begun: list[float] = []
    done: list[float] = []

    def watch(event: str, _: Mapping[str, Any]) -> None:
        if event in ("round", "round done"):
            (begun if event == "round" else done).append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        run(recipe(sites, cohort, rounds), Path(folder) / "run", dataset=gathered, watch=watch)
        end = time.process_time()
    per_round = statistics.median(after - before for before, after in zip(begun, [*begun[1:], done[-1]], strict=True))
    return {
        "sites": sites,
        "cohort": min(sites, cohort),
        "divide_s": moments[1] - moments[0],
        "setup_s": begun[0] - moments[1],
        "round_s": per_round,
        "round_ms_per_site": per_round / min(sites, cohort) * 1e3,
        "end_s": end - done[-1],
        "peak_bytes": peak_bytes(),
        "imports_bytes": base,
    }


def apart(sites: int, cohort: int, rounds: int) -> dict[str, Any]:
    """One run in a fresh process, so that its peak of memory is its own."""
    numbers = ",".join(str(number) for number in (sites, cohort, rounds))
    command = [sys.executable, "-m", "benchmarks.scaling", "--one", numbers]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def by_sites(sites: list[int], cohorts: list[int], rounds: int) -> list[dict[str, Any]]:
    header = f"{'divide':>9}{'set-up':>9}{'s/round':>9}{'ms per site':>13}{'end s':>9}{'peak MB':>9}"
    print(f"{'sites':>7}{'cohort':>8}{header}")
    rows = []
    for cohort in cohorts:
        for count in (n for n in sites if n >= cohort):
            row = apart(count, cohort, rounds)
            figures = f"{row['divide_s']:>9.2f}{row['setup_s']:>9.2f}{row['round_s']:>9.3f}"
            figures += f"{row['round_ms_per_site']:>13.2f}{row['end_s']:>9.2f}{row['peak_bytes'] / 1e6:>9.0f}"
            print(f"{count:>7}{row['cohort']:>8}{figures}", flush=True)
            rows.append(row)
    return rows


def by_model(models: list[str], repeats: int) -> list[dict[str, Any]]:
    print(f"\n{'model':<15}{'ours s/round':>13}{'bare':>9}{'floor':>9}{'ratio':>8}{'to floor':>10}{'extra ms':>10}")
    rows = []
    for model in models:
        row = measure(Workload(model, model, 10, 96, MODELS[model], 10, 32, 1, None), repeats)
        seconds = row["s_per_round"]
        figures = f"{seconds['ours']:>13.3f}{seconds['bare']:>9.3f}{seconds['floor']:>9.3f}{row['ratio']:>8.2f}"
        print(f"{model:<15}{figures}{row['ratio_to_floor']:>10.2f}{row['extra_ms_per_client']:>10.2f}", flush=True)
        rows.append(row)
    return rows


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=_numbers, default=[10, 100, 1_000, 10_000])
    parser.add_argument("--cohorts", type=_numbers, default=[10, 100])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", type=_numbers, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.one:
        print(json.dumps(one(*given.one)))
        return
    sites = by_sites(given.sites, given.cohorts, given.rounds)
    models = by_model(given.models.split(",") if given.models else [], given.repeats)
    if given.json:
        found = {"torch": torch.__version__, "sites": sites, "models": models}
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    if any(row["peak_bytes"] > MOST_BYTES for row in sites):
        raise SystemExit("a run held more than 8 GB")


if __name__ == "__main__":
    main()
