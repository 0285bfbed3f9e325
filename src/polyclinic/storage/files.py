"""Writing files that are either whole or absent: synced, then renamed; appended rows; folder locks."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from polyclinic.core import StoreError, failpoint

LOCK = ".lock"
ANOTHER = "make room or choose another folder with --out, then go on with the same command"


@contextlib.contextmanager
def explain_os_errors(path: Path, action: str = "write", remedy: str = ANOTHER) -> Iterator[None]:
    """Raise an OSError again as a StoreError: one sentence with the action, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if full else error.strerror or error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "allow more open files (`ulimit -n`, or LimitNOFILE of systemd), then go on with the same command"
        raise StoreError(f"cannot {action} {path}: {reason}; {remedy}") from error


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and its parents, or explain why that is not possible."""
    with explain_os_errors(path):
        path.mkdir(mode=mode, parents=True, exist_ok=True)


def write_atomically(
    path: Path,
    data: bytes,
    half_written: str = "",
    before_rename: str = "",
    mode: int | None = None,
    remedy: str = ANOTHER,
) -> None:
    """Write a file that is either whole or absent. `mode`: its permissions from the first moment on; None: as usual."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_os_errors(path, remedy=remedy):
        try:
            with open(temporary, "wb", opener=partial(os.open, mode=0o666 if mode is None else mode)) as file:
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                _write_and_sync(file, data, half_written)
            failpoint(before_rename)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def erase_file(path: Path) -> None:
    """Overwrite a file that holds a key, then remove it; one that is not there is left so.

    A disk that writes elsewhere (flash memory, snapshots of a file system) may keep a copy all the same.
    """
    with explain_os_errors(path, "erase"), contextlib.suppress(FileNotFoundError):
        with open(path, "r+b") as file:
            file.write(bytes(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        failpoint("key-overwritten")
        path.unlink()
        _sync_folder(path.parent)


def append_durably(path: Path, data: bytes, half_written: str = "") -> None:
    """Append to a file. If the disk fails on the way, the file is as before."""
    with explain_os_errors(path):
        start = path.stat().st_size if path.exists() else 0
        try:
            with open(path, "ab") as file:
                _write_and_sync(file, data, half_written)
        except OSError:
            if path.exists():
                os.truncate(path, start)
            raise


def append_line(path: Path, line: str) -> None:
    """Append a line durably, below one that a killed process may have left incomplete."""
    with explain_os_errors(path):
        start = "\n" if _ends_torn(path) else ""
    append_durably(path, f"{start}{line}\n".encode())


def _ends_torn(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _write_and_sync(file: IO[bytes], data: bytes, half: str) -> None:
    file.write(data[: len(data) // 2])
    file.flush()
    failpoint(half)
    file.write(data[len(data) // 2 :])
    file.flush()
    os.fsync(file.fileno())


def write_json(path: Path, value: object) -> None:
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: one process at a time works in it. The lock goes with the process, however it ends."""
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "wb")  # noqa: SIM115  errors are explained for opening it only
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"another process is at work in {folder}; wait for it, or choose another folder") from None
        yield


def file_sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
