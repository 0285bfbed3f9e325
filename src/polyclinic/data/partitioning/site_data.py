"""From a collection to sites with training, validation and test parts, checked before training."""

from collections.abc import Mapping, Sized
from typing import TypedDict

import numpy as np
import torch

from polyclinic.core import DataError, Stream
from polyclinic.data.examples import Collection, Selection, SiteData
from polyclinic.data.partitioning.partitions import Partition, make_display_names
from polyclinic.data.patients import Indices
from polyclinic.data.splits import PARTS, Fractions, Parts, split_by_patient


class SiteSummary(TypedDict):
    site: str
    train: int
    validation: int
    test: int
    classes: dict[str, int]
    """The number of images of each class, over all three parts."""


def build_site_data(
    collection: Collection,
    partition: Partition,
    fractions: Fractions,
    stream: Stream,
    allow_single_class: bool = False,
) -> dict[str, SiteData]:
    """Partition a collection into sites and split each site into parts, both by patient.

    `stream` draws the partition and the splits. `allow_single_class` permits sites that train on a single class
    (pathological partitions). Return the sites by name.
    """
    _check_counts(collection)
    assigned = partition.assign_images(
        collection.labels.cpu().numpy(), collection.patients, stream.child("partition"), collection.sites
    )
    members = dict(zip(partition.site_names(collection.sites), assigned, strict=True))
    called = make_display_names({name: [collection.patients[row] for row in rows] for name, rows in members.items()})
    for name, rows in members.items():
        _check_images(called[name].subject, rows, collection)
    split = stream.child("split")
    if sum(map(len, assigned)) > len(np.unique(np.concatenate(assigned))):
        parts = _split_overlapping(collection, members, fractions, split)
    else:
        parts = {name: _split_rows(collection, rows, fractions, split.child(name)) for name, rows in members.items()}
    for name in members:
        _check_parts(called[name].subject, parts[name], collection, fractions, allow_single_class)
    everything = collection.to_images()
    return {
        name: SiteData(name, *(Selection.from_rows(everything, torch.from_numpy(of[part])) for part in PARTS))
        for name, of in parts.items()
    }


def summarise_sites(sites: Mapping[str, SiteData], classes: tuple[str, ...]) -> list[SiteSummary]:
    """Return the sizes of every site's parts and its images of each class."""
    return [
        SiteSummary(
            site=site.name,
            train=len(site.train),
            validation=len(site.validation),
            test=len(site.test),
            classes=_count_labels(torch.cat([site.train.labels, site.validation.labels, site.test.labels]), classes),
        )
        for site in sites.values()
    ]


def _count_labels(labels: torch.Tensor, classes: tuple[str, ...]) -> dict[str, int]:
    return dict(zip(classes, torch.bincount(labels, minlength=len(classes)).tolist(), strict=True))


def _split_overlapping(
    collection: Collection, members: Mapping[str, Indices], fractions: Fractions, stream: Stream
) -> dict[str, Parts]:
    """Split all images at once if sites share patients; otherwise one site could train on another's test images."""
    part_of = np.empty(len(collection), dtype=np.int64)
    for number, rows in enumerate(_split_rows(collection, np.arange(len(collection)), fractions, stream).values()):
        part_of[rows] = number
    return {
        name: {part: rows[part_of[rows] == number] for number, part in enumerate(PARTS)}
        for name, rows in zip(members, map(np.sort, members.values()), strict=True)
    }


def _split_rows(collection: Collection, rows: Indices, fractions: Fractions, stream: Stream) -> Parts:
    parts = split_by_patient(
        labels=collection.labels.cpu().numpy()[rows],
        patients=[collection.patients[row] for row in rows],
        fractions=fractions,
        stream=stream,
        official=None if collection.split is None else [collection.split[row] for row in rows],
    )
    return {part: rows[chosen] for part, chosen in parts.items()}


def _check_counts(collection: Collection) -> None:
    images = len(collection.images)
    if not images:
        raise DataError("The collection has no images; check where it was loaded from.")
    columns: dict[str, Sized | None] = {
        "labels": collection.labels,
        "patients": collection.patients,
        "sites": collection.sites,
        "official parts": collection.split,
    }
    for name, column in columns.items():
        if column is not None and len(column) != images:
            raise DataError(f"The collection has {images} images but {len(column)} {name}; give one for each image.")


def _check_images(site: str, rows: Indices, collection: Collection) -> None:
    if not len(rows):
        raise DataError(f"{site} has no images; ask for fewer sites or a minimum of at least 1.")
    index, classes = torch.from_numpy(rows), len(collection.classes)
    labels = collection.labels[index]
    _check_none(
        (labels < 0) | (labels >= classes),
        index,
        f"{site} has {{}} labelled outside the {classes} classes of the task",
        f"use labels 0 to {classes - 1}",
    )
    if collection.images.is_floating_point():
        finite = collection.images[index].isfinite().flatten(1).all(1)
        _check_none(~finite, index, f"{site} has {{}} with values that are not finite", "correct or remove them")


def _check_none(wrong: torch.Tensor, index: torch.Tensor, sentence: str, remedy: str) -> None:
    if count := int(wrong.sum()):
        raise DataError(
            f"{sentence.format(f'{count} images')} (the first at index {int(index[wrong.cpu()][0])}); {remedy}."
        )


def _check_parts(
    site: str, parts: Parts, collection: Collection, fractions: Fractions, allow_single_class: bool
) -> None:
    for part in PARTS:
        if fractions.fraction_of(part) > 0 and not len(parts[part]):
            raise DataError(
                f"{site} has no images left for its {part} part; "
                "give it at least three patients or set that fraction to 0."
            )
    labels = np.unique(collection.labels.cpu().numpy()[parts["train"]])
    if len(labels) == 1 and not allow_single_class:
        raise DataError(
            f"{site} would train on class '{collection.classes[labels[0]]}' only; "
            "choose another partition or set allow_single_class: true."
        )
