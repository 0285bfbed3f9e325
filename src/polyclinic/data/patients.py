"""Images grouped by patient, so that partitions and splits divide patients rather than images."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polyclinic.core import Examples

Indices: TypeAlias = NDArray[np.int64]
UNNAMED = "unnamed image "
"""The beginning of the identifier of an image whose patient is not named; a number that makes it unique follows."""


def is_named(patient: str) -> bool:
    """Whether an identifier stands for a patient that the source names, and not for a single image of anybody."""
    return bool(patient) and not patient.startswith(UNNAMED)


@runtime_checkable
class PatientCounts(Protocol):
    """Images of which only numbers are known, as those of another machine."""

    largest: int
    """The images of the patient who has most."""
    unnamed: int
    """The images whose patient is not named."""


def count_unnamed(examples: Examples) -> int:
    """Count the images whose patient is not named."""
    if isinstance(examples, PatientCounts):
        return min(examples.unnamed, len(examples))
    return len(examples) if examples.patients is None else sum(not is_named(name) for name in examples.patients)


def max_images_per_patient(examples: Examples) -> int:
    """Return the number of images of the patient who has most."""
    if isinstance(examples, PatientCounts):
        return max(1, min(examples.largest, len(examples) - count_unnamed(examples)))
    return max(Counter(examples.patients).values()) if examples.patients else 1


def spread_group(patients: Sequence[str], most: int) -> Indices:
    """Return the ascending indices of at most `most` images of each patient, evenly spread over that patient's images.

    Which images of a patient are left out depends on that patient's number of images alone, and on nobody else's.
    """
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(patients):
        rows.setdefault(name, []).append(row)
    kept = (own[turn * len(own) // most] for own in rows.values() if len(own) > most for turn in range(most))
    whole = (row for own in rows.values() if len(own) <= most for row in own)
    return np.array(sorted([*kept, *whole]), dtype=np.int64)


@dataclass(frozen=True)
class Patients:
    of_image: Indices
    """The patient's number, for every image."""
    sizes: Indices
    """The number of images, for every patient."""
    labels: Indices
    """The most frequent label (the lowest of equally frequent ones), for every patient."""

    @staticmethod
    def from_names(labels: Indices, names: Sequence[str]) -> "Patients":
        """Number the patients by first appearance, so that a site on its own has the same order as in a simulation."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        of_image = np.array([numbers[name] for name in names], dtype=np.int64)
        return Patients(of_image, np.bincount(of_image, minlength=len(numbers)), _majority_labels(of_image, labels))

    def __len__(self) -> int:
        return len(self.sizes)

    def image_indices(self, members: Indices) -> Indices:
        """Return the ascending indices of all images of these patients."""
        chosen = np.zeros(len(self), dtype=bool)
        chosen[members] = True
        return np.flatnonzero(chosen[self.of_image])

    def count_spread(self, group: Indices) -> int:
        """Count the patients with images in more than one group. They are not named, since errors end up in logs."""
        pairs = np.unique(np.stack([self.of_image, group]), axis=1)
        return int((np.bincount(pairs[0]) > 1).sum())


def _majority_labels(groups: Indices, labels: Indices) -> Indices:
    pairs, counts = np.unique(np.stack([groups, labels]), axis=1, return_counts=True)
    order = np.lexsort((-pairs[1], counts, pairs[0]))
    last = np.flatnonzero(np.diff(pairs[0][order], append=-1))
    return np.asarray(pairs[1][order][last], dtype=np.int64)
