"""The heterogeneity of sites: label skew, size skew, intensity shift and feature shift within classes.

Skews and shifts come with their expectation if sites did not differ, from permutations of whole patients. Each becomes
one sentence with the methods designed for it. These are suggestions: only a run shows what a method gains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch

from polyclinic.core import DataError, Examples, Stream
from polyclinic.data.heterogeneity import feature_shift
from polyclinic.data.heterogeneity.advice import Advice, format_thresholds, list_caveats, recommend_methods
from polyclinic.data.heterogeneity.feature_shift import Features, PatientSample, SiteClassifierResult
from polyclinic.data.partitioning.partitions import SiteDisplayName, make_display_names
from polyclinic.data.patients import Indices, Patients
from polyclinic.evaluation.metrics import Floats
from polyclinic.evaluation.statistics import correct_holm

PER_SITE, PER_PATIENT, IN_ALL = 400, 8, 2400
"""The largest numbers of images whose pixels are examined, at most PER_PATIENT of one patient."""
BINS = 64
PIXELS = 4096
"""How many grey values of an image enter its histogram: all of a 64 × 64 image, a random sample of a larger one."""
BATCH = 64
PERMUTATIONS, BLOCK = 500, 50
PAIR_PERMUTATIONS = (400, 40, 4000)
"""The smallest number, the number per pair of sites (so that Holm's correction keeps power), and the largest number."""
RANDOM = (
    "means and maxima of two random convolutions with a fixed seed, quantiles, mean and spread of the grey values: "
    "they reflect texture and brightness, not disease"
)


@dataclass(frozen=True)
class TestedStatistic:
    """A statistic, its expectation if sites did not differ, and its p-value."""

    observed: float
    expected: float
    p: float


@dataclass(frozen=True)
class SiteStatistics:
    """The images of one site."""

    name: str
    images: int
    patients: int
    counts: dict[str, int]
    """The number of images of each class."""
    skew: float
    """The Jensen–Shannon divergence of its labels from those of all sites, in bits."""
    mean: float
    std: float
    histogram: tuple[float, ...]
    """The proportions of grey values, over the range common to all sites."""


@dataclass(frozen=True)
class SitePair:
    """Two sites. Values are None if the sites share no class with at least two patients at each."""

    a: str
    b: str
    labels: float
    """Jensen–Shannon divergence, in bits."""
    intensity: float
    """The Wasserstein-1 distance of the grey values, in standard deviations over all sites."""
    mmd2: float | None
    p: float | None
    holm: float | None
    """p after Holm's correction for the number of pairs."""


@dataclass(frozen=True)
class Diagnosis:
    classes: tuple[str, ...]
    sites: tuple[SiteStatistics, ...]
    """Sorted by name; a site so small that its name may be a patient's is shown by a number."""
    pairs: tuple[SitePair, ...]
    labels: TestedStatistic
    """The divergence from the labels of all sites, in bits: the mean over sites, weighted by images."""
    effective_sites: float
    """1 / Σ p², where p is a site's proportion of the images."""
    size_ratio: float
    """The size of the largest site over that of the smallest."""
    intensity: TestedStatistic
    """The largest distance between two sites."""
    greys: tuple[float, float]
    """The range of the histograms."""
    domain: SiteClassifierResult | None
    features: str
    permutations: int
    """The number of permutations for every pair."""
    advice: tuple[Advice, ...] = ()
    caveats: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def diagnose_sites(
    sites: Mapping[str, Examples],
    classes: tuple[str, ...],
    stream: Stream,
    features: Features | None = None,
) -> Diagnosis:
    """Measure how sites differ.

    Pass each site's examples. `features` maps a batch of images to features of a frozen network (None: random
    features). `stream` draws images, patients and permutations.
    """
    names = sorted(sites)
    if len(names) < 2:
        raise DataError("A diagnosis compares sites, and this federation has fewer than two; choose another partition.")
    called = make_display_names({name: _patient_names(sites[name]) for name in names})
    for name in names:
        _check_site(called[name], sites[name], classes)
    seen = _draw_sample(sites, called, stream, features)
    shown = [called[name].name for name in names]
    tallies, member = _count_labels([sites[name] for name in names], len(classes))
    counts = np.stack([tallies[member == number].sum(axis=0) for number in range(len(names))])
    shares = counts.sum(axis=1) / counts.sum()
    grey = _GreyValues.from_sample(seen)
    distances, intensity = grey.compare_sites(seen.cohort, stream.child("intensity"))
    found, permutations = _compare_pairs(seen, len(names), stream.child("mmd"))
    diagnosis = Diagnosis(
        classes=classes,
        sites=tuple(
            SiteStatistics(
                shown[number],
                len(sites[name]),
                int((member == number).sum()),
                dict(zip(classes, counts[number].tolist(), strict=True)),
                float(jensen_shannon(counts[number], counts.sum(axis=0))),
                *grey.describe_site(seen.cohort, number),
            )
            for number, name in enumerate(names)
        ),
        pairs=tuple(
            SitePair(shown[i], shown[j], float(jensen_shannon(counts[i], counts[j])), float(distances[i, j]), *answer)
            for (i, j), answer in zip(combinations(range(len(names)), 2), found, strict=True)
        ),
        labels=measure_label_skew(tallies, member, stream.child("labels")),
        effective_sites=float(1 / (shares**2).sum()),
        size_ratio=float(shares.max() / shares.min()),
        intensity=intensity,
        greys=(grey.low, grey.high),
        domain=feature_shift.classify_sites(seen.features, seen.cohort, shown, stream.child("domain")),
        features=RANDOM if features is None else "given by the caller",
        permutations=permutations,
    )
    unknown = [name for name, site in zip(shown, names, strict=True) if sites[site].patients is None]
    shared = len(seen.cohort) - len(np.unique(seen.cohort.person))
    return replace(diagnosis, advice=recommend_methods(diagnosis), caveats=list_caveats(diagnosis, unknown, shared))


def format_diagnosis(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis as sentences, one paragraph each, not wrapped."""
    advice = [
        f"{one.kind.capitalize()} ({one.strength}): {one.sentence}"
        + (f" Consider: {'; '.join(one.methods)}." if one.methods else "")
        for one in diagnosis.advice
    ]
    return [*advice, *diagnosis.caveats, f"The features are {diagnosis.features}.", format_thresholds()]


def jensen_shannon(p: Floats | Indices, q: Floats | Indices) -> Floats:
    """Return the divergence of two distributions (or counts) along the last axis, in bits (0: equal, 1: disjoint)."""
    one, other = (each / each.sum(axis=-1, keepdims=True) for each in (p, q))
    return np.maximum(0, _entropy((one + other) / 2) - (_entropy(one) + _entropy(other)) / 2)


def _entropy(p: Floats) -> Floats:
    return np.asarray(-(p * np.log2(np.where(p > 0, p, 1))).sum(axis=-1))


def measure_label_skew(tallies: Indices, site: Indices, stream: Stream) -> TestedStatistic:
    """Test the label skew, given the images of each class (columns) of every patient (rows) and the patients' sites.

    Patients with equal rows are interchangeable, so a permutation is a random table of kinds of patients by sites.
    """
    from scipy.stats import random_table  # takes a second to load, and most runs do without

    kinds, of_patient, sizes = np.unique(tallies, axis=0, return_inverse=True, return_counts=True)
    table = np.zeros((len(kinds), site.max() + 1), dtype=np.int64)
    np.add.at(table, (of_patient.reshape(-1), site), 1)
    draw = random_table(sizes, table.sum(axis=0), seed=np.random.default_rng(stream.integer()))
    blocks = (draw.rvs(BLOCK).astype(np.int64).transpose(0, 2, 1) for _ in range(PERMUTATIONS // BLOCK))
    null = np.concatenate([_mean_skew(tables @ kinds) for tables in blocks])
    observed = float(_mean_skew(table.T @ kinds))
    return TestedStatistic(observed, float(null.mean()), feature_shift.p_value(observed, null))


def _mean_skew(counts: Indices) -> Floats:
    """Return the mean divergence weighted by images; the last two axes are sites × classes."""
    shares = counts.sum(axis=-1) / counts.sum(axis=(-2, -1))[..., None]
    return np.asarray((jensen_shannon(counts, counts.sum(axis=-2, keepdims=True)) * shares).sum(axis=-1))


def _check_site(site: SiteDisplayName, examples: Examples, classes: tuple[str, ...]) -> None:
    if not len(examples):
        raise DataError(f"{site.subject} has no images; leave it out or choose another partition.")
    if wrong := int(((examples.labels < 0) | (examples.labels >= len(classes))).sum()):
        raise DataError(
            f"{site.subject} has {wrong} images labelled outside the {len(classes)} classes of the task; "
            f"use labels 0 to {len(classes) - 1}."
        )


def _patient_names(examples: Examples) -> Sequence[str]:
    """Return the patient of every image; if patients are unknown, every image counts as one."""
    return [str(row) for row in range(len(examples))] if examples.patients is None else examples.patients


def _count_labels(sites: Sequence[Examples], classes: int) -> tuple[Indices, Indices]:
    """Count the images of each class for every patient, and return the patients' sites."""
    tallies = []
    for examples in sites:
        labels = examples.labels.cpu().numpy().astype(np.int64)
        people = Patients.from_names(labels, _patient_names(examples))
        cells = np.bincount(people.of_image * classes + labels, minlength=len(people) * classes)
        tallies.append(cells.reshape(len(people), classes))
    return np.concatenate(tallies), np.repeat(np.arange(len(tallies)), [len(tally) for tally in tallies])


class _Sample(NamedTuple):
    """The patients that were drawn, with the features and grey values of their images."""

    cohort: PatientSample
    features: Floats
    values: Floats


def _draw_sample(
    sites: Mapping[str, Examples], called: Mapping[str, SiteDisplayName], stream: Stream, features: Features | None
) -> _Sample:
    most = max(2, min(PER_SITE, IN_ALL // len(called)))
    cohorts, persons, seen = [], [], []
    for number, (name, site_called) in enumerate(called.items()):
        examples = sites[name]
        labels, people = examples.labels.cpu().numpy().astype(np.int64), _patient_names(examples)
        patients = Patients.from_names(labels, people)
        rows = _draw_rows(patients, most, np.random.default_rng(stream.child("sample", name).integer()))
        drawn, first, of_image = np.unique(patients.of_image[rows], return_index=True, return_inverse=True)
        prefix = "" if examples.patients is not None else f"{name} image "
        persons += [prefix + people[rows[row]] for row in first]
        cohorts.append((np.full(len(drawn), number), patients.labels[drawn], of_image.reshape(-1)))
        seen.append(_extract_features(site_called, examples, rows, stream, features))
    if len({(values.shape[1], found.shape[1]) for values, found in seen}) > 1:
        raise DataError("The sites' images have different shapes; load them all with the same size and channels.")
    site, label = (np.concatenate([cohort[column] for cohort in cohorts]) for column in (0, 1))
    before = np.cumsum([0] + [len(cohort[0]) for cohort in cohorts])
    of_image = np.concatenate([cohort[2] + start for cohort, start in zip(cohorts, before[:-1], strict=True)])
    person = np.unique(np.asarray(persons), return_inverse=True)[1].reshape(-1)
    values, found = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    return _Sample(PatientSample(site, label, person, of_image), feature_shift.standardise(found), values)


def _draw_rows(patients: Patients, most: int, rng: np.random.Generator) -> Indices:
    """Draw a few images per patient, patients in random order, up to `most` images (at least the first patient's)."""
    rank = rng.permutation(len(patients))[patients.of_image]
    order = np.lexsort((rng.random(len(rank)), rank))
    rank = rank[order]
    nth = np.arange(len(rank)) - np.searchsorted(rank, rank)
    order, rank = order[nth < PER_PATIENT], rank[nth < PER_PATIENT]
    last = np.searchsorted(rank, rank, side="right")
    chosen = order[(last <= most) | (rank == 0)]
    return np.asarray(chosen[np.lexsort((chosen, patients.of_image[chosen]))], dtype=np.int64)


def _extract_features(
    site: SiteDisplayName, examples: Examples, rows: Indices, stream: Stream, features: Features | None
) -> tuple[Floats, Floats]:
    values, found = [], []
    for chunk in torch.split(torch.from_numpy(rows), BATCH):
        images = examples.batch(chunk)[0]
        flat = images.flatten(1).float()
        if broken := int((~flat.isfinite().all(1)).sum()):
            raise DataError(
                f"{site.subject} has at least {broken} images with values that are not finite; correct them."
            )
        chosen = torch.randperm(flat.shape[1], generator=stream.child("pixels").generator())[:PIXELS]
        values.append(flat[:, chosen.to(flat.device)].cpu().numpy())
        with torch.no_grad():
            found.append((features or feature_shift.random_features(images.shape[1]))(images).double().cpu().numpy())
        if found[-1].ndim != 2 or len(found[-1]) != len(chunk) or not np.isfinite(found[-1]).all():
            raise DataError("The features must be finite, one row per image; correct the function that returns them.")
    return np.concatenate(values), np.concatenate(found)


@dataclass(frozen=True)
class _GreyValues:
    """The grey values of all sites: histograms of patients over the common range, and moments of images."""

    low: float
    high: float
    spread: float
    sums: Floats
    """Patients × bins: sums of the histograms of the patient's images."""
    images: Indices
    """The number of images of every patient."""
    moments: Floats
    """Images × (mean, mean square)."""

    @staticmethod
    def from_sample(sample: _Sample) -> "_GreyValues":
        values = sample.values
        low, high = float(values.min()), float(values.max())
        width = (high - low) / BINS or 1.0
        bins = np.minimum(((values - low) / width).astype(np.int64), BINS - 1)
        cells = np.bincount(
            (sample.cohort.of_image[:, None] * BINS + bins).ravel(), minlength=len(sample.cohort) * BINS
        )
        moments = np.stack([values.mean(axis=1, dtype=np.float64), np.square(values, dtype=np.float64).mean(axis=1)], 1)
        return _GreyValues(
            low=low,
            high=low + BINS * width,
            spread=_standard_deviation(moments),
            sums=cells.reshape(-1, BINS) / values.shape[1],
            images=np.bincount(sample.cohort.of_image),
            moments=moments,
        )

    def describe_site(self, cohort: PatientSample, number: int) -> tuple[float, float, tuple[float, ...]]:
        """Return mean, standard deviation and histogram of the grey values of a site."""
        members = cohort.site == number
        histogram = self.sums[members].sum(axis=0) / self.images[members].sum()
        moments = self.moments[members[cohort.of_image]]
        return float(moments[:, 0].mean()), _standard_deviation(moments), tuple(histogram.tolist())

    def compare_sites(self, cohort: PatientSample, stream: Stream) -> tuple[Floats, TestedStatistic]:
        """Return the distances between all sites, and test the largest by permutations within classes."""
        rng = np.random.default_rng(stream.integer())
        moved = feature_shift.shuffle_sites(cohort.site, cohort.label, PERMUTATIONS, rng)
        null = np.array([self._wasserstein_distances(site).max() for site in moved])
        distances = self._wasserstein_distances(cohort.site)
        return distances, TestedStatistic(
            float(distances.max()), float(null.mean()), feature_shift.p_value(distances.max(), null)
        )

    def _wasserstein_distances(self, site: Indices) -> Floats:
        """Return the Wasserstein-1 distances (area between cumulative histograms), in standard deviations."""
        here = (site == np.arange(site.max() + 1)[:, None]).astype(np.float64)
        cumulative = np.cumsum(here @ self.sums / (here @ self.images)[:, None], axis=1)
        width = (self.high - self.low) / BINS / (self.spread or 1.0)
        return np.asarray(np.abs(cumulative[:, None] - cumulative).sum(axis=2) * width)


def _standard_deviation(moments: Floats) -> float:
    mean, square = moments.mean(axis=0)
    return float(np.sqrt(max(0.0, square - mean**2)))


def _compare_pairs(
    sample: _Sample, sites: int, stream: Stream
) -> tuple[list[tuple[float | None, float | None, float | None]], int]:
    """Return (MMD², p, Holm's p) for every pair of sites, and the number of permutations."""
    pairs = list(combinations(range(sites), 2))
    least, each, most = PAIR_PERMUTATIONS
    times = min(most, max(least, each * len(pairs)))
    kernel, cohort = feature_shift.patient_kernel(sample.features, sample.cohort), sample.cohort
    found = []
    for i, j in pairs:
        members = np.flatnonzero((cohort.site == i) | (cohort.site == j))
        first = (cohort.site[members] == i).astype(np.int64)
        rng = np.random.default_rng(stream.child(i, j).integer())
        found.append(
            feature_shift.measure_discrepancy(
                kernel[np.ix_(members, members)], first, cohort.label[members], times, rng
            )
        )
    corrected = iter(correct_holm([answer[1] for answer in found if answer]))
    return [(*answer, next(corrected)) if answer else (None, None, None) for answer in found], times
