"""Images, and how they come to sites. One entry per named dataset; its loader reads top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.core import Stream
from polyclinic.data.digits import DigitsOptions, digits
from polyclinic.data.examples import Collection, Images, Selection, SiteData, concatenate
from polyclinic.data.federate import SiteSummary, describe, federate
from polyclinic.data.folder import data_folder
from polyclinic.data.mnist import MnistOptions, mnist
from polyclinic.data.options import Options
from polyclinic.data.partition import PARTITIONS, Partition
from polyclinic.data.phantom import PhantomOptions, phantom
from polyclinic.data.splits import Fractions, split

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Collection",
    "Dataset",
    "Fractions",
    "Images",
    "Options",
    "Partition",
    "Selection",
    "SiteData",
    "SiteSummary",
    "concatenate",
    "data_folder",
    "describe",
    "federate",
    "split",
]


@dataclass(frozen=True)
class Dataset:
    """A named dataset: what it is, under which terms, and how it is loaded."""

    load: Callable[[Any, Stream, Path | None], Collection]
    """(options, stream, data folder) -> collection; sets that need no files ignore the folder."""
    options: type[Options]
    about: str
    licence: str
    classes: tuple[str, ...]
    """With the default options."""


DATASETS: Mapping[str, Dataset] = {
    "phantom": Dataset(
        load=phantom,
        options=PhantomOptions,
        about="drawn mammograms of five hospitals with different machines; not real, not evidence",
        licence="Apache-2.0 (part of polyclinic)",
        classes=("benign", "malignant"),
    ),
    "digits": Dataset(
        load=digits,
        options=DigitsOptions,
        about="1,797 handwritten digits of 8 × 8 pixels (Alpaydin and Kaynak 1998), shipped with scikit-learn",
        licence="CC BY 4.0",
        classes=tuple("0123456789"),
    ),
    "mnist": Dataset(
        load=mnist,
        options=MnistOptions,
        about="60,000 + 10,000 handwritten digits of 28 × 28 pixels (LeCun, Cortes and Burges)",
        licence="CC BY-SA 3.0",
        classes=tuple("0123456789"),
    ),
}
