"""The server's public set: labelled images that belong to no site, with the sites' shape and classes."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from polyclinic.config.recipe import PublicSection
from polyclinic.core import DataError, SiteId, Stream
from polyclinic.data import DATASETS
from polyclinic.data.examples import Collection, Images, Selection, SiteData
from polyclinic.data.partitioning.partitions import Natural
from polyclinic.data.partitioning.site_data import build_site_data

PUBLIC = "public"
HASHED = 256
"""Images hashed at a time."""


def load_public(
    section: PublicSection,
    data: Path | None,
    classes: tuple[str, ...],
    channels: int,
    size: int,
    stream: Stream,
    sites: Mapping[SiteId, SiteData] | None = None,
    held_out: Images | None = None,
) -> SiteData:
    """Load the public set as one site, split by patient, without images that `sites` hold too, pixel by pixel, or that
    are held out for testing. Under a privacy plan leave out `sites`: the gap would reveal their images."""
    spec = DATASETS[section.name]
    collection = spec.load(spec.options.model_validate(section.options), stream.child("data"), data)
    _check_shape(section.name, collection, channels, size)
    collection = _align_labels(section.name, collection, classes)
    parts = [part for site in (sites or {}).values() for part in (site.train, site.validation, site.test)]
    held = [part for part in (*parts, held_out) if isinstance(part, Images | Selection)]
    if held:
        collection = _drop_duplicates(held, collection)
    collection = replace(collection, sites=(PUBLIC,) * len(collection))
    return build_site_data(collection, Natural(), section.split, stream.child("sites"))[PUBLIC]


def _check_shape(name: str, collection: Collection, channels: int, size: int) -> None:
    found, wanted = tuple(collection.images.shape[1:]), (channels, size, size)
    if found != wanted:
        raise DataError(
            f"The public set {name} has images of {_format_shape(found)} (channels × height × width), the sites have "
            f"{_format_shape(wanted)}; set public.channels: {channels} and public.size: {size}, or choose another set."
        )


def _format_shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _align_labels(name: str, collection: Collection, classes: tuple[str, ...]) -> Collection:
    """Return the collection with its labels numbered as at the sites."""
    if sorted(collection.classes) != sorted(classes):
        raise DataError(
            f"The public set {name} has the classes {', '.join(collection.classes)}, the sites have "
            f"{', '.join(classes)}; bring both to the same names with public.task or data.task, "
            "or choose another public set."
        )
    numbers = torch.tensor([classes.index(label) for label in collection.classes])
    return replace(collection, labels=numbers[collection.labels], classes=classes)


def _drop_duplicates(held: Sequence[Images | Selection], collection: Collection) -> Collection:
    """Return the collection without images that sites hold, and without other images of the same patients."""
    private = {digest for images in held for digest in _image_hashes(images)}
    shared = [digest in private for digest in _image_hashes(collection.to_images())]
    people = {patient for patient, known in zip(collection.patients, shared, strict=True) if known}
    if not people:
        return collection
    kept = [row for row, patient in enumerate(collection.patients) if patient not in people]
    said = f"{sum(shared)} of {len(collection)} images of the public set are at the sites too, or held out for testing"
    if not kept:
        raise DataError(f"{said}, so none is left; choose another public set, or other official_parts of this one.")
    logging.getLogger(__name__).warning("%s; they are left out of it, with all of those patients", said)
    return replace(
        collection,
        images=collection.images[kept],
        labels=collection.labels[kept],
        patients=tuple(collection.patients[row] for row in kept),
        split=collection.split and tuple(collection.split[row] for row in kept),
    )


def _image_hashes(images: Images | Selection) -> Iterator[bytes]:
    """Yield a hash of every stored image."""
    for index in torch.split(torch.arange(len(images)), HASHED):
        for image in images.stored_batch(index)[0]:
            yield hashlib.sha256(image.numpy().tobytes()).digest()
