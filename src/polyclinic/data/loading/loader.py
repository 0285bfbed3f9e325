"""From a listing to a collection: apply the task, check for faults, decode the images."""

import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from polyclinic.core import DataError, Part, Stream
from polyclinic.data.examples import Collection
from polyclinic.data.findings import Finding, format_count, format_places, group_positions, raise_findings
from polyclinic.data.loading.cache import Pixels, load_cached, pixel_shape
from polyclinic.data.loading.image_options import ImageOptions, Preparation
from polyclinic.data.loading.preprocessing import preprocess_image
from polyclinic.data.patients import UNNAMED
from polyclinic.data.quality.duplicates import CONFLICT, duplicate_findings
from polyclinic.data.quality.files import (
    BLANK,
    file_findings,
    missing_file_findings,
    repeated_file_findings,
    unreadable_file_findings,
)
from polyclinic.data.quality.image_stats import measure_images
from polyclinic.data.quality.labels import FEW, TYPO, disclosable_labels, label_findings
from polyclinic.data.quality.near_duplicates import merge_patients
from polyclinic.data.records import Listing, Record
from polyclinic.data.sources.decoder import decode_image
from polyclinic.data.sources.folder import clean_text
from polyclinic.data.sources.images import UnreadableImage
from polyclinic.data.sources.stacks import stream_rows
from polyclinic.data.splits import PARTS

SAMPLE = 16
"""The step between the rows and columns that are compared first; they suffice to see that most images are not blank."""


def load_collection(listing: Listing, options: ImageOptions, stream: Stream) -> Collection:
    """Load all used images of a listing, checked and decoded once, as one collection.

    `stream` draws the images to keep if the options set a limit.
    """
    listing = apply_task(listing, options.task)
    raise_findings(find_early_faults(listing))
    listing = replace(listing, records=draw_records(listing.used_records, options.limit, stream.child("limit")))
    images = load_pixels(listing, options)
    check_pixels(listing, images)
    found = build_collection(listing, images).with_normalisation(*options.normalisation)
    if options.merge_near_duplicates:
        return replace(found, patients=merge_patients(found.patients, images))
    return found


def build_collection(listing: Listing, images: Tensor) -> Collection:
    """Combine the images with the labels, patients, sites and parts of a listing whose records are all used."""
    records = listing.records
    numbers = {name: number for number, name in enumerate(listing.classes)}
    return Collection(
        images,
        torch.tensor([numbers[record.label] for record in records]),
        listing.classes,
        tuple(record.patient or f"{UNNAMED}{position}" for position, record in enumerate(records, 1)),
        _optional_column(record.site for record in records),
        _optional_column(record.split for record in records) if listing.official else None,
    )


def apply_task(listing: Listing, task: dict[str, list[str]] | None) -> Listing:
    """Replace labels by the classes of the task; images with other labels are excluded."""
    if task is None:
        return listing
    task = {name: [clean_text(label) for label in labels] for name, labels in task.items()}
    named = [label for labels in task.values() for label in labels]
    if len(task) < 2 or len(set(named)) < len(named):
        raise DataError("The task needs at least two classes, and each label in only one of them; correct data.task.")
    unknown = sorted(set(named) - set(listing.classes))
    if unknown:
        labels = group_positions(listing, range(len(listing.records)), lambda record: record.label)
        disclosable = disclosable_labels(listing, labels)  # a rare one may be a patient's name in the wrong column
        shown = [label for label in listing.classes if label in disclosable]
        common = shown and format_places(shown, len(listing.classes))
        raise DataError(
            f"The task names the label '{unknown[0]}', which {listing.name} does not have; "
            f"it has {common or f'{len(listing.classes)} rare ones'}."
        )
    group = {label: name for name, labels in task.items() for label in labels}
    outside = set(listing.classes) - set(named)
    # images with other labels are excluded without a message, so misspelt ones are refused
    raise_findings(
        finding
        for finding in label_findings(listing)
        if finding.kind == TYPO.name and outside & {listing.records[position].label for position in finding.positions}
    )
    records = [
        replace(record, excluded=record.excluded or "not part of the task")
        if record.label in outside
        else replace(record, label=group.get(record.label, record.label))
        for record in listing.records
    ]
    return replace(listing, records=tuple(records), classes=tuple(task), declared=True)


def restrict_to_parts(listing: Listing, parts: Sequence[Part] | None) -> Listing:
    """Exclude all images outside these official parts. Without a training part, the split is no longer official."""
    if parts is None:
        return listing
    there = {record.split for record in listing.used_records}
    for part in (part for part in parts if part not in there):
        known = ", ".join(name for name in PARTS if name in there) or "none"
        raise DataError(f"{listing.name} has no official {part} part (it has: {known}); correct official_parts.")
    inside, outside = (
        {r.patient for r in listing.used_records if (r.split in parts) is side} for side in (True, False)
    )
    if shared := inside & outside - {""}:
        raise DataError(
            f"{format_count(len(shared), 'patient')} of {listing.name} would be in the official_parts and outside of "
            "them; leave official_parts out, or correct the split."
        )
    reason = f"not in the official {' or '.join(parts)} part"
    away = {position: reason for position, r in enumerate(listing.records) if not r.excluded and r.split not in parts}
    return replace(listing.exclude_records(away), official=listing.official and "train" in parts)


def find_early_faults(listing: Listing) -> Iterator[Finding]:
    """Find the faults that stop training and need no file to be opened; parts and sites are checked elsewhere."""
    if not listing.used_records:
        raise DataError(f"{listing.name} has no image to use; check where it was loaded from.")
    # os.path, because Path.is_file raises, with the path, what it does not expect, such as a name that is too long
    yield from missing_file_findings(
        listing, [position for position, record in enumerate(listing.records) if not os.path.isfile(record.path)]
    )
    yield from repeated_file_findings(listing)
    yield from find_label_faults(listing)


def find_label_faults(listing: Listing) -> Iterator[Finding]:
    """Find the faults of labels, as `check_listing` reports and `load_collection` refuses them."""
    # every result shows the classes, so undeclared ones with few patients stop training: they may be names
    remedy = "correct these labels, or declare the classes if these are some; they may be names in the wrong column"
    for finding in label_findings(listing):
        undeclared = finding.kind == FEW.name and not listing.declared
        yield replace(finding, level="stop", remedy=remedy) if undeclared else finding


def draw_records(records: tuple[Record, ...], limit: int | None, stream: Stream) -> tuple[Record, ...]:
    """Draw at most `limit` images, taking whole patients in random order; the records keep their order."""
    if limit is None or limit >= len(records):
        return records
    names = [record.patient or f"image-{position}" for position, record in enumerate(records)]
    patients = sorted(set(names))
    rank = {patients[p]: n for n, p in enumerate(torch.randperm(len(patients), generator=stream.generator()).tolist())}
    kept = sorted(range(len(records)), key=lambda position: (rank[names[position]], position))[:limit]
    return tuple(records[position] for position in sorted(kept))


def load_pixels(listing: Listing, options: ImageOptions) -> Tensor:
    """Return the preprocessed images of all records, from the cache unless the options turn it off."""
    preparation = options.preparation
    if options.cache:
        return load_cached(listing.records, preparation, lambda pixels: decode_records(pixels, listing, preparation))
    pixels: Pixels = np.empty(pixel_shape(listing.records, preparation), np.uint8)
    decode_records(pixels, listing, preparation)
    return torch.from_numpy(pixels)


def decode_records(pixels: Pixels, listing: Listing, preparation: Preparation) -> None:
    """Decode and preprocess every record into its row of `pixels`; one error names all that cannot be read."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(work) for work in _decoding_tasks(pixels, listing.records, preparation)]
    raise_findings(unreadable_file_findings(listing, dict(sorted(problem for job in jobs for problem in job.result()))))


def check_pixels(listing: Listing, images: Tensor) -> None:
    """Refuse blank images and copies under different labels, which `check_listing` also refuses.

    A blank or copied file stays so when it is preprocessed, so the preprocessed pixels show the suspects at a fraction
    of the cost of file checksums. Suspects are then opened and checked in full, since different files may become equal
    when they are made small.
    """
    pixels: Pixels = images.numpy()
    suspects = sorted({*_blank_rows(pixels), *_conflicting_rows(listing.records, pixels)})
    if suspects:
        some = replace(listing, records=tuple(listing.records[position] for position in suspects), unlisted=())
        stats = measure_images(some)
        found = (*file_findings(some, stats), *duplicate_findings(some, stats))
        raise_findings(finding for finding in found if finding.kind in (BLANK.name, CONFLICT.name))


def _blank_rows(pixels: Pixels) -> Iterator[int]:
    """Find the rows of a single colour, apart from black bars such as padding."""
    for row, image in enumerate(pixels):
        middle = image[:, image.shape[1] // 2, image.shape[2] // 2, None, None]
        if all(((some == middle) | (some == 0)).all() for some in (image[:, ::SAMPLE, ::SAMPLE], image)):
            yield row


def _conflicting_rows(records: Sequence[Record], pixels: Pixels) -> Iterator[int]:
    """Find the rows whose checksum equals that of a row with another label."""
    same: defaultdict[int, list[int]] = defaultdict(list)
    for row, image in enumerate(pixels):
        same[zlib.crc32(image.data)].append(row)
    for rows in same.values():
        if len({records[row].label for row in rows}) > 1:
            yield from rows


Problems: TypeAlias = list[tuple[int, str]]
"""Positions of unreadable records, each with the reason."""


def _decoding_tasks(
    pixels: Pixels, records: Sequence[Record], preparation: Preparation
) -> Iterator[Callable[[], Problems]]:
    """Split the decoding into tasks: one for each file, or one for all rows of an array."""
    stacks: dict[tuple[Path, str], list[int]] = {}
    for position, record in enumerate(records):
        if record.row is None:
            yield partial(_decode_file, pixels, position, record.path, preparation)
        else:
            stacks.setdefault((record.path, record.array), []).append(position)
    for (path, array), positions in stacks.items():
        yield partial(
            _decode_rows,
            pixels,
            {position: records[position].row or 0 for position in positions},
            path,
            array,
            preparation,
        )


def _decode_file(pixels: Pixels, position: int, path: Path, preparation: Preparation) -> Problems:
    try:
        pixels[position] = preprocess_image(decode_image(path, preparation.bits).pixels, preparation)
    except UnreadableImage as problem:
        return [(position, str(problem))]
    return []


def _decode_rows(pixels: Pixels, rows: Mapping[int, int], path: Path, array: str, preparation: Preparation) -> Problems:
    places = sorted(rows, key=lambda position: rows[position])
    try:
        found = stream_rows(path, array, [rows[position] for position in places], preparation.bits)
        for position, image in zip(places, found, strict=True):
            pixels[position] = preprocess_image(image, preparation)
    except UnreadableImage as problem:
        return [(position, str(problem)) for position in places]
    return []


def _optional_column(values: Iterable[str]) -> tuple[str, ...] | None:
    column = tuple(values)
    return column if any(column) else None
