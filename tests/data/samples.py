"""Small made-up collections for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from polyclinic.data.examples import Collection
from polyclinic.data.patients import Indices


@dataclass(frozen=True)
class Sample:
    labels: Indices
    patients: list[str]
    column: list[str]

    def __len__(self) -> int:
        return len(self.labels)

    def owners(self, index: Indices) -> set[str]:
        return {self.patients[row] for row in index}


def sample(seed: int, patients: int, classes: int, most_images: int = 4, sites: int = 3) -> Sample:
    """Patients with 1 to `most_images` images, a main class with now and then another, and a natural site."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most_images + 1, patients)
    main = np.concatenate([np.arange(classes), rng.integers(0, classes, patients - classes)])
    owner = rng.permutation(np.repeat(np.arange(patients), sizes))
    labels = np.where(rng.random(len(owner)) < 0.9, main[owner], rng.integers(0, classes, len(owner)))
    site = np.concatenate([np.arange(sites), rng.integers(0, sites, patients - sites)])
    return Sample(labels, [f"p{number}" for number in owner], [f"clinic-{site[number]}" for number in owner])


def collection(seed: int = 0, patients: int = 60, classes: int = 2) -> Collection:
    made = sample(seed, patients, classes)
    return Collection(
        images=torch.rand(len(made), 1, 4, 4, generator=torch.Generator().manual_seed(seed)),
        labels=torch.from_numpy(made.labels),
        classes=tuple(f"class-{number}" for number in range(classes)),
        patients=tuple(made.patients),
        sites=tuple(made.column),
    )
