"""How fast prepared images come from the cache, beside what a network can take; and what preparing them costs, once.

    python -m benchmarks.loader [--repeats 7] [--threads 2] [--json FILE]

Grey: 8,192 images of 1×64×64, batches of 32 and of 256. Colour: 1,024 of 3×224×224, batches of 32, normalised as for
ImageNet; beside it MobileNetV2 takes training steps on such a batch, on the same threads. An epoch goes through a set
in random order, as training does, through `Images` and through a site's `Selection` (one half). Preparing: 300 JPEGs of
512×512 to 224×224; first as in a first run, then from the cache, its checksum looked over.
All measurements in turn, the order swapped each time; medians. The cache was read before: its pages are in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from polyclinic.core.rng import Stream
from polyclinic.core.types import Examples
from polyclinic.data.examples import Collection, Selection
from polyclinic.data.loading.cache import VARIABLE
from polyclinic.data.loading.image_options import ImageOptions
from polyclinic.data.loading.loader import load_collection
from polyclinic.data.sources.folder import read_folder
from polyclinic.data.sources.npz import read_npz
from polyclinic.evaluation.summary import package_versions
from polyclinic.federation.engines.local import keep_freed_memory
from polyclinic.models import build_model

RESULT = Path("docs/results/data/loader.json")
GREY, COLOUR, JPEGS = 8192, 1024, 300
BATCH = 32
STEPS = 2
LEAST_GREY, LEAST_TIMES = 10_000, 3
"""Bars: images a second at 64×64, and how many times faster than MobileNetV2 trains at 224×224."""

Deed = Callable[[], int]
"""Does something with images and says with how many."""


def stack(folder: Path, count: int, size: int, channels: Literal[1, 3]) -> Collection:
    """Noise, from the cache: what an image shows does not change how fast it is copied."""
    rng = np.random.default_rng(0)
    file = folder / f"{size}.npz"
    np.savez(file, images=rng.integers(0, 256, (count, size, size, channels), np.uint8), labels=np.arange(count) % 2)
    options = ImageOptions(size=size, channels=channels, normalise="imagenet" if channels == 3 else "half")
    return load_collection(read_npz(file, name="noise"), options, Stream(0))


def epoch(examples: Examples, batch: int) -> Deed:
    generator = Stream(0, ("order",)).generator()

    def deed() -> int:
        for index in torch.split(torch.randperm(len(examples), generator=generator), batch):
            examples.batch(index)
        return len(examples)

    return deed


def training(examples: Examples) -> Deed:
    """Steps of MobileNetV2 on one batch that lies ready: the loader has no part in it."""
    module = build_model("mobilenet_v2", classes=2, channels=3, size=224, dropout=None, seed=Stream(0))
    module.train()
    optimiser = torch.optim.SGD(module.parameters(), 0.01)
    images, labels = examples.batch(torch.arange(BATCH))

    def deed() -> int:
        for _ in range(STEPS):
            optimiser.zero_grad()
            F.cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        return STEPS * BATCH

    return deed


def photographs(folder: Path) -> Path:
    """JPEGs with something in them at every scale, as photographs have."""
    rng = np.random.default_rng(0)
    for number in range(JPEGS):
        layers = [rng.integers(0, 256, (side, side, 3), np.uint8) for side in (8, 64, 256)]
        large = [np.asarray(Image.fromarray(layer).resize((512, 512)), np.float32) for layer in layers]
        mixed = np.average(large, axis=0, weights=[6, 3, 1]).astype(np.uint8)
        path = folder / ("benign", "malignant")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mixed).save(path, quality=90)
    return folder


def preparing(folder: Path, anew: bool) -> Deed:
    """Load the photographs: with a cache that knows them, or with an empty one."""

    def deed() -> int:
        with tempfile.TemporaryDirectory() as empty, cache_in(Path(empty) if anew else None):
            return len(load_collection(read_folder(folder, name="photographs"), ImageOptions(size=224), Stream(0)))

    return deed


@contextmanager
def cache_in(folder: Path | None) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    try:
        if folder is not None:
            os.environ[VARIABLE] = str(folder)
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def rate(deed: Deed) -> float:
    """Images a second."""
    begun = time.perf_counter()
    count = deed()
    return count / (time.perf_counter() - begun)


def half(collection: Collection) -> Selection:
    """A site's images among those of all."""
    order = torch.randperm(len(collection), generator=Stream(0, ("site",)).generator())
    return Selection.from_rows(collection.to_images(), order[: len(collection) // 2])


def deeds(folder: Path) -> dict[str, Deed]:
    grey, colour = stack(folder, GREY, 64, 1), stack(folder, COLOUR, 224, 3)
    jpegs = photographs(folder / "photographs")
    return {
        "64x64 grey, batch 32, Images": epoch(grey.to_images(), 32),
        "64x64 grey, batch 32, Selection": epoch(half(grey), 32),
        "64x64 grey, batch 256, Images": epoch(grey.to_images(), 256),
        "64x64 grey, batch 256, Selection": epoch(half(grey), 256),
        "224x224 colour, batch 32, Images": epoch(colour.to_images(), BATCH),
        "224x224 colour, batch 32, Selection": epoch(half(colour), BATCH),
        "224x224 colour, MobileNetV2 trains": training(colour.to_images()),
        "512x512 JPEGs, first run": preparing(jpegs, anew=True),
        "512x512 JPEGs, later runs": preparing(jpegs, anew=False),
    }


def measure(repeats: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder, cache_in(Path(folder) / "cache"):
        plan = deeds(Path(folder))
        for deed in plan.values():
            deed()
        rates: dict[str, list[float]] = {name: [] for name in plan}
        for number in range(repeats):
            for name in list(plan)[:: -1 if number % 2 else 1]:
                rates[name].append(rate(plan[name]))
    return rates


def bars(rates: dict[str, float], lists: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """What was promised, and what was found: of several ways the slowest."""
    slowest = min(rate for name, rate in rates.items() if name.startswith("64x64"))
    trains = lists["224x224 colour, MobileNetV2 trains"]
    times = min(
        statistics.median(a / b for a, b in zip(lists[f"224x224 colour, batch 32, {way}"], trains, strict=True))
        for way in ("Images", "Selection")
    )
    return {
        "64x64 grey, images a second": {"least": LEAST_GREY, "found": slowest, "met": slowest >= LEAST_GREY},
        "224x224, times MobileNetV2": {"least": LEAST_TIMES, "found": times, "met": times >= LEAST_TIMES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as every engine does
    lists = measure(options.repeats)
    rates = {name: statistics.median(found) for name, found in lists.items()}
    promised = bars(rates, lists)
    print(f"{'images a second':<38}{'median':>12}{'least':>12}{'most':>12}")
    for name, found in lists.items():
        print(f"{name:<38}{rates[name]:>12,.0f}{min(found):>12,.0f}{max(found):>12,.0f}")
    for name, bar in promised.items():
        print(f"{name}: {bar['found']:,.1f}, at least {bar['least']:,} wanted: {'met' if bar['met'] else 'NOT MET'}")
    facts = {
        "threads": options.threads,
        "cores": os.cpu_count(),
        "repeats": options.repeats,
        "versions": package_versions(),
    }
    everything = {**facts, "bars": promised, "images_per_second": rates, "every_repeat": lists}
    options.json.write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
