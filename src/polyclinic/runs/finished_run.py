"""Finished runs, read back: their networks as sites compute with them, and their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from polyclinic.algorithms.base import Averaging
from polyclinic.config.recipe import ModelSection, Recipe
from polyclinic.core.contract import Bundle, SiteId, Stream
from polyclinic.core.errors import DataError, StoreError
from polyclinic.models.classifier import Classifier
from polyclinic.models.split_point import cut_after
from polyclinic.runs.experiment import read_result
from polyclinic.runs.networks import build_network, build_networks, device_of, without_weights
from polyclinic.runs.sites import FederatedDataset, load_sites
from polyclinic.storage import messages
from polyclinic.storage.run_files import DiskMemory
from polyclinic.training.network import LiveNetwork


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A finished run, read back."""

    folder: Path
    recipe: Recipe
    summary: dict[str, Any]
    state: Bundle
    dataset: FederatedDataset
    device: torch.device

    @cached_property
    def algorithm(self) -> Averaging:
        """Without the files that first weights came from: nothing is trained any more."""
        recipe = without_weights(self.recipe)
        lineup = build_networks(recipe, self.dataset, build_network(recipe, self.dataset), torch.device("cpu"))
        return lineup.wrap_algorithm(recipe.build_algorithm())

    def models_at(self, site: SiteId) -> tuple[dict[str, Bundle], bool]:
        """The models of a site, and whether it remembers anything that they would be made of."""
        memory = DiskMemory(self.folder / "sites").load(site, int(self.summary["rounds"]) + 1)
        return self.algorithm.models(self.algorithm.broadcast(self.state, site), memory), memory is not None

    def model_at(self, site: SiteId) -> tuple[str, Bundle]:
        """The weights that a site computes with, and what they are called: its own, or the first that it has."""
        models, _ = self.models_at(site)
        name = site if site in models else next(iter(models))
        return name, models[name]

    def site_network(self, site: SiteId) -> tuple[str, Classifier]:
        """A site's network with those weights."""
        name, weights = self.model_at(site)
        return name, self.load_network(self._model_section(site), weights)

    def load_network(self, section: ModelSection, weights: Bundle) -> Classifier:
        """Ready to evaluate; whole, wherever the recipe cuts it, so that its names are the network's own."""
        whole = build_network(self._recipe_with_model(section), self.dataset)
        cut = whole if section.cut is None else cut_after(whole, section.cut)  # which shares the layers
        try:
            LiveNetwork(cut, self.device).load_weights(weights)
        except (KeyError, RuntimeError):
            raise StoreError(
                f"the weights in {self.folder} are not those of its recipe's network; restore both, or run again"
            ) from None
        return whole.eval().requires_grad_(False)

    def untrained_network(self, site: SiteId, stream: Stream) -> Classifier:
        """The same network with random weights."""
        recipe = self._recipe_with_model(self._model_section(site)).model_copy(
            update={"seed": stream.integer() % 2**53}
        )
        return build_network(recipe, self.dataset).to(self.device).eval().requires_grad_(False)

    def _model_section(self, site: SiteId) -> ModelSection:
        group = self.algorithm.cluster_of(self.state, site)
        return self.recipe.clusters[group].model if group else self.recipe.model

    def _recipe_with_model(self, section: ModelSection) -> Recipe:
        """The recipe with this network, uncut, its weights from the seed alone."""
        return self.recipe.model_copy(update={"model": section.model_copy(update={"cut": None, "weights": None})})


def open_run(
    folder: Path, data: Path | None, device: str | None = None, dataset: FederatedDataset | None = None
) -> FinishedRun:
    """A finished run's folder, and its images, which must be those of the run; `gathered`: they are at hand already."""
    recipe, summary, state, place = read_run_files(folder, device)
    consortium = dataset or load_sites(recipe, data)
    if list(consortium.describe()) != summary["hospitals"]:
        raise DataError(f"the images found are not those of the run in {folder}; give --data DIR as the run had it")
    return FinishedRun(folder, recipe, summary, state, consortium, place)


def read_run_files(folder: Path, device: str | None = None) -> tuple[Recipe, dict[str, Any], Bundle, torch.device]:
    """What a finished run's folder holds without its images, and where to compute."""
    if not (folder / "recipe.yaml").is_file():
        raise StoreError(f"{folder} holds no run (recipe.yaml is missing); give the folder that `run` wrote to")
    if not (folder / "result.json").is_file():
        raise StoreError(f"the run in {folder} has not ended; go on with: polyclinic resume {folder}")
    recipe = Recipe.load(folder / "recipe.yaml", {} if device is None else {"engine.device": device})
    place, summary, state = device_of(recipe), read_result(folder).summary, read_weights(folder / "model.safetensors")
    if messages.hash_tensors(state) != summary.get("sha256"):
        raise StoreError(f"{folder / 'model.safetensors'} is not the model of this run; restore it, or run again")
    return recipe, summary, state, place


def read_weights(path: Path) -> Bundle:
    try:
        return messages.unflatten(load_file(path))
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} cannot be read ({error}); restore it, or run again") from error


def check_same_images(run: FinishedRun, first: FinishedRun) -> None:
    """Runs can be compared image by image only if they have the same ones, at the same sites."""
    if run.dataset.classes != first.dataset.classes:
        raise DataError(
            f"the run in {run.folder} has other classes than that in {first.folder}; give runs on the same data"
        )
    if run.dataset.fingerprint != first.dataset.fingerprint:
        raise DataError(
            f"the run in {run.folder} has other images, or divides them otherwise, than that in {first.folder}; give "
            "runs with the same data and the same seed"
        )


def run_names(past_runs: Sequence[FinishedRun]) -> tuple[str, ...]:
    """The runs' names, or their folders where names are not enough."""
    names = [str(past.summary["name"]) for past in past_runs]
    return tuple(names if len(set(names)) == len(names) else [str(past.folder) for past in past_runs])
