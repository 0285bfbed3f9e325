"""60,000 + 10,000 handwritten digits of 28 × 28 pixels (LeCun, Cortes and Burges).

MNIST from its four idx files (LeCun, Cortes and Burges), plain or gzipped.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.core import DataError, Stream
from polyclinic.data.data_dir import data_folder
from polyclinic.data.datasets.toolkit import Download, Listing, NamedDataset, Record
from polyclinic.data.examples import Collection, Images
from polyclinic.data.options import Options
from polyclinic.data.patients import UNNAMED

CLASSES = tuple("0123456789")
SIDE = 28
PUBLISHED = {"train": 60_000, "t10k": 10_000}


class MnistOptions(Options):
    limit: int | None = Field(None, ge=1, le=PUBLISHED["train"])
    """Use only so many training images, drawn at random."""
    normalise: Literal["none", "half"] = "none"
    """none: pixels from 0 to 1; half: from −1 to 1."""


def load_mnist(options: MnistOptions, stream: Stream, folder: Path | None = None) -> Collection:
    home = data_folder(folder) / "mnist"
    images, labels = _read_images_and_labels(home, "train")
    if options.limit is not None and options.limit < len(labels):
        kept = torch.randperm(len(labels), generator=stream.child("limit").generator())[: options.limit]
        images, labels = images[kept.sort().values], labels[kept.sort().values]
    found = Collection(
        images,
        labels,
        CLASSES,
        patients=tuple(f"{UNNAMED}{row}" for row in range(len(labels))),
        held_out=Images(*_read_images_and_labels(home, "t10k")),
    )
    return found if options.normalise == "none" else found.with_normalisation(0.5, 0.5)


def _read_images_and_labels(home: Path, prefix: str) -> tuple[Tensor, Tensor]:
    most = PUBLISHED[prefix]
    images = _read_idx(_find_file(home, f"{prefix}-images-idx3-ubyte"), (SIDE, SIDE), most)
    path = _find_file(home, f"{prefix}-labels-idx1-ubyte")
    labels = _read_idx(path, (), most).long()
    if len(images) != len(labels):
        raise DataError(f"'{path}' has {len(labels)} labels for {len(images)} images; get the four files anew.")
    if len(labels) and labels.max() > 9:
        raise DataError(f"'{path}' has a label {int(labels.max())}, not a digit 0 to 9; get the file anew.")
    return images[:, None], labels


def _find_file(home: Path, name: str) -> Path:
    for path in (home / name, home / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(f"'{home / name}' is missing, plain and .gz; put MNIST's four idx files into '{home}'.")


def read_listing(options: MnistOptions, folder: Path) -> Listing:  # noqa: ARG001  the contract's
    """Every digit with its official part, for `data check`."""
    records: list[Record] = []
    for prefix, part in (("train", "train"), ("t10k", "test")):
        path = _find_file(folder, f"{prefix}-images-idx3-ubyte")
        _, labels = _read_images_and_labels(folder, prefix)
        records += [
            Record(path, str(label), split=part, where=f"{prefix} image {row + 1}", row=row)
            for row, label in enumerate(labels.tolist())
        ]
    return Listing("mnist", folder, tuple(records), CLASSES, declared=True)


def _read_idx(path: Path, shape: tuple[int, ...], most: int) -> Tensor:
    """Read an idx file of bytes. The header must announce items of this `shape`, and no more than `most` of them."""
    try:
        with gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb") as file:
            count = _check_count(path, file.read(8 + 4 * len(shape)), shape, most)
            size = count * math.prod(shape)
            body = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{path}' cannot be read ({error}); get the file anew.") from None
    if len(body) != size:
        found = "is truncated" if len(body) < size else "has bytes after its end"
        raise DataError(f"'{path}' {found}: its header promises {size} bytes of content; get the file anew.")
    return torch.from_numpy(np.frombuffer(bytearray(body), dtype=np.uint8)).reshape(count, *shape)


def _check_count(path: Path, header: bytes, shape: tuple[int, ...], most: int) -> int:
    fields = 2 + len(shape)
    if len(header) < 4 * fields:
        raise DataError(f"'{path}' is truncated within its header; get the file anew.")
    magic, count, *sides = struct.unpack(f">{fields}I", header)
    wanted = 0x800 + 1 + len(shape)
    if magic != wanted:
        raise DataError(f"'{path}' starts with {magic:#010x}, not {wanted:#010x}: it is not this idx file.")
    if tuple(sides) != shape:
        found, expected = (" × ".join(map(str, each)) for each in (sides, shape))
        raise DataError(f"'{path}' has images of {found} pixels, not {expected}; it is another set's file.")
    if not 1 <= count <= most:
        raise DataError(f"'{path}' claims {count} items, where there can be {most}; get the file anew.")
    return int(count)


DATASET = NamedDataset(
    name="mnist",
    licence="CC BY-SA 3.0",
    classes=CLASSES,
    read=read_listing,
    obtain="Get the four files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte, plain or .gz.",
    options=MnistOptions,
    load=load_mnist,
    downloads=tuple(
        Download(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz", sha256, f"{name}.gz")
        for name, sha256 in {
            "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        }.items()
    ),
)
