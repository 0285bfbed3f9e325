"""What an attacker has: a finished run's networks as its sites compute with them, and half of a site's images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from polyclinic import wire
from polyclinic.algorithms.averaging import Averaging
from polyclinic.consortium import Consortium, gather
from polyclinic.core import Bundle, SiteId, Stream
from polyclinic.data.examples import Images, Selection
from polyclinic.data.splits import Fractions, split
from polyclinic.errors import DataError, StoreError
from polyclinic.experiment import finished
from polyclinic.learning.network import LiveNetwork
from polyclinic.lineup import device_of, line_up, network_of
from polyclinic.models.classifier import Classifier
from polyclinic.models.cut import cut_after
from polyclinic.recipe import ModelSection, Recipe
from polyclinic.store import DiskMemory

LEAST = 16
"""Images a site must have, so that either half says anything."""


@dataclass(frozen=True, eq=False)
class Loot:
    """A finished run, read back."""

    folder: Path
    recipe: Recipe
    summary: dict[str, Any]
    state: Bundle
    consortium: Consortium
    device: torch.device

    @cached_property
    def algorithm(self) -> Averaging:
        module = network_of(self._with(self.recipe.model), self.consortium)
        lineup = line_up(self.recipe, self.consortium, module, torch.device("cpu"))
        return lineup.around(self.recipe.algorithm_of())

    def model_at(self, site: SiteId) -> tuple[str, Bundle]:
        """The weights that a site computes with, and what they are called: its own, or the first that it has."""
        memory = DiskMemory(self.folder / "sites").load(site, int(self.summary["rounds"]) + 1)
        models = self.algorithm.models(self.algorithm.broadcast(self.state, site), memory)
        name = site if site in models else next(iter(models))
        return name, models[name]

    def network(self, site: SiteId) -> tuple[str, Classifier]:
        """A site's network with those weights, whole, wherever the recipe cuts it; ready to evaluate."""
        section, (name, weights) = self._section(site), self.model_at(site)
        whole = network_of(self._with(section), self.consortium)
        live = LiveNetwork(
            whole if section.cut is None else cut_after(whole, section.cut), self.device
        )  # shares layers
        try:
            live.load(weights)
        except (KeyError, RuntimeError):
            raise StoreError(
                f"{self.folder / 'model.safetensors'} does not hold the network of {self.folder / 'recipe.yaml'}; "
                "restore both, or run again"
            ) from None
        return name, whole.to(self.device).eval().requires_grad_(False)

    def untrained(self, site: SiteId, stream: Stream) -> Classifier:
        """The same network with random weights."""
        recipe = self._with(self._section(site)).model_copy(update={"seed": stream.integer() % 2**53})
        return network_of(recipe, self.consortium).to(self.device).eval().requires_grad_(False)

    def _section(self, site: SiteId) -> ModelSection:
        group = self.algorithm.group(self.state, site)
        return self.recipe.clusters[group].model if group else self.recipe.model

    def _with(self, section: ModelSection) -> Recipe:
        """The recipe with this network, uncut, its weights from the seed alone."""
        return self.recipe.model_copy(update={"model": section.model_copy(update={"cut": None, "weights": None})})


def read(folder: Path, data: Path | None, device: str | None = None) -> Loot:
    """A finished run's folder, and its images, which must be those of the run."""
    if not (folder / "recipe.yaml").is_file():
        raise StoreError(f"{folder} holds no run (recipe.yaml is missing); give the folder that `run` wrote to")
    if not (folder / "result.json").is_file():
        raise StoreError(f"the run in {folder} has not ended; go on with: polyclinic resume {folder}")
    recipe = Recipe.load(folder / "recipe.yaml", {} if device is None else {"engine.device": device})
    place, summary, state = device_of(recipe), finished(folder).summary, _state(folder / "model.safetensors")
    if wire.digest(state) != summary.get("sha256"):
        raise StoreError(f"{folder / 'model.safetensors'} is not the model of this run; restore it, or run again")
    consortium = gather(recipe, data)
    if list(consortium.describe()) != summary["hospitals"]:
        raise DataError(f"the images found are not those of the run in {folder}; give --data DIR as the run had it")
    return Loot(folder, recipe, summary, state, consortium, place)


def _state(path: Path) -> Bundle:
    try:
        return wire.unflatten(load_file(path))
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} cannot be read ({error}); restore it, or run again") from error


@dataclass(frozen=True, eq=False)
class Halves:
    """A site's training images as pixels in [0, 1]: the attacker's own, and those under attack."""

    own: Tensor
    attacked: Tensor
    labels: Tensor
    """Of the attacked."""
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    """Where both stand among the site's training images."""
    seen: Callable[[Tensor], Tensor]
    """What the network is shown in the place of pixels."""


def halve(site: SiteId, examples: Images | Selection, stream: Stream, most: int, device: torch.device) -> Halves:
    """Half and half by patient, classes alike; of many images a random choice of `most`.

    Pixels are the stored bytes / 255; of images that are stored as numbers, 0 is the site's least and 1 its largest.
    """
    rows = tuple(part[: most // 2] for part in divided(examples, stream))
    if min(map(len, rows)) < LEAST // 2:
        raise DataError(
            f"site {site} has {len(examples)} training images, too few for two halves of {LEAST // 2} or more by "
            "patient; attack another site"
        )
    stored = [examples.stored(part)[0] for part in rows]
    integers = stored[0].dtype == torch.uint8
    low, high = (0.0, 1.0) if integers else (float(min(s.min() for s in stored)), float(max(s.max() for s in stored)))
    scale = 255.0 if integers else max(high - low, 1e-12)
    own, attacked = ((part.to(device).float() - low) / scale for part in stored)

    def seen(pixels: Tensor) -> Tensor:
        return examples.scaled(pixels * (high - low) + low)

    places = tuple(rows[0].tolist()), tuple(rows[1].tolist())
    return Halves(own, attacked, examples.labels.cpu()[rows[1]].to(device), places, seen)


def divided(examples: Images | Selection, stream: Stream) -> tuple[Tensor, Tensor]:
    """The rows of both halves, each in random order; nobody has images in both."""
    people = examples.patients or tuple(map(str, range(len(examples))))
    fractions = Fractions(train=0.5, validation=0.0, test=0.5)
    parts = split(examples.labels.cpu().numpy(), people, fractions, stream.child("halves"))
    generator = np.random.default_rng(stream.child("order").integer())
    own, attacked = (torch.from_numpy(generator.permutation(parts[part])) for part in ("train", "test"))
    return own, attacked
