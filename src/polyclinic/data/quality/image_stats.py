"""Statistics of every image, from one decoding: its shape, a digest of its pixels and a thumbnail."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from polyclinic.data.records import Listing
from polyclinic.data.sources.decoder import decode_image
from polyclinic.data.sources.images import Bytes, DecodedImage, UnreadableImage, silence_decoders
from polyclinic.data.sources.stacks import decode_rows

Progress: TypeAlias = Callable[[int, int], None]
"""(images done, images in all)."""
SIDE = 32
BLOCK = 2**27
"""The bytes of an array's images that each worker holds at once."""
MISSING = "missing"


class ImageStats(NamedTuple):
    height: int
    width: int
    bits: int
    colour: bool
    windowed: bool
    blank: bool
    digest: bytes
    thumbnail: Bytes


class ListingStats(NamedTuple):
    """The statistics of all images by position in the listing."""

    images: dict[int, ImageStats]
    unreadable: dict[int, str]
    """The reasons, free of names."""
    missing: tuple[int, ...]


Seen: TypeAlias = list[tuple[int, ImageStats | str]]
Task: TypeAlias = Callable[[], Seen]


def measure_image(image: DecodedImage) -> ImageStats:
    pixels = _drop_redundant_colour(image.pixels)
    thumbnail = np.asarray(Image.fromarray(pixels).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    blank = thumbnail.min() == thumbnail.max() and bool((pixels == pixels[:1, :1]).all())
    digest = hashlib.blake2b(pixels.data, digest_size=16, key=str(pixels.shape).encode()).digest()
    height, width = pixels.shape[:2]
    return ImageStats(height, width, image.bits, image.colour, image.windowed, blank, digest, thumbnail)


def _drop_redundant_colour(pixels: Bytes) -> Bytes:
    """Convert grey images saved as colour to grey. Few pixels suffice to see that an image is coloured."""
    for some in (pixels[::16, ::16], pixels):
        if pixels.ndim == 2 or not (some == some[..., :1]).all():
            return np.ascontiguousarray(pixels)
    return np.ascontiguousarray(pixels[..., 0])


def measure_images(listing: Listing, workers: int = 0, progress: Progress | None = None) -> ListingStats:
    """Measure all images, excluded ones too. Every file is opened once, however often it is listed."""
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
    yield from (partial(_measure_file, path, positions) for path, positions in files.items())
    for (path, array), rows in arrays.items():
        yield from _block_tasks(path, array, sorted(rows))


def _measure_file(path: Path, positions: Sequence[int]) -> Seen:
    if not os.path.isfile(path):
        return [(position, MISSING) for position in positions]
    try:
        found: ImageStats | str = measure_image(decode_image(path))
    except UnreadableImage as error:
        found = str(error)
    return [(position, found) for position in positions]


def _block_tasks(path: Path, array: str, rows: Sequence[tuple[int, int]]) -> Iterator[Task]:
    """Split the rows of an array into tasks whose pixels fit into `BLOCK`."""
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
        yield partial(_measure_block, path, array, rows[start : start + length])


def _measure_block(path: Path, array: str, rows: Sequence[tuple[int, int]]) -> Seen:
    try:
        images = decode_rows(path, array, [row for row, _ in rows])
    except UnreadableImage as error:
        return [(position, str(error)) for _, position in rows]
    return [
        (position, measure_image(DecodedImage(pixels, bits=8, colour=pixels.ndim == 3)))
        for (_, position), pixels in zip(rows, images, strict=True)
    ]
