"""Images, and how they come to sites. One entry per named dataset; its loader reads top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.core.contract import Stream
from polyclinic.data.builtin.digits import DigitsOptions, digits
from polyclinic.data.builtin.phantom import PhantomOptions, phantom
from polyclinic.data.data_dir import data_folder
from polyclinic.data.datasets import SETS, NamedSet
from polyclinic.data.datasets.user_data import (
    FolderOptions,
    OwnOptions,
    SeveralOptions,
    TableOptions,
    own_folder,
    own_npz,
    own_table,
    several,
)
from polyclinic.data.examples import Collection, Images, Selection, SiteData, concatenate
from polyclinic.data.loading.load import for_parts, load
from polyclinic.data.loading.options import ImageOptions
from polyclinic.data.options import Options
from polyclinic.data.partitioning.federate import SiteSummary, describe, federate
from polyclinic.data.partitioning.partition import PARTITIONS, Natural, Partition
from polyclinic.data.records import Listing
from polyclinic.data.splits import Fractions, split

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Collection",
    "Dataset",
    "Fractions",
    "Images",
    "Natural",
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
    """With the default options; () where they depend on the files."""
    read: Callable[[Any, Path | None], Listing] | None = None
    """(options, data folder) -> what is listed, nothing opened; None where images are not files."""


def _in_parts(read: Callable[[Any, Path | None], Listing]) -> Callable[[Any, Path | None], Listing]:
    return lambda options, folder: for_parts(read(options, folder), getattr(options, "official_parts", None))


def _read(named: NamedSet) -> Callable[[Any, Path | None], Listing]:
    def read(options: Any, folder: Path | None) -> Listing:
        return named.read(options, data_folder(folder) / (named.folder or named.name))

    return _in_parts(read)


def _loading(read: Callable[[Any, Path | None], Listing]) -> Callable[[Any, Stream, Path | None], Collection]:
    return lambda options, stream, folder: load(read(options, folder), options, stream)


def _public(named: NamedSet) -> Dataset:
    read = _read(named)
    about, licence = named.about, named.licence
    return Dataset(named.load or _loading(read), named.options, about, licence, named.classes, read)


def _several(options: SeveralOptions, folder: Path | None) -> Listing:
    return several(options, data_folder(folder), SETS)


def _own(read: Callable[[Any, Path | None], Listing], options: type[ImageOptions], about: str) -> Dataset:
    in_parts = _in_parts(read)
    return Dataset(_loading(in_parts), options, about, "yours", (), in_parts)


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
    "folder": _own(own_folder, FolderOptions, "your images in folders: of classes, of sites, as you say"),
    "table": _own(own_table, TableOptions, "your images as a CSV file lists them: path, label, site, patient, split"),
    "npz": _own(own_npz, OwnOptions, "your images as arrays in one npz file"),
    "several": _own(_several, SeveralOptions, "several public sets side by side, a site each, under common classes"),
    **{name: _public(named) for name, named in SETS.items()},
}
