"""One look at every image: what is kept of it is its shape, a digest of its pixels and a thumbnail."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyclinic.data.records import Listing
from polyclinic.data.sources.decode import DecodedImage, UnreadableImage, decode_image, decode_rows, silence_decoders

Bytes: TypeAlias = NDArray[np.uint8]
Progress: TypeAlias = Callable[[int, int], None]
"""(images looked at, images in all)."""
SIDE = 32
BLOCK = 2**27
"""Bytes of an array's images held at once by each worker."""
MISSING = "missing"


@dataclass(frozen=True)
class ImageStats:
    height: int
    width: int
    bits: int
    colour: bool
    windowed: bool
    blank: bool
    digest: bytes
    thumbnail: Bytes


@dataclass(frozen=True)
class ListingStats:
    """By position in the listing."""

    images: dict[int, ImageStats]
    unreadable: dict[int, str]
    """Why, free of names."""
    missing: tuple[int, ...]


Seen: TypeAlias = list[tuple[int, ImageStats | str]]
Task: TypeAlias = Callable[[], Seen]


def measure_image(image: DecodedImage) -> ImageStats:
    pixels = _drop_redundant_colour(image.pixels)
    thumbnail = np.asarray(Image.fromarray(pixels).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    blank = thumbnail.min() == thumbnail.max() and bool((pixels == pixels[:1, :1]).all())
    digest = hashlib.blake2b(pixels.data, digest_size=16, key=str(pixels.shape).encode())
    height, width = pixels.shape[:2]
    return ImageStats(height, width, image.bits, image.colour, image.windowed, blank, digest.digest(), thumbnail)


def _drop_redundant_colour(pixels: Bytes) -> Bytes:
    """Grey saved as colour is the same picture. A glance at few pixels settles most."""
    for some in (pixels[::16, ::16], pixels):
        if pixels.ndim == 2 or not (some == some[..., :1]).all():
            return np.ascontiguousarray(pixels)
    return np.ascontiguousarray(pixels[..., 0])


def measure_images(listing: Listing, workers: int = 0, progress: Progress | None = None) -> ListingStats:
    """Every file is opened once, however often it is listed; excluded images are looked at too."""
    seen: dict[int, ImageStats | str] = {}
    with silence_decoders(), ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for found in pool.map(lambda task: task(), _build_tasks(listing)):
            seen.update(found)
            if progress is not None:
                progress(len(seen), len(listing.records))
    order = sorted(seen)
    texts = {position: text for position in order if isinstance(text := seen[position], str)}
    return ListingStats(
        images={position: image for position in order if isinstance(image := seen[position], ImageStats)},
        unreadable={position: text for position, text in texts.items() if text != MISSING},
        missing=tuple(position for position, text in texts.items() if text == MISSING),
    )


def _build_tasks(listing: Listing) -> Iterator[Task]:
    files: defaultdict[Path, list[int]] = defaultdict(list)
    arrays: defaultdict[tuple[Path, str], list[tuple[int, int]]] = defaultdict(list)
    for position, record in enumerate(listing.records):
        if record.row is None:
            files[record.path].append(position)
        else:
            arrays[record.path, record.array].append((record.row, position))
    yield from (_file_task(path, positions) for path, positions in files.items())
    for (path, array), rows in arrays.items():
        yield from _block_tasks(path, array, sorted(rows))


def _file_task(path: Path, positions: Sequence[int]) -> Task:
    def task() -> Seen:
        if not os.path.isfile(path):
            return [(position, MISSING) for position in positions]
        try:
            found: ImageStats | str = measure_image(decode_image(path))
        except UnreadableImage as error:
            found = str(error)
        return [(position, found) for position in positions]

    return task


def _block_tasks(path: Path, array: str, rows: Sequence[tuple[int, int]]) -> Iterator[Task]:
    """Rows of an array, so many at a time that their pixels fit into `BLOCK`."""
    positions = [position for _, position in rows]
    if not os.path.isfile(path):
        yield lambda: [(position, MISSING) for position in positions]
        return
    try:
        size = decode_rows(path, array, [rows[0][0]]).nbytes
    except UnreadableImage as error:
        reason = str(error)
        yield lambda: [(position, reason) for position in positions]
        return
    length = max(1, BLOCK // size)
    for start in range(0, len(rows), length):
        yield _block_task(path, array, rows[start : start + length])


def _block_task(path: Path, array: str, rows: Sequence[tuple[int, int]]) -> Task:
    def task() -> Seen:
        try:
            images = decode_rows(path, array, [row for row, _ in rows])
        except UnreadableImage as error:
            return [(position, str(error)) for _, position in rows]
        return [
            (position, measure_image(DecodedImage(pixels, bits=8, colour=pixels.ndim == 3)))
            for (_, position), pixels in zip(rows, images, strict=True)
        ]

    return task
