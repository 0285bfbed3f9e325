"""Feature shift: do images of the SAME class look different at different sites?

Two answers: how well a small classifier names the site of an unseen patient's image, and how far the sites' features
lie apart (maximum mean discrepancy). Both are judged by moving patients, with all their images, between sites WITHIN
their class, so differences that only follow from different class proportions are not mistaken for a shift.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.core import Stream
from polyclinic.data.patients import Indices
from polyclinic.evaluation.metrics import Floats, Predictions
from polyclinic.evaluation.statistics import bootstrap_intervals

Features: TypeAlias = Callable[[Tensor], Tensor]
"""Images (n × channels × height × width) -> features (n × any number)."""

FEWEST, TRUSTED = 10, 25
"""The patients that a site needs for the domain classifier to be trained, and to be trusted."""
LARGEST, GREYS = 96, 64
"""The largest side in pixels for random features; a larger image is reduced, and its grey values are sampled."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
FOLDS = 5
REFITS = 100
"""The permutations for the domain classifier; each trains it again on every fold."""
COMPONENTS = 32


@dataclass(frozen=True)
class PatientSample:
    """Patients drawn from all sites. A patient of two sites appears twice, with the same `person`."""

    site: Indices
    """The number of every patient's site …"""
    label: Indices
    """… and most frequent label …"""
    person: Indices
    """… and identity."""
    of_image: Indices
    """The patient of every image, ascending."""

    def __len__(self) -> int:
        return len(self.site)

    @property
    def first_images(self) -> Indices:
        """The first image of every patient."""
        return np.searchsorted(self.of_image, np.arange(len(self)))

    def select_patients(self, members: Indices) -> "tuple[PatientSample, Indices]":
        """Return the cohort of these patients, and the numbers of their images."""
        number = np.full(len(self), -1)
        number[members] = np.arange(len(members))
        rows = np.flatnonzero(number[self.of_image] >= 0)
        rows = rows[np.argsort(number[self.of_image[rows]], kind="stable")]
        return PatientSample(
            self.site[members], self.label[members], self.person[members], number[self.of_image[rows]]
        ), rows


@dataclass(frozen=True)
class SiteClassifierResult:
    """The accuracy of a logistic regression on frozen features that predicts the site of unseen patients' images."""

    accuracy: float
    """The balanced accuracy over sites."""
    chance: float
    """The mean accuracy after patients are permuted between sites within classes. With few patients it is slightly
    below 1 / sites, because the held-out patients are missing from their site's training data."""
    low: float
    high: float
    """The 95 % interval of the accuracy over patients, given the trained classifiers."""
    p: float
    sites: tuple[str, ...]
    """The sites with enough patients."""
    patients: int
    """The number of patients at the smallest of these sites."""
    balanced: bool
    """Whether every site contributed the same number of patients of every class."""

    @property
    def is_trusted(self) -> bool:
        return self.patients >= TRUSTED

    @property
    def excess(self) -> float:
        """0 at chance, 1 if every site is recognised."""
        return (self.accuracy - self.chance) / (1 - self.chance) if self.chance < 1 else 0.0


def random_features(channels: int) -> Features:
    """Two random convolutions with fixed weights: mean and maximum of 16 + 32 filters, and grey-value statistics."""
    generator = Stream(0).child("random features", channels).generator()
    first = torch.randn(16, channels, 5, 5, generator=generator) / math.sqrt(25 * channels)
    second = torch.randn(32, 16, 3, 3, generator=generator) / math.sqrt(9 * 16 / 2)

    def features(images: Tensor) -> Tensor:
        images = images.float().cpu()
        if max(images.shape[-2:]) > LARGEST:
            images = F.interpolate(images, size=(LARGEST, LARGEST), mode="area")
        one = F.relu(F.conv2d(images, first, padding=2))
        two = F.relu(F.conv2d(F.avg_pool2d(one, 2, ceil_mode=True), second, padding=1))
        pooled = [pool for maps in (one, two) for pool in (maps.mean((2, 3)), maps.amax((2, 3)))]
        greys = (images if max(images.shape[-2:]) <= GREYS else F.interpolate(images, size=(GREYS, GREYS))).flatten(1)
        quantiles = torch.quantile(greys, torch.tensor(QUANTILES), dim=1).T
        return torch.cat([*pooled, quantiles, torch.stack([greys.mean(1), greys.std(1, correction=0)], 1)], 1)

    return features


def standardise(features: Floats) -> Floats:
    """Scale every feature to mean 0 and standard deviation 1 over all images; a constant feature becomes 0."""
    spread = features.std(axis=0)
    varies = spread > 1e-9 * np.maximum(1, np.abs(features).max(axis=0))
    return np.asarray((features - features.mean(axis=0)) * varies / np.where(varies, spread, 1))


def shuffle_sites(site: Indices, label: Indices, times: int, rng: np.random.Generator) -> Indices:
    """Permute the patients' sites within every class; each of the `times` rows is one permutation."""
    drawn = np.tile(site, (times, 1))
    for one in np.unique(label):
        members = np.flatnonzero(label == one)
        drawn[:, members] = rng.permuted(drawn[:, members], axis=1)
    return drawn


def p_value(observed: float, permuted: Floats) -> float:
    """Return (1 + k) / (1 + n); values that differ only by rounding count as equal."""
    return float((1 + (permuted >= observed - 1e-12).sum()) / (1 + len(permuted)))


def classify_sites(
    features: Floats, cohort: PatientSample, names: Sequence[str], stream: Stream
) -> SiteClassifierResult | None:
    """Train and test the domain classifier. Return None if fewer than two sites have enough patients."""
    able = np.flatnonzero(np.bincount(cohort.site, minlength=len(names)) >= FEWEST)
    if len(able) < 2:
        return None
    rng = np.random.default_rng(stream.integer())
    members, balanced = _balance_cohort(cohort, able, rng)
    cohort, rows = cohort.select_patients(members)
    site = np.searchsorted(able, cohort.site)
    folds, whitened = _assign_folds(cohort, rng), _whiten_components(features[rows])
    probabilities = _predict_held_out(whitened, site[cohort.of_image], folds)
    accuracy = _balanced_accuracy(probabilities, site[cohort.of_image])
    moved = [row[cohort.of_image] for row in shuffle_sites(site, cohort.label, REFITS, rng)]
    null = np.array([_balanced_accuracy(_predict_held_out(whitened, truth, folds), truth) for truth in moved])
    predictions = Predictions(probabilities, site[cohort.of_image], tuple(map(str, cohort.person[cohort.of_image])))
    low, high = bootstrap_intervals(predictions, ["balanced_accuracy"], stream=stream.child("interval"))[
        "balanced_accuracy"
    ]
    return SiteClassifierResult(
        accuracy=accuracy,
        chance=float(null.mean()),
        low=low,
        high=high,
        p=p_value(accuracy, null),
        sites=tuple(names[number] for number in able.tolist()),
        patients=int(np.bincount(site).min()),
        balanced=balanced,
    )


def _balance_cohort(cohort: PatientSample, able: Indices, rng: np.random.Generator) -> tuple[Indices, bool]:
    """Select equally many patients of each class from every site, or all patients if that leaves too few."""
    able_site = np.isin(cohort.site, able)
    cells = [
        [np.flatnonzero(able_site & (cohort.site == site) & (cohort.label == label)) for site in able]
        for label in np.unique(cohort.label)
    ]
    fewest = [min(map(len, row)) for row in cells]
    if sum(fewest) < FEWEST:
        return np.flatnonzero(able_site), False
    drawn = [rng.permutation(cell)[:n] for row, n in zip(cells, fewest, strict=True) for cell in row]
    return np.sort(np.concatenate(drawn)), True


def _assign_folds(cohort: PatientSample, rng: np.random.Generator) -> Indices:
    """Assign every image to a fold, each person to one only. Persons are renumbered so that folds mix the sites."""
    from sklearn.model_selection import GroupKFold

    person = rng.permutation(cohort.person.max() + 1)[cohort.person][cohort.of_image]
    folds = np.zeros(len(person), dtype=np.int64)
    for fold, (_, held) in enumerate(GroupKFold(FOLDS).split(person, groups=person)):
        folds[held] = fold
    return folds


def _whiten_components(features: Floats) -> Floats:
    """Return the whitened principal components, at most one for every ten images."""
    left, spread, _ = np.linalg.svd(features - features.mean(axis=0), full_matrices=False)
    most = max(1, min(COMPONENTS, len(features) // 10))
    varies = spread[:most] > 1e-6 * max(spread[0], 1e-6)
    return np.asarray(left[:, :most] * varies * math.sqrt(len(features)))


def _predict_held_out(features: Floats, site: Indices, folds: Indices) -> Floats:
    """Predict every image's site probabilities by a classifier that was not trained on its patient."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    probabilities = np.zeros((len(site), site.max() + 1))
    with warnings.catch_warnings():
        # If sites are separable the weights need not converge: the predictions are settled early.
        warnings.simplefilter("ignore", ConvergenceWarning)
        for fold in range(FOLDS):
            held = folds == fold
            model = LogisticRegression(C=0.1, class_weight="balanced", tol=1e-3, max_iter=200)
            model.fit(features[~held], site[~held])
            probabilities[np.ix_(held, model.classes_)] = model.predict_proba(features[held])
    return probabilities


def _balanced_accuracy(probabilities: Floats, site: Indices) -> float:
    right = probabilities.argmax(axis=1) == site
    return float((np.bincount(site, weights=right) / np.bincount(site)).mean())


def patient_kernel(features: Floats, cohort: PatientSample) -> Floats:
    """Patients × patients: the mean Gaussian kernel between their images, as wide as the median distance of images.

    The kernel of patients' mean embeddings. So a patient counts once, however many images there are, and a discrepancy
    that leaves out the diagonal is unbiased although the images of one patient resemble each other.
    """
    squares = (features**2).sum(axis=1)
    distances = np.maximum(squares[:, None] + squares - 2 * features @ features.T, 0)
    median = float(np.median(distances[np.triu_indices(len(distances), 1)])) if len(distances) > 1 else 0.0
    images = np.exp(-distances / (2 * (median or 1.0)))
    sums = np.add.reduceat(np.add.reduceat(images, cohort.first_images, axis=0), cohort.first_images, axis=1)
    sizes = np.bincount(cohort.of_image)
    return np.asarray(sums / np.outer(sizes, sizes))


def measure_discrepancy(
    kernel: Floats, first: Indices, label: Indices, times: int, rng: np.random.Generator
) -> tuple[float, float] | None:
    """Unbiased MMD² (Gretton et al. 2012, Eq. 3) between patients with `first` 1 and 0, and its p-value.

    Taken within every class that both have twice, then averaged with weights m·n/(m + n). None where no class is such.
    """
    moved = np.vstack([first, shuffle_sites(first, label, times, rng)]).astype(np.float64)
    total, weights = np.zeros(times + 1), 0.0
    for one in np.unique(label):
        members = np.flatnonzero(label == one)
        m = int(first[members].sum())
        n = len(members) - m
        if min(m, n) >= 2:
            total += m * n / (m + n) * _unbiased_mmd(kernel[np.ix_(members, members)], moved[:, members], m, n)
            weights += m * n / (m + n)
    if not weights:
        return None
    return float(total[0] / weights), p_value(total[0], total[1:])


def _unbiased_mmd(kernel: Floats, first: Floats, m: int, n: int) -> Floats:
    """Return one value for each row of `first`, which is 1 for m patients and 0 for n patients."""
    apart = kernel - np.diag(np.diag(kernel))
    within = ((first @ apart) * first).sum(axis=1)
    reached = first @ apart.sum(axis=1)
    others = apart.sum() - 2 * reached + within
    return np.asarray(within / (m * (m - 1)) + others / (n * (n - 1)) - 2 * (reached - within) / (m * n))
