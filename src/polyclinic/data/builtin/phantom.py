"""Synthetic mammograms, for trials where no real image may be used. Results on them are no evidence.

A patient has one breast with a lesion in two to four views (CC, MLO, then again CC and MLO). A benign lesion is smooth,
round and well bordered; a malignant one is irregular, spiculated and ill defined, often with microcalcifications. Sites
differ in their machine (`VENDORS`), their number of patients and their proportion of malignant cases.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyclinic.core import RecipeError, Stream
from polyclinic.data.builtin.phantom_images import VENDORS, Cases, Vendor, VendorName, acquire_images, draw_anatomy
from polyclinic.data.datasets.base import Dataset
from polyclinic.data.examples import Collection
from polyclinic.data.options import Options

MEAN, STD = 0.33, 0.32
"""Mean and standard deviation of all pixels of the default sites: plain SGD needs centred images."""
CHUNK = 64
"""How many images are drawn at once; this bounds memory at large sizes."""


class PhantomSite(Options):
    name: str = Field(min_length=1)
    vendor: VendorName
    patients: int = Field(ge=1)
    malignant: float = Field(ge=0, le=1)
    """The proportion of patients with a malignant lesion."""


HOSPITALS = (
    PhantomSite(name="harbour", vendor="selenium", patients=160, malignant=0.5),
    PhantomSite(name="hillside", vendor="film", patients=120, malignant=0.3),
    PhantomSite(name="lakeview", vendor="photon-counting", patients=90, malignant=0.7),
    PhantomSite(name="northfield", vendor="silicon", patients=60, malignant=0.4),
    PhantomSite(name="riverside", vendor="phosphor-plate", patients=40, malignant=0.2),
)


class PhantomOptions(Options):
    size: int = Field(64, ge=32, le=2048)
    task: Literal["diagnosis", "screening"] = "diagnosis"
    """diagnosis: benign or malignant. screening: also normal (half of the patients without a malignant lesion)."""
    views: tuple[int, int] = (2, 4)
    """The smallest and largest number of images per patient."""
    hospitals: tuple[PhantomSite, ...] = Field(HOSPITALS, min_length=1)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        names = [site.name for site in self.hospitals]
        if len(set(names)) < len(names):
            raise RecipeError("Two hospitals have the same name; give each its own name.")
        if not 1 <= self.views[0] <= self.views[1]:
            raise RecipeError(
                f"The views {self.views} are not a range that starts at 1 or more; write for example [2, 4]."
            )
        return self

    @property
    def classes(self) -> tuple[str, ...]:
        return ("benign", "malignant") if self.task == "diagnosis" else ("normal", "benign", "malignant")


def generate_phantom(options: PhantomOptions, stream: Stream, folder: Path | None = None) -> Collection:  # noqa: ARG001
    """Draw all sites. Each is drawn from its own stream, so adding one leaves the others unchanged."""
    sites = [_draw_site(options, site, stream.child(site.name)) for site in options.hospitals]
    return Collection(
        images=torch.cat([site.images for site in sites]),
        labels=torch.cat([site.labels for site in sites]),
        classes=options.classes,
        patients=tuple(name for site in sites for name in site.patients),
        sites=tuple(name for site in sites for name in site.sites or ()),
        mean=MEAN,
        std=STD,
    )


def _draw_site(options: PhantomOptions, site: PhantomSite, stream: Stream) -> Collection:
    generator = stream.child("patients").generator()
    labels = _draw_diagnoses(options, site, generator)
    fewest, most = options.views
    views = torch.randint(fewest, most + 1, (site.patients,), generator=generator)
    cases = _draw_cases(labels - len(options.classes) + 2, views, generator)
    owner = torch.arange(site.patients).repeat_interleave(views)
    return Collection(
        classes=options.classes,
        images=_scan_cases(cases, options.size, VENDORS[site.vendor], stream),
        labels=labels[owner],
        patients=tuple(f"{site.name}-{number}" for number in owner.tolist()),
        sites=(site.name,) * len(owner),
    )


def _scan_cases(cases: Cases, size: int, vendor: Vendor, stream: Stream) -> Tensor:
    chunks = []
    for start in range(0, len(cases), CHUNK):
        generator = stream.child("images", start).generator()
        tissue = draw_anatomy(cases.select_rows(slice(start, start + CHUNK)), size, generator)
        chunks.append(acquire_images(tissue, vendor, generator))
    return torch.cat(chunks)


def _draw_diagnoses(options: PhantomOptions, site: PhantomSite, generator: torch.Generator) -> Tensor:
    """A class for every patient: exactly the requested proportion, in random order."""
    malignant = round(site.malignant * site.patients)
    normal = 0 if options.task == "diagnosis" else (site.patients - malignant) // 2
    counts = torch.tensor([normal, site.patients - malignant - normal, malignant])
    labels = torch.arange(3).repeat_interleave(counts) - (3 - len(options.classes))
    return labels[torch.randperm(len(labels), generator=generator)]


def _draw_cases(malignant: Tensor, views: Tensor, generator: torch.Generator) -> Cases:
    """`malignant` is −1 (normal), 0 or 1 for every patient. All views of a patient share the anatomy."""

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(views), generator=generator)

    spread = 0.16 * torch.randn(len(views), generator=generator)
    patients = Cases(
        lesion=(malignant >= 0).float(),
        malignancy=(0.2 + 0.6 * malignant + spread).clamp(0, 1),
        density=between(0.15, 0.75),
        depth=between(0.6, 0.85),
        height=between(0.38, 0.46),
        radius=between(0.09, 0.13),
        place=between(0.5, 0.65),
        oblique=torch.zeros(len(views), dtype=torch.bool),
        right=between(0, 1) < 0.5,
    )
    images = patients.select_rows(torch.arange(len(views)).repeat_interleave(views))
    return replace(images, oblique=torch.cat([torch.arange(int(count)) % 2 == 1 for count in views]))


DATASET = Dataset(
    options=PhantomOptions,
    licence="Apache-2.0 (part of polyclinic)",
    classes=("benign", "malignant"),
    load=generate_phantom,
)
