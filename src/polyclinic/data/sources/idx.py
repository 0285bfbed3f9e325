"""Idx files (LeCun, Cortes and Burges), plain or gzipped: arrays of bytes behind a short header."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyclinic.core import DataError


def read_idx(path: Path, shape: tuple[int, ...], most: int) -> Tensor:
    """Read an idx file of bytes. The header must announce items of this `shape`, and no more than `most` of them."""
    try:
        with _open_file(path) as file:
            count = _check_count(path, file.read(8 + 4 * len(shape)), shape, most)
            size = count * math.prod(shape)
            body = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{path}' cannot be read ({error}); get the file anew.") from None
    if len(body) != size:
        found = "is truncated" if len(body) < size else "has bytes after its end"
        raise DataError(f"'{path}' {found}: its header promises {size} bytes of content; get the file anew.")
    return torch.from_numpy(np.frombuffer(bytearray(body), dtype=np.uint8)).reshape(count, *shape)


def _open_file(path: Path) -> io.BufferedIOBase:
    return gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")


def _check_count(path: Path, header: bytes, shape: tuple[int, ...], most: int) -> int:
    fields = 2 + len(shape)
    if len(header) < 4 * fields:
        raise DataError(f"'{path}' is truncated within its header; get the file anew.")
    magic, count, *sides = struct.unpack(f">{fields}I", header)
    wanted = 0x800 + 1 + len(shape)
    if magic != wanted:
        raise DataError(f"'{path}' starts with {magic:#010x}, not {wanted:#010x}: it is not this idx file.")
    if tuple(sides) != shape:
        found = " × ".join(str(side) for side in sides)
        wish = " × ".join(str(side) for side in shape)
        raise DataError(f"'{path}' has images of {found} pixels, not {wish}; it is another set's file.")
    if not 1 <= count <= most:
        raise DataError(f"'{path}' claims {count} items, where there can be {most}; get the file anew.")
    return int(count)
