"""Images in a NumPy archive: MedMNIST's `train_images`, `train_labels`, … or plain `images` and `labels`.

An npz file is a zip of arrays, and its sender controls every number in it. So only the headers of images are read here,
nothing is unpickled, and a header must agree with the zip before memory is allocated.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy

from polyclinic.core import DataError
from polyclinic.data.records import Listing, Record, find_classes, pseudonymise
from polyclinic.data.sources.folder import SPLITS, clean_text, parse_part

MOST_IMAGES = 10_000_000
MOST_BYTES = {"images": 8 * 2**30, "labels": 2**28, "site": 2**30, "patient": 2**30, "split": 2**30}
MOST_HEADER = 10_000
DEFLATE_LIMIT = 1032
"""The highest compression ratio of deflate (zlib's technical notes); a zip that claims more is forged."""
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
Array = np.ndarray[Any, np.dtype[Any]]


class _ImageArray(NamedTuple):
    """An array of images with one text per image in every field."""

    array: str
    labels: list[str]
    sites: list[str]
    patients: list[str]
    splits: list[str]


def read_npz(
    file: Path,
    *,
    name: str,
    classes: tuple[str, ...] | None = None,
    label_names: tuple[str, ...] | None = None,
) -> Listing:
    """List the images in arrays `images` or `<part>_images` (n × height × width, or × 1 or 3 colours).

    Arrays with the same prefix hold `labels` (n or n × 1, whole numbers or texts) and optionally `site`, `patient` and
    `split`. `label_names` names the labels 0, 1, … and declares the classes; a larger number stays a number, which
    `check_listing` reports. Rows are counted from 0, as in NumPy.
    """
    with _open_archive(file) as archive:
        parts = [_read_array(archive, prefix) for prefix in _find_prefixes(archive)]
    declared = label_names if classes is None else classes
    names = {str(number): clean_text(text) for number, text in enumerate(label_names or ())}
    labels = [names.get(label, label) for part in parts for label in part.labels]
    if not labels:
        raise DataError(f"'{file}' has arrays of images, but no image in them; get the file anew.")
    patients = pseudonymise([patient for part in parts for patient in part.patients])
    rows = [(part.array, *row) for part in parts for row in zip(count(), part.sites, part.splits, strict=False)]
    records = tuple(
        Record(file, label, site, patient, split, f"{array} row {row}", array, row)
        for (array, row, site, split), label, patient in zip(rows, labels, patients, strict=True)
    )
    found = find_classes(set(labels)) if declared is None else tuple(map(clean_text, declared))
    return Listing(name, file.parent, records, found, declared=declared is not None)


class _Archive:
    """The arrays of an untrusted npz file."""

    def __init__(self, file: Path, members: ZipFile) -> None:
        self.file, self.members = file, members
        self.size = file.stat().st_size
        self.keys = [name.removesuffix(".npy") for name in members.namelist() if name.endswith(".npy")]

    def build_error(self, fault: str) -> DataError:
        return DataError(f"'{self.file}': {fault}; get a new copy of the file or write it with numpy.savez.")

    def read_header(self, key: str, kind: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and type of an array after checking them against the size of its member and the limits."""
        info = self._member_info(key, kind)
        with self._plain_errors(key), self.members.open(info) as member:
            opening = BytesIO(member.read(MOST_HEADER))  # NumPy itself would read any length that the header claims
            shape, _, dtype = HEADERS[npy.read_magic(opening)](opening)
        if dtype.hasobject:
            raise self.build_error(f"'{key}' holds Python objects, which may run code when read")
        if any(side < 0 for side in shape) or opening.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
            raise self.build_error(
                f"the header of '{key}' claims another size than its member of {info.file_size:,} bytes"
            )
        return shape, dtype

    def read_texts(self, key: str, kind: str, count: int) -> list[str]:
        """Read a column of `count` whole numbers or texts."""
        shape, dtype = self.read_header(key, kind)
        if shape not in ((count,), (count, 1)):
            raise self.build_error(
                f"'{key}' has the shape {_format_shape(shape)} for {count} images; it must have one per image"
            )
        if dtype.kind not in "biuSU":
            raise self.build_error(f"'{key}' is of type {dtype.name}; it must hold whole numbers or texts")
        with self._plain_errors(key), self.members.open(f"{key}.npy") as member:
            column: Array = npy.read_array(member, allow_pickle=False).reshape(count)
            if dtype.kind in "biu":
                return [str(int(value)) for value in column.tolist()]
            texts = [clean_text(value if isinstance(value, str) else value.decode()) for value in column.tolist()]
        if strange := sum(not text.isprintable() for text in texts):
            raise self.build_error(f"{strange} of '{key}' hold characters that cannot be printed")
        return texts

    def _member_info(self, key: str, kind: str) -> ZipInfo:
        info, most = self.members.getinfo(f"{key}.npy"), MOST_BYTES[kind]
        if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise self.build_error(f"'{key}' is compressed in a way that NumPy does not write")
        if info.file_size > most:
            raise self.build_error(f"'{key}' has {info.file_size:,} bytes, more than the {most:,} that are read")
        if info.header_offset + info.compress_size > self.size or info.file_size > DEFLATE_LIMIT * (
            info.compress_size + 1
        ):
            raise self.build_error(f"'{key}' claims {info.file_size:,} bytes, more than the file can hold")
        return info

    @contextmanager
    def _plain_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except Exception:  # errors of zip and npy parsers may quote the file
            raise self.build_error(f"'{key}' is damaged or not an array that NumPy writes") from None


@contextmanager
def _open_archive(file: Path) -> Iterator[_Archive]:
    try:
        with ZipFile(file) as members:
            yield _Archive(file, members)
    except OSError as error:
        raise DataError(f"'{file}' cannot be read ({error.strerror}); correct the path or the permissions.") from None
    except (BadZipFile, NotImplementedError, ValueError):
        raise DataError(f"'{file}' is not an npz file, or only a part of one; get the file anew.") from None


def _find_prefixes(archive: _Archive) -> list[str]:
    """Return what precedes "images" in the names of arrays: "train_", "val_", …, or ""."""
    if len(set(archive.keys)) < len(archive.keys):
        raise archive.build_error("two of its arrays have the same name")
    prefixes = [key.removesuffix("images") for key in archive.keys if key.endswith("images")]
    unknown = sum(bool(prefix) and prefix.removesuffix("_") not in SPLITS for prefix in prefixes)
    if unknown or not prefixes:
        fault = f"{unknown} of its arrays of images" if unknown else "none of its arrays"
        raise archive.build_error(
            f"{fault} {'are not' if unknown else 'is'} called images, train_images, val_images or test_images"
        )
    return prefixes


def _read_array(archive: _Archive, prefix: str) -> _ImageArray:
    count = _count_images(archive, f"{prefix}images")
    if f"{prefix}labels" not in archive.keys:
        raise archive.build_error(f"'{prefix}images' has no '{prefix}labels' beside it")

    def column(kind: str) -> list[str]:
        key = f"{prefix}{kind}"
        return archive.read_texts(key, kind, count) if key in archive.keys else [""] * count

    official = parse_part(prefix.removesuffix("_"))
    splits = [official] * count if official else [parse_part(text) for text in column("split")]
    return _ImageArray(f"{prefix}images", column("labels"), column("site"), column("patient"), splits)


def _count_images(archive: _Archive, key: str) -> int:
    shape, dtype = archive.read_header(key, "images")
    if dtype.kind != "u" or dtype.itemsize > 2:
        raise archive.build_error(f"'{key}' is of type {dtype.name}; images must be uint8 or uint16")
    grey, colour = len(shape) == 3, len(shape) == 4 and shape[-1] in (1, 3)
    if not (grey or colour) or 0 in shape[1:]:
        raise archive.build_error(
            f"'{key}' has the shape {_format_shape(shape)}; images are n × height × width (× 1 or 3 colours)"
        )
    if shape[0] > MOST_IMAGES:
        raise archive.build_error(f"'{key}' has {shape[0]:,} images, more than the {MOST_IMAGES:,} that are read")
    return shape[0]


def _format_shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "of a single number"
