"""From a listing to a collection: the task, what stops training, the pixels, the numbers."""

from __future__ import annotations

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

from polyclinic.core.contract import Part, Stream
from polyclinic.core.errors import DataError
from polyclinic.data.examples import Collection
from polyclinic.data.findings import Finding, refuse, told
from polyclinic.data.loading.cache import Pixels, cached, shape_of
from polyclinic.data.loading.options import ImageOptions, Preparation
from polyclinic.data.loading.preprocess import prepare
from polyclinic.data.quality.duplicates import CONFLICT, duplicate_findings
from polyclinic.data.quality.files import BLANK, file_findings, listed_twice, missing_files, unreadable_files
from polyclinic.data.quality.finding_text import by, many
from polyclinic.data.quality.image_stats import look_at
from polyclinic.data.quality.labels import FEW, TYPO, label_findings, said_labels
from polyclinic.data.records import Listing, Record
from polyclinic.data.sources.decode import UnreadableImage, decode, stream_rows
from polyclinic.data.sources.folder import cleaned
from polyclinic.data.splits import PARTS

SAMPLE = 16
"""Every so many rows and columns are looked at first: they settle that most images are not blank."""


def load(listing: Listing, options: ImageOptions, stream: Stream) -> Collection:
    """Everything the listing uses, checked, decoded once, as one collection."""
    listing = for_task(listing, options.task)
    refuse(before_decoding(listing))
    listing = replace(listing, records=drawn(listing.used, options.limit, stream.child("limit")))
    images = pixels_of(listing, options)
    refuse_pictures(listing, images)
    found = collected(listing, images).normalised(*options.normalisation)
    if options.join_copies:
        from polyclinic.data.loading.join_duplicates import (
            with_twins_joined,  # scipy takes a second to load, and most runs do without
        )

        found = replace(found, patients=with_twins_joined(found.patients, images))
    return found


def collected(listing: Listing, images: Tensor) -> Collection:
    """What the listing says of its records, which are all in use, beside their images."""
    records = listing.records
    numbers = {name: number for number, name in enumerate(listing.classes)}
    return Collection(
        images,
        torch.tensor([numbers[record.label] for record in records]),
        listing.classes,
        tuple(record.patient or f"image-{position}" for position, record in enumerate(records, 1)),
        _column(record.site for record in records),
        _column(record.split for record in records) if listing.official else None,
    )


def for_task(listing: Listing, task: dict[str, list[str]] | None) -> Listing:
    """The listing with the task's classes in place of its labels; other labels are left out of use."""
    if task is None:
        return listing
    task = {name: [cleaned(label) for label in labels] for name, labels in task.items()}
    named = [label for labels in task.values() for label in labels]
    if len(task) < 2 or len(set(named)) < len(named):
        raise DataError("The task needs two classes or more, and each label in one of them; mend data.task.")
    unknown = sorted(set(named) - set(listing.classes))
    if unknown:
        raise DataError(
            f"The task names the label '{unknown[0]}', which {listing.name} does not have; it has {_labels(listing)}."
        )
    group = {label: name for name, labels in task.items() for label in labels}
    outside = set(listing.classes) - set(named)
    _refuse_misspelt(listing, outside)
    records = [
        replace(record, excluded=record.excluded or "not part of the task")
        if record.label in outside
        else replace(record, label=group.get(record.label, record.label))
        for record in listing.records
    ]
    return replace(listing, records=tuple(records), classes=tuple(task), declared=True)


def _labels(listing: Listing) -> str:
    """The labels there are, less the rare ones: those may be a patient's name in the wrong column."""
    said = said_labels(listing, by(listing, range(len(listing.records)), lambda record: record.label))
    common = [label for label in listing.classes if label in said]
    return told(common, len(listing.classes)) if common else f"{len(listing.classes)} rare ones"


def _refuse_misspelt(listing: Listing, outside: set[str]) -> None:
    """What a task leaves out is left out without a word; an image whose label is misspelt must not be."""
    refuse(
        finding
        for finding in label_findings(listing)
        if finding.kind == TYPO.name and outside & {listing.records[position].label for position in finding.positions}
    )


def for_parts(listing: Listing, parts: Sequence[Part] | None) -> Listing:
    """The listing with everything outside these official parts left out of use; without a training part it has no
    official split any more."""
    if parts is None:
        return listing
    there = {record.split for record in listing.used}
    for part in (part for part in parts if part not in there):
        known = ", ".join(name for name in PARTS if name in there) or "none"
        raise DataError(f"{listing.name} has no official {part} part (it has: {known}); correct official_parts.")
    inside, outside = ({r.patient for r in listing.used if (r.split in parts) is side} for side in (True, False))
    if shared := inside & outside - {""}:
        raise DataError(
            f"{many(len(shared), 'patient')} of {listing.name} would be in the official_parts and outside of them; "
            "leave official_parts out, or mend the split."
        )
    reason = f"not in the official {' or '.join(parts)} part"
    away = {position: reason for position, r in enumerate(listing.records) if not r.excluded and r.split not in parts}
    return replace(listing.excluding(away), official=listing.official and "train" in parts)


def before_decoding(listing: Listing) -> Iterator[Finding]:
    """What stops training and can be seen without opening a file. Parts and sites are `federate`'s to judge."""
    if not listing.used:
        raise DataError(f"{listing.name} has no image to use; check where it was loaded from.")
    # os.path, because Path.is_file raises, with the path, what it does not expect, such as a name that is too long
    gone = [position for position, record in enumerate(listing.records) if not os.path.isfile(record.path)]
    yield from missing_files(listing, gone)
    yield from listed_twice(listing)
    yield from judged_labels(listing)


def judged_labels(listing: Listing) -> Iterator[Finding]:
    """Faults of labels, as `check` tells them and `load` refuses them."""
    for finding in label_findings(listing):
        yield _undeclared(finding) if finding.kind == FEW.name and not listing.declared else finding


def _undeclared(finding: Finding) -> Finding:
    """Classes are said aloud in every result, so what may be a name in the wrong column is not taken for one."""
    remedy = "correct these labels, or declare the classes if these are some; they may be names in the wrong column"
    return replace(finding, level="stop", remedy=remedy)


def drawn(records: tuple[Record, ...], limit: int | None, stream: Stream) -> tuple[Record, ...]:
    """At most `limit` images, patient after patient in random order; their own order is kept."""
    if limit is None or limit >= len(records):
        return records
    names = [record.patient or f"image-{position}" for position, record in enumerate(records)]
    patients = sorted(set(names))
    rank = {patients[p]: n for n, p in enumerate(torch.randperm(len(patients), generator=stream.generator()).tolist())}
    kept = sorted(range(len(records)), key=lambda position: (rank[names[position]], position))[:limit]
    return tuple(records[position] for position in sorted(kept))


def pixels_of(listing: Listing, options: ImageOptions) -> Tensor:
    """The prepared images of all records, from the cache unless the options say otherwise."""
    preparation = options.preparation
    if options.cache:
        return cached(listing.records, preparation, lambda pixels: decode_into(pixels, listing, preparation))
    pixels: Pixels = np.empty(shape_of(listing.records, preparation), np.uint8)
    decode_into(pixels, listing, preparation)
    return torch.from_numpy(pixels)


def decode_into(pixels: Pixels, listing: Listing, preparation: Preparation) -> None:
    """Decode and prepare every record into its row of `pixels`; what cannot be read is told, all of it."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(work) for work in _work(pixels, listing.records, preparation)]
        broken = dict(sorted(problem for job in jobs for problem in job.result()))
    refuse(unreadable_files(listing, broken))


def refuse_pictures(listing: Listing, images: Tensor) -> None:
    """Refuse blank images and copies under different labels, which `check` would not let pass either.

    A file that is blank, or a copy, is still that when it is prepared; so prepared pixels tell whom to suspect, at a
    small part of what their checksum costs. Suspects are opened and judged as `check` does: other files may look alike
    once they are small.
    """
    pixels: Pixels = images.numpy()
    suspects = sorted({*_blank(pixels), *_contested(listing.records, pixels)})
    if suspects:
        some = replace(listing, records=tuple(listing.records[position] for position in suspects), unlisted=())
        looks = look_at(some)
        found = (*file_findings(some, looks), *duplicate_findings(some, looks))
        refuse(finding for finding in found if finding.kind in (BLANK.name, CONFLICT.name))


def _blank(pixels: Pixels) -> Iterator[int]:
    """Rows that show one colour, apart from black bars such as those that fill up an oblong image."""
    for row, image in enumerate(pixels):
        middle = image[:, image.shape[1] // 2, image.shape[2] // 2, None, None]
        if all(((some == middle) | (some == 0)).all() for some in (image[:, ::SAMPLE, ::SAMPLE], image)):
            yield row


def _contested(records: Sequence[Record], pixels: Pixels) -> Iterator[int]:
    """Rows that share a checksum with one of another label."""
    same: defaultdict[int, list[int]] = defaultdict(list)
    for row, image in enumerate(pixels):
        same[zlib.crc32(image.data)].append(row)
    for rows in same.values():
        if len({records[row].label for row in rows}) > 1:
            yield from rows


Problems: TypeAlias = list[tuple[int, str]]
"""Positions of records that could not be read, each with the reason."""


def _work(pixels: Pixels, records: Sequence[Record], preparation: Preparation) -> Iterator[Callable[[], Problems]]:
    """Pieces of work: a file each, or all rows of one array."""
    stacks: dict[tuple[Path, str], list[int]] = {}
    for position, record in enumerate(records):
        if record.row is None:
            yield partial(_decode, pixels, position, record.path, preparation)
        else:
            stacks.setdefault((record.path, record.array), []).append(position)
    for (path, array), positions in stacks.items():
        rows = {position: records[position].row or 0 for position in positions}
        yield partial(_decode_rows, pixels, rows, path, array, preparation)


def _decode(pixels: Pixels, position: int, path: Path, preparation: Preparation) -> Problems:
    try:
        pixels[position] = prepare(decode(path, preparation.bits).pixels, preparation)
    except UnreadableImage as problem:
        return [(position, str(problem))]
    return []


def _decode_rows(pixels: Pixels, rows: Mapping[int, int], path: Path, array: str, preparation: Preparation) -> Problems:
    places = sorted(rows, key=lambda position: rows[position])
    try:
        found = stream_rows(path, array, [rows[position] for position in places], preparation.bits)
        for position, image in zip(places, found, strict=True):
            pixels[position] = prepare(image, preparation)
    except UnreadableImage as problem:
        return [(position, str(problem)) for position in places]
    return []


def _column(values: Iterable[str]) -> tuple[str, ...] | None:
    column = tuple(values)
    return column if any(column) else None
