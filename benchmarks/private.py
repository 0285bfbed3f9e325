"""What privacy costs in time and memory: DP-SGD steps against a plain loop and against Opacus.

    python -m benchmarks.private [--repeats 9] [--device cpu] [--json FILE] [--noise]

cpu:  small CNN and GroupNorm CNN, images 1×28×28, batch 64, SGD, one thread. Ways take turns in one process, all with
      the engines' memory settings; examples a CPU-second, medians. Memory: what steps add at most to their process.
cuda: GroupNorm CNN, 5 sites × batch 64, 100 steps. Opacus' hooks for one site after another; ours stacked, compiled and
      not, batches of 64 as Opacus' here, or Poisson; the same stack without privacy. Examples a second, medians.
noise: private steps with the noise of the cipher against the same steps with that of a fast generator (SFC64 on the
      CPU, torch's Philox on a GPU), taking turns; CPU time on the CPU; on a GPU five sites stacked, too. Networks of 5
      thousand to 3.5 million weights; a step of the perceptrons is the cheapest, so that noise weighs most there.

Every private way clips to 1 and draws noise of 1. Opacus (hooks: GradSampleModule; ghost: fast gradient clipping) is
called as its documentation does, without its data loader.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from polyclinic.core.jobs import Fit, Site
from polyclinic.core.options import Optimiser, Private, Training
from polyclinic.core.rng import Stream
from polyclinic.data.examples import Images, Selection
from polyclinic.federation.engines.local import keep_freed_memory
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.models.modifications import replace_batch_norm
from polyclinic.training.dp import secure_random
from polyclinic.training.fit import fit
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from polyclinic.training.stacked.batching import StackMember
from polyclinic.training.stacked.fit import fit_stacked

LR, BATCH, STEPS, SITES = 0.05, 64, 10, 5
CLIP, NOISE = 1.0, 1.0
EACH, LONG = BATCH * STEPS, 100
MODELS = ("small_cnn", "groupnorm_cnn")
Deed = Callable[[], Any]
Row = dict[str, Any]


def network(model: str) -> Classifier:
    return build_model(model, classes=10, channels=1, size=28, dropout=0.0, seed=Stream(0))


def pool(count: int) -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 1, 28, 28, generator=generator)
    return Images(images, torch.randint(10, (count,), generator=generator))


def looped(module: torch.nn.Module, optimiser: torch.optim.Optimizer, data: Images) -> Deed:
    def steps() -> None:
        for index in torch.split(torch.randperm(len(data), device=data.labels.device), BATCH):
            optimiser.zero_grad()
            F.cross_entropy(module(data.images[index]), data.labels[index]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return steps


def plain(model: str, data: Images) -> Deed:
    """A loop as most people write it."""
    module = network(model).to(data.images.device)
    optimiser = torch.optim.SGD(module.parameters(), LR)

    return looped(module, optimiser, data)


def hooks(model: str, data: Images) -> Deed:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    module = GradSampleModule(network(model).to(data.images.device))
    inner = torch.optim.SGD(module.parameters(), LR)
    optimiser = DPOptimizer(inner, noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=BATCH)

    return looped(module, optimiser, data)


def ghost(model: str, data: Images) -> Deed:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    module = GradSampleModuleFastGradientClipping(network(model), max_grad_norm=CLIP, use_ghost_clipping=True)
    inner = torch.optim.SGD(module.parameters(), LR)
    optimiser = DPOptimizerFastGradientClipping(
        inner, noise_multiplier=NOISE, max_grad_norm=CLIP, expected_batch_size=BATCH
    )
    criterion = DPLossFastGradientClipping(module, optimiser, torch.nn.CrossEntropyLoss())

    def steps() -> None:
        for index in torch.split(torch.randperm(len(data)), BATCH):
            optimiser.zero_grad()
            criterion(module(data.images[index]), data.labels[index]).backward()
            optimiser.step()

    return steps


def ours(model: str, data: Images, private: Private | None = Private(CLIP, NOISE, "shuffle")) -> Deed:  # noqa: B008
    live = LiveNetwork(network(model), data.images.device)
    job = Fit(copy_module_weights(live.module), task_loss, Training(Optimiser("sgd", LR), BATCH, private=private))
    site = Site("a", len(data), 1, 1, LR)
    return lambda: fit(job, live, data, site, Stream(0), Stream(1))


WAYS: dict[str, Callable[[str, Images], Deed]] = {
    "plain SGD": plain,
    "Opacus hooks": hooks,
    "Opacus ghost": ghost,
    "ours": ours,
    "ours without privacy": lambda model, data: ours(model, data, None),
}


def figure(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def added(model: str, way: str) -> float:
    """MiB by which steps raise this process's memory at most."""
    WAYS[way](model, pool(2))()  # whatever is loaded at the first step of all
    steps = WAYS[way](model, pool(EACH))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = figure("VmRSS")
    steps()
    return (figure("VmHWM") - before) / 2**20


def memory(model: str, way: str) -> float:
    """The same, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.private", "--memory", model, way]
    alone = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}  # tensors are mapped, and given back, one by one
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=alone).stdout)


def cpu(repeats: int) -> list[Row]:
    found: list[Row] = []
    for model in MODELS:
        data = pool(EACH)
        deeds = {name: make(model, data) for name, make in WAYS.items()}
        taken: dict[str, list[float]] = {name: [] for name in deeds}
        for number in range(repeats + 1):
            for name, deed in deeds.items():
                began = time.process_time()
                deed()
                taken[name] += [time.process_time() - began] if number else []
        rates = {name: EACH / statistics.median(seconds) for name, seconds in taken.items()}
        for name, rate in rates.items():
            row = {"model": model, "way": name, "examples_per_s": rate, "ours_over_it": rates["ours"] / rate}
            found.append(row | {"added_mib": memory(model, name)})
            print(
                f"{model:15}{name:22}{rate:9.0f} examples a CPU-second; ours {rates['ours'] / rate:5.2f} ×;"
                f"{found[-1]['added_mib']:7.0f} MiB",
                flush=True,
            )
    return found


def stack(device: torch.device, each: int, private: Private | None, compiled: bool) -> Deed:
    shared = pool(SITES * each).to(device)
    live = LiveNetwork(network("groupnorm_cnn"), device)
    job = Fit(copy_module_weights(live.module), task_loss, Training(Optimiser("sgd", LR), BATCH, private=private))
    parts = [Selection.from_rows(shared, torch.arange(n * each, (n + 1) * each)) for n in range(SITES)]
    seats = [
        StackMember(job, part, Site(str(n), each, 1, 1, LR), Stream(n), Stream(n, ("secret",)))
        for n, part in enumerate(parts)
    ]
    return lambda: fit_stacked(seats, live, compiled)


def cuda(device: torch.device, repeats: int) -> list[Row]:
    each = BATCH * LONG
    fixed, drawn = Private(CLIP, NOISE, "shuffle"), Private(CLIP, NOISE)
    data = pool(each).to(device)
    deeds: dict[str, tuple[Deed, int]] = {
        "Opacus hooks, one site": (hooks("groupnorm_cnn", data), each),
        "ours, one site": (ours("groupnorm_cnn", data, fixed), each),
        "stacked": (stack(device, each, fixed, False), SITES * each),
        "stacked, compiled": (stack(device, each, fixed, True), SITES * each),
        "stacked, compiled, Poisson": (stack(device, each, drawn, True), SITES * each),
        "stacked without privacy, compiled": (stack(device, each, None, True), SITES * each),
    }
    found = []
    for name, (deed, examples) in deeds.items():
        taken = []
        for number in range(repeats + 2):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            deed()
            torch.cuda.synchronize(device)
            taken += [time.perf_counter() - began] if number > 1 else []
        found.append({"way": name, "examples_per_s": examples / statistics.median(taken)})
        print(f"{name:36}{found[-1]['examples_per_s']:10.0f} examples a second", flush=True)
    return found


NOISED: dict[str, tuple[str, int, int, int]] = {
    "mlp, 5 thousand": ("mlp", 1, 8, 10),
    "cnn_c, 33 thousand": ("cnn_c", 1, 28, 10),
    "mlp, 1.0 million": ("mlp", 3, 72, 10),
    "groupnorm_cnn, 0.6 million": ("groupnorm_cnn", 1, 28, 10),
    "mlp, 3.5 million": ("mlp", 3, 135, 10),
    "mobilenet_v2, 3.5 million": ("mobilenet_v2", 3, 32, 1000),
}
"""Model, channels, size and classes."""


def former_normals(streams: list[Stream], size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers of a fast generator, not a cipher."""

    def draw(stream: Stream) -> torch.Tensor:
        if device.type == "cuda":
            generator = torch.Generator(device).manual_seed(stream.integer())
            return torch.randn(size, generator=generator, device=device, dtype=dtype)
        entropy = np.random.SeedSequence([stream.child("entropy", part).integer() for part in range(4)])
        drawn = np.random.Generator(np.random.SFC64(entropy)).standard_normal(size, np.float32)
        return torch.from_numpy(drawn).to(dtype)

    return torch.stack([draw(stream) for stream in streams])


def noised(name: str, device: torch.device, sites: int, batch: int = 16) -> tuple[Deed, int]:
    """Four private steps of one site, or of several as a stack; and the number of weights."""
    model, channels, size, classes = NOISED[name]
    module = build_model(model, classes=classes, channels=channels, size=size, dropout=0.0, seed=Stream(0))
    live = LiveNetwork(replace_batch_norm(module), device)
    private = Private(CLIP, NOISE, "shuffle")
    job = Fit(copy_module_weights(live.module), task_loss, Training(Optimiser("sgd", LR), batch, private=private))
    count = 4 * batch * sites
    data = Images(torch.rand(count, channels, size, size), torch.randint(classes, (count,))).to(device)
    weights = sum(t.numel() for t in live.live["model"].values())
    if sites == 1:
        return lambda: fit(job, live, data, Site("a", count, 1, 1, LR), Stream(0), Stream(1)), weights
    parts = [Selection.from_rows(data, torch.arange(n * 4 * batch, (n + 1) * 4 * batch)) for n in range(sites)]
    seats = [
        StackMember(job, part, Site(str(n), 4 * batch, 1, 1, LR), Stream(n), Stream(n, ("secret",)))
        for n, part in enumerate(parts)
    ]
    return lambda: fit_stacked(seats, live), weights


def noise_cost(device: torch.device, repeats: int) -> list[Row]:
    """What a private step with the cipher's noise takes, in units of one with a fast generator's."""
    found: list[Row] = []
    ways = {"cipher": secure_random.draw_normals, "fast generator": former_normals}
    for name in NOISED:
        for sites in (1, SITES) if device.type == "cuda" else (1,):
            deed, weights = noised(name, device, sites)
            taken: dict[str, list[float]] = {way: [] for way in ways}
            times, clock = max(1, 400_000 // weights), time.process_time if device.type == "cpu" else time.perf_counter
            for number in range(repeats + 1):
                for way, draw in ways.items():
                    secure_random.draw_normals = draw  # type: ignore[assignment]
                    _wait_for(device)
                    began = clock()
                    for _ in range(times):
                        deed()
                    _wait_for(device)
                    taken[way] += [(clock() - began) / times] if number else []
            ratios = [a / b for a, b in zip(*taken.values(), strict=True)]
            step = {way: statistics.median(seconds) / 4 * 1000 for way, seconds in taken.items()}
            row = {"network": name, "weights": weights, "sites": sites, "ratio": statistics.median(ratios)}
            found.append(row | {f"{way}_ms_per_step": value for way, value in step.items()})
            print(
                f"{name:28}{weights:10,} weights, {sites} site(s): a step takes {step['cipher']:8.2f} ms, with a fast "
                f"generator {step['fast generator']:8.2f} ms; ratio {row['ratio']:.3f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
    return found


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", nargs=2, metavar=("MODEL", "WAY"), help="print what a way's steps add, in MiB")
    parser.add_argument("--noise", action="store_true", help="measure what the cipher's noise costs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus' hooks warn at every step
    torch.set_num_threads(1)
    if options.memory:
        print(added(*options.memory))
        return
    keep_freed_memory()
    device = torch.device(options.device)
    if options.noise:
        rows = noise_cost(device, options.repeats)
    else:
        rows = cpu(options.repeats) if device.type == "cpu" else cuda(device, options.repeats)
    if options.json:
        report = {"torch": torch.__version__, "device": options.device, "batch": BATCH, "ways": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
