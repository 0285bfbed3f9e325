"""Stacks of images in npz and idx files, read row by row."""

import gzip
import io
import math
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from polyclinic.data.sources.images import (
    Bytes,
    UnreadableImage,
    check_size,
    read_head,
    scale_to_bytes,
    silence_decoders,
)
from polyclinic.data.sources.npz import HEADERS, MOST_HEADER

IDX_OF_BYTE_IMAGES = 0x803
BLOCK = 1 << 20

Readable = IO[bytes] | io.BufferedIOBase


@dataclass(frozen=True)
class _Stack:
    """Consecutive images of one shape in an open file."""

    file: Readable
    count: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.unsignedinteger[Any]]

    def read_images(self, rows: Sequence[int]) -> Iterator[NDArray[np.unsignedinteger[Any]]]:
        """Read the images at the ascending `rows`. Those between are read too, for the checksum at the end."""
        if rows and not 0 <= rows[0] <= rows[-1] < self.count:
            raise UnreadableImage(f"row {rows[-1]} was requested, but it has {self.count} images, counted from 0")
        size, reached = math.prod(self.shape) * self.dtype.itemsize, 0
        for row in rows:
            _skip_bytes(self.file, (row - reached) * size)
            yield np.frombuffer(_read_exactly(self.file, size), self.dtype).reshape(self.shape)
            reached = row + 1
        if reached == self.count and self.file.read(1):
            raise UnreadableImage("it has bytes after its last image")


def _read_exactly(file: Readable, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise UnreadableImage("the file is truncated")
    return data


def _skip_bytes(file: Readable, size: int) -> None:
    for start in range(0, size, BLOCK):
        _read_exactly(file, min(BLOCK, size - start))


def decode_rows(path: Path, array: str, rows: Sequence[int], bits: int | None = None) -> Bytes:
    """Decode the images of a stack (n×H×W or n×H×W×3) in the order of `rows`.

    Each call reads the file from the start, so request many rows at once.
    """
    wanted, places = np.unique(np.asarray(rows, dtype=np.int64), return_inverse=True)
    images = list(stream_rows(path, array, wanted.tolist(), bits))
    return np.stack([images[place] for place in places]) if images else np.empty((0, 0, 0), np.uint8)


def stream_rows(path: Path, array: str, rows: Sequence[int], bits: int | None = None) -> Iterator[Bytes]:
    """Yield the images at the ascending `rows` of an array in an npz file, or of an idx(.gz) file.

    The file is read once and one image is held at a time, so the stack may be larger than the memory.
    """
    if any(next_one <= row for row, next_one in pairwise(rows)):
        raise ValueError("rows must ascend")
    with _open_stack(path, array) as stack:
        for image in stack.read_images(rows):
            pixels = image.astype(np.uint8) if image.dtype == np.uint8 else scale_to_bytes(image, bits or 16)
            yield pixels[..., 0] if image.ndim == 3 and image.shape[2] == 1 else pixels


@contextmanager
def _open_stack(path: Path, array: str) -> Iterator[_Stack]:
    head = read_head(path)
    try:
        with ExitStack() as files:
            file = files.enter_context(path.open("rb"))
            if head.startswith(b"PK"):
                yield _open_npy(files.enter_context(zipfile.ZipFile(file)), array, files)
            else:
                yield _open_idx(gzip.GzipFile(fileobj=file) if head.startswith(b"\x1f\x8b") else file)
    except UnreadableImage:
        raise
    except Exception:  # errors of zip, deflate and header parsers may quote the damaged file
        raise UnreadableImage("the file is truncated or damaged") from None


def _open_npy(archive: zipfile.ZipFile, array: str, files: ExitStack) -> _Stack:
    name = f"{array}.npy"
    if name not in archive.namelist():
        raise UnreadableImage(f"it has no array '{array}'")
    with silence_decoders(), archive.open(name) as member:
        opening = io.BytesIO(member.read(MOST_HEADER))  # NumPy itself would read any length that a header claims
        shape, by_column, dtype = HEADERS[npy.read_magic(opening)](opening)
    if dtype.kind != "u" or dtype.itemsize > 2:
        raise UnreadableImage("its images are not whole numbers of 8 or 16 bits (uint8, uint16)")
    if by_column and len(shape) > 1:
        raise UnreadableImage("its images are stored column by column; save them with numpy.ascontiguousarray")
    file = files.enter_context(archive.open(name))
    _skip_bytes(file, opening.tell())
    return _build_stack(file, shape, dtype)


def _open_idx(file: Readable) -> _Stack:
    header = file.read(16)
    if len(header) < 16 or struct.unpack(">I", header[:4])[0] != IDX_OF_BYTE_IMAGES:
        raise UnreadableImage("it is not an idx file of images")
    return _build_stack(file, struct.unpack(">3I", header[4:]), np.dtype(np.uint8))


def _build_stack(file: Readable, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Stack:
    image = shape[1:]
    if len(image) not in (2, 3) or image[2:] not in ((), (1,), (3,)) or min(image) < 1:
        raise UnreadableImage("its array has not the shape of images: n×H×W, n×H×W×1 or n×H×W×3")
    check_size(image[1], image[0])
    return _Stack(file, shape[0], image, dtype)
