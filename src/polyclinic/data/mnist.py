"""MNIST from its four idx files (LeCun, Cortes and Burges), plain or gzipped."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.core import Stream
from polyclinic.data.examples import Collection, Images
from polyclinic.data.folder import data_folder
from polyclinic.data.options import Options
from polyclinic.errors import DataError

CLASSES = tuple("0123456789")
SIDE = 28
PUBLISHED = {"train": 60_000, "t10k": 10_000}


class MnistOptions(Options):
    limit: int | None = Field(None, ge=1, le=PUBLISHED["train"])
    """Use only so many training images, drawn at random."""


def mnist(options: MnistOptions, stream: Stream, folder: Path | None = None) -> Collection:
    home = data_folder(folder) / "mnist"
    images, labels = _pair(home, "train")
    if options.limit is not None and options.limit < len(labels):
        kept = torch.randperm(len(labels), generator=stream.child("limit").generator())[: options.limit]
        images, labels = images[kept.sort().values], labels[kept.sort().values]
    patients = tuple(f"digit-{row}" for row in range(len(labels)))
    return Collection(images, labels, CLASSES, patients, held_out=Images(*_pair(home, "t10k")))


def _pair(home: Path, prefix: str) -> tuple[Tensor, Tensor]:
    most = PUBLISHED[prefix]
    images = _read_idx(_find(home, f"{prefix}-images-idx3-ubyte"), (SIDE, SIDE), most)
    path = _find(home, f"{prefix}-labels-idx1-ubyte")
    labels = _read_idx(path, (), most).long()
    if len(images) != len(labels):
        raise DataError(f"'{path}' has {len(labels)} labels for {len(images)} images; get the four files anew.")
    if len(labels) and labels.max() > 9:
        raise DataError(f"'{path}' has a label {int(labels.max())}, not a digit 0 to 9; get the file anew.")
    return images[:, None], labels


def _find(home: Path, name: str) -> Path:
    for path in (home / name, home / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"'{home / name}' is missing, plain and .gz; put MNIST's four idx files into '{home}'.")


def _read_idx(path: Path, shape: tuple[int, ...], most: int) -> Tensor:
    """The items of an idx file of bytes. The header is believed only within what MNIST can be."""
    try:
        with _opened(path) as file:
            count = _count(path, file.read(8 + 4 * len(shape)), shape, most)
            size = count * math.prod(shape)
            body = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{path}' cannot be read ({error}); get the file anew.") from None
    if len(body) != size:
        found = "is truncated" if len(body) < size else "has bytes after its end"
        raise DataError(f"'{path}' {found}: its header promises {size} bytes of content; get the file anew.")
    return torch.from_numpy(np.frombuffer(bytearray(body), dtype=np.uint8)).reshape(count, *shape)


def _opened(path: Path) -> io.BufferedIOBase:
    return gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")


def _count(path: Path, header: bytes, shape: tuple[int, ...], most: int) -> int:
    fields = 2 + len(shape)
    if len(header) < 4 * fields:
        raise DataError(f"'{path}' is truncated within its header; get the file anew.")
    magic, count, *sides = struct.unpack(f">{fields}I", header)
    wanted = 0x800 + 1 + len(shape)
    if magic != wanted:
        raise DataError(f"'{path}' starts with {magic:#010x}, not {wanted:#010x}: it is not this idx file.")
    if tuple(sides) != shape:
        found = " × ".join(str(side) for side in sides)
        raise DataError(f"'{path}' has images of {found} pixels, not {SIDE} × {SIDE}; it is not MNIST.")
    if not 1 <= count <= most:
        raise DataError(f"'{path}' claims {count} items, where MNIST has {most}; get the file anew.")
    return int(count)
