"""What the local engine costs beyond a bare PyTorch loop that takes the same steps.

    python -m benchmarks.overhead [--repeats 7] [--json FILE]

Workload A: 100 clients × 200 images 1×28×28, 10 a round, batch 32, one epoch SGD, small CNN (conv 32, conv 64, fc 128).
Workload B: 50 × 600, 5 a round, batch 64. Null: a tiny MLP, 8 images a client, 10 clients a round.
Ours includes the wire both ways, validation, ledger, metrics and a snapshot every round; neither side evaluates.
CPU-seconds of the process, one thread, both sides in turn in one process, the order swapped each time; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from polyclinic.algorithms.fedavg import FedAvg
from polyclinic.core import Federation, Optimiser, Stream, Training
from polyclinic.data.examples import Images, SiteData
from polyclinic.engines.local import LocalEngine
from polyclinic.journal import FolderJournal
from polyclinic.learning.network import LiveNetwork, weights_of
from polyclinic.models import Classifier, build
from polyclinic.rounds import Rounds, Rules, draw_cohort
from polyclinic.runner import SiteRunner
from polyclinic.store import RamMemory


@dataclass(frozen=True)
class Workload:
    name: str
    model: str
    clients: int
    images: int
    size: int
    cohort: int
    batch: int
    rounds: int


WORKLOADS = (
    Workload("A", "small_cnn", 100, 200, 28, 10, 32, 2),
    Workload("B", "small_cnn", 50, 600, 28, 5, 64, 2),
    Workload("null", "mlp", 100, 8, 4, 10, 32, 50),
)
LR = 0.05


def clients(work: Workload) -> dict[str, SiteData]:
    generator = torch.Generator().manual_seed(0)
    sites = {}
    for number in range(work.clients):
        images = torch.rand(work.images, 1, work.size, work.size, generator=generator)
        labels = torch.randint(10, (work.images,), generator=generator)
        sites[f"client-{number}"] = SiteData(f"client-{number}", *(Images(images, labels) for _ in range(3)))
    return sites


def network(work: Workload) -> Classifier:
    return build(work.model, classes=10, channels=1, size=work.size, dropout=0.0, seed=Stream(0))


def ours(work: Workload, sites: dict[str, SiteData]) -> Callable[[], None]:
    """`work.rounds` rounds of FedAvg through the round loop, the wire, the ledger and snapshots."""
    algorithm = FedAvg(Training(Optimiser("sgd", LR), batch=work.batch))
    module = network(work)
    live = LiveNetwork(module)
    runners = {name: SiteRunner(name, site, algorithm, live, RamMemory()) for name, site in sites.items()}
    federation = Federation(tuple("0123456789"), {n: len(s.train) for n, s in sites.items()}, weights_of(module))
    rules = Rules(rounds=work.rounds, cohort=work.cohort, evaluate_every=0)

    def play() -> None:
        with tempfile.TemporaryDirectory() as folder:
            Rounds(federation, algorithm, LocalEngine(runners), rules, FolderJournal(Path(folder))).run()

    return play


def bare(work: Workload, sites: dict[str, SiteData]) -> Callable[[], None]:
    """The same steps as most people would write them: load, train, add up, divide."""
    module = network(work)
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    rules = Rules(rounds=work.rounds, cohort=work.cohort)

    def play() -> None:
        weights = start
        for number in range(work.rounds):
            total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            cohort = draw_cohort(list(sites), rules, number + 1)
            for name in cohort:
                images, labels = sites[name].train.batch(torch.arange(work.images))
                module.load_state_dict(weights)
                module.train()
                optimiser = torch.optim.SGD(module.parameters(), LR)
                for index in torch.split(torch.randperm(work.images), work.batch):
                    optimiser.zero_grad()
                    F.cross_entropy(module(images[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
                for key, tensor in module.state_dict().items():
                    total[key] += tensor / len(cohort)
            weights = total

    return play


def cpu_seconds(play: Callable[[], None]) -> float:
    begun = time.process_time()
    play()
    return time.process_time() - begun


def measure(work: Workload, repeats: int) -> dict[str, Any]:
    sites = clients(work)
    sides = {"ours": ours(work, sites), "bare": bare(work, sites)}
    for play in sides.values():
        play()
    taken: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(repeats):
        for side in sorted(sides, reverse=number % 2 == 1):
            taken[side].append(cpu_seconds(sides[side]) / work.rounds)
    ratios = [a / b for a, b in zip(taken["ours"], taken["bare"], strict=True)]
    extra = [(a - b) / work.cohort * 1e3 for a, b in zip(taken["ours"], taken["bare"], strict=True)]
    return {
        "workload": work.name,
        "ours_s_per_round": statistics.median(taken["ours"]),
        "bare_s_per_round": statistics.median(taken["bare"]),
        "ratio": statistics.median(ratios),
        "extra_ms_per_client": statistics.median(extra),
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(work, options.repeats) for work in WORKLOADS]
    print(f"{'workload':<10}{'ours s/round':>14}{'bare s/round':>14}{'ratio':>9}{'extra ms/client':>18}")
    for row in rows:
        figures = f"{row['ours_s_per_round']:>14.4f}{row['bare_s_per_round']:>14.4f}{row['ratio']:>9.3f}"
        print(f"{row['workload']:<10}{figures}{row['extra_ms_per_client']:>18.3f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
