"""What a local epoch of FedMP costs beside one of FedAvg.

    python -m benchmarks.fedmp [--model mobilenet_v2] [--size 64] [--images 256] [--repeats 5] [--device cpu] [--cut N]
                              [--sample N]

A site's whole round (decoding apart): an epoch of batches of 64, and for FedMP the features that it sends after it; in
round 2, with features and prototypes of another site. Both in turn, the order swapped each time; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.fedmp import FedMP
from polyclinic.core.jobs import Federation, Fit, Job, Site, Update
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.data.examples import Images
from polyclinic.federation.site_runner import drive_jobs
from polyclinic.models import build_model
from polyclinic.models.modifications import cut_after
from polyclinic.training.fit import fit, score
from polyclinic.training.network import LiveNetwork, copy_module_weights, feature_shape

CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="mobilenet_v2")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cut", type=int, default=None)
    parser.add_argument("--sample", type=int, default=None)
    given = parser.parse_args()
    device = torch.device(given.device)
    module = build_model(given.model, classes=CLASSES, channels=3, size=given.size, seed=Stream(0))
    network = LiveNetwork(cut_after(module, given.cut) if given.cut else module, device)
    drawn = Stream(1).generator()
    images = torch.randn(given.images, 3, given.size, given.size, generator=drawn).to(device)
    data = Images(images, (torch.arange(given.images) % CLASSES).to(device))
    shape = feature_shape(network, images)
    training = Training(optimiser=Optimiser("adam", lr=1e-4), batch=64)
    sides: dict[str, Algorithm] = {"FedAvg": FedAvg(training), "FedMP": FedMP(training, sample=given.sample)}
    federation = Federation(
        tuple(map(str, range(CLASSES))),
        {"one": given.images, "two": given.images},
        copy_module_weights(network.module),
        features=shape,
    )
    received = {name: _second_round(side, federation, network, data) for name, side in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(given.repeats + 1):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            begun = time.perf_counter()
            _round(sides[name], received[name], network, data, 2)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - begun)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"{given.model}, features {' × '.join(map(str, shape))}: ", end="")
    print(", ".join(f"{name} {each:.3f} s" for name, each in found.items()), end="")
    print(f"; ratio {found['FedMP'] / found['FedAvg']:.2f}")


def _round(side: Algorithm, received: Bundle, network: LiveNetwork, data: Images, number: int) -> Update:
    site = Site("one", len(data), number, 5, 1e-4)
    rng = Stream(number)

    def run(job: Job, _: int) -> object:
        return fit(job, network, data, site, rng) if isinstance(job, Fit) else score(job, network, data)

    update, _ = drive_jobs(side.local(received, None, site, rng), run)  # type: ignore[arg-type]
    return update


def _second_round(side: Algorithm, federation: Federation, network: LiveNetwork, data: Images) -> Bundle:
    state = side.init(federation)
    first = [_round(side, side.broadcast(state, site), network, data, 1) for site in federation.sites]
    named = [Update(u.tensors, u.examples, site) for u, site in zip(first, federation.sites, strict=True)]
    return side.broadcast(side.aggregate(state, named), "one")


if __name__ == "__main__":
    main()
