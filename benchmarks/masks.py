"""The time of masks in a round: `python -m benchmarks.masks [--rounds N]`.

Five sites train a MobileNetV2 with a head of 1,000 units (3.5 M parameters) in one process, a round with masks and one
without in turn. Printed: the median processor time of each, which other programs hardly change, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import nn

from polyclinic import Recipe
from polyclinic.core import Stream
from polyclinic.federation.engines.local import LocalEngine
from polyclinic.federation.rounds import Progress, Rounds
from polyclinic.models import build_model, register_model
from polyclinic.models.classifier import Classifier
from polyclinic.runs.assemble import round_options
from polyclinic.runs.experiment import Experiment
from polyclinic.storage.journal import RamJournal
from polyclinic.storage.site_memory import RamMemory

SITES = 5
MODEL = "mobilenet_v2_wide"


@register_model(MODEL)
def mobilenet_v2_wide(*, classes: int, channels: int, size: int, dropout: float) -> Classifier:
    """A MobileNetV2 with as many parameters as the one for a thousand classes."""
    found = build_model("mobilenet_v2", classes=1000, channels=channels, size=size, dropout=dropout, seed=Stream(0))
    return Classifier(nn.Sequential(found.extractor, found.head, nn.ReLU()), nn.Linear(1000, classes))


def make_rounds(stages: list[dict[str, Any]], steps: int, batch: int) -> Rounds:
    """Return the rounds of a recipe with these stages."""
    recipe = Recipe.from_values(
        {
            "name": "masks",
            "rounds": 1000,
            "data": {"name": "phantom", "size": 64, "partition": {"by": "iid", "sites": SITES}},
            "model": {"name": MODEL},
            "algorithm": "fedavg",
            "training": {"epochs": None, "steps": steps, "batch": batch, "optimiser": {"lr": 0.01}},
            "evaluate": {"every": 0},
            "stages": stages,
        }
    )
    made = Experiment(recipe)
    engine = LocalEngine(made.setup.make_runners(RamMemory(), None))
    return Rounds(
        made.setup.federation,
        made.setup.algorithm,
        engine,
        round_options(recipe, "run"),
        RamJournal(),
        transforms=made.setup.transforms,
    )


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--steps", type=int, default=10)
    given.add_argument("--batch", type=int, default=16)
    asked = given.parse_args()
    torch.set_num_threads(1)
    both = {
        name: make_rounds(stages, asked.steps, asked.batch)
        for name, stages in (("plain", []), ("masked", [{"name": "mask"}]))
    }
    states = {name: rounds.algorithm.init(rounds.federation) for name, rounds in both.items()}
    progress = dict.fromkeys(both, Progress(run="run"))
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(asked.rounds + 1):
        for name, rounds in both.items():
            begun = time.process_time()
            states[name], progress[name] = rounds.play_round(states[name], progress[name])
            seconds[name].append(time.process_time() - begun)
    parameters = sum(t.numel() for t in states["plain"]["model"].values())
    medians = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    extra = [masked - plain for plain, masked in zip(*(seconds[n][1:] for n in ("plain", "masked")), strict=True)]
    print(
        json.dumps(
            {
                "sites": SITES,
                "parameters": parameters,
                "images a round and site": asked.steps * asked.batch,
                "seconds": medians,
                "ratio": medians["masked"] / medians["plain"],
                "seconds of masks": statistics.median(extra),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
