"""A finished run's models on new images: which models there are, how images are prepared for them, what they say.

The run's images are not needed. Image files become tensors exactly as the recipe made them of its own: decoded, cut,
resized, normalised; and are computed in the same batches and layout, so that the run's own test images get the run's
own predictions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic import __version__
from polyclinic.algorithms.wrappers.ensemble import ENSEMBLE, models_by_site
from polyclinic.config.recipe import ModelSection, Recipe
from polyclinic.core.contract import Bundle, Examples, Part, SiteId
from polyclinic.core.errors import DataError, PolyclinicError, RecipeError, StoreError
from polyclinic.data import DATASETS
from polyclinic.data.builtin.digits import DigitsOptions
from polyclinic.data.builtin.phantom import MEAN, STD, PhantomOptions
from polyclinic.data.datasets.mnist.dataset import SIDE, MnistOptions
from polyclinic.data.examples import Images, PerChannel
from polyclinic.data.loading.options import ImageOptions, Preparation
from polyclinic.data.loading.preprocess import prepare
from polyclinic.data.options import Options
from polyclinic.data.sources.decode import UnreadableImage, decode
from polyclinic.data.sources.folder import images, reading, subfolders
from polyclinic.evaluation.calibration import Calibration, Uncalibrated, calibrated, fitted, of_part
from polyclinic.evaluation.metrics import Floats, Predictions
from polyclinic.federation.site_runner import STUDENT
from polyclinic.models.classifier import Classifier
from polyclinic.runs.finished_run import PastRun, opened, read, read_weights
from polyclinic.runs.networks import server_models
from polyclinic.runs.remote_sites import RemoteSites, SiteProfile
from polyclinic.storage.run_files import Snapshots, kept_predictions
from polyclinic.training.fit import at_a_time

GLOBAL, PERSONAL = "global", "personal"
STUDENT_FILE = "student.safetensors"
PARTS: tuple[Part, ...] = ("validation", "test")


@dataclass(frozen=True)
class Preprocessing:
    """How an image file becomes what the network gets."""

    preparation: Preparation
    mean: PerChannel
    std: PerChannel

    def stored(self, path: Path) -> Tensor:
        """Bytes, channels × size × size; `Unreadable` says what is wrong with the file, and nothing else of it."""
        pixels = decode(path, self.preparation.bits).pixels
        if (pixels == pixels.flat[0]).all():
            raise UnreadableImage("it is blank: all its pixels are alike")
        return torch.from_numpy(prepare(pixels, self.preparation))

    def scaled(self, stored: Tensor) -> Tensor:
        """Of a batch of bytes, what the network gets."""
        return Images(stored, torch.zeros(len(stored)), None, self.mean, self.std).scaled(stored)


def preprocessing_of(recipe: Recipe) -> Preprocessing:
    options = DATASETS[recipe.data.name].options.model_validate(recipe.data.options)
    if isinstance(options, ImageOptions):
        return Preprocessing(options.preparation, *options.normalisation)
    size, mean, std = _drawn(options)
    return Preprocessing(Preparation(size=size, channels=1), mean, std)


def _drawn(options: Options) -> tuple[int, float, float]:
    """Sets without image options: their images are grey, and of one size."""
    if isinstance(options, PhantomOptions):
        return options.size, MEAN, STD
    if isinstance(options, DigitsOptions):
        return options.size, 0.0, 1.0
    if isinstance(options, MnistOptions):
        return (SIDE, 0.0, 1.0) if options.normalise == "none" else (SIDE, 0.5, 0.5)
    raise RecipeError("how this data set prepares its images is not known here; give a run on image files")


@dataclass(frozen=True, eq=False)
class Model:
    """One of a run's models, ready to evaluate."""

    name: str
    """global, personal, student, ensemble, or a cluster's name."""
    site: SiteId | None
    """Whose it is, of personal ones."""
    key: str
    """What results call it."""
    sites: tuple[SiteId, ...]
    """The sites that it is for: whose figures are its own."""
    networks: tuple[Classifier, ...]
    """One; of an ensemble one for each member."""
    sections: tuple[ModelSection, ...]
    device: torch.device

    @property
    def told(self) -> str:
        return f"{self.name} model of {self.site}" if self.site else f"{self.name} model"

    @torch.no_grad()
    def answers(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Of prepared images: probabilities, and logits (of an ensemble, which has none, log-probabilities)."""
        laid = images.to(self.device)
        if self._convolves:
            laid = laid.contiguous(memory_format=torch.channels_last)  # as in the run, to the bit
        logits = [network(laid) for network in self.networks]
        if len(logits) == 1:
            return torch.softmax(logits[0], -1).cpu(), logits[0].cpu()
        mean = torch.stack([torch.softmax(each, -1) for each in logits]).mean(0)
        return mean.cpu(), mean.log().cpu()

    @cached_property
    def _convolves(self) -> bool:
        return any(isinstance(module, nn.Conv2d) for module in self.networks[0].modules())


@dataclass(frozen=True, eq=False)
class ModelCatalogue(PastRun):
    """A finished run's models; its images may be far away."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.consortium.classes

    @cached_property
    def preprocessing(self) -> Preprocessing:
        return preprocessing_of(self.recipe)

    @cached_property
    def _server(self) -> Mapping[str, Bundle]:
        """The server's own: under "", or by cluster."""
        return server_models(self.algorithm, self.state, self.recipe.clusters or {"": None})

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What `model` can be asked for."""
        personal = any(key != GLOBAL for key in self.models_at(next(iter(self.consortium.sites)))[0])
        return (
            *(name or GLOBAL for name in self._server),
            *((PERSONAL,) if personal else ()),
            *((STUDENT,) if (self.folder / STUDENT_FILE).is_file() else ()),
            *((ENSEMBLE,) if models_by_site(self.state) else ()),
        )

    def model(self, wanted: str | None = None, site: SiteId | None = None) -> Model:
        """The model of that name; None: the one that the run is judged by."""
        if site is not None and site not in self.consortium.sites:
            known = ", ".join(list(self.consortium.sites)[:12])
            raise RecipeError(f"--site is {site!r:.60}, which is no site of this run; there are: {known}")
        name = wanted or self._usual(site)
        if name == GLOBAL and self.recipe.clusters and site is not None:
            name, site = self.algorithm.cluster_of(self.state, site), None
        if name not in self.names:
            raise RecipeError(f"this run has no model {name!r:.60}; choose with --model: {', '.join(self.names)}")
        if name != PERSONAL and site is not None:
            instead = ", or set --model personal" if PERSONAL in self.names else ""
            raise RecipeError(f"the {name} model is the same for all its sites; leave --site out{instead}")
        if name == PERSONAL:
            return self._personal(site)
        if name == STUDENT:
            return self._model(name, name, [(self.recipe.model, read_weights(self.folder / STUDENT_FILE))])
        if name == ENSEMBLE:
            return self._model(name, name, [(self.recipe.model, each) for each in models_by_site(self.state).values()])
        cluster = name if self.recipe.clusters else ""
        section = self.recipe.clusters[cluster].model if cluster else self.recipe.model
        members = tuple(s for s in self.consortium.sites if self.algorithm.cluster_of(self.state, s) == cluster)
        return self._model(name, GLOBAL, [(section, self._server[cluster])], members)

    def _usual(self, site: SiteId | None) -> str:
        if site is not None:
            return PERSONAL if PERSONAL in self.names else GLOBAL
        best = self.summary["headline"]
        name = str(best.get("of", best["model"]))
        if name == GLOBAL and self.recipe.clusters:
            raise RecipeError(
                f"this run has a model for each cluster; say which with --model {' or '.join(self.recipe.clusters)}, "
                "or whose with --site NAME"
            )
        return PERSONAL if name == "transfer" else name

    def _keeps(self, site: SiteId) -> bool:
        """Whether a site's model is made of what it remembers, too: not if it never trained, or keeps nothing."""
        snapshot = Snapshots(self.folder).load()
        return snapshot is None or site in snapshot[1].fields["progress"]["remembering"]

    def _personal(self, site: SiteId | None) -> Model:
        if site is None:
            rest = ", ".join(name for name in self.names if name != PERSONAL)
            instead = f", or choose with --model: {rest}" if rest else ""
            raise RecipeError(f"this run's sites have models of their own; say whose with --site NAME{instead}")
        models, remembers = self.models_at(site)
        key = site if site in models else PERSONAL
        if key == PERSONAL and not remembers and self._keeps(site):
            raise StoreError(
                f"what site {site} remembers is not in {self.folder / 'sites'} (a real site keeps it to itself), so "
                "its personal model cannot be put together; ask the site for it, or choose another model with --model"
            )
        return self._model(PERSONAL, key, [(self._section(site), models[key])], (site,), site)

    def _model(
        self,
        name: str,
        key: str,
        parts: Sequence[tuple[ModelSection, Bundle]],
        sites: tuple[SiteId, ...] | None = None,
        site: SiteId | None = None,
    ) -> Model:
        networks = tuple(self.loaded(section, weights) for section, weights in parts)
        here = tuple(self.consortium.sites) if sites is None else sites
        return Model(name, site, key, here, networks, tuple(section for section, _ in parts), self.device)


def shelf(folder: Path, device: str | None = None) -> ModelCatalogue:
    """The models of a finished run."""
    recipe, summary, state, place = opened(folder, device)
    return ModelCatalogue(folder, recipe, summary, state, _roster(recipe, summary), place)


def _roster(recipe: Recipe, summary: Mapping[str, Any]) -> RemoteSites:
    """The sites of a run without their images, as a server knows them."""
    wanted, classes = preprocessing_of(recipe).preparation, tuple(summary["classes"])
    cards = {}
    for site in summary["hospitals"]:
        counts = (site["train"], site["validation"], site["test"])
        cards[site["site"]] = SiteProfile(__version__, classes, wanted.channels, wanted.size, *counts, (1, 1), "")
    return RemoteSites.of(cards)


def calibration_of(run: ModelCatalogue, model: Model, data: Path | None = None) -> Calibration | Uncalibrated:
    """By the predictions that the run kept; else, where `data` says where its images lie, by those made of them now."""
    if kept := kept_predictions(run.folder):
        validation, test = (of_part(kept, model.sites, model.key, part) for part in PARTS)
    elif data is not None:
        sites = read(run.folder, data, str(run.device)).consortium.sites
        validation, test = (_said(model, [getattr(sites[s], part) for s in model.sites]) for part in PARTS)
    else:
        return Uncalibrated("the run kept no predictions of validation images; give its images with --data DIR")
    if validation is None:
        return Uncalibrated("no validation image's prediction by this model is known")
    return fitted(validation, test)


def _said(model: Model, parts: Sequence[Examples]) -> Predictions | None:
    found = []
    for examples in (part for part in parts if len(part)):
        turns = torch.split(torch.arange(len(examples)), at_a_time(model.device))
        rows = [model.answers(examples.batch(index)[0])[0].double() for index in turns]
        found.append(Predictions(torch.cat(rows).numpy(), examples.labels.cpu().numpy()))
    return Predictions.merge(found) if found else None


@dataclass(frozen=True, eq=False)
class Prediction:
    file: Path
    image: Tensor
    """As prepared, in bytes."""
    probabilities: Floats
    calibrated: Floats | None

    @property
    def predicted(self) -> int:
        return int(self.probabilities.argmax())


@dataclass(frozen=True)
class Failed:
    file: Path
    why: str


def predict(
    model: Model, preprocessing: Preprocessing, files: Sequence[Path], temperature: float | None = None
) -> Iterator[Prediction | Failed]:
    """What a model says of image files, in their order; one that cannot be read does not keep the others back."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        size = at_a_time(model.device)
        for some in (files[start : start + size] for start in range(0, len(files), size)):
            opened = list(pool.map(lambda path: _opened(preprocessing, path), some))
            pictures = [image for image in opened if isinstance(image, Tensor)]
            said = iter(_answered(model, preprocessing, pictures, temperature))
            for path, image in zip(some, opened, strict=True):
                yield Prediction(path, image, *next(said)) if isinstance(image, Tensor) else Failed(path, image)


def _opened(preprocessing: Preprocessing, path: Path) -> Tensor | str:
    try:
        return preprocessing.stored(path)
    except PolyclinicError as problem:
        return str(problem)


def _answered(
    model: Model, preprocessing: Preprocessing, pictures: Sequence[Tensor], temperature: float | None
) -> Iterator[tuple[Floats, Floats | None]]:
    if not pictures:
        return
    probabilities, logits = model.answers(preprocessing.scaled(torch.stack(list(pictures))))
    if not probabilities.isfinite().all():
        raise DataError("the network gives values that are not finite; train it anew")
    plain: Floats = probabilities.double().numpy()
    scaled = None if temperature is None else calibrated(logits.double().numpy(), temperature)
    for row in range(len(plain)):
        yield plain[row], None if scaled is None else np.asarray(scaled[row])


def image_files(given: Sequence[Path]) -> tuple[list[Path], list[Failed]]:
    """Files as they are given, folders' images by name, all of them once; and folders that have none."""
    found: dict[Path, None] = {}
    failed = []
    for path in given:
        inside = list(_below(path)) if path.is_dir() else [path]
        found |= dict.fromkeys(inside)
        if not inside:
            failed.append(Failed(path, "the folder holds no image"))
    return list(found), failed


def _below(folder: Path) -> Iterator[Path]:
    with reading(folder):
        yield from images(folder)
        deeper = [inner for inner in subfolders(folder) if not inner.is_symlink()]  # a link may lead back up, for ever
    for inner in deeper:
        yield from _below(inner)
