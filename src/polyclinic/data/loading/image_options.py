"""The options of image datasets: which images to use, and how they become tensors of one shape."""

from typing import Literal

from pydantic import Field

from polyclinic.core import Part
from polyclinic.data.examples import PerChannel
from polyclinic.data.options import Options

Normalisation = Literal["none", "half", "imagenet"]
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Mean and standard deviation per channel; grey images use the average over channels."""


class Preparation(Options):
    """How a decoded image becomes `channels` × `size` × `size` bytes. All of it is part of the cache key."""

    size: int = Field(224, ge=8, le=2048)
    channels: Literal[1, 3] = 3
    fit: Literal["pad", "stretch", "crop"] = "pad"
    """pad and crop keep the aspect ratio, with black borders or a centre crop; stretch does not."""
    crop_borders: bool = False
    """Crop to the largest object first and blacken everything that does not touch it (labels on mammograms)."""
    bits: int | None = Field(None, ge=8, le=16)
    """The number of bits that 16-bit image files really use (DICOM files state it themselves)."""


class ImageOptions(Preparation):
    """The options of every dataset of image files."""

    normalise: Normalisation = "none"
    task: dict[str, list[str]] | None = None
    """The classes to learn, each with its labels; images with other labels are left out."""
    official_parts: list[Part] | None = Field(None, min_length=1)
    """Use only these parts of the official split, so that the public set and the sites can share one dataset."""
    limit: int | None = Field(None, ge=1)
    """The largest number of images to use, drawn at random by patient."""
    merge_near_duplicates: bool = False
    """Treat patients who share a near duplicate as one patient, so that splits and partitions keep copies together."""
    cache: bool = True
    """Keep preprocessed images on disk between runs."""

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
