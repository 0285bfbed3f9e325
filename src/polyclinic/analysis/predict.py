"""Loads a finished run's models, prepares new images as the run did, and predicts them.

The run's own images are not needed. Image files are decoded (`load_image`), cropped, resized and normalised exactly as
the recipe's images were, and computed in the same batches and memory layout, so that the run's test images get the
run's own predictions.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from polyclinic.algorithms.wrappers.ensemble import ENSEMBLE, models_by_site
from polyclinic.config.recipe import ModelSection, Recipe
from polyclinic.core import (
    STUDENT,
    Bundle,
    DataError,
    Examples,
    Part,
    PolyclinicError,
    RecipeError,
    SiteId,
    StoreError,
    __version__,
)
from polyclinic.data import DATASETS
from polyclinic.data.builtin.digits import DigitsOptions
from polyclinic.data.builtin.phantom import MEAN, STD, PhantomOptions
from polyclinic.data.datasets.mnist.dataset import SIDE, MnistOptions
from polyclinic.data.examples import Images, PerChannel
from polyclinic.data.loading.image_options import ImageOptions, Preparation
from polyclinic.data.loading.preprocessing import preprocess_image
from polyclinic.data.sources.decoder import decode_image
from polyclinic.data.sources.folder import list_images, list_subfolders, plain_read_errors
from polyclinic.data.sources.images import UnreadableImage
from polyclinic.evaluation.calibration import Calibration, Uncalibrated, apply_temperature, calibrate, merge_part
from polyclinic.evaluation.metrics import Floats, Predictions
from polyclinic.evaluation.summary import RunSummary
from polyclinic.evaluation.task import class_names
from polyclinic.models.classifier import Classifier
from polyclinic.runs.finished_run import FinishedRun, open_run, read_run_files, read_weights
from polyclinic.runs.networks import server_models
from polyclinic.runs.remote_sites import RemoteSites, SiteProfile
from polyclinic.storage.predictions import load_predictions
from polyclinic.storage.snapshots import SnapshotStore
from polyclinic.training.fit import evaluation_batch_size

GLOBAL, PERSONAL = "global", "personal"
PARTS: tuple[Part, ...] = ("validation", "test")


@dataclass(frozen=True)
class Preprocessing:
    """Turns an image file into the input of the network."""

    preparation: Preparation
    mean: PerChannel
    std: PerChannel

    def load_image(self, path: Path) -> Tensor:
        """Decode and resize a file to channels × size × size bytes; `UnreadableImage` gives the reason if it cannot."""
        pixels = decode_image(path, self.preparation.bits).pixels
        if (pixels == pixels.flat[0]).all():
            raise UnreadableImage("it is blank: all its pixels are alike")
        return torch.from_numpy(preprocess_image(pixels, self.preparation))

    def normalise(self, stored: Tensor) -> Tensor:
        """Normalise a batch of prepared images, as bytes, to the input of the network."""
        return Images(stored, torch.zeros(len(stored)), None, self.mean, self.std).scale_images(stored)


def build_preprocessing(recipe: Recipe) -> Preprocessing:
    options = DATASETS[recipe.data.name].options.model_validate(recipe.data.options)
    if isinstance(options, ImageOptions):
        return Preprocessing(options.preparation, *options.normalisation)
    if isinstance(options, PhantomOptions):
        return Preprocessing(Preparation(size=options.size, channels=1), MEAN, STD)
    if isinstance(options, DigitsOptions):
        return Preprocessing(Preparation(size=options.size, channels=1), 0.0, 1.0)
    if isinstance(options, MnistOptions):
        mean, std = (0.0, 1.0) if options.normalise == "none" else (0.5, 0.5)
        return Preprocessing(Preparation(size=SIDE, channels=1), mean, std)
    raise RecipeError("how this data set prepares its images is not known here; give a run on image files")


@dataclass(frozen=True, eq=False)
class RunModel:
    """A model of a finished run, ready to evaluate."""

    name: str
    """global, personal, student, ensemble, or a cluster's name."""
    site: SiteId | None
    """The owner of a personal model; None for others."""
    key: str
    """Its key in the run's summary."""
    sites: tuple[SiteId, ...]
    """The sites that it is for, whose scores are its own."""
    networks: tuple[Classifier, ...]
    """One network, or one for each member of an ensemble."""
    sections: tuple[ModelSection, ...]
    device: torch.device

    @property
    def description(self) -> str:
        return f"{self.name} model of {self.site}" if self.site else f"{self.name} model"

    @torch.no_grad()
    def compute_probabilities(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities and logits of normalised images; for an ensemble, log-probabilities as logits."""
        laid = images.to(self.device)
        if self.has_convolutions:
            laid = laid.contiguous(memory_format=torch.channels_last)  # as in the run, for equal bits
        logits = [network(laid) for network in self.networks]
        if len(logits) == 1:
            return torch.softmax(logits[0], -1).cpu(), logits[0].cpu()
        mean = torch.stack([torch.softmax(each, -1) for each in logits]).mean(0)
        return mean.cpu(), mean.log().cpu()

    @cached_property
    def has_convolutions(self) -> bool:
        return any(isinstance(module, nn.Conv2d) for module in self.networks[0].modules())


@dataclass(frozen=True, eq=False)
class ModelCatalogue(FinishedRun):
    """The models of a finished run whose images need not be here."""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    @cached_property
    def preprocessing(self) -> Preprocessing:
        return build_preprocessing(self.recipe)

    @cached_property
    def _server_models(self) -> Mapping[str, Bundle]:
        """The server's models: under "", or by cluster."""
        return server_models(self.algorithm, self.state, self.recipe.clusters or {"": None})

    @cached_property
    def model_names(self) -> tuple[str, ...]:
        """The names that `load_model` accepts."""
        personal = any(key != GLOBAL for key in self.models_at(next(iter(self.dataset.sites)))[0])
        return (
            *(name or GLOBAL for name in self._server_models),
            *((PERSONAL,) if personal else ()),
            *((STUDENT,) if (self.files.student).is_file() else ()),
            *((ENSEMBLE,) if models_by_site(self.state) else ()),
        )

    def load_model(self, wanted: str | None = None, site: SiteId | None = None) -> RunModel:
        """Load the model of this name; None: the one that the run's headline is about."""
        if site is not None and site not in self.dataset.sites:
            raise RecipeError(
                f"--site is {site!r:.60}, which is no site of this run; there are: "
                f"{', '.join(list(self.dataset.sites)[:12])}"
            )
        name = wanted or self._load_default(site)
        if name == GLOBAL and self.recipe.clusters and site is not None:
            name, site = self.algorithm.cluster_of(self.state, site), None
        if name not in self.model_names:
            raise RecipeError(f"this run has no model {name!r:.60}; choose with --model: {', '.join(self.model_names)}")
        if name != PERSONAL and site is not None:
            instead = ", or set --model personal" if PERSONAL in self.model_names else ""
            raise RecipeError(f"the {name} model is the same for all its sites; leave --site out{instead}")
        if name == PERSONAL:
            return self._load_personal(site)
        if name == STUDENT:
            return self._build_model(name, name, [(self.recipe.model, read_weights(self.files.student))])
        if name == ENSEMBLE:
            members = [(self.recipe.model, weights) for weights in models_by_site(self.state).values()]
            return self._build_model(name, name, members)
        cluster = name if self.recipe.clusters else ""
        section = self.recipe.clusters[cluster].model if cluster else self.recipe.model
        sites = tuple(s for s in self.dataset.sites if self.algorithm.cluster_of(self.state, s) == cluster)
        return self._build_model(name, GLOBAL, [(section, self._server_models[cluster])], sites)

    def _load_default(self, site: SiteId | None) -> str:
        if site is not None:
            return PERSONAL if PERSONAL in self.model_names else GLOBAL
        best = self.summary.headline
        name = best.of or best.model
        if name == GLOBAL and self.recipe.clusters:
            raise RecipeError(
                f"this run has a model for each cluster; say which with --model {' or '.join(self.recipe.clusters)}, "
                "or whose with --site NAME"
            )
        return PERSONAL if name == "transfer" else name

    def _load_personal(self, site: SiteId | None) -> RunModel:
        if site is None:
            rest = ", ".join(name for name in self.model_names if name != PERSONAL)
            instead = f", or choose with --model: {rest}" if rest else ""
            raise RecipeError(f"this run's sites have models of their own; say whose with --site NAME{instead}")
        models, has_memory = self.models_at(site)
        key = site if site in models else PERSONAL
        if key == PERSONAL and not has_memory:
            snapshot = SnapshotStore(self.files.snapshots).load()  # says which sites have trained and keep a memory
            if snapshot is None or site in snapshot.fields["progress"]["memory_rounds"]:
                raise StoreError(
                    f"the memory of site {site} is not in {self.files.site_memory} (a real site keeps it to itself), "
                    "so its personal model cannot be assembled; ask the site for it, or choose another model with "
                    "--model"
                )
        return self._build_model(PERSONAL, key, [(self._model_section(site), models[key])], (site,), site)

    def _build_model(
        self,
        name: str,
        key: str,
        parts: Sequence[tuple[ModelSection, Bundle]],
        sites: tuple[SiteId, ...] | None = None,
        site: SiteId | None = None,
    ) -> RunModel:
        networks = tuple(self.load_network(section, weights) for section, weights in parts)
        sites = tuple(self.dataset.sites) if sites is None else sites
        return RunModel(name, site, key, sites, networks, tuple(section for section, _ in parts), self.device)


def open_catalogue(folder: Path, device: str | None = None) -> ModelCatalogue:
    """Open the models of a finished run; `device`: where to compute (default: as the run)."""
    recipe, summary, state, place = read_run_files(folder, device)
    return ModelCatalogue(folder, recipe, summary, state, _remote_sites(recipe, summary), place)


def _remote_sites(recipe: Recipe, summary: RunSummary) -> RemoteSites:
    """Return the sites of a run without their images, as a deployed server knows them."""
    wanted, classes = build_preprocessing(recipe).preparation, class_names(summary)
    profiles = {
        site.site: SiteProfile(
            version=__version__,
            classes=classes,
            channels=wanted.channels,
            size=wanted.size,
            train=site.train,
            validation=site.validation,
            test=site.test,
            groups=(1, 1),
            unnamed=(0, 0, 0),
            left_out=0,
            fingerprint="",
        )
        for site in summary.site_sizes
    }
    return RemoteSites.from_profiles(profiles)


def fit_calibration(run: ModelCatalogue, model: RunModel, data: Path | None = None) -> Calibration | Uncalibrated:
    """Fit a temperature on the run's validation images.

    Uses the predictions that the run kept; else, if `data` is the folder of the run's images, predicts them now.

    Returns:
        The temperature, with the calibration error on validation and test images, or why there is none.
    """
    if kept := load_predictions(run.files.predictions_file):
        validation, test = (merge_part(kept, model.sites, model.key, part) for part in PARTS)
    elif data is not None:
        sites = open_run(run.folder, data, str(run.device)).dataset.sites
        validation, test = (_predict_parts(model, [getattr(sites[s], part) for s in model.sites]) for part in PARTS)
    else:
        return Uncalibrated("the run kept no predictions of validation images; give its images with --data DIR")
    if validation is None:
        return Uncalibrated("no validation image's prediction by this model is known")
    return calibrate(validation, test)


def _predict_parts(model: RunModel, parts: Sequence[Examples]) -> Predictions | None:
    found = []
    for examples in filter(len, parts):
        batches = torch.split(torch.arange(len(examples)), evaluation_batch_size(model.device))
        rows = [model.compute_probabilities(examples.batch(batch)[0])[0].double() for batch in batches]
        found.append(Predictions(torch.cat(rows).numpy(), examples.labels.cpu().numpy()))
    return Predictions.merge(found) if found else None


@dataclass(frozen=True, eq=False)
class Prediction:
    file: Path
    image: Tensor
    """The prepared image, in bytes."""
    probabilities: Floats
    calibrated: Floats | None

    @property
    def predicted_class(self) -> int:
        return int(self.probabilities.argmax())


@dataclass(frozen=True)
class UnreadableFile:
    file: Path
    why: str


def predict_files(
    model: RunModel, preprocessing: Preprocessing, files: Sequence[Path], temperature: float | None = None
) -> Iterator[Prediction | UnreadableFile]:
    """Predict image files in their order; for a file that cannot be read, yield why."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        size = evaluation_batch_size(model.device)
        for some in (files[start : start + size] for start in range(0, len(files), size)):
            opened = list(pool.map(lambda path: _open_image(preprocessing, path), some))
            images = [image for image in opened if isinstance(image, Tensor)]
            outputs = _predict_batch(model, preprocessing, images, temperature)
            for path, image in zip(some, opened, strict=True):
                yield (
                    Prediction(path, image, *next(outputs))
                    if isinstance(image, Tensor)
                    else UnreadableFile(path, image)
                )


def _open_image(preprocessing: Preprocessing, path: Path) -> Tensor | str:
    try:
        return preprocessing.load_image(path)
    except PolyclinicError as problem:
        return str(problem)


def _predict_batch(
    model: RunModel, preprocessing: Preprocessing, images: Sequence[Tensor], temperature: float | None
) -> Iterator[tuple[Floats, Floats | None]]:
    if not images:
        return
    probabilities, logits = model.compute_probabilities(preprocessing.normalise(torch.stack(list(images))))
    if not probabilities.isfinite().all():
        raise DataError("the network gives values that are not finite; train it anew")
    calibrated = (
        [None] * len(images) if temperature is None else apply_temperature(logits.double().numpy(), temperature)
    )
    yield from zip(probabilities.double().numpy(), calibrated, strict=True)


def find_image_files(given: Sequence[Path]) -> tuple[list[Path], list[UnreadableFile]]:
    """Expand folders to their images, sorted by name, without repeats; also returns the folders that have none."""
    inside = {path: list(_files_in_folder(path)) if path.is_dir() else [path] for path in given}
    failed = [UnreadableFile(path, "the folder holds no image") for path in given if not inside[path]]
    return list(dict.fromkeys(chain.from_iterable(inside.values()))), failed


def _files_in_folder(folder: Path) -> Iterator[Path]:
    with plain_read_errors(folder):
        yield from list_images(folder)
        deeper = [inner for inner in list_subfolders(folder) if not inner.is_symlink()]  # a link may lead back up
    for inner in deeper:
        yield from _files_in_folder(inner)
