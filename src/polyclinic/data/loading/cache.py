"""Decoded and resized images on disk, once per preparation: mapped into memory, checksummed, safe for many readers.

A cached set is a folder named by a hash over the preparation and over every file's path, size and time of change; it
holds pixels and nothing else: no name, no label, no patient. It lies under POLYCLINIC_CACHE, or XDG_CACHE_HOME, or
~/.cache, readable by its owner only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyclinic.core.errors import DataError, StoreError
from polyclinic.data.loading.options import Preparation
from polyclinic.data.records import Record
from polyclinic.storage.run_files import explain_os_errors, write_json

VARIABLE = "POLYCLINIC_CACHE"
REMEDY = f"make room, set {VARIABLE} to another folder, or set cache: false"
LAYOUT = 1
"""Of the files and of the preparation; a change of either makes everything anew."""
BLOCK = 1 << 24

Pixels = NDArray[np.uint8]
Fill = Callable[[Pixels], None]
"""Writes all images into the array it is given."""


def cache_folder() -> Path:
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyclinic"


def load_cached(records: Sequence[Record], preparation: Preparation, fill: Fill) -> Tensor:
    """The prepared images of `records`, n × channels × size × size bytes, from the cache or made now and kept there."""
    shape = pixel_shape(records, preparation)
    folder = cache_folder() / cache_key(records, preparation)
    if not _is_intact(folder, shape):
        _write_once(folder, shape, fill)
    return torch.from_file(str(folder / "pixels"), shared=False, size=_byte_count(shape), dtype=torch.uint8).reshape(
        shape
    )


def pixel_shape(records: Sequence[Record], preparation: Preparation) -> tuple[int, int, int, int]:
    return len(records), preparation.channels, preparation.size, preparation.size


def cache_key(records: Sequence[Record], preparation: Preparation) -> str:
    """What decides the pixels: layout, decoder, preparation, and which state of which files."""
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
    except OSError as error:  # it names the file, and thereby perhaps a patient
        raise DataError(f"The file of {record.where} cannot be read ({error.strerror}); get it back.") from None


def _byte_count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


@contextlib.contextmanager
def _exclusive_lock(lock: Path) -> Iterator[None]:
    """One process makes a set while others wait for it."""
    with explain_os_errors(lock, remedy=REMEDY), open(lock, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_once(folder: Path, shape: tuple[int, ...], fill: Fill) -> None:
    """One process makes a set; those that waited for it find it made."""
    with explain_os_errors(folder.parent, remedy=REMEDY):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _exclusive_lock(folder.with_name(f"{folder.name}.lock")):
        if not _is_intact(folder, shape):
            _write_set(folder, shape, fill)


def _write_set(folder: Path, shape: tuple[int, ...], fill: Fill) -> None:
    """Written beside its place and renamed when whole, so that a killed process leaves nothing that looks finished."""
    draft = folder.with_name(f"{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    _check_free_space(folder.parent, _byte_count(shape))
    try:
        with explain_os_errors(draft, remedy=REMEDY):
            draft.mkdir(mode=0o700)
            _reserve_space(draft / "pixels", _byte_count(shape))
            pixels = np.memmap(draft / "pixels", np.uint8, "r+", shape=shape)
            fill(pixels)
            pixels.flush()
            write_json(draft / "index.json", {"shape": list(shape), "sha256": _file_sha256(draft / "pixels")})
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _reserve_space(path: Path, size: int) -> None:
    """A mapped file that outgrows the disk ends the process without a word, so take its room before filling it."""
    with open(path, "wb") as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)


def _check_free_space(home: Path, wanted: int) -> None:
    """With both figures, which the system does not tell."""
    free = shutil.disk_usage(home).free
    if wanted > free:
        raise StoreError(
            f"the prepared images need {wanted / 2**20:,.0f} MiB but {home} has {free / 2**20:,.0f} MiB left; {REMEDY}"
        )


def _is_intact(folder: Path, shape: tuple[int, ...]) -> bool:
    """Whether the set is there, whole, and has the bytes it was written with."""
    try:
        index: dict[str, Any] = json.loads((folder / "index.json").read_text())
        return bool(index["shape"] == list(shape) and index["sha256"] == _file_sha256(folder / "pixels"))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _file_sha256(path: Path) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            total.update(block)
    return total.hexdigest()
