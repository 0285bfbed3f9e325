"""The cache of preprocessed images: memory-mapped, with checksums, safe for concurrent readers.

A cached set is a folder named by a hash of the preparation and of every file's path, size and modification time. It
holds only pixels: no names, labels or patients. It lies in POLYCLINIC_CACHE, or else XDG_CACHE_HOME, or ~/.cache, and
only its owner can read it.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyclinic.core import DataError, StoreError
from polyclinic.data.loading.image_options import Preparation
from polyclinic.data.records import Record
from polyclinic.storage.files import explain_os_errors, file_sha256, write_json

VARIABLE = "POLYCLINIC_CACHE"
REMEDY = f"make room, set {VARIABLE} to another folder, or set cache: false"
LAYOUT = 1
"""The version of the cache's layout and of the preprocessing; a new version rebuilds everything."""

Pixels = NDArray[np.uint8]
Fill = Callable[[Pixels], None]
"""Writes all images into the given array."""


def cache_folder() -> Path:
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyclinic"


def load_cached(records: Sequence[Record], preparation: Preparation, fill: Fill) -> Tensor:
    """Return the preprocessed images of `records` (n × channels × size × size bytes), calling `fill` if not cached."""
    shape = pixel_shape(records, preparation)
    folder = cache_folder() / cache_key(records, preparation)
    if not _is_intact(folder, shape):
        _write_once(folder, shape, fill)
    os.utime(folder)  # `trim_cache` keeps what was used last
    return torch.from_file(str(folder / "pixels"), shared=False, size=math.prod(shape), dtype=torch.uint8).reshape(
        shape
    )


def trim_cache(limit: int) -> list[str]:
    """Remove the sets that were not used for longest until the cache has at most `limit` bytes; returns their names.

    The set that was used last always stays. A set that a process has open can be removed: its images stay readable.
    """
    found: list[tuple[float, int, Path]] = []
    for folder in (index.parent for index in cache_folder().glob("*/index.json")):
        with contextlib.suppress(OSError):  # another process may be removing it
            found.append((folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), folder))
    total, removed = 0, []
    for number, (_, size, folder) in enumerate(sorted(found, reverse=True)):
        if number and total + size > limit:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
        else:
            total += size
    return removed


def pixel_shape(records: Sequence[Record], preparation: Preparation) -> tuple[int, int, int, int]:
    return len(records), preparation.channels, preparation.size, preparation.size


def cache_key(records: Sequence[Record], preparation: Preparation) -> str:
    """Hash everything that determines the pixels: layout, decoder version, preparation, and the state of every file."""
    total = hashlib.sha256(f"{LAYOUT}|{PIL.__version__}|{preparation.model_dump_json()}".encode())
    states: dict[Path, bytes] = {}
    for record in records:
        if record.path not in states:
            states[record.path] = _file_state(record)
        total.update(states[record.path] + f"|{record.array}|{record.row}\n".encode())
    return total.hexdigest()[:32]


def _file_state(record: Record) -> bytes:
    try:
        state = record.path.stat()
        return os.fsencode(record.path.resolve()) + f"|{state.st_size}|{state.st_mtime_ns}".encode()
    except OSError as error:  # it contains the file's name, which may name a patient
        raise DataError(f"The file of {record.where} cannot be read ({error.strerror}); restore it.") from None


def _write_once(folder: Path, shape: tuple[int, ...], fill: Fill) -> None:
    """Write a set unless another process has written it while this one waited for the lock."""
    with explain_os_errors(folder.parent, remedy=REMEDY):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = folder.with_name(f"{folder.name}.lock")
    with explain_os_errors(lock, remedy=REMEDY), open(lock, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not _is_intact(folder, shape):
            _write_set(folder, shape, fill)


def _write_set(folder: Path, shape: tuple[int, ...], fill: Fill) -> None:
    """Write a set to a draft folder and rename it when complete, so that a killed process leaves no incomplete set."""
    draft = folder.with_name(f"{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    wanted, free = math.prod(shape), shutil.disk_usage(folder.parent).free
    if wanted > free:  # the system's own error contains no figures
        raise StoreError(
            f"the prepared images need {wanted / 2**20:,.0f} MiB but {folder.parent} has {free / 2**20:,.0f} MiB left; "
            f"{REMEDY}"
        )
    try:
        with explain_os_errors(draft, remedy=REMEDY):
            draft.mkdir(mode=0o700)
            _reserve_space(draft / "pixels", wanted)
            pixels = np.memmap(draft / "pixels", np.uint8, "r+", shape=shape)
            fill(pixels)
            pixels.flush()
            write_json(draft / "index.json", {"shape": list(shape), "sha256": file_sha256(draft / "pixels")})
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _reserve_space(path: Path, size: int) -> None:
    """Reserve the disk space first: a mapped file that outgrows the disk kills the process without a message."""
    with open(path, "wb") as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


def _is_intact(folder: Path, shape: tuple[int, ...]) -> bool:
    """Whether the set exists, is complete and matches its checksum."""
    try:
        index = json.loads((folder / "index.json").read_text())
        return bool(index["shape"] == list(shape) and index["sha256"] == file_sha256(folder / "pixels"))
    except (OSError, ValueError, LookupError, TypeError):
        return False
