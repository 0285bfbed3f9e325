"""What one GPU does: many small sites as a stack, a large network site by site, and the limits both are compared with.

    python -m benchmarks.gpu [--device cuda] [--only stack,floor,large,memory,equal,feed] [--json FILE] [--small]

stack:  1,000 sites × 200 images 1×28×28, 100 a round, batch 32, one epoch of SGD, GroupNorm CNN: seconds of a round
        through the round loop (validation, ledger, snapshot), compiled and not, in float32 and bfloat16.
floor:  the same FLOPs as ONE network with a batch of 100 × 32, as most people write it, and compiled.
large:  MobileNetV2 at 224², five sites on the local engine, against one plain training loop: images a second.
memory: GPU memory and client-steps a second by the number of sites in a stack.
equal:  every algorithm on both engines in float64: the largest relative difference (law L5).
feed:   images that stay on the host and are fetched ahead, against images on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.jobs import Federation, Fit, Site
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, Precision
from polyclinic.data.examples import Images, Selection, SiteData
from polyclinic.federation.engines.stacked import Compile
from polyclinic.federation.progress import RoundOptions
from polyclinic.federation.rounds import Rounds
from polyclinic.federation.site_runner import SiteRunner
from polyclinic.models import build_model
from polyclinic.runs.engines.choice import make_engine
from polyclinic.storage.journal import FolderJournal
from polyclinic.storage.site_memory import RamMemory
from polyclinic.training.fit import fit
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from polyclinic.training.stacked.batching import StackMember
from polyclinic.training.stacked.fit import fit_stacked

LR = 0.05
Row = dict[str, Any]


class Bench:
    def __init__(self, device: torch.device, small: bool) -> None:
        self.device, self.small = device, small
        self.sites, self.images, self.cohort, self.batch = (20, 40, 10, 32) if small else (1000, 200, 100, 32)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, deed: Callable[[], Any], repeats: int, warm: int = 2) -> float:
        """The median of single runs."""
        taken = []
        for number in range(warm + repeats):
            self.wait()
            began = time.perf_counter()
            deed()
            self.wait()
            taken.append(time.perf_counter() - began)
            if number < warm:
                taken.clear()
        return statistics.median(taken)

    def pool(self, count: int, channels: int, size: int, dtype: torch.dtype = torch.float32) -> Images:
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(count, channels, size, size, generator=generator).to(dtype)
        return Images(images, torch.randint(10, (count,), generator=generator))

    def divided(self, shared: Images, sites: int, each: int) -> dict[str, SiteData]:
        parts = {f"site-{n}": Selection.from_rows(shared, torch.arange(n * each, (n + 1) * each)) for n in range(sites)}
        return {name: SiteData(name, part, part.subset(torch.arange(0)), part) for name, part in parts.items()}

    def rounds(
        self,
        engine: str,
        sites: dict[str, SiteData],
        model: str,
        training: Training,
        rounds: int,
        cohort: int | None,
        compile: Compile = "never",
    ) -> list[float]:
        """Seconds of each round of FedAvg, with messages, validation, ledger and a snapshot every round."""
        first = next(iter(sites.values())).train
        channels, size = first.batch(torch.arange(1))[0].shape[1:3]
        module = build_model(model, classes=10, channels=channels, size=size, dropout=0.0, seed=Stream(0))
        network, algorithm = LiveNetwork(module, self.device), FedAvg(training)
        runners = {name: SiteRunner(name, site, algorithm, network, RamMemory()) for name, site in sites.items()}
        federation = Federation(
            tuple("0123456789"), {n: len(s.train) for n, s in sites.items()}, copy_module_weights(module)
        )
        rules = RoundOptions(rounds=rounds, cohort=cohort, evaluate_every=0)
        taken: list[float] = []

        def watch(event: str, found: Any) -> None:
            if event == "round done":
                taken.append(found["seconds"])

        with tempfile.TemporaryDirectory() as folder:
            driver = make_engine(engine, runners, 0, 1, compile)
            Rounds(federation, algorithm, driver, rules, FolderJournal(Path(folder)), watch).play_all()
        return taken

    def stack(self) -> list[Row]:
        sites = self.divided(self.pool(self.sites * self.images, 1, 28).to(self.device), self.sites, self.images)
        ways: list[tuple[str, Compile, Precision]] = [
            ("local", "never", "float32"),
            ("stacked", "never", "float32"),
            ("stacked", "always", "float32"),
            ("stacked", "always", "bfloat16"),
        ]
        found = []
        for engine, compile, precision in ways:
            training = Training(Optimiser("sgd", LR), batch=self.batch, precision=precision)
            taken = self.rounds(
                engine, sites, "groupnorm_cnn", training, 3 if engine == "local" else 12, self.cohort, compile
            )
            steady = statistics.median(taken[1 if engine == "local" else 4 :])
            found.append({"engine": engine, "compile": compile, "precision": precision, "s_per_round": steady})
            print(
                f"stack   {engine:8}{compile:8}{precision:10}{steady:9.4f} s a round; first {taken[0]:.2f} s",
                flush=True,
            )
        return found

    def seats(self, model: str, sites: int, precision: Precision = "float32") -> tuple[LiveNetwork, list[StackMember]]:
        """Ten steps each, an epoch."""
        module = build_model(model, classes=10, channels=1, size=28, dropout=0.0, seed=Stream(0))
        each = 10 * self.batch
        shared = self.pool(sites * each, 1, 28).to(self.device)
        training = Training(Optimiser("sgd", LR), batch=self.batch, precision=precision)
        job = Fit(copy_module_weights(module.to(self.device)), task_loss, training)
        parts = [Selection.from_rows(shared, torch.arange(n * each, (n + 1) * each)) for n in range(sites)]
        found = [StackMember(job, part, Site(str(n), each, 1, 1, LR), Stream(n)) for n, part in enumerate(parts)]
        return LiveNetwork(module, self.device), found

    def single(self, model: str, count: int, compiled: bool) -> Callable[[], None]:
        """Ten steps of one network with everybody's images in one batch."""
        module = build_model(model, classes=10, channels=1, size=28, dropout=0.0, seed=Stream(0)).to(self.device)
        shared = self.pool(count, 1, 28).to(self.device)
        optimiser = torch.optim.SGD(module.parameters(), LR)

        def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(module(images), labels)

        computed = torch.compile(loss, dynamic=False) if compiled else loss

        def steps() -> None:
            for _ in range(10):
                optimiser.zero_grad()
                computed(shared.images, shared.labels).backward()  # type: ignore[no-untyped-call]
                optimiser.step()

        return steps

    def floor(self) -> list[Row]:
        found = []
        for model in ("groupnorm_cnn", "small_cnn"):
            count = self.cohort
            network, seats = self.seats(model, count)
            ways: dict[str, Callable[[], Any]] = {
                "one network, as most write it": self.single(model, count * self.batch, False),
                "one network, compiled": self.single(model, count * self.batch, True),
                "site by site": lambda: [fit(s.job, network, s.data, s.site, s.stream) for s in seats],  # noqa: B023
                "stacked": lambda: fit_stacked(seats, network),  # noqa: B023
                "stacked, compiled": lambda: fit_stacked(seats, network, True),  # noqa: B023
            }
            for way, deed in ways.items():
                taken = self.seconds(deed, 2 if way == "site by site" else 9)
                found.append({"model": model, "way": way, "client_steps_per_s": 10 * count / taken})
                print(f"floor   {model:15}{way:32}{10 * count / taken:10.0f} client-steps a second", flush=True)
        return found

    def large(self) -> list[Row]:
        each, size, batch = (16, 64, 8) if self.small else (640, 224, 64)
        shared = self.pool(5 * each, 3, size).to(self.device)
        sites = self.divided(shared, 5, each)
        found = []
        for precision in ("float32", "bfloat16"):
            training = Training(Optimiser("sgd", LR), batch=batch, precision=precision)
            for layout in (torch.contiguous_format, torch.channels_last):
                plain = self.plain(shared, batch, layout, precision)
                loop = 5 * each / self.seconds(plain, 3, 1)
                ours = 5 * each / statistics.median(self.rounds("local", sites, "mobilenet_v2", training, 5, None)[2:])
                row = {"precision": precision, "layout": str(layout), "loop": loop, "ours": ours, "share": ours / loop}
                found.append(row)
                print(f"large   {precision:10}{layout!s:26} loop {loop:8.0f}  ours {ours:8.0f} images/s", flush=True)
        return found

    def plain(self, shared: Images, batch: int, layout: torch.memory_format, precision: str) -> Callable[[], None]:
        """An epoch as most people write it, over all images."""
        module = build_model(
            "mobilenet_v2", classes=10, channels=3, size=shared.images.shape[-1], dropout=0.0, seed=Stream(0)
        )
        module = module.to(self.device).to(memory_format=layout)
        optimiser = torch.optim.SGD(module.parameters(), LR)

        def epoch() -> None:
            order = torch.randperm(len(shared), device=self.device)
            for index in torch.split(order, batch):
                images = shared.images[index].contiguous(memory_format=layout)
                optimiser.zero_grad()
                with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                    loss = F.cross_entropy(module(images), shared.labels[index])
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()

        return epoch

    def memory(self) -> list[Row]:
        found = []
        for model in ("mlp", "small_cnn", "groupnorm_cnn"):
            for count in (2, 10) if self.small else (10, 100, 1000):
                network, seats = self.seats(model, count)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                taken = self.seconds(lambda: fit_stacked(seats, network), 3)  # noqa: B023
                peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
                found.append({"model": model, "sites": count, "gib": peak, "client_steps_per_s": 10 * count / taken})
                print(
                    f"memory  {model:15}{count:6} sites {peak:7.2f} GiB {10 * count / taken:9.0f} client-steps/s",
                    flush=True,
                )
        return found

    def equal(self) -> list[Row]:
        shared = self.pool(57, 1, 12, torch.float64).to(self.device)
        sizes, start, sites = (12, 7, 16, 16, 6), 0, {}
        for number, size in enumerate(sizes):
            part = Selection.from_rows(shared, torch.arange(start, start + size))
            sites[f"site-{number}"] = SiteData(f"site-{number}", part, part, part)
            start += size
        found = []
        for name, kind in sorted(ALGORITHMS.items()):
            if kind.pooled:
                continue
            states = [self.state(engine, kind, sites) for engine in ("local", "stacked")]
            apart = max(_apart(states[0][k][n], states[1][k][n]) for k in states[0] for n in states[0][k])
            found.append({"algorithm": name, "largest_difference": apart})
            print(f"equal   {name:15}{apart:10.1e}", flush=True)
        return found

    def state(self, engine: str, kind: Any, sites: dict[str, SiteData]) -> Bundle:
        module = build_model("groupnorm_cnn", classes=10, channels=1, size=12, dropout=0.3, seed=Stream(0)).double()
        algorithm = kind(training=Training(Optimiser("sgd", LR), batch=4, epochs=2))
        network = LiveNetwork(module, self.device)
        runners = {name: SiteRunner(name, site, algorithm, network, RamMemory()) for name, site in sites.items()}
        federation = Federation(
            tuple("0123456789"), {n: len(s.train) for n, s in sites.items()}, copy_module_weights(module)
        )
        with tempfile.TemporaryDirectory() as folder:
            driver = make_engine(engine, runners, 0, 1)
            return (
                Rounds(federation, algorithm, driver, RoundOptions(rounds=2), FolderJournal(Path(folder)))
                .play_all()
                .state
            )

    def feed(self) -> list[Row]:
        each, size, batch = (16, 64, 8) if self.small else (640, 224, 64)
        host = self.pool(5 * each, 3, size)
        stored = Images((host.images * 255).to(torch.uint8), host.labels)
        training, found = Training(Optimiser("sgd", LR), batch=batch, precision="bfloat16"), []
        for where, shared in (("device", stored.to(self.device)), ("host", stored)):
            taken = self.rounds("local", self.divided(shared, 5, each), "mobilenet_v2", training, 5, None)
            found.append({"images": where, "images_per_s": 5 * each / statistics.median(taken[2:])})
            print(f"feed    images on the {where:8}{found[-1]['images_per_s']:9.0f} images/s", flush=True)
        return found


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.numel():
        return 0.0
    one, other = one.double().cpu(), other.double().cpu()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="equal,floor,stack,large,memory,feed")
    parser.add_argument("--small", action="store_true", help="a try that takes little time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench(torch.device(options.device), options.small)
    found: dict[str, Any] = {"torch": torch.__version__, "device": options.device}
    if options.device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name()
    for name in options.only.split(","):
        found[name] = getattr(bench, name)()
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
