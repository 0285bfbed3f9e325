"""Finished runs, read back: their networks as sites compute with them, and their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from polyclinic.algorithms.base import Algorithm
from polyclinic.config.recipe import ModelSection, Recipe
from polyclinic.core import Bundle, DataError, SiteId, StoreError, Stream
from polyclinic.evaluation.summary import RunSummary, SiteSizes
from polyclinic.models.classifier import Classifier
from polyclinic.models.split_point import cut_after
from polyclinic.runs.networks import build_network, build_networks, device_of, without_weights
from polyclinic.runs.sites import FederatedDataset, load_sites
from polyclinic.storage import messages
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.site_memory import DiskMemory
from polyclinic.training.network import LiveNetwork


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A finished run, read back."""

    folder: Path
    recipe: Recipe
    summary: RunSummary
    state: Bundle
    dataset: FederatedDataset
    device: torch.device

    @cached_property
    def files(self) -> RunFolder:
        return RunFolder(self.folder)

    @cached_property
    def algorithm(self) -> Algorithm:
        """Without the files that first weights came from: nothing is trained any more."""
        recipe = without_weights(self.recipe)
        lineup = build_networks(
            recipe, self.dataset, build_network(recipe, self.dataset), recipe.build_algorithm(), torch.device("cpu")
        )
        return lineup.wrap_algorithm(recipe.build_algorithm())

    def models_at(self, site: SiteId) -> tuple[dict[str, Bundle], bool]:
        """The models of a site, and whether it remembers anything that they would be made of."""
        memory = DiskMemory(self.files.site_memory).load(site, self.summary.rounds + 1)
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
        cut = whole if section.split_after is None else cut_after(whole, section.split_after)  # which shares the layers
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
        return self.recipe.model_copy(
            update={"model": section.model_copy(update={"split_after": None, "weights": None})}
        )


def open_run(
    folder: Path, data: Path | None, device: str | None = None, dataset: FederatedDataset | None = None
) -> FinishedRun:
    """A finished run's folder, and its images, which must be those of the run; `gathered`: they are at hand already."""
    recipe, summary, state, place = read_run_files(folder, device)
    consortium = dataset or load_sites(recipe, data)
    if [SiteSizes.model_validate(site) for site in consortium.describe()] != summary.site_sizes:
        raise DataError(f"the images found are not those of the run in {folder}; give --data DIR as the run had it")
    return FinishedRun(folder, recipe, summary, state, consortium, place)


def read_run_files(path: Path, device: str | None = None) -> tuple[Recipe, RunSummary, Bundle, torch.device]:
    """The recipe, summary and state of a finished run, and the device to compute on; its images are not needed."""
    folder = RunFolder(path)
    if not folder.recipe.is_file():
        raise StoreError(f"{path} holds no run (recipe.yaml is missing); give the folder that `run` wrote to")
    summary = folder.read_summary()
    recipe = Recipe.load(folder.recipe, {} if device is None else {"engine.device": device})
    device_used, state = device_of(recipe), read_weights(folder.model)
    if messages.hash_tensors(state) != summary.sha256:
        raise StoreError(f"{folder.model} is not the model of this run; restore it, or run again")
    return recipe, summary, state, device_used


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
    names = [past.summary.name for past in past_runs]
    return tuple(names if len(set(names)) == len(names) else [str(past.folder) for past in past_runs])
