"""What the local engine costs beyond a bare PyTorch loop that takes the same steps.

    python -m benchmarks.overhead [--repeats 7] [--json FILE]

Workload A: 100 clients × 200 images 1×28×28, 10 a round, batch 32, one epoch SGD, small CNN (conv 32, conv 64, fc 128).
Workload B: 50 × 600, 5 a round, batch 64. Null: a tiny MLP, 8 images a client, 10 clients a round.
Ours includes the wire both ways, validation, ledger, metrics and a snapshot every round; neither side evaluates.
CPU-seconds, one thread, each measurement in a forked process, sides in turn, the order swapped each time; medians.
"bare" is the loop as most people write it; "tuned" the same loop with our engine's memory setting (freed memory is
kept). So `ratio` says what a user sees, `to tuned` and `extra` what our bookkeeping costs.
"""

from __future__ import annotations

import argparse
import json
import os
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
from polyclinic.engines.local import LocalEngine, keep_freed_memory
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


def bare_tuned(work: Workload, sites: dict[str, SiteData]) -> Callable[[], None]:
    """The bare loop with our engine's memory setting: what is left of the ratio is our overhead."""
    play = bare(work, sites)

    def tuned() -> None:
        keep_freed_memory()
        play()

    return tuned


def cpu_seconds(play: Callable[[], None]) -> float:
    """CPU-seconds of one run after a warm-up, in a forked process: no side inherits another's memory settings."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        play()
        begun = time.process_time()
        play()
        os.write(writer, f"{time.process_time() - begun}".encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        seconds = float(pipe.read())
    os.wait()
    return seconds


def measure(work: Workload, repeats: int) -> dict[str, Any]:
    sites = clients(work)
    sides = {"ours": ours(work, sites), "bare": bare(work, sites), "tuned": bare_tuned(work, sites)}
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(repeats):
        for side in sorted(sides, reverse=number % 2 == 1):
            taken[side].append(cpu_seconds(sides[side]) / work.rounds)
    middle = {side: statistics.median(values) for side, values in taken.items()}
    pairs = list(zip(taken["ours"], taken["bare"], taken["tuned"], strict=True))
    return {
        "workload": work.name,
        "ours_s_per_round": middle["ours"],
        "bare_s_per_round": middle["bare"],
        "bare_tuned_s_per_round": middle["tuned"],
        "ratio": statistics.median(a / b for a, b, _ in pairs),
        "ratio_to_tuned": statistics.median(a / c for a, _, c in pairs),
        "extra_ms_per_client": statistics.median((a - c) / work.cohort * 1e3 for a, _, c in pairs),
        "repeats": repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(work, options.repeats) for work in WORKLOADS]
    print(
        f"{'workload':<9}{'ours':>9}{'bare':>9}{'tuned':>9}  s/round{'ratio':>8}{'to tuned':>10}{'extra ms/client':>17}"
    )
    for row in rows:
        seconds = "".join(f"{row[f'{side}_s_per_round']:>9.4f}" for side in ("ours", "bare", "bare_tuned"))
        ratios = f"{row['ratio']:>8.3f}{row['ratio_to_tuned']:>10.3f}{row['extra_ms_per_client']:>17.3f}"
        print(f"{row['workload']:<9}{seconds}{'':>9}{ratios}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
