"""Finished runs, read back: their networks as sites compute with them, and their images."""

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
from polyclinic.models.modifications import cut_after
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
        """The run's algorithm, built without the files of first weights, since nothing is trained any more."""
        recipe = without_weights(self.recipe)
        module, algorithm = build_network(recipe, self.dataset), recipe.build_algorithm()
        networks = build_networks(recipe, self.dataset, module, algorithm, torch.device("cpu"))
        return networks.wrap_algorithm(algorithm)

    def models_at(self, site: SiteId) -> tuple[dict[str, Bundle], bool]:
        """Return a site's models by name, and whether the site has a memory that they are made of."""
        memory = DiskMemory(self.files.site_memory).load(site, self.summary.rounds + 1)
        return self.algorithm.models(self.algorithm.broadcast(self.state, site), memory), memory is not None

    def site_network(self, site: SiteId) -> tuple[str, Classifier]:
        """Return the name of the model that a site predicts with (its own, or its first one), and its network."""
        models, _ = self.models_at(site)
        name = site if site in models else next(iter(models))
        return name, self.load_network(self._model_section(site), models[name])

    def load_network(self, section: ModelSection, weights: Bundle) -> Classifier:
        """Return a network with these weights, ready to evaluate. It is not split, so that layers keep their names."""
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
        """Return a site's network with random weights."""
        recipe = self._recipe_with_model(self._model_section(site))
        recipe = recipe.model_copy(update={"seed": stream.integer() % 2**53})
        return build_network(recipe, self.dataset).to(self.device).eval().requires_grad_(False)

    def _model_section(self, site: SiteId) -> ModelSection:
        group = self.algorithm.cluster_of(self.state, site)
        return self.recipe.clusters[group].model if group else self.recipe.model

    def _recipe_with_model(self, section: ModelSection) -> Recipe:
        """Return the recipe with this network, not split and without first weights."""
        model = section.model_copy(update={"split_after": None, "weights": None})
        return self.recipe.model_copy(update={"model": model})


def open_run(
    folder: Path, data: Path | None, device: str | None = None, dataset: FederatedDataset | None = None
) -> FinishedRun:
    """Return the finished run in `folder`. `data`: the data folder; `dataset`: its images, if they are loaded already.

    Raises `DataError` if the images are not those of the run.
    """
    recipe, summary, state, place = read_run_files(folder, device)
    dataset = dataset or load_sites(recipe, data)
    if [SiteSizes.model_validate(site) for site in dataset.describe()] != summary.site_sizes:
        raise DataError(f"the images found are not those of the run in {folder}; give --data DIR as the run had it")
    return FinishedRun(folder, recipe, summary, state, dataset, place)


def read_run_files(path: Path, device: str | None = None) -> tuple[Recipe, RunSummary, Bundle, torch.device]:
    """Return the recipe, summary and state of a finished run, and the device to compute on, without its images."""
    folder = RunFolder(path)
    if not folder.recipe.is_file():
        raise StoreError(f"{path} holds no run (recipe.yaml is missing); give the folder that `run` wrote to")
    summary = folder.read_summary()
    recipe = Recipe.load(folder.recipe, {} if device is None else {"engine.device": device})
    place, state = device_of(recipe), read_weights(folder.model)
    if messages.hash_tensors(state) != summary.sha256:
        raise StoreError(f"{folder.model} is not the model of this run; restore it, or run again")
    return recipe, summary, state, place


def read_weights(path: Path) -> Bundle:
    try:
        return messages.unflatten(load_file(path))
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} cannot be read ({error}); restore it, or run again") from error


def check_same_images(run: FinishedRun, first: FinishedRun) -> None:
    """Raise unless both runs have the same images at the same sites, so that they can be compared image by image."""
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
    """Return the runs' names, or their folders if two runs have the same name."""
    names = [past.summary.name for past in past_runs]
    return tuple(names if len(set(names)) == len(names) else [str(past.folder) for past in past_runs])
