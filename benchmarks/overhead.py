"""What a round costs beside a bare PyTorch loop that takes the same steps.

    python -m benchmarks.overhead [--repeats 7] [--workloads A,B,enh,null] [--json FILE]

Workload A: 100 clients × 200 images 1×28×28, 10 a round, batch 32, one epoch SGD, small CNN (conv 32, conv 64, fc 128).
Workload B: 50 × 600, 5 a round, batch 64. enh: A with the GroupNorm CNN. Null: a tiny MLP, 8 images a client, 10 a
round. Ours includes messages both ways, validation, ledger, metrics and a snapshot every round; no side evaluates.
CPU-seconds, one thread, each measurement in a forked process that makes its own data (what malloc learned elsewhere
would help the bare loop), sides in turn, the order swapped each time; medians.
"bare" is the loop as most people write it; "tuned" the same loop with our engine's memory setting (freed memory is
kept); "floor" that with channels_last too: all that ours does to the arithmetic, and none of its bookkeeping.
So `ratio` says what a user sees, `to floor` and `extra` what our bookkeeping costs. `float64` is the largest
difference, relative to the largest weight, between ours and the bare loop after the same batches in double precision.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.jobs import Federation
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, Tensors
from polyclinic.data.examples import Images, SiteData
from polyclinic.federation.engines.local import keep_freed_memory
from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.rounds import Rounds, Watch, draw_cohort
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.runs.engines.choice import make_engine
from polyclinic.storage.journal import FolderJournal
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.data_order import iterate_steps
from polyclinic.training.network import LiveNetwork, copy_module_weights

Draw = Callable[[str, int, Tensor], Iterable[Tensor]]
"""(client, round, labels) -> the batches of one epoch."""
Side = Callable[[dict[str, SiteData]], Callable[[], Any]]
"""The clients' data -> a run."""


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
    bar: float | None
    """The most of the bare loop's CPU-seconds that a round may take."""
    precise: float | None = None
    """The same for training in bfloat16."""


WORKLOADS = (
    Workload("A", "small_cnn", 100, 200, 28, 10, 32, 2, 0.62, 0.42),
    Workload("B", "small_cnn", 50, 600, 28, 5, 64, 2, 0.62, 0.42),
    Workload("enh", "groupnorm_cnn", 100, 200, 28, 10, 32, 1, 0.55, 0.5),
    Workload("null", "mlp", 100, 8, 4, 10, 32, 50, None),
)
LR = 0.05
EXACT = 1e-12
"""Double precision leaves about 1e-16 a step; anything near this would be another algorithm."""


def clients(work: Workload, dtype: torch.dtype = torch.float32) -> dict[str, SiteData]:
    generator = torch.Generator().manual_seed(0)
    sites = {}
    for number in range(work.clients):
        images = torch.rand(work.images, 1, work.size, work.size, generator=generator).to(dtype)
        labels = torch.randint(10, (work.images,), generator=generator)
        sites[f"client-{number}"] = SiteData(f"client-{number}", *(Images(images, labels) for _ in range(3)))
    return sites


def network(work: Workload, dtype: torch.dtype = torch.float32) -> Classifier:
    return build_model(work.model, classes=10, channels=1, size=work.size, dropout=0.0, seed=Stream(0)).to(dtype)


def training(work: Workload, **options: Any) -> Training:
    return Training(Optimiser("sgd", LR), batch=work.batch, **options)


def ours(
    work: Workload, sites: dict[str, SiteData], dtype: torch.dtype = torch.float32, **options: Any
) -> Callable[[], Bundle]:
    """`work.rounds` rounds of FedAvg through the round loop, the messages, the ledger and snapshots."""
    return federated(work, sites, dtype, training(work, **options))


def federated(
    work: Workload,
    sites: dict[str, SiteData],
    dtype: torch.dtype = torch.float32,
    wanted: Training | None = None,
    workers: int = 0,
    watch: Watch = lambda *_: None,
) -> Callable[[], Bundle]:
    algorithm = FedAvg(wanted or training(work))
    module = network(work, dtype)
    live = LiveNetwork(module)
    runners = {name: SiteRunner(name, site, algorithm, live, RamMemory()) for name, site in sites.items()}
    federation = Federation(
        tuple("0123456789"), {n: len(s.train) for n, s in sites.items()}, copy_module_weights(module)
    )
    rules = RoundOptions(rounds=work.rounds, cohort=work.cohort, evaluate_every=0)

    def play() -> Bundle:
        engine = make_engine("local", runners, workers, 1)
        with tempfile.TemporaryDirectory() as folder, closing(engine):
            return Rounds(federation, algorithm, engine, rules, FolderJournal(Path(folder)), watch).play_all().state

    return play


def any_order(work: Workload) -> Draw:
    return lambda _name, _round, labels: torch.split(torch.randperm(len(labels)), work.batch)


def our_order(work: Workload) -> Draw:
    """The very batches that `ours` takes."""

    def draw(name: str, round: int, labels: Tensor) -> Iterable[Tensor]:
        steps = iterate_steps(labels, training(work), Stream(RoundOptions(rounds=1).seed, ("site", name)), round, False)
        return [index for _, micro in steps for index in micro]

    return draw


def bare(work: Workload, sites: dict[str, SiteData], module: Classifier, draw: Draw) -> Callable[[], Tensors]:
    """The same steps as most people would write them: load, train, add up, divide."""
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    rules = RoundOptions(rounds=work.rounds, cohort=work.cohort)

    def play() -> Tensors:
        weights = start
        for number in range(work.rounds):
            total = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            cohort = draw_cohort(list(sites), rules, number + 1)
            for name in cohort:
                images, labels = sites[name].train.batch(torch.arange(work.images))
                module.load_state_dict(weights)
                module.train()
                optimiser = torch.optim.SGD(module.parameters(), LR)
                for index in draw(name, number + 1, labels):
                    optimiser.zero_grad()
                    F.cross_entropy(module(images[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
                for key, tensor in module.state_dict().items():
                    if tensor.is_floating_point():
                        total[key] += tensor / len(cohort)
            weights = total
        return weights

    return play


def tuned(play: Callable[[], Tensors]) -> Callable[[], Tensors]:
    """The same with our engine's memory setting."""

    def kept() -> Tensors:
        keep_freed_memory()
        return play()

    return kept


def floor(work: Workload, sites: dict[str, SiteData]) -> Callable[[], Tensors]:
    """The bare loop with our memory setting and, where there are convolutions, with channels last."""
    laid_out = {
        name: SiteData(name, *[replace(site.train, images=_channels_last(site.train))] * 3)
        for name, site in sites.items()
        if isinstance(site.train, Images)
    }
    module = network(work)
    convolves = any(isinstance(layer, torch.nn.Conv2d) for layer in module.modules())
    module = module.to(memory_format=torch.channels_last) if convolves else module
    return tuned(bare(work, laid_out, module, any_order(work)))


def _channels_last(examples: Images) -> Tensor:
    laid: Tensor = examples.images.contiguous(memory_format=torch.channels_last)
    return laid


def forked(deed: Callable[[], float]) -> float:
    """What the deed gives in a process of its own: no side inherits another's memory settings."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, f"{deed()}".encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        found = float(pipe.read())
    os.waitpid(child, 0)
    return found


def cpu_seconds(work: Workload, side: Side) -> float:
    """CPU-seconds of one run after a warm-up."""
    play = side(clients(work))
    play()
    begun = time.process_time()
    play()
    return time.process_time() - begun


def difference(work: Workload) -> float:
    """Ours and the bare loop after the same batches, in double precision: relative to the largest weight."""
    work = replace(work, rounds=min(work.rounds, 2), cohort=min(work.cohort, 3), images=min(work.images, 100))
    sites = clients(work, torch.float64)
    state = ours(work, sites, torch.float64)()
    found = {**state["model"], **state["buffers"]}
    wanted = bare(work, sites, network(work, torch.float64), our_order(work))()
    floats = {name: tensor for name, tensor in wanted.items() if tensor.is_floating_point()}
    largest = max(float(tensor.abs().max()) for tensor in floats.values())
    return max(float((found[name] - tensor).abs().max()) for name, tensor in floats.items()) / largest


def sides_of(work: Workload) -> dict[str, Side]:
    sides: dict[str, Side] = {
        "ours": lambda sites: ours(work, sites),
        "bare": lambda sites: bare(work, sites, network(work), any_order(work)),
        "tuned": lambda sites: tuned(bare(work, sites, network(work), any_order(work))),
        "floor": lambda sites: floor(work, sites),
    }
    if hasattr(Training(), "precision") and work.precise is not None:
        sides["bfloat16"] = lambda sites: ours(work, sites, precision="bfloat16")
    return sides


def measure(work: Workload, repeats: int) -> dict[str, Any]:
    sides = sides_of(work)
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(repeats):
        for side, make in sorted(sides.items(), reverse=number % 2 == 1):
            taken[side].append(forked(partial(cpu_seconds, work, make)) / work.rounds)

    def ratio(side: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(taken[side], taken[other], strict=True))

    extra = statistics.median(a - b for a, b in zip(taken["ours"], taken["floor"], strict=True))
    return {
        "workload": work.name,
        "s_per_round": {side: statistics.median(values) for side, values in taken.items()},
        "ratio": ratio("ours", "bare"),
        "bar": work.bar,
        "ratio_to_tuned": ratio("ours", "tuned"),
        "ratio_to_floor": ratio("ours", "floor"),
        "floor_ratio": ratio("floor", "bare"),
        "bfloat16_ratio": ratio("bfloat16", "bare") if "bfloat16" in taken else None,
        "bfloat16_bar": work.precise,
        "extra_ms_per_client": extra / work.cohort * 1e3,
        "float64_difference": forked(lambda: difference(work)),
        "repeats": repeats,
    }


def show(rows: list[dict[str, Any]]) -> None:
    sides = ("ours", "bare", "tuned", "floor", "bfloat16")
    header = "".join(f"{side:>9}" for side in sides)
    print(f"{'s/round':<8}{header}{'ratio':>8}{'bar':>6}{'to floor':>9}{'extra ms':>9}{'float64':>9}")
    for row in rows:
        seconds = "".join(_cell(row["s_per_round"].get(side), 9, 4) for side in sides)
        ratios = f"{row['ratio']:>8.3f}{_cell(row['bar'], 6, 2)}{row['ratio_to_floor']:>9.3f}"
        print(
            f"{row['workload']:<8}{seconds}{ratios}{row['extra_ms_per_client']:>9.3f}{row['float64_difference']:>9.0e}"
        )
    for row in rows:
        if row["bfloat16_ratio"] is not None:
            print(f"{row['workload']}: bfloat16 {row['bfloat16_ratio']:.3f} x bare (bar {row['bfloat16_bar']})")
        if row["float64_difference"] > EXACT:
            raise SystemExit(f"{row['workload']}: ours and the bare loop differ by {row['float64_difference']:.1e}")


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workloads", default=",".join(work.name for work in WORKLOADS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = options.workloads.split(",")
    rows = [measure(work, options.repeats) for work in WORKLOADS if work.name in wanted]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
