"""Sites trained as one stack against one after another, in one process.

    python -m benchmarks.stacking [--repeats 5] [--device cpu] [--json FILE]

Each measurement trains every site for one epoch of 200 images, batch 32, SGD: the same jobs through `fit`, then through
`fit_stacked`, in turn; medians. `times` is how many times faster the stack is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from polyclinic.core.jobs import Fit, Site
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.data.examples import Images, Selection
from polyclinic.federation.engines.local import keep_freed_memory
from polyclinic.models import build_model
from polyclinic.training.fit import fit
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from polyclinic.training.stacked.batching import StackMember
from polyclinic.training.stacked.fit import fit_stacked

WORK = (("mlp", 8), ("mlp", 28), ("small_cnn", 28))
"""Model, pixels of a side."""
SITES = (10, 50)
IMAGES, BATCH, LR = 200, 32, 0.05


def stack(model: str, size: int, sites: int, device: torch.device) -> tuple[LiveNetwork, list[StackMember]]:
    module = build_model(model, classes=10, channels=1, size=size, dropout=0.0, seed=Stream(0))
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(sites * IMAGES, 1, size, size, generator=generator)
    shared = Images(images, torch.randint(10, (len(images),), generator=generator)).to(device)
    job = Fit(copy_module_weights(module), task_loss, Training(Optimiser("sgd", LR), batch=BATCH))
    seats = [
        StackMember(
            job,
            Selection.from_rows(shared, torch.arange(n * IMAGES, (n + 1) * IMAGES)),
            Site(str(n), IMAGES, 1, 1, LR),
            Stream(n),
        )
        for n in range(sites)
    ]
    return LiveNetwork(module, device), seats


def seconds(deed: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    deed()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measure(model: str, size: int, sites: int, repeats: int, device: torch.device) -> dict[str, Any]:
    network, seats = stack(model, size, sites, device)
    apart, together = [], []
    for _ in range(repeats + 1):
        apart.append(seconds(lambda: [fit(s.job, network, s.data, s.site, s.stream) for s in seats], device))
        together.append(seconds(lambda: fit_stacked(seats, network), device))
    one, all_at_once = statistics.median(apart[1:]), statistics.median(together[1:])
    found = {"model": model, "pixels": size, "sites": sites, "apart": one, "stacked": all_at_once}
    return found | {"times": one / all_at_once}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--device", default="cpu")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    device = torch.device(given.device)
    rows = [measure(model, size, sites, given.repeats, device) for model, size in WORK for sites in SITES]
    print(f"{'model':10}{'pixels':>7}{'sites':>6}{'apart ms':>10}{'stacked ms':>12}{'times':>7}")
    for row in rows:
        print(
            f"{row['model']:10}{row['pixels']:>7}{row['sites']:>6}"
            f"{row['apart'] * 1e3:>10.1f}{row['stacked'] * 1e3:>12.1f}{row['times']:>7.2f}"
        )
    if given.json:
        given.json.write_text(
            json.dumps({"device": str(device), "torch": torch.__version__, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
