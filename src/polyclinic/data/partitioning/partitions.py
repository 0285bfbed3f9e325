"""Partitions of a collection into sites.

Every partition divides patients, so no patient's images are at two sites. A patient's class is the majority label of
its images. All partitions but `Admixture` give disjoint sites that together hold all images, unless `Natural.only`
leaves sites out.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from polyclinic.core import DataError, Stream
from polyclinic.data.findings import format_count
from polyclinic.data.options import Options
from polyclinic.data.patients import Indices, Patients
from polyclinic.data.records import is_disclosable

DRAWS = 500
OURS = re.compile(r"site-\d+")
"""The names of sites that were drawn."""


class SiteDisplayName(NamedTuple):
    """A site's name in messages: its own or, if that may be a patient's name in the wrong column, a number."""

    name: str
    """ "north", or "site 3 (4 images)"."""
    subject: str
    """The subject of an error sentence: "Site 'north'", or "Site 3 of 5, with 4 images,"."""


def make_display_names(members: Mapping[str, Sequence[str]]) -> dict[str, SiteDisplayName]:
    """Return the display name of every site, given the patient of each of its images. Numbers follow this order."""
    called = {}
    for number, (name, patients) in enumerate(members.items(), 1):
        if OURS.fullmatch(name) or is_disclosable(len(patients), len(set(patients))):
            called[name] = SiteDisplayName(name, f"Site '{name}'")
        else:
            size = format_count(len(patients), "image")
            subject = f"Site {number} of {len(members)}" + (f", with {size}," if patients else "")
            called[name] = SiteDisplayName(f"site {number} ({size})", subject)
    return called


class Partition(Options, ABC):
    minimum: int = Field(1, ge=0)
    """The smallest number of images at a site."""

    @abstractmethod
    def assign_images(
        self, labels: Indices, patients: Sequence[str], stream: Stream, column: Sequence[str] | None = None
    ) -> list[Indices]:
        """Return the image indices of every site.

        Pass the label and the patient of every image; `column` is the natural site of every image, if known.
        """

    @abstractmethod
    def site_names(self, column: Sequence[str] | None = None) -> list[str]:
        """Return the names of the sites, in the order of `assign_images`."""


class Natural(Partition):
    """The sites from which the images really come."""

    only: tuple[str, ...] = ()
    """The sites that take part; (): all."""

    def assign_images(
        self, labels: Indices, patients: Sequence[str], stream: Stream, column: Sequence[str] | None = None
    ) -> list[Indices]:
        names, where = self.site_names(column), np.asarray(self._check_column(column))
        if shared := Patients.from_names(labels, patients).count_spread(np.unique(where, return_inverse=True)[1]):
            raise DataError(
                f"{shared} patients have images at more than one natural site; choose another partition, or write the "
                "site into the patient identifiers if they are different people."
            )
        members = [np.flatnonzero(where == name) for name in names]
        people = {name: [patients[row] for row in rows.tolist()] for name, rows in zip(names, members, strict=True)}
        for name, called in make_display_names(people).items():
            if (size := len(people[name])) < self.minimum:
                raise DataError(
                    f"{called.subject} is below the minimum of {self.minimum} images ({size}); lower the minimum."
                )
        return members

    def site_names(self, column: Sequence[str] | None = None) -> list[str]:
        found = sorted(set(self._check_column(column)))
        if unknown := [name for name in self.only if name not in found]:
            raise DataError(
                f"data.partition.only has {unknown[0]!r:.60}, but no image comes from there; correct the name"
            )
        return [name for name in found if name in self.only] if self.only else found

    def _check_column(self, column: Sequence[str] | None) -> Sequence[str]:
        if column is None:
            raise DataError("This collection has no natural sites; choose another partition, such as iid.")
        return column


class RandomPartition(Partition):
    """A random partition, redrawn until every site has the minimum."""

    sites: int = Field(ge=1)

    def suggest_remedy(self) -> str:
        return "ask for fewer sites or a lower minimum"

    def assign_images(
        self, labels: Indices, patients: Sequence[str], stream: Stream, column: Sequence[str] | None = None
    ) -> list[Indices]:
        people = Patients.from_names(labels, patients)
        self.check_feasible(people)
        rng = np.random.default_rng(stream.integer())
        for _ in range(DRAWS):
            members = self.draw_patients(people, rng)
            if min(people.sizes[site].sum() for site in members) >= self.minimum:
                return [people.image_indices(site) for site in members]
        raise self._size_error(people)

    def site_names(self, column: Sequence[str] | None = None) -> list[str]:
        return [f"site-{number:0{len(str(self.sites))}d}" for number in range(1, self.sites + 1)]

    def check_feasible(self, patients: Patients) -> None:
        """Refuse a partition that no draw can satisfy."""
        if self.sites * self.minimum > patients.sizes.sum() or (self.minimum and self.sites > len(patients)):
            raise self._size_error(patients)

    @abstractmethod
    def draw_patients(self, patients: Patients, rng: np.random.Generator) -> list[Indices]:
        """Draw the patients of every site."""

    def _size_error(self, patients: Patients) -> DataError:
        return DataError(
            f"{patients.sizes.sum()} images of {len(patients)} patients could not be divided among {self.sites} sites "
            f"with at least {self.minimum} images each ({DRAWS} draws at most); {self.suggest_remedy()}."
        )


class Iid(RandomPartition):
    """Every site is a random sample of equal size."""

    def draw_patients(self, patients: Patients, rng: np.random.Generator) -> list[Indices]:
        return _cut_by_shares(patients, rng.permutation(len(patients)), np.ones(self.sites))


class Quantity(RandomPartition):
    """Random samples whose sizes follow a Dirichlet distribution."""

    alpha: float = Field(0.5, gt=0)

    def suggest_remedy(self) -> str:
        return "ask for fewer sites, a lower minimum or a larger alpha"

    def draw_patients(self, patients: Patients, rng: np.random.Generator) -> list[Indices]:
        return _cut_by_shares(patients, rng.permutation(len(patients)), rng.dirichlet(np.full(self.sites, self.alpha)))


class Dirichlet(RandomPartition):
    """Every class is divided by an independent Dirichlet draw (Hsu, Qi and Brown 2019; Li et al. 2022)."""

    alpha: float = Field(0.5, gt=0)
    top_up: bool = False
    """Move patients from the largest sites to those below the minimum instead of drawing again."""

    def suggest_remedy(self) -> str:
        if self.top_up:
            return super().suggest_remedy()
        return "ask for fewer sites, a lower minimum or a larger alpha, or set top_up: true"

    def draw_patients(self, patients: Patients, rng: np.random.Generator) -> list[Indices]:
        dealt = [
            _cut_by_shares(patients, rng.permutation(members), rng.dirichlet(np.full(self.sites, self.alpha)))
            for members in _group_by_class(patients)
        ]
        drawn = [np.concatenate(pieces) for pieces in zip(*dealt, strict=True)]
        return _top_up(patients, drawn, self.minimum) if self.top_up else drawn


class Shards(RandomPartition):
    """Few classes per site (McMahan et al. 2017): each class is cut into shards, and each site gets some shards.

    Departure: no shard spans two classes, so no site has more than `classes_per_site` classes.
    """

    classes_per_site: int = Field(2, ge=1)

    def suggest_remedy(self) -> str:
        return "ask for fewer sites, a lower minimum or more classes_per_site"

    def check_feasible(self, patients: Patients) -> None:
        super().check_feasible(patients)
        classes = len(np.unique(patients.labels))
        if self.sites * self.classes_per_site < classes:
            raise DataError(
                f"{self.sites} sites with {self.classes_per_site} classes each cannot hold all {classes} classes; "
                "ask for more sites or more classes_per_site."
            )

    def draw_patients(self, patients: Patients, rng: np.random.Generator) -> list[Indices]:
        classes, total = _group_by_class(patients), self.sites * self.classes_per_site
        counts = _apportion_shards([int(patients.sizes[members].sum()) for members in classes], total)
        shards = [
            shard
            for members, count in zip(classes, counts, strict=True)
            for shard in _cut_by_shares(patients, rng.permutation(members), np.ones(count))
        ]
        hands = rng.permutation(total).reshape(self.sites, self.classes_per_site)
        return [np.concatenate([shards[number] for number in hand]) for hand in hands]


class Admixture(RandomPartition):
    """Overlapping sites: all patients of a site's primary classes, every other with probability `admixture`.

    Site k's primary classes are k·m … k·m + m − 1, modulo the number of classes, with m = `primary`.
    """

    primary: int = Field(2, ge=1)
    admixture: float = Field(0.7, ge=0, le=1)

    def suggest_remedy(self) -> str:
        return "ask for a lower minimum or more admixture"

    def check_feasible(self, patients: Patients) -> None:
        """Sites overlap, so any number of them can share the patients."""

    def draw_patients(self, patients: Patients, rng: np.random.Generator) -> list[Indices]:
        classes, label = np.unique(patients.labels, return_inverse=True)
        return [
            np.flatnonzero(
                ((label - site * self.primary) % len(classes) < self.primary)
                | (rng.random(len(patients)) < self.admixture)
            )
            for site in range(self.sites)
        ]


PARTITIONS: Mapping[str, type[Partition]] = {
    "natural": Natural,
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "quantity": Quantity,
    "admixture": Admixture,
}


def _group_by_class(patients: Patients) -> list[Indices]:
    return [np.flatnonzero(patients.labels == label) for label in np.unique(patients.labels)]


def _cut_by_shares(patients: Patients, order: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    """Cut `order` into consecutive pieces whose image counts follow `shares` as closely as whole patients allow."""
    ends = np.cumsum(patients.sizes[order])
    bounds = np.cumsum(shares)[:-1] / shares.sum() * ends[-1]
    return np.split(order, np.searchsorted(ends - patients.sizes[order] / 2, bounds))


def _top_up(patients: Patients, drawn: list[Indices], minimum: int) -> list[Indices]:
    """Move patients to the smallest site until all sites have the minimum or no site can give one away."""
    members = [site.tolist() for site in drawn]
    sizes = np.array([patients.sizes[site].sum() for site in drawn])
    while sizes.min() < minimum and (spared := _find_donor(patients, members, sizes, minimum)):
        giver, patient = spared
        taker = int(sizes.argmin())
        members[giver].remove(patient)
        members[taker].append(patient)
        sizes[giver] -= patients.sizes[patient]
        sizes[taker] += patients.sizes[patient]
    return [np.array(site, dtype=np.int64) for site in members]


def _find_donor(patients: Patients, members: list[list[int]], sizes: Indices, minimum: int) -> tuple[int, int] | None:
    """Return the largest site that keeps the minimum after giving away a patient, and that patient.

    The patient is of the site's most frequent class, so that no site loses a rare class.
    """
    for giver in np.argsort(-sizes, kind="stable").tolist():
        here = np.array(members[giver], dtype=np.int64)
        free = patients.sizes[here] <= sizes[giver] - minimum
        if free.any():
            _, label = np.unique(patients.labels[here], return_inverse=True)
            frequency = np.bincount(label, patients.sizes[here])[label]
            return giver, int(here[free & (frequency == frequency[free].max())][-1])
    return None


def _apportion_shards(sizes: list[int], total: int) -> list[int]:
    """Apportion `total` shards to the classes by size, at least one each (D'Hondt's method)."""
    counts = [1] * len(sizes)
    for _ in range(total - len(sizes)):
        counts[np.argmax(np.divide(sizes, counts))] += 1
    return counts
