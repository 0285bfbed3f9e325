"""What a run costs besides its arithmetic: per task, before it starts, in memory; and what a second core brings.

    python -m benchmarks.footprint [--repeats 5] [--only tasks,start,memory,workers] [--json FILE]

tasks: CPU-milliseconds of a site's part in a round of the null workload (see benchmarks.overhead), and how much of
that the bare loop does not need. start: CPU-seconds of `python -m polyclinic --version` and of a minimal run up to its
first round, imports included, and the heaviest imports. memory: the peak of resident memory (VmHWM) of a process that
plays workload A, as a user starts it, with its folder and its result, against a process that imports nothing but torch
and trains the same network on the same images in a bare loop. workers: wall-clock seconds of the rounds of workload A
with one worker process and with two (on quiet cores).
Every measurement has a process of its own, sides in turn; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BARS = {
    "ms per task above bare": 0.5,
    "start of a run, CPU-s": 4.0,
    "peak memory, of bare": 1.1,
    "two workers, times one": 1.8,
}
CLIENTS, IMAGES, COHORT, BATCH, ROUNDS, LR = 100, 200, 10, 32, 3, 0.05
MINIMAL = """
import time
import polyclinic
loaded = time.process_time()
class Begun(Exception): pass
def watch(event, fields):
    if event == "round": raise Begun
data = {"name": "digits", "partition": {"by": "iid", "sites": 3}}
values = {"name": "minimal", "rounds": 1, "data": data, "model": "linear", "algorithm": "fedavg"}
recipe = polyclinic.Recipe.from_values(values)
try: polyclinic.run(recipe, watch=watch)
except Begun: print(loaded, time.process_time())
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True)


def side(name: str, *more: str) -> Any:
    """What one side of a comparison prints, in a process of its own."""
    return json.loads(python("-m", "benchmarks.footprint", "--side", ",".join([name, *more])).stdout)


def tasks(repeats: int) -> dict[str, float]:
    from benchmarks.overhead import WORKLOADS, measure

    null = next(work for work in WORKLOADS if work.name == "null")
    row = measure(null, repeats)
    return {
        "ms per task": row["s_per_round"]["ours"] / null.cohort * 1e3,
        "ms per task above bare": row["extra_ms_per_client"],
    }


def start(repeats: int) -> dict[str, float]:
    """CPU-seconds. Imports are loaded once beforehand, so that none waits for the disk."""
    versions, loads, runs = [], [], []
    for _ in range(repeats + 1):
        before = os.times()
        python("-m", "polyclinic", "--version")
        after = os.times()
        versions.append(after.children_user + after.children_system - before.children_user - before.children_system)
        loaded, begun = map(float, python("-c", MINIMAL).stdout.split())
        loads.append(loaded)
        runs.append(begun)
    medians = [statistics.median(values[1:]) for values in (versions, loads, runs)]
    return dict(zip(("--version, CPU-s", "imports of a run, CPU-s", "start of a run, CPU-s"), medians, strict=True))


def heaviest(count: int = 12) -> list[tuple[str, float]]:
    """Modules that import-time says take longest with what they load, ours and the first of each package."""
    found: dict[str, float] = {}
    for line in python("-X", "importtime", "-c", "import polyclinic").stderr.splitlines():
        match = re.match(r"import time:\s+\d+ \|\s+(\d+) \| +(\S+)", line)
        if match and (match[2].startswith("polyclinic.") or "." not in match[2] or match[2].count(".") == 1):
            found[match[2]] = int(match[1]) / 1e6
    return sorted(found.items(), key=lambda item: -item[1])[:count]


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def images() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    count = CLIENTS * IMAGES
    return (
        torch.rand(count, 1, 28, 28, generator=generator),
        torch.randint(10, (count,), generator=generator),
    )


def memory_of_bare() -> dict[str, int]:
    """Workload A as most people would write it, in a process that knows only torch."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_num_threads(1)
    pictures, labels = images()
    before = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    after = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10)]
    module = nn.Sequential(*before, *after)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for _ in range(ROUNDS):
        total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        for client in torch.randperm(CLIENTS)[:COHORT].tolist():
            module.load_state_dict(weights)
            optimiser = torch.optim.SGD(module.parameters(), LR)
            for index in torch.split(torch.randperm(IMAGES) + client * IMAGES, BATCH):
                optimiser.zero_grad()
                F.cross_entropy(module(pictures[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            for key, tensor in module.state_dict().items():
                total[key] += tensor / COHORT
        weights = total
    return {"rounds": peak_bytes(), "all": peak_bytes()}


def memory_of_ours() -> dict[str, int]:
    """The same through `polyclinic.run`, as a user calls it."""
    import torch

    from polyclinic.config.recipe import Recipe
    from polyclinic.data.examples import Images, Selection, SiteData
    from polyclinic.runs.experiment import FederatedDataset, run

    shared, rows = Images(*images()), torch.arange(CLIENTS * IMAGES).reshape(CLIENTS, IMAGES)
    sites = {
        name: SiteData(name, *(Selection.from_rows(shared, mine) for mine in (own, own[:20], own[20:40])))
        for name, own in ((f"client-{number}", own) for number, own in enumerate(rows))
    }
    seen: dict[str, int] = {}

    def watch(event: str, _: Mapping[str, Any]) -> None:
        if event == "round done":
            seen["rounds"] = peak_bytes()

    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe.from_values(
            {
                "name": "A",
                "rounds": ROUNDS,
                "cohort": COHORT,
                "data": {"name": "digits", "partition": {"by": "iid", "sites": CLIENTS}},
                "model": "small_cnn",
                "algorithm": "fedavg",
                "training": {"batch": BATCH, "optimiser": {"lr": LR}},
            }
        )
        consortium = FederatedDataset(tuple("0123456789"), sites, None, 1, 28)
        run(recipe, Path(folder) / "run", dataset=consortium, watch=watch)
    return {**seen, "all": peak_bytes()}


def memory(repeats: int) -> dict[str, float]:
    taken = [(side("ours"), side("bare")) for _ in range(repeats)]
    ours, rounds, bare = (
        statistics.median(pair[place][part] for pair in taken) / 1e6
        for place, part in ((0, "all"), (0, "rounds"), (1, "all"))
    )
    return {
        "peak of ours, MB": ours,
        "of its rounds alone, MB": rounds,
        "peak of bare, MB": bare,
        "peak memory, of bare": ours / bare,
    }


def wall(workers: int) -> float:
    """Seconds of the rounds of workload A, after a round to warm up."""
    from dataclasses import replace

    from benchmarks.overhead import WORKLOADS, clients, federated

    work = replace(next(work for work in WORKLOADS if work.name == "A"), rounds=ROUNDS + 1)
    begun: list[float] = []

    def watch(event: str, _: Mapping[str, Any]) -> None:
        if event in ("round", "round done"):
            begun.append(time.perf_counter())

    federated(work, clients(work), workers=workers, watch=watch)()
    return begun[-1] - begun[2]


def workers(repeats: int) -> dict[str, float]:
    taken = [(side("workers", "1"), side("workers", "2")) for _ in range(repeats)]
    return {
        "one worker, s": statistics.median(one for one, _ in taken),
        "two workers, s": statistics.median(two for _, two in taken),
        "two workers, times one": statistics.median(one / two for one, two in taken),
    }


SIDES = {"ours": memory_of_ours, "bare": memory_of_bare, "workers": lambda number: wall(int(number))}
PARTS = {"tasks": tasks, "start": start, "memory": memory, "workers": workers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.side:
        name, *more = given.side.split(",")
        print(json.dumps(SIDES[name](*more)))  # type: ignore[operator]
        return
    figures: dict[str, float] = {}
    for part in given.only.split(","):
        found = PARTS[part](given.repeats)
        for name, value in found.items():
            print(f"{name:<28}{value:>10.3f}{f'bar {BARS[name]}' if name in BARS else '':>10}", flush=True)
        figures |= found
    imports = heaviest() if "start" in given.only else []
    for module, seconds in imports:
        print(f"  import {module:<40}{seconds:>8.3f} s")
    if given.json:
        given.json.write_text(json.dumps({"figures": figures, "bars": BARS, "imports": imports}, indent=2) + "\n")


if __name__ == "__main__":
    main()
