"""The split into training, validation and test parts, by patient."""

from collections.abc import Sequence
from typing import Self, TypeAlias, get_args

import numpy as np
from pydantic import Field, model_validator

from polyclinic.core import DataError, Part, RecipeError, Stream
from polyclinic.data.options import Options
from polyclinic.data.patients import Indices, Patients

PARTS: tuple[Part, ...] = get_args(Part)
Parts: TypeAlias = dict[Part, Indices]


class Fractions(Options):
    """The proportion of a site's images in each part; a part with proportion 0 stays empty."""

    train: float = Field(0.8, gt=0)
    validation: float = Field(0.1, ge=0)
    test: float = Field(0.1, ge=0)
    official: bool = True
    """Keep the official split if the collection has one."""

    @model_validator(mode="after")
    def _check_sum(self) -> Self:
        total = self.train + self.validation + self.test
        if abs(total - 1) > 1e-6:
            raise RecipeError(f"The fractions train, validation and test add up to {total:g}; make them 1.")
        return self

    def fraction_of(self, part: Part) -> float:
        return float(getattr(self, part))


def split_by_patient(
    labels: Indices,
    patients: Sequence[str],
    fractions: Fractions,
    stream: Stream,
    official: Sequence[str] | None = None,
) -> Parts:
    """Split images into parts so that no patient is in two of them.

    Pass the label and the patient of every image and, if there is one, its official part. Return the ascending indices
    of each part. Parts that an official split lacks are taken from its training part.
    """
    people = Patients.from_names(labels, patients)
    given = np.zeros(len(people), dtype=np.int64)
    if official is not None and fractions.official:
        given = _official_parts(people, official)
    wanted = np.array([fractions.fraction_of(part) for part in PARTS])
    wanted[1:][np.isin([1, 2], given)] = 0
    part = given.copy()
    pool = np.flatnonzero(given == 0)
    part[pool] = _stratify_patients(people, pool, wanted / wanted.sum(), np.random.default_rng(stream.integer()))
    return {name: people.image_indices(np.flatnonzero(part == number)) for number, name in enumerate(PARTS)}


def _official_parts(patients: Patients, official: Sequence[str]) -> Indices:
    unknown = set(official) - set(PARTS)
    if unknown:  # their names are not shown: a cell of a table may hold anything, even a patient's name
        raise DataError(
            f"The official split names {len(unknown)} part(s) other than train, validation and test "
            f"({sum(part in unknown for part in official)} images); use only these, or set official: false."
        )
    part = np.array([PARTS.index(name) for name in official if name in PARTS], dtype=np.int64)
    if leaked := patients.count_spread(part):
        raise DataError(
            f"The official split puts {leaked} patients into more than one part; "
            "set official: false to split by patient instead."
        )
    of_patient = np.zeros(len(patients), dtype=np.int64)
    of_patient[patients.of_image] = part
    return of_patient


def _stratify_patients(patients: Patients, pool: Indices, shares: np.ndarray, rng: np.random.Generator) -> Indices:
    """Assign every patient of `pool` to the part that is furthest below its proportion, class by class.

    The rarest class comes first, because the first patients are assigned to training.
    """
    labels = patients.labels[pool]
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((rng.permutation(len(pool)), labels, counts[inverse]))
    part = np.zeros(len(pool), dtype=np.int64)
    behind = np.zeros(len(shares))
    for position, size in zip(order, patients.sizes[pool][order], strict=True):
        behind += shares * size
        part[position] = len(behind) - 1 - np.argmax(behind[::-1])  # a tie goes to the test part, which is reported
        behind[part[position]] -= size
    _fill_empty(part, labels, shares)
    return part


def _fill_empty(part: Indices, labels: Indices, shares: np.ndarray) -> None:
    """Fill parts that are empty but should not be: move one patient of the commonest class from the fullest part."""
    for empty in np.flatnonzero(shares > 0):
        fullest = np.bincount(part, minlength=len(shares)).argmax() if len(part) else 0
        donors = np.flatnonzero(part == fullest)
        if (part == empty).any() or len(donors) < 2:
            continue
        values, counts = np.unique(labels[donors], return_counts=True)
        part[donors[labels[donors] == values[counts.argmax()]][-1]] = empty
