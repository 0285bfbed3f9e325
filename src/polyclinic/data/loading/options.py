"""What the user of an image set may choose: which images, and how they become tensors of one shape."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from polyclinic.core.contract import Part
from polyclinic.data.examples import PerChannel
from polyclinic.data.options import Options

Normalisation = Literal["none", "half", "imagenet"]
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Mean and standard deviation per channel; a grey image takes their means."""


class Preparation(Options):
    """How a decoded image becomes `channels` × `size` × `size` bytes; everything that decides a cached pixel."""

    size: int = Field(224, ge=8, le=2048)
    channels: Literal[1, 3] = 3
    fit: Literal["pad", "stretch", "crop"] = "pad"
    """Keep the aspect ratio and pad with black, or with a centre crop; or squash."""
    crop_borders: bool = False
    """Cut empty borders off first, and what does not touch the largest object (labels on mammograms)."""
    bits: int | None = Field(None, ge=8, le=16)
    """Bits really used by 16-bit image files (not DICOM, which says so itself)."""


class ImageOptions(Preparation):
    """Options of every set of image files."""

    normalise: Normalisation = "none"
    task: dict[str, list[str]] | None = None
    """Classes to learn, each with the labels that belong to it; images with other labels are left out."""
    official_parts: list[Part] | None = Field(None, min_length=1)
    """Use only these parts of the official split, so that a public set and the sites can share a set between them."""
    limit: int | None = Field(None, ge=1)
    """Use only so many images, drawn at random by patient."""
    join_copies: bool = False
    """Count patients who share a near duplicate as one, so that no split or partition parts the copies."""
    cache: bool = True
    """Keep decoded images on disk between runs."""

    @property
    def preparation(self) -> Preparation:
        return Preparation(**{name: getattr(self, name) for name in Preparation.model_fields})

    @property
    def normalisation(self) -> tuple[PerChannel, PerChannel]:
        """Mean and standard deviation."""
        if self.normalise == "none":
            return 0.0, 1.0
        mean, std = NORMALISATIONS[self.normalise]
        return (mean, std) if self.channels == 3 else (sum(mean) / 3, sum(std) / 3)
