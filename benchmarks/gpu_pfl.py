"""pfl-research on the GPU workload: seconds per round for several numbers of worker processes on one GPU.

    python -m benchmarks.gpu_pfl --device cuda --processes 1,2,4,8,12 --rounds 12 [--json FILE]
    python -m benchmarks.gpu_pfl --device cpu --clients 20 --cohort 5 --images 40 --processes 1,2 --rounds 4

Needs torch, numpy and pfl 0.6 only. Clients of 200 images 1×28×28, batch 32, one epoch of SGD, the GroupNorm residual
CNN, weights averaged by images. pfl-research gets what its guide to fast simulation recommends: every client as a
`Dataset` in memory, here on the device itself in every process and already cut into batches; several processes a GPU
by PFL_WORKER_ADDRESSES; no evaluation (it cannot leave out the one in the first round, which is warm-up) and no
printing. It does not shuffle within an epoch; we do.

pfl-research asks for NCCL wherever it sees a GPU, and NCCL refuses two processes on one GPU; its torchrun way takes
device LOCAL_RANK, which one GPU does not have. So several processes join by gloo here (`--backend nccl` shows the
refusal). `--compile MODE` goes beyond what its users get: the network compiled by torch in that mode.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, SIZE, BATCH, LR = 10, 28, 32, 0.05
MIB = 2**20


def block(channels: int, width: int) -> nn.Sequential:
    layers = {"conv": nn.Conv2d(channels, width, 3, padding=1), "norm": nn.GroupNorm(8, width), "relu": nn.ReLU()}
    return nn.Sequential(OrderedDict(layers))


class GroupNormCNN(nn.Module):
    """polyclinic's `groupnorm_cnn` without dropout, copied so that no polyclinic is needed, as pfl wants a network."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3 = block(1, 32), block(32, 64), block(64, 128)
        self.pool = nn.MaxPool2d(2)
        self.skip = nn.Sequential(nn.Conv2d(32, 128, 1), nn.MaxPool2d(2), nn.MaxPool2d(2), nn.MaxPool2d(2))
        self.dense = nn.Linear(128 * (SIZE // 8) ** 2, 256)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        early = self.block1(images)
        late = self.pool(self.block3(self.pool(self.block2(self.pool(early)))))
        logits: Tensor = self.head(torch.relu(self.dense(torch.flatten(late + self.skip(early), 1))))
        return logits

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self(images), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted  # type: ignore[import-not-found]

        return {"loss": Weighted(float(self.loss(images, labels)) * len(labels), len(labels))}


def clients(count: int, images: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """Ten smooth patterns in noise, the same in every process; one client more than asked for, which is for testing."""
    source = torch.Generator(device).manual_seed(1)
    coarse = torch.randn(CLASSES, 1, 4, 4, generator=source, device=device)
    patterns = 2 * F.interpolate(coarse, SIZE, mode="bilinear")

    def client() -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (images,), generator=source, device=device)
        noise = torch.randn(images, 1, SIZE, SIZE, generator=source, device=device)
        return patterns[labels] + noise, labels

    return [client() for _ in range(count + 1)]


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Stopwatch:
    """A pfl callback: the seconds of every round, and the loss on the testing client outside the timed part."""

    def __init__(self, testing: tuple[Tensor, Tensor], device: str, metrics: Callable[[], Any]) -> None:
        self.testing, self.device, self.metrics = testing, device, metrics
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_begin(self, *, model: Any) -> Any:
        self._look(model)
        self._begun = time.perf_counter()
        return self.metrics()

    def after_central_iteration(self, _metrics: Any, _model: Any, *, central_iteration: int) -> tuple[bool, Any]:
        settle(self.device)
        now = time.perf_counter()
        self.seconds.append(now - self._begun)
        self._begun = now
        return False, self.metrics()

    def on_train_end(self, *, model: Any) -> None:
        self._look(model)

    def _look(self, model: Any) -> None:
        with torch.no_grad():
            self.losses.append(float(model.pytorch_model.loss(*self.testing)))


def join_by(backend: str) -> None:
    """pfl-research names NCCL itself when it is imported; this names another backend in its stead."""
    initialise = torch.distributed.init_process_group

    def instead(**options: Any) -> None:
        initialise(**{**options, "backend": backend})

    torch.distributed.init_process_group = instead  # type: ignore[assignment]


def simulate(options: argparse.Namespace) -> Stopwatch:
    """One process's share of the simulation; pfl reads rank and partners from the environment when it is imported."""
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
    from pfl.aggregate.weighting import WeightByDatapoints  # type: ignore[import-not-found]
    from pfl.algorithm import FederatedAveraging, NNAlgorithmParams  # type: ignore[import-not-found]
    from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
    from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
    from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams  # type: ignore[import-not-found]
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]

    np.random.seed(1)  # pfl draws the cohorts from numpy's global state, and every process must draw the same
    torch.manual_seed(1)
    network = GroupNormCNN().to(options.device)
    if options.compile:
        network.compile(mode=options.compile, dynamic=False)
    *users, testing = clients(options.clients, options.images, options.device)
    datasets = [Dataset(raw_data=user) for user in users]
    for dataset in datasets:
        list(dataset.iter(BATCH))  # fills its cache of batches
    federated = FederatedDataset(datasets.__getitem__, get_user_sampler("minimize_reuse", range(len(datasets))))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    watch = Stopwatch(testing, options.device, Metrics)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=options.rounds,
            evaluation_frequency=options.rounds + 1,
            train_cohort_size=options.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(federated, federated, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR),
        NNEvalHyperParams(local_batch_size=None),
        [watch],
        send_metrics_to_platform=False,
    )
    return watch


def work(options: argparse.Namespace) -> None:
    """A worker process: takes part and leaves its figures in a file."""
    torch.set_num_threads(1)
    if options.backend:
        join_by(options.backend)
    watch = simulate(options)
    figures: dict[str, Any] = {"seconds": watch.seconds, "losses": watch.losses}
    figures["host_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if options.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        figures["device_mib"] = (total - free) / MIB
        figures["torch_mib"] = torch.cuda.max_memory_reserved() / MIB
    options.worker.write_text(json.dumps(figures))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # nobody leaves before every process has read the device's memory
        torch.distributed.destroy_process_group()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def environments(processes: int, device: str) -> Iterator[dict[str, str]]:
    """The documented variables of pfl-research's distributed simulation; none for one process."""
    common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, "PFL_PYTORCH_DEVICE": device}
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(processes))
    for rank in range(processes):
        yield common | ({"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)} if processes > 1 else {})


def play(processes: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs one simulation in so many processes and returns each one's figures; raises when one of them fails."""
    names = ["device", "clients", "cohort", "images", "rounds", "warmup", "compile", "backend"]
    given = [f"--{name}={getattr(options, name)}" for name in names]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started = []
        for rank, environment in enumerate(environments(processes, options.device)):
            log = stack.enter_context((Path(folder) / f"{rank}.log").open("w"))
            command = [sys.executable, "-m", "benchmarks.gpu_pfl", *given, f"--worker={folder}/{rank}.json"]
            root = Path(__file__).parents[1]
            started.append(subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log))
        try:
            attend(started, Path(folder), options.limit)
        finally:
            for process in started:
                process.kill()
                process.wait()
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]


def attend(started: list[subprocess.Popen[bytes]], folder: Path, limit: float) -> None:
    """Waits until all have ended; one failure ends the wait, since the others would wait for that process for ever."""
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        if any(process.poll() for process in started):
            break
        time.sleep(0.1)
    for rank, process in enumerate(started):
        if process.poll():
            said = (folder / f"{rank}.log").read_text().strip().splitlines()
            telling = [each for each in said if "Duplicate" in each or "Error" in each] or said or ["it said nothing"]
            raise RuntimeError(f"process {rank} of {len(started)} ended with {process.poll()}: {telling[-1]}")
    if any(process.poll() is None for process in started):
        raise RuntimeError(f"not done within {limit:.0f} s")


def measure(processes: int, options: argparse.Namespace) -> dict[str, Any]:
    ranks = play(processes, options)
    first = ranks[0]
    steady = first["seconds"][options.warmup :]
    return {
        "processes": processes,
        "s_per_round": statistics.median(steady),
        "s_fastest": min(steady),
        "s_slowest": max(steady),
        "s_every_round": first["seconds"],
        "loss_before": first["losses"][0],
        "loss_after": first["losses"][1],
        "host_mib": sum(rank["host_mib"] for rank in ranks),
        "torch_mib": sum(rank.get("torch_mib", 0.0) for rank in ranks),
        "device_mib": max(rank.get("device_mib", 0.0) for rank in ranks),
    }


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    seconds = "".join(f"{row[key]:>9.4f}" for key in ("s_per_round", "s_fastest", "s_slowest"))
    memory = "".join(f"{row[key]:>10.0f}" for key in ("torch_mib", "device_mib", "host_mib"))
    losses = f"{row['loss_before']:>9.3f}{row['loss_after']:>9.4f}"
    return f"{row['processes']:>9}{seconds}{first['s_per_round'] / row['s_per_round']:>7.2f}{losses}{memory}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--processes", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--images", type=int, default=200, help="a client")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3, help="first rounds that do not count")
    parser.add_argument("--compile", default="", metavar="MODE", help="torch.compile's mode, as 'default'; '' for none")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"], help="between processes")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one number of processes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds <= options.warmup:
        parser.error(f"--rounds {options.rounds} leaves nothing to measure after {options.warmup} rounds of warm-up")
    return options


def main() -> None:
    options = arguments()
    if options.worker:
        work(options)
        return
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "worker")}
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"pfl-research on {name}, torch {torch.__version__}: {options.cohort} of {options.clients} clients a round")
    print(
        f"{'processes':>9}{'s/round':>9}{'fastest':>9}{'slowest':>9}{'times':>7}{'loss 0':>9}{'loss end':>9}"
        f"{'torch MiB':>10}{'GPU MiB':>10}{'host MiB':>10}",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    for processes in options.processes:
        try:
            rows.append(measure(processes, options))
            print(line(rows[-1], rows[0]), flush=True)
        except RuntimeError as problem:
            print(f"{processes:>9}  {problem}", flush=True)
        if options.json:
            report = {"device": name, "torch": torch.__version__, "settings": settings, "rows": rows}
            options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
