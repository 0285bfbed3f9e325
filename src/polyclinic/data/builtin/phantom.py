"""Drawn mammograms: for trying things out where no real image may go. They imitate, they are not evidence.

A patient has one breast with a lesion in two to four views (CC and MLO, later the same again). A benign lesion is
smooth, round and well bordered; a malignant one irregular, spiculated, ill defined, often with microcalcifications.
Hospitals differ in their machine (`VENDORS`), their size and their share of malignant patients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from polyclinic.core.contract import Stream
from polyclinic.core.errors import RecipeError
from polyclinic.data.builtin.phantom_anatomy import Cases, draw_anatomy
from polyclinic.data.builtin.phantom_scanner import VENDORS, Vendor, acquire_images
from polyclinic.data.examples import Collection
from polyclinic.data.options import Options

MEAN, STD = 0.33, 0.32
"""Of all pixels of the default hospitals: plain SGD needs centred images."""
CHUNK = 64
"""Images drawn at once, which bounds memory at large sizes."""


class PhantomSite(Options):
    name: str = Field(min_length=1)
    vendor: str
    patients: int = Field(ge=1)
    malignant: float = Field(ge=0, le=1)
    """Share of patients with a malignant lesion."""

    @field_validator("vendor")
    @classmethod
    def _check_vendor(cls, vendor: str) -> str:
        if vendor not in VENDORS:
            raise RecipeError(f"There is no vendor '{vendor}'; choose one of: {', '.join(VENDORS)}.")
        return vendor


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
    """diagnosis: benign or malignant. screening: also normal, half of the patients who are not malignant."""
    views: tuple[int, int] = (2, 4)
    """Fewest and most images of a patient."""
    hospitals: tuple[PhantomSite, ...] = Field(HOSPITALS, min_length=1)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        names = [hospital.name for hospital in self.hospitals]
        if len(set(names)) < len(names):
            raise RecipeError("Two hospitals have the same name; give each its own.")
        if not 1 <= self.views[0] <= self.views[1]:
            raise RecipeError(f"The views {self.views} are not a range from 1 up; write for example [2, 4].")
        return self

    @property
    def classes(self) -> tuple[str, ...]:
        return ("benign", "malignant") if self.task == "diagnosis" else ("normal", "benign", "malignant")


def generate_phantom(options: PhantomOptions, stream: Stream, folder: Path | None = None) -> Collection:  # noqa: ARG001
    """Every hospital is drawn from its own stream: adding one leaves the others as they are."""
    wards = [_draw_site(options, hospital, stream.child(hospital.name)) for hospital in options.hospitals]
    return Collection(
        images=torch.cat([ward.images for ward in wards]),
        labels=torch.cat([ward.labels for ward in wards]),
        classes=options.classes,
        patients=tuple(name for ward in wards for name in ward.patients),
        sites=tuple(name for ward in wards for name in ward.sites),
        mean=MEAN,
        std=STD,
    )


@dataclass(frozen=True)
class _SiteImages:
    """All images of one hospital."""

    images: Tensor
    labels: Tensor
    patients: tuple[str, ...]
    sites: tuple[str, ...]


def _draw_site(options: PhantomOptions, hospital: PhantomSite, stream: Stream) -> _SiteImages:
    generator = stream.child("patients").generator()
    labels = _draw_diagnoses(options, hospital, generator)
    fewest, most = options.views
    views = torch.randint(fewest, most + 1, (hospital.patients,), generator=generator)
    cases = _draw_cases(labels - len(options.classes) + 2, views, generator)
    owner = torch.arange(hospital.patients).repeat_interleave(views)
    return _SiteImages(
        images=_scan_cases(cases, options.size, VENDORS[hospital.vendor], stream),
        labels=labels[owner],
        patients=tuple(f"{hospital.name}-{number}" for number in owner.tolist()),
        sites=(hospital.name,) * len(owner),
    )


def _scan_cases(cases: Cases, size: int, vendor: Vendor, stream: Stream) -> Tensor:
    chunks = []
    for start in range(0, len(cases), CHUNK):
        generator = stream.child("images", start).generator()
        tissue = draw_anatomy(cases.select_rows(slice(start, start + CHUNK)), size, generator)
        chunks.append(acquire_images(tissue, vendor, generator))
    return torch.cat(chunks)


def _draw_diagnoses(options: PhantomOptions, hospital: PhantomSite, generator: torch.Generator) -> Tensor:
    """A class for every patient: exactly the share asked for, in random order."""
    malignant = round(hospital.malignant * hospital.patients)
    normal = 0 if options.task == "diagnosis" else (hospital.patients - malignant) // 2
    counts = torch.tensor([normal, hospital.patients - malignant - normal, malignant])
    labels = torch.arange(3).repeat_interleave(counts) - (3 - len(options.classes))
    return labels[torch.randperm(len(labels), generator=generator)]


def _draw_cases(malignant: Tensor, views: Tensor, generator: torch.Generator) -> Cases:
    """`malignant` is −1 (normal), 0 or 1 for every patient; its views share the patient's anatomy."""

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
    number = torch.cat([torch.arange(int(count)) for count in views])
    return replace(images, oblique=number % 2 == 1)
