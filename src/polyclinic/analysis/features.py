"""What a finished run's network makes of the hospitals' images, and how far hospitals lie apart in it.

FedMP: tackling medical feature heterogeneity in federated learning from a manifold perspective (Zhou et al. 2025),
sections 4.2.1 and 4.2.3, shows features by t-SNE (van der Maaten and Hinton 2008). Such a picture can be read either
way, so two figures stand beside it, both of features as they are and not of the picture:

    recognised  the share of images whose nearest one, of the same class and another patient, is of their own site; mean
                over sites. The test of Schilling 1986 and Henze 1988: whether samples have one distribution.
    apart       the Hausdorff distance between two sites' features of a class, mean over classes and pairs of sites,
                divided by the mean distance between two classes' means. Scaling or turning features changes nothing.

and, beside them, how well a fresh classifier of sites does (domains.py).

Each with what chance gives: the mean of the same figure after patients were dealt anew to sites, within their class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyclinic.analysis.site_classifier import classify_sites
from polyclinic.core.contract import Examples, Part, SiteId, Stream
from polyclinic.core.errors import DataError, RecipeError
from polyclinic.data.heterogeneity.feature_shift import p_value, shuffle_sites
from polyclinic.data.patients import Indices
from polyclinic.evaluation.metrics import Floats
from polyclinic.models.classifier import Classifier
from polyclinic.models.split_point import count_stages, cut_after
from polyclinic.runs.finished_run import FinishedRun, check_same_images, run_names
from polyclinic.runs.sites import FederatedDataset
from polyclinic.training.fit import evaluation_batch_size

FEWEST = 2
"""Patients of a class that a site must have to be compared in that class: one alone has no neighbour at home."""
IMAGES = 8
"""Fewer are no picture."""
DEALT = 200
"""How often patients are dealt anew."""
PERPLEXITY = 30.0
ROOM = 2**29
"""Values of all features together; in double precision they take 4 GiB."""


@dataclass(frozen=True)
class FeatureOptions:
    """Which images, seen by which stage."""

    part: Part = "test"
    label: str | None = None
    """Only this class."""
    most: int = 1000
    stage: int | None = None
    """None: what the run's extractor hands to its head."""


@dataclass(frozen=True, eq=False)
class FeaturePoints:
    """Features of images: one row each."""

    values: Floats
    site: Indices
    label: Indices
    patient: Indices

    def select_rows(self, rows: Indices) -> FeaturePoints:
        return FeaturePoints(self.values[rows], self.site[rows], self.label[rows], self.patient[rows])


@dataclass(frozen=True)
class FeatureScore:
    """A figure, what chance gives in its place, and how often chance gives as much."""

    value: float
    chance: float
    p: float


@dataclass(frozen=True)
class FeatureScores:
    recognised: FeatureScore
    apart: FeatureScore | None
    """None: there is but one class, and no distance between classes to compare with."""
    sites: int
    """Compared in one class or more."""
    classes: int
    """In which two sites or more were compared."""
    told_apart: float | None
    """What a fresh classifier of sites scores; see domains.py."""


@dataclass(frozen=True, eq=False)
class RunFeatures:
    """One run's features."""

    folder: Path
    name: str
    stage: int
    stages: int
    dimensions: int
    shared: bool
    """All sites have the same extractor; else each site's images are seen by its own."""
    points: FeaturePoints
    """Those that are shown."""
    scores: FeatureScores | None
    """None: no class has two sites with patients enough."""


def compare_features(runs: Sequence[FinishedRun], options: FeatureOptions, stream: Stream) -> list[RunFeatures]:
    """The features of the same images in every run."""
    for past in runs:
        _check_unclustered(past)
        check_same_images(past, runs[0])
    consortium = runs[0].dataset
    rows = choose_images(consortium, options, stream.child("images"))
    seen = zip(runs, run_names(runs), strict=True)
    return [_features_of_run(past, name, rows, options, stream.child("dealt")) for past, name in seen]


def measure_site_classifier(run: FinishedRun) -> float | None:
    """What `polyclinic features` says of a run: how well a fresh classifier tells the sites of test images."""
    [view] = compare_features([run], FeatureOptions(), Stream(run.recipe.seed, ("features",)))
    return None if view.scores is None else view.scores.told_apart


def _check_unclustered(run: FinishedRun) -> None:
    if run.recipe.clusters:
        raise RecipeError(
            f"the run in {run.folder} has a network for each of its clusters, whose features cannot be compared; give "
            "runs without clusters"
        )


def choose_images(dataset: FederatedDataset, options: FeatureOptions, stream: Stream) -> dict[SiteId, Tensor]:
    """The rows of each site's images, evenly over sites; with a label as many of all other classes, for comparison."""
    held: dict[SiteId, Examples] = {name: getattr(site, options.part) for name, site in dataset.sites.items()}
    labels = {name: examples.labels.cpu().numpy() for name, examples in held.items()}
    wanted = {name: np.ones(len(own), dtype=bool) for name, own in labels.items()}
    if options.label is not None:
        number = _class_number(dataset.classes, options.label)
        wanted = {name: own == number for name, own in labels.items()}
    there = sum(int(own.sum()) for own in wanted.values())
    if there < IMAGES:
        of = "" if options.label is None else f" of class {options.label}"
        raise DataError(
            f"the sites have {there} {options.part} images{of}, and fewer than {IMAGES} make no picture; choose another "
            "--part" + (" or --label" if of else "")
        )
    rng = np.random.default_rng(stream.integer())
    parts = [
        _sample_rows([np.flatnonzero(own == keep) for own in wanted.values()], options.most, rng)
        for keep in (True, False)
    ]
    return {name: torch.from_numpy(np.concatenate(both)) for name, *both in zip(held, *parts, strict=True)}


def _class_number(classes: Sequence[str], label: str) -> int:
    if label not in classes:
        raise RecipeError(f"there is no class {label!r:.60}; choose among {', '.join(classes[:12])}")
    return classes.index(label)


def _sample_rows(rows: Sequence[Indices], most: int, rng: np.random.Generator) -> list[Indices]:
    sizes = divide_evenly([len(own) for own in rows], most)
    return [np.sort(rng.permutation(own)[:size]) for own, size in zip(rows, sizes, strict=True)]


def divide_evenly(sizes: Sequence[int], most: int) -> list[int]:
    """`most` divided evenly; what one has not, others may have."""
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
    people = [person for site, own in rows.items() for person in _patient_numbers(site, held[site], own)]
    points = FeaturePoints(
        reduce_dimensions(values),
        np.repeat(np.arange(len(rows)), [len(own) for own in rows.values()]),
        np.concatenate([held[site].labels.cpu().numpy()[own] for site, own in rows.items()]),
        np.unique(people, return_inverse=True)[1],
    )
    if not np.isfinite(points.values).all() or not points.values.any():
        raise DataError(f"the features of {run.folder} are not finite, or those of all images the same; train it anew")
    among = None if options.label is None else _class_number(run.dataset.classes, options.label)
    shown = points if among is None else points.select_rows(np.flatnonzero(points.label == among))
    figures = measure_features(shown, class_distance(points), stream)
    return RunFeatures(run.folder, name, stage, last, values.shape[1], shared, shown, figures)


def _patient_numbers(site: SiteId, examples: Examples, rows: Tensor) -> list[str]:
    """Who the images are of; where that is unknown, every image is of somebody else."""
    if examples.patients is None:
        return [f"{site}/{row}" for row in rows.tolist()]
    return [examples.patients[row] for row in rows.tolist()]


def _extract_all(
    run: FinishedRun, rows: Mapping[SiteId, Tensor], options: FeatureOptions
) -> tuple[Floats, int, int, bool]:
    """All features, of which stage of how many, and whether one extractor made them."""
    found: list[Tensor] = []
    first: dict[str, Tensor] = {}
    shared, images = True, sum(map(len, rows.values()))
    for site, own in rows.items():
        _, network = run.site_network(site)
        last = count_stages(network)
        stage = (run.recipe.model.cut or last) if options.stage is None else options.stage
        if not 1 <= stage <= last:
            raise RecipeError(f"--stage is {stage}, but the network of {run.folder} has stages 1 to {last}")
        cut = cut_after(network, stage)
        weights = cut.extractor.state_dict()
        first = first or weights
        shared = shared and all(torch.equal(tensor, first[name]) for name, tensor in weights.items())
        found.append(_extract_rows(cut, getattr(run.dataset.sites[site], options.part), own, run.device))
        _check_memory(found[-1].shape[1], images, stage)
    return torch.cat(found).numpy(), stage, last, shared


@torch.no_grad()
def _extract_rows(network: Classifier, examples: Examples, rows: Tensor, device: torch.device) -> Tensor:
    parts = torch.split(rows, evaluation_batch_size(device))
    return torch.cat([network.extractor(examples.batch(part)[0].to(device)).flatten(1).cpu() for part in parts])


def _check_memory(dimensions: int, images: int, stage: int) -> None:
    if dimensions * images > ROOM:
        raise RecipeError(
            f"a feature of stage {stage} has {dimensions:,} values, too many for {images:,} images; lower --most to "
            f"{ROOM // dimensions:,} or choose a later --stage"
        )


def reduce_dimensions(values: Floats) -> Floats:
    """The same points turned, centred: every distance stays, and there are no more dimensions than points."""
    centred: Floats = values.astype(np.float64) - values.mean(axis=0, dtype=np.float64)
    if centred.shape[1] <= len(centred):
        return centred
    turned: Floats = np.linalg.qr(centred.T).R.T
    return turned


def embed_tsne(values: Floats, stream: Stream) -> Floats:
    """t-SNE in two dimensions; on one core, so that the same seed gives the same picture."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn brings it

    perplexity = min(PERPLEXITY, len(values) / 4)
    with threadpool_limits(1):
        found: Floats = TSNE(init="pca", perplexity=perplexity, random_state=stream.integer() % 2**32).fit_transform(
            values
        )
    return found


def class_distance(points: FeaturePoints) -> float | None:
    """The mean distance between two classes' means."""
    from scipy.spatial.distance import pdist  # takes as long to load as the rest of the command line

    means = [points.values[points.label == label].mean(axis=0) for label in np.unique(points.label)]
    return float(pdist(means).mean()) if len(means) > 1 else None


@dataclass(frozen=True, eq=False)
class _Class:
    """The images of one class at sites that are compared."""

    distance: Floats
    nearest: Indices
    """Of every image, the nearest one of another patient."""
    unit: Indices
    """The number of every image's patient …"""
    home: Indices
    """… and, of every patient, the site. A patient of two sites is here twice."""


def measure_features(points: FeaturePoints, scale: float | None, stream: Stream) -> FeatureScores | None:
    """Both figures; `scale`: the distance between classes."""
    classes = [found for label in np.unique(points.label) if (found := _select_class(points, label))]
    if not classes:
        return None
    rng = np.random.default_rng(stream.integer())
    dealt = [shuffle_sites(one.home, np.zeros_like(one.home), DEALT, rng) for one in classes]

    def judged(figure: Callable[[Sequence[_Class], Sequence[Indices]], float]) -> FeatureScore:
        value = figure(classes, [one.home for one in classes])
        chance = np.array([figure(classes, homes) for homes in zip(*dealt, strict=True)])
        return FeatureScore(value, float(chance.mean()), p_value(value, chance))

    apart = judged(lambda found, homes: _site_distance(found, homes) / scale) if scale else None
    sites = np.unique(np.concatenate([one.home for one in classes]))
    return FeatureScores(
        judged(_site_recognition), apart, len(sites), len(classes), classify_sites(points, stream.child("folds"))
    )


def _select_class(points: FeaturePoints, label: int) -> _Class | None:
    from scipy.spatial.distance import cdist

    members = np.flatnonzero(points.label == label)
    pairs, patients = np.unique(np.stack([points.site[members], points.patient[members]]), axis=1, return_inverse=True)
    able = np.bincount(pairs[0]) >= FEWEST
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
    """The Hausdorff distance of every pair of sites, from distances of images."""
    order = np.argsort(site, kind="stable")
    _, starts = np.unique(site[order], return_index=True)
    to_site = np.minimum.reduceat(distance[np.ix_(order, order)], starts, axis=1)
    directed = np.maximum.reduceat(to_site, starts, axis=0)
    both: Floats = np.maximum(directed, directed.T)[np.triu_indices(len(starts), 1)]
    return both
