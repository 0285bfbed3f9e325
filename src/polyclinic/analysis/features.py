"""Measures how far sites lie apart in the features that a finished run's network extracts from their images.

FedMP: tackling medical feature heterogeneity in federated learning from a manifold perspective (Zhou et al. 2025),
sections 4.2.1 and 4.2.3, shows features by t-SNE (van der Maaten and Hinton 2008). Such a figure can be read either
way, so two scores accompany it, both computed from the features themselves and not from the figure:

    recognised  the share of images whose nearest one, of the same class and another patient, is of their own site; mean
                over sites. The test of Schilling 1986 and Henze 1988: whether samples have one distribution.
    apart       the Hausdorff distance between two sites' features of a class, mean over classes and pairs of sites,
                divided by the mean distance between two classes' means. Scaling or turning features changes nothing.

A third score is the accuracy of a classifier that predicts the site of an image: it grows with the sites' difference.

Each is reported with its chance level: the mean of the same score after patients of a class were permuted among sites.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from polyclinic.core import DataError, Examples, Part, RecipeError, SiteId, Stream
from polyclinic.data.heterogeneity.feature_shift import p_value, shuffle_sites
from polyclinic.data.patients import Indices
from polyclinic.evaluation.metrics import Floats
from polyclinic.models.modifications import count_stages, cut_after
from polyclinic.runs.finished_run import FinishedRun, check_same_images, run_names
from polyclinic.runs.sites import FederatedDataset
from polyclinic.training.fit import evaluation_batch_size

MIN_PATIENTS = 2
"""Of a class, for a site to be compared in that class: a single patient has no neighbour at its own site."""
MIN_IMAGES = 8
"""Below this number a t-SNE figure shows nothing."""
PERMUTATIONS = 200
"""How often patients are permuted among sites."""
FOLDS = 5
"""Of the site classifier's cross-validation."""
PERPLEXITY = 30.0
MAX_VALUES = 2**29
"""The most values of all features together, which take 4 GiB in double precision."""


@dataclass(frozen=True)
class FeatureOptions:
    """Which images are used, and the stage of the network whose features are compared."""

    part: Part = "test"
    label: str | None = None
    """Show only this class."""
    most: int = 1000
    stage: int | None = None
    """None: the stage whose features the run's head receives."""


@dataclass(frozen=True, eq=False)
class FeaturePoints:
    """The features of images, one row each, with the numbers of their sites, classes and patients."""

    values: Floats
    site: Indices
    label: Indices
    patient: Indices

    def select_rows(self, rows: Indices) -> Self:
        return replace(self, **{name: column[rows] for name, column in vars(self).items()})


@dataclass(frozen=True)
class FeatureScore:
    """A score, its chance level, and the p-value of the permutation test."""

    value: float
    chance: float
    p: float


@dataclass(frozen=True)
class FeatureScores:
    recognised: FeatureScore
    apart: FeatureScore | None
    """None with a single class: there is no distance between classes to compare with."""
    sites: int
    """How many sites are compared in at least one class."""
    classes: int
    """How many classes at least two sites are compared in."""
    site_classifier_accuracy: float | None
    """See `score_site_classifier`."""


@dataclass(frozen=True, eq=False)
class RunFeatures:
    """The features of one run, and their scores."""

    folder: Path
    name: str
    stage: int
    stages: int
    dimensions: int
    shared: bool
    """Whether all sites have the same extractor; otherwise each site's images pass through its own."""
    points: FeaturePoints
    """The images that are shown."""
    scores: FeatureScores | None
    """None if no class has two sites with enough patients."""


def compare_features(runs: Sequence[FinishedRun], options: FeatureOptions, stream: Stream) -> list[RunFeatures]:
    """Extract features of the same images in every run, and score them."""
    for run in runs:
        if run.recipe.clusters:
            raise RecipeError(
                f"the run in {run.folder} has a network for each of its clusters, whose features cannot be compared; "
                "give runs without clusters"
            )
        check_same_images(run, runs[0])
    rows = choose_images(runs[0].dataset, options, stream.child("images"))
    return [
        _features_of_run(run, name, rows, options, stream.child("dealt"))
        for run, name in zip(runs, run_names(runs), strict=True)
    ]


def measure_site_classifier(run: FinishedRun) -> float | None:
    """Return a run's site_classifier_accuracy on test images, as `polyclinic features` reports it."""
    [found] = compare_features([run], FeatureOptions(), Stream(run.recipe.seed, ("features",)))
    return None if found.scores is None else found.scores.site_classifier_accuracy


def choose_images(dataset: FederatedDataset, options: FeatureOptions, stream: Stream) -> dict[SiteId, Tensor]:
    """Return the rows of the images to use, evenly over sites, and with a label as many images of all other classes."""
    held: dict[SiteId, Examples] = {name: getattr(site, options.part) for name, site in dataset.sites.items()}
    labels = {name: examples.labels.cpu().numpy() for name, examples in held.items()}
    number = None if options.label is None else _class_number(dataset.classes, options.label)
    wanted = {name: np.full(len(own), number is None) | (own == number) for name, own in labels.items()}
    there = sum(int(own.sum()) for own in wanted.values())
    if there < MIN_IMAGES:
        of = "" if options.label is None else f" of class {options.label}"
        raise DataError(
            f"the sites have {there} {options.part} images{of}, and fewer than {MIN_IMAGES} make no picture; choose "
            "another --part" + (" or --label" if of else "")
        )
    rng, parts = np.random.default_rng(stream.integer()), []
    for keep in (True, False):
        rows = [np.flatnonzero(own == keep) for own in wanted.values()]
        sizes = divide_evenly([len(own) for own in rows], options.most)
        parts.append([np.sort(rng.permutation(own)[:size]) for own, size in zip(rows, sizes, strict=True)])
    return {name: torch.from_numpy(np.concatenate(both)) for name, *both in zip(held, *parts, strict=True)}


def _class_number(classes: Sequence[str], label: str) -> int:
    if label not in classes:
        raise RecipeError(f"there is no class {label!r:.60}; choose among {', '.join(classes[:12])}")
    return classes.index(label)


def divide_evenly(sizes: Sequence[int], most: int) -> list[int]:
    """Divide `most` evenly; a share that one site cannot fill goes to the others."""
    given, left = [0] * len(sizes), most
    for place, number in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        given[number] = min(sizes[number], left // (len(sizes) - place))
        left -= given[number]
    return given


def _features_of_run(
    run: FinishedRun, name: str, rows: Mapping[SiteId, Tensor], options: FeatureOptions, stream: Stream
) -> RunFeatures:
    values, stage, last, shared = _extract_all(run, rows, options)
    held = {site: getattr(run.dataset.sites[site], options.part) for site in rows}
    patients = [patient for site, own in rows.items() for patient in _name_patients(site, held[site], own)]
    points = FeaturePoints(
        reduce_dimensions(values),
        np.repeat(np.arange(len(rows)), [len(own) for own in rows.values()]),
        np.concatenate([held[site].labels.cpu().numpy()[own] for site, own in rows.items()]),
        np.unique(patients, return_inverse=True)[1],
    )
    if not np.isfinite(points.values).all() or not points.values.any():
        raise DataError(f"the features of {run.folder} are not finite, or those of all images the same; train it anew")
    among = None if options.label is None else _class_number(run.dataset.classes, options.label)
    shown = points if among is None else points.select_rows(np.flatnonzero(points.label == among))
    scores = measure_features(shown, class_distance(points), stream)
    return RunFeatures(run.folder, name, stage, last, values.shape[1], shared, shown, scores)


def _name_patients(site: SiteId, examples: Examples, rows: Tensor) -> list[str]:
    """Return the patient of each image. Where patients are unknown, every image counts as another patient."""
    patients = examples.patients
    return [f"{site}/{row}" if patients is None else patients[row] for row in rows.tolist()]


@torch.no_grad()
def _extract_all(
    run: FinishedRun, rows: Mapping[SiteId, Tensor], options: FeatureOptions
) -> tuple[Floats, int, int, bool]:
    """Return the features, their stage, the number of stages, and whether all sites share one extractor."""
    found: list[Tensor] = []
    first: dict[str, Tensor] = {}
    shared, images = True, sum(map(len, rows.values()))
    for site, own in rows.items():
        _, network = run.site_network(site)
        last = count_stages(network)
        stage = (run.recipe.model.split_after or last) if options.stage is None else options.stage
        if not 1 <= stage <= last:
            raise RecipeError(f"--stage is {stage}, but the network of {run.folder} has stages 1 to {last}")
        cut = cut_after(network, stage)
        weights = cut.extractor.state_dict()
        first = first or weights
        shared = shared and all(torch.equal(tensor, first[name]) for name, tensor in weights.items())
        examples: Examples = getattr(run.dataset.sites[site], options.part)
        found += [
            cut.extractor(examples.batch(part)[0].to(run.device)).flatten(1).cpu()
            for part in torch.split(own, evaluation_batch_size(run.device))
        ]
        if (dimensions := found[-1].shape[1]) * images > MAX_VALUES:
            raise RecipeError(
                f"a feature of stage {stage} has {dimensions:,} values, too many for {images:,} images; lower --most "
                f"to {MAX_VALUES // dimensions:,} or choose a later --stage"
            )
    return torch.cat(found).numpy(), stage, last, shared


def reduce_dimensions(values: Floats) -> Floats:
    """Centre and rotate the points: distances stay the same, and there are no more dimensions than points."""
    centred: Floats = values.astype(np.float64) - values.mean(axis=0, dtype=np.float64)
    return centred if centred.shape[1] <= len(centred) else np.asarray(np.linalg.qr(centred.T).R.T)


def embed_tsne(values: Floats, stream: Stream) -> Floats:
    """Embed points in two dimensions by t-SNE; on one core, so that the same seed gives the same figure."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn brings it

    tsne = TSNE(init="pca", perplexity=min(PERPLEXITY, len(values) / 4), random_state=stream.integer() % 2**32)
    with threadpool_limits(1):
        return np.asarray(tsne.fit_transform(values))


def class_distance(points: FeaturePoints) -> float | None:
    """Return the mean distance between the means of two classes; None for a single class."""
    from scipy.spatial.distance import pdist  # takes as long to load as the rest of the command line

    means = [points.values[points.label == label].mean(axis=0) for label in np.unique(points.label)]
    return float(pdist(means).mean()) if len(means) > 1 else None


@dataclass(frozen=True, eq=False)
class _Class:
    """The images of one class at the sites that are compared."""

    distance: Floats
    nearest: Indices
    """Of every image, the nearest image of another patient."""
    unit: Indices
    """The number of every image's patient …"""
    home: Indices
    """… and of every patient, the site. A patient of two sites counts twice."""


def measure_features(points: FeaturePoints, scale: float | None, stream: Stream) -> FeatureScores | None:
    """Score features; `scale`: the distance between classes. None if no class can be compared."""
    classes = [found for label in np.unique(points.label) if (found := _select_class(points, label))]
    if not classes:
        return None
    rng = np.random.default_rng(stream.integer())
    permuted = [shuffle_sites(one.home, np.zeros_like(one.home), PERMUTATIONS, rng) for one in classes]

    def test_score(score: Callable[[Sequence[_Class], Sequence[Indices]], float]) -> FeatureScore:
        value = score(classes, [one.home for one in classes])
        chance = np.array([score(classes, homes) for homes in zip(*permuted, strict=True)])
        return FeatureScore(value, float(chance.mean()), p_value(value, chance))

    apart = test_score(lambda found, homes: _site_distance(found, homes) / scale) if scale else None
    sites = np.unique(np.concatenate([one.home for one in classes]))
    accuracy = score_site_classifier(points.values, points.site, points.patient, stream.child("folds"))
    return FeatureScores(test_score(_site_recognition), apart, len(sites), len(classes), accuracy)


def score_site_classifier(features: Floats, site: Indices, patient: Indices, stream: Stream) -> float | None:
    """Return a logistic regression's balanced accuracy on patients it was not fitted on; chance is 1 / number of sites.

    Args:
        features: One row for each image.
        site: The number of each image's site. Every site counts alike, whatever its size.
        patient: The number of each image's patient; no patient is in two folds of the cross-validation.
        stream: Decides the folds.

    Returns:
        The accuracy; None if fewer than two sites have a patient for every fold.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict

    patients = [len(np.unique(patient[site == number])) for number in range(site.max() + 1)]
    able = np.flatnonzero(np.array(patients) >= FOLDS)
    rows = np.isin(site, able)
    if len(able) < 2:
        return None
    values = features[rows] - features[rows].mean(axis=0)
    values /= np.sqrt((values**2).mean())  # one scale for all: moving or turning features changes nothing
    classifier = LogisticRegression(class_weight="balanced", max_iter=2000)
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=stream.integer() % 2**32)
    predicted = cross_val_predict(classifier, values, site[rows], groups=patient[rows], cv=folds)
    return float(balanced_accuracy_score(site[rows], predicted))


def _select_class(points: FeaturePoints, label: int) -> _Class | None:
    from scipy.spatial.distance import cdist

    members = np.flatnonzero(points.label == label)
    pairs, patients = np.unique(np.stack([points.site[members], points.patient[members]]), axis=1, return_inverse=True)
    able = np.bincount(pairs[0]) >= MIN_PATIENTS
    rows = able[points.site[members]]
    if able.sum() < 2:
        return None
    numbers, unit = np.unique(patients[rows], return_inverse=True)
    here = points.select_rows(members[rows])
    distance = cdist(here.values, here.values)
    others = np.where(here.patient[:, None] == here.patient, np.inf, distance)
    return _Class(distance, others.argmin(axis=1), unit, pairs[0][numbers])


def _site_recognition(classes: Sequence[_Class], homes: Sequence[Indices]) -> float:
    owns = [home[one.unit] for one, home in zip(classes, homes, strict=True)]
    right = np.concatenate([own == own[one.nearest] for one, own in zip(classes, owns, strict=True)])
    site = np.concatenate(owns)
    images = np.bincount(site)
    return float((np.bincount(site, weights=right)[images > 0] / images[images > 0]).mean())


def _site_distance(classes: Sequence[_Class], homes: Sequence[Indices]) -> float:
    pairs = zip(classes, homes, strict=True)
    return float(np.concatenate([hausdorff_distances(one.distance, home[one.unit]) for one, home in pairs]).mean())


def hausdorff_distances(distance: Floats, site: Indices) -> Floats:
    """Return the Hausdorff distance of every pair of sites, from distances of images."""
    order = np.argsort(site, kind="stable")
    _, starts = np.unique(site[order], return_index=True)
    to_site = np.minimum.reduceat(distance[np.ix_(order, order)], starts, axis=1)
    directed = np.maximum.reduceat(to_site, starts, axis=0)
    return np.asarray(np.maximum(directed, directed.T)[np.triu_indices(len(starts), 1)])
