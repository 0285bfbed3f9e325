"""The work every side does, in numpy and torch alone, so that no peer's environment needs polyclinic.

    python -m benchmarks.peers.workload prepare A FOLDER     (writes the images)
    python -m benchmarks.peers.workload judge A FOLDER       (prints how far the weights moved, and the loss)

A side is `python -m benchmarks.peers.NAME --workload A --rounds 10 --folder FOLDER [--tuned]`. It maps the images from
FOLDER, plays the rounds, calls `report` with the number of rounds that are over, and leaves its weights with `keep`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LR = 0.05
CLASSES = 10
MARKS = "POLYCLINIC_PEERS_MARKS"
"""Names the pipe on which `report` tells the measuring process that rounds are over."""


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


WORKLOADS = {
    work.name: work
    for work in (
        Workload("A", "small", 100, 200, 28, 10, 32, 10),
        Workload("B", "small", 50, 600, 28, 5, 64, 10),
        Workload("enh", "enh", 100, 200, 28, 10, 32, 10),
        Workload("null", "mlp", 100, 8, 4, 10, 32, 30),
    )
}


@dataclass(frozen=True)
class Task:
    """What a side is asked to do."""

    work: Workload
    rounds: int
    folder: Path
    tuned: bool

    def arguments(self) -> list[str]:
        given = ["--workload", self.work.name, "--rounds", str(self.rounds), "--folder", str(self.folder)]
        return [*given, "--tuned"] if self.tuned else given


def asked(arguments: list[str] | None = None) -> Task:
    """The task on the command line. Also: one thread, and in a tuned run freed memory is kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tuned", action="store_true")
    options = parser.parse_args(arguments)
    task = Task(WORKLOADS[options.workload], options.rounds, options.folder.resolve(), options.tuned)
    settle(task)
    return task


def settle(task: Task) -> None:
    """The settings of a process: to be called in every one that trains."""
    torch.set_num_threads(1)
    if task.tuned:
        keep_freed_memory()


def keep_freed_memory() -> None:
    """The three settings of polyclinic's local engine: glibc keeps freed activations for the next step."""
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    libc = ctypes.CDLL(None)
    for option, size in ((mmap_threshold, 32 << 20), (trim_threshold, 512 << 20), (top_pad, 64 << 20)):
        libc.mallopt(option, size)


class Network(nn.Module):
    """Runs on images in the layout of its weights, torch's usual one or channels last; always begins with the same."""

    channels_last = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

    def forward(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        logits: Tensor = self.logits(images.contiguous(memory_format=layout))
        return logits

    def logits(self, images: Tensor) -> Tensor:
        raise NotImplementedError


class Small(Network):
    """polyclinic's small_cnn: convolutions of 32 and 64 filters, 128 dense units."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.dense = nn.Linear(64 * (size // 4) ** 2, 128)
        self.head = nn.Linear(128, CLASSES)

    def logits(self, images: Tensor) -> Tensor:
        early = F.max_pool2d(F.relu(self.conv1(images)), 2)
        late = F.max_pool2d(F.relu(self.conv2(early)), 2)
        logits: Tensor = self.head(F.relu(self.dense(late.flatten(1))))
        return logits


class Enhanced(Network):
    """polyclinic's groupnorm_cnn without dropout: three convolutions with GroupNorm, and a skip."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.block1, self.block2, self.block3 = _block(1, 32), _block(32, 64), _block(64, 128)
        self.skip = nn.Conv2d(32, 128, 1)
        self.dense = nn.Linear(128 * (size // 8) ** 2, 256)
        self.head = nn.Linear(256, CLASSES)

    def logits(self, images: Tensor) -> Tensor:
        early = self.block1(images)
        late = F.max_pool2d(self.block3(F.max_pool2d(self.block2(F.max_pool2d(early, 2)), 2)), 2)
        short = self.skip(early)
        for _ in range(3):
            short = F.max_pool2d(short, 2)
        logits: Tensor = self.head(F.relu(self.dense((late + short).flatten(1))))
        return logits


class Dense(Network):
    """polyclinic's mlp: one hidden layer of 64 units."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(size**2, 64)
        self.head = nn.Linear(64, CLASSES)

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.dense(images.flatten(1))))
        return logits


def _block(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU())


NETWORKS: dict[str, type[Small | Enhanced | Dense]] = {"small": Small, "enh": Enhanced, "mlp": Dense}


def network(work: Workload, tuned: bool = False) -> Network:
    """The workload's network; in a tuned run with channels last."""
    module = NETWORKS[work.model](work.size)
    if tuned and work.model != "mlp":
        module.channels_last = True
        module.to(memory_format=torch.channels_last)
    return module


@lru_cache
def own_network(work: Workload, tuned: bool) -> Network:
    """One network for all clients that a process serves: building one for every task would be wasteful."""
    return network(work, tuned)


def train(module: nn.Module, client: tuple[Tensor, Tensor], batch: int) -> None:
    """One epoch of SGD, as most people write it: the step of every side that lets its user write it."""
    images, labels = client
    module.train()
    optimiser = torch.optim.SGD(module.parameters(), LR)
    for index in torch.split(torch.randperm(len(labels)), batch):
        optimiser.zero_grad()
        F.cross_entropy(module(images[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def prepare(work: Workload, folder: Path) -> None:
    """Every class has a pattern of its own; an image is its class's pattern under as much noise."""
    generator = np.random.default_rng(0)
    count = work.clients * work.images
    patterns = generator.standard_normal((CLASSES, 1, work.size, work.size), dtype=np.float32)
    labels = generator.integers(CLASSES, size=count)
    images = generator.standard_normal((count, 1, work.size, work.size), dtype=np.float32)
    images += patterns[labels]
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)


@lru_cache
def clients(work: Workload, folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Every client's images and labels, mapped from the files: nobody pays for a copy."""
    images, labels = (torch.from_numpy(np.load(folder / f"{part}.npy", mmap_mode="c")) for part in ("images", "labels"))
    return list(zip(torch.split(images, work.images), torch.split(labels, work.images), strict=True))


def report(rounds: int) -> None:
    """Tell the measuring process that so many rounds are over."""
    with open(os.environ[MARKS], "w") as pipe:
        pipe.write(f"{rounds}\n")


def keep(weights: Iterable[Tensor | np.ndarray], folder: Path) -> None:
    """Leave the final weights, in the order of the network's parameters, to be judged."""
    arrays = [w.detach().numpy() if isinstance(w, Tensor) else w for w in weights]
    np.savez(folder / "weights.npz", *arrays)


def judge(work: Workload, folder: Path) -> dict[str, float]:
    """The loss on 1,000 images before and after, and how far the weights moved."""
    torch.set_num_threads(1)
    images, labels = (torch.cat(parts)[:1000] for parts in zip(*clients(work, folder)[:125], strict=True))
    module = network(work).eval()
    before = _loss(module, images, labels)
    with np.load(folder / "weights.npz") as stored, torch.no_grad():
        arrays = [torch.from_numpy(stored[name]) for name in stored.files]
        squares = 0.0
        for parameter, array in zip(module.parameters(), arrays, strict=True):
            squares += float((array.reshape(parameter.shape) - parameter).square().sum())
            parameter.copy_(array.reshape(parameter.shape))
    return {"loss_before": before, "loss_after": _loss(module, images, labels), "moved": squares**0.5}


def _loss(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(module(images), labels))


if __name__ == "__main__":
    deed, name, where = sys.argv[1:]
    if deed == "prepare":
        prepare(WORKLOADS[name], Path(where))
    else:
        print(json.dumps(judge(WORKLOADS[name], Path(where))))
