"""Images, and how they come to sites. One entry per named dataset; its loader reads top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.core.contract import Stream
from polyclinic.data.builtin.digits import DigitsOptions, load_digit_images
from polyclinic.data.builtin.phantom import PhantomOptions, generate_phantom
from polyclinic.data.data_dir import data_folder
from polyclinic.data.datasets import SETS, PublicDataset
from polyclinic.data.datasets.user_data import (
    FolderOptions,
    MultiOptions,
    TableOptions,
    UserDataOptions,
    read_multi,
    read_user_folder,
    read_user_npz,
    read_user_table,
)
from polyclinic.data.examples import Collection, Images, Selection, SiteData, concatenate
from polyclinic.data.loading.load import load_collection, restrict_to_parts
from polyclinic.data.loading.options import ImageOptions
from polyclinic.data.options import Options
from polyclinic.data.partitioning.federate import SiteSummary, build_site_data, summarise_sites
from polyclinic.data.partitioning.partition import PARTITIONS, Natural, Partition
from polyclinic.data.records import Listing
from polyclinic.data.splits import Fractions, split_by_patient

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
    "build_site_data",
    "concatenate",
    "data_folder",
    "split_by_patient",
    "summarise_sites",
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


def _limit_to_parts(read: Callable[[Any, Path | None], Listing]) -> Callable[[Any, Path | None], Listing]:
    return lambda options, folder: restrict_to_parts(read(options, folder), getattr(options, "official_parts", None))


def _public_reader(named: PublicDataset) -> Callable[[Any, Path | None], Listing]:
    def read(options: Any, folder: Path | None) -> Listing:
        return named.read(options, data_folder(folder) / (named.folder or named.name))

    return _limit_to_parts(read)


def _build_loader(read: Callable[[Any, Path | None], Listing]) -> Callable[[Any, Stream, Path | None], Collection]:
    return lambda options, stream, folder: load_collection(read(options, folder), options, stream)


def _public_dataset(named: PublicDataset) -> Dataset:
    read = _public_reader(named)
    about, licence = named.about, named.licence
    return Dataset(named.load or _build_loader(read), named.options, about, licence, named.classes, read)


def _read_multi_set(options: MultiOptions, folder: Path | None) -> Listing:
    return read_multi(options, data_folder(folder), SETS)


def _user_dataset(read: Callable[[Any, Path | None], Listing], options: type[ImageOptions], about: str) -> Dataset:
    in_parts = _limit_to_parts(read)
    return Dataset(_build_loader(in_parts), options, about, "yours", (), in_parts)


DATASETS: Mapping[str, Dataset] = {
    "phantom": Dataset(
        load=generate_phantom,
        options=PhantomOptions,
        about="drawn mammograms of five hospitals with different machines; not real, not evidence",
        licence="Apache-2.0 (part of polyclinic)",
        classes=("benign", "malignant"),
    ),
    "digits": Dataset(
        load=load_digit_images,
        options=DigitsOptions,
        about="1,797 handwritten digits of 8 × 8 pixels (Alpaydin and Kaynak 1998), shipped with scikit-learn",
        licence="CC BY 4.0",
        classes=tuple("0123456789"),
    ),
    "folder": _user_dataset(
        read_user_folder, FolderOptions, "your images in folders: of classes, of sites, as you say"
    ),
    "table": _user_dataset(
        read_user_table, TableOptions, "your images as a CSV file lists them: path, label, site, patient, split"
    ),
    "npz": _user_dataset(read_user_npz, UserDataOptions, "your images as arrays in one npz file"),
    "several": _user_dataset(
        _read_multi_set, MultiOptions, "several public sets side by side, a site each, under common classes"
    ),
    **{name: _public_dataset(named) for name, named in SETS.items()},
}
