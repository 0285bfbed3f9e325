"""A run's folder: atomic snapshots, an append-only ledger, metrics by round, what sites remember.

Whatever is read back is checked against a checksum. A file is either whole or absent: it is written beside its name,
synced, then renamed. The ledger is never rewritten: each row carries a hash over itself and the row before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from polyclinic.core.contract import Bundle, SiteId, Tensors
from polyclinic.core.errors import DataError, Refused, StoreError
from polyclinic.core.failpoints import failpoint
from polyclinic.core.flat_tensors import FlatTensors, copy_tensors
from polyclinic.core.names import HELD_OUT
from polyclinic.evaluation.metrics import Predictions
from polyclinic.storage import messages

PREDICTIONS = "predictions.safetensors"
MARK = b'"chain": "'
ANOTHER = "make room or choose another folder with --out, then go on with the same command"
HASH = 32
"""Hexadecimal digits of a row's hash."""


@contextlib.contextmanager
def explain_os_errors(path: Path, action: str = "write", remedy: str = ANOTHER) -> Iterator[None]:
    """Turn what the disk says into one sentence."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if full else error.strerror or error
        raise StoreError(f"cannot {action} {path}: {reason}; {remedy}") from error


def write_atomically(path: Path, data: bytes, half_written: str = "", before_rename: str = "") -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_os_errors(path):
        try:
            with open(temporary, "wb") as file:
                _write_and_sync(file, data, half_written)
            failpoint(before_rename)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def append_durably(path: Path, data: bytes, half_written: str = "") -> None:
    """Add to the end of a file. Where the disk gives out on the way, nothing was added."""
    with explain_os_errors(path):
        start = path.stat().st_size if path.exists() else 0
        try:
            with open(path, "ab") as file:
                _write_and_sync(file, data, half_written)
        except OSError:
            if path.exists():
                os.truncate(path, start)
            raise


def _write_and_sync(file: IO[bytes], data: bytes, half: str) -> None:
    file.write(data[: len(data) // 2])
    file.flush()
    failpoint(half)
    file.write(data[len(data) // 2 :])
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def save_predictions(folder: Path, found: Mapping[SiteId, Bundle], apart: Predictions | None) -> None:
    """What final models say of validation and test images, by `site|model|part`, beside a run's result: probabilities,
    labels, patients by number. `apart`: of the test images that belong to no site."""
    kept = {f"{site}|{key}": group for site, groups in found.items() for key, group in groups.items()}
    kept = {key: group for key, group in kept.items() if not key.endswith("|train")}
    if apart is not None:
        columns = {"probabilities": torch.tensor(apart.probabilities), "labels": torch.tensor(apart.labels)}
        kept[f"{HELD_OUT}|{HELD_OUT}|test"] = {**columns, "patients": torch.arange(len(apart))}
    if kept:
        write_atomically(folder / PREDICTIONS, messages.encode_body(kept).data)


def load_predictions(folder: Path) -> dict[tuple[SiteId, str, str], Predictions]:
    """The same, by site, model and part; {} where none were kept."""
    path = folder / PREDICTIONS
    if not path.exists():
        return {}
    try:
        bundle = messages.unflatten(load_file(path))
        named = {tuple(key.split("|")): group for key, group in bundle.items()}
        return {(site, model, part): _to_predictions(site, group) for (site, model, part), group in named.items()}
    except (SafetensorError, OSError, KeyError, ValueError, DataError, Refused) as error:
        raise StoreError(f"{path} is damaged ({error}); remove it, and reports do without") from error


def _to_predictions(site: SiteId, group: Tensors) -> Predictions:
    patients = tuple(f"{site}:{number}" for number in group["patients"].tolist())
    return Predictions(group["probabilities"].double().numpy(), group["labels"].numpy(), patients)


def prepare_folder(folder: Path) -> None:
    """Make a run's folder, or say why it cannot be; sweep up what a killed process had not finished writing."""
    with explain_os_errors(folder):
        (folder / "snapshots").mkdir(parents=True, exist_ok=True)
        for place in (folder, folder / "snapshots", *folder.glob("sites/*")):
            for unfinished in place.glob(".*.[0-9]*.tmp"):
                unfinished.unlink(missing_ok=True)
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """One process at a time works in a run's folder; the lock goes with the process, however it ends."""
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "wb")  # noqa: SIM115  named_failure is for opening it only
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"another process is at work in {folder}; wait for it, or choose another folder") from None
        yield


class SnapshotStore:
    """The server's state after a round; the newest two are kept, the newest sound one is loaded."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder / "snapshots", keep

    def save(self, round: int, state: Bundle, fields: Mapping[str, Any]) -> None:
        data = messages.encode({**fields, "round": round}, state)
        write_atomically(self._path(round), data, "snapshot-half-written", "snapshot-unnamed")
        with explain_os_errors(self.folder):
            for old in self._paths()[: -self.keep]:
                old.unlink(missing_ok=True)

    def load(self) -> tuple[int, messages.Message] | None:
        """The newest snapshot that passes its checksum; None when there is none at all."""
        paths = self._paths()
        for path in reversed(paths):
            with contextlib.suppress(Refused, OSError):
                message = messages.decode(path.read_bytes())
                return int(message.fields["round"]), message
        if paths:
            raise StoreError(
                f"every snapshot in {self.folder} is damaged (checksum); start the run anew in another folder"
            )
        return None

    def oldest_round(self) -> int:
        """The earliest round a resume could go back to: sites must remember from there on."""
        paths = self._paths()
        return int(paths[0].stem.split("-")[1]) if paths else 0

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.pcl"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.pcl"))


class Ledger:
    """What the run has cost so far: one JSON row a line, hashed in a chain, synced before it counts."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows, self.chain = path, 0, ""
        if path.exists():
            self._verify()
        else:
            with explain_os_errors(path):
                path.touch()

    def append(self, **row: Any) -> None:
        text = json.dumps(row, allow_nan=False)
        chain = _hash_row(self.chain, text)
        line = f'{text[:-1]}{", " if row else ""}{MARK.decode()}{chain}"}}\n'.encode()
        append_durably(self.path, line, "ledger-half-written")
        self.chain, self.rows = chain, self.rows + 1

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def includes(self, rows: int, chain: str) -> bool:
        """Whether the first `rows` rows end in `chain`: nothing a snapshot has seen was lost since."""
        lines = self.path.read_text().splitlines()
        return rows <= len(lines) and (rows == 0 or json.loads(lines[rows - 1])["chain"] == chain)

    def _verify(self) -> None:
        """Walk the chain. A half-written last line is what a crash leaves: it is cut off. Anything else is damage."""
        with explain_os_errors(self.path, "read"):
            *lines, tail = self.path.read_bytes().split(b"\n")
        for line in lines:
            self.chain, self.rows = self._next_link(line), self.rows + 1
        if tail:
            whole = tail[: tail.find(MARK) + len(MARK) + HASH + 2]
            if whole != tail and _valid_link(self.chain, whole):
                self._next_link(tail)  # a row with its line's end lost was never half-written
            with explain_os_errors(self.path):
                os.truncate(self.path, self.path.stat().st_size - len(tail))

    def _next_link(self, line: bytes) -> str:
        chain = _valid_link(self.chain, line)
        if chain is None:
            raise StoreError(
                f"{self.path} is damaged at row {self.rows + 1} (checksum); what the run has cost can no longer be "
                "shown, so it cannot be resumed: restore the file or start anew in another folder"
            )
        return chain


def _hash_row(chain: str, row: str) -> str:
    return hashlib.sha256(f"{chain}|{row}".encode()).hexdigest()[:HASH]


def _valid_link(chain: str, line: bytes) -> str | None:
    """The hash a row carries, if that is what follows from the row before."""
    row, _, carried = line.decode(errors="replace").rpartition(MARK.decode())
    link = _hash_row(chain, row.removesuffix(", ") + "}")
    return link if carried == f'{link}"}}' else None


class MetricsFile:
    """`metrics.jsonl`: a row per round and site."""

    def __init__(self, path: Path) -> None:
        self.path, self._sum = path, hashlib.sha256()

    def append(self, rows: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        append_durably(self.path, data)
        self._sum.update(data)

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def checksum(self) -> str:
        """Of everything that was appended, or kept by `cut`."""
        return self._sum.hexdigest()

    def truncate(self, size: int, checksum: str | None = None) -> None:
        """Forget what was written after the snapshot that is resumed from; those rounds run again."""
        with explain_os_errors(self.path, "read"):
            seen = self.path.read_bytes()[:size] if self.path.exists() else b""
        self._sum = hashlib.sha256(seen)
        if len(seen) < size:
            raise StoreError(
                f"{self.path} is shorter than its snapshot says; restore it or start anew in another folder"
            )
        if checksum not in (None, self.checksum()):
            raise StoreError(f"{self.path} is damaged (checksum); restore it or start anew in another folder")
        if self.path.exists():
            with explain_os_errors(self.path):
                os.truncate(self.path, size)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


class SiteMemory(Protocol):
    """What sites remember between rounds, by round, so that a round can be played again."""

    def load(self, site: SiteId, before: int) -> Bundle | None: ...

    def save(self, site: SiteId, round: int, memory: Bundle, durable: int) -> None: ...

    def forget(self, site: SiteId, after: int, before: int) -> None:
        """Drop what was remembered of the rounds between: they did not count."""
        ...

    def save_report(self, site: SiteId, round: int, found: Bundle) -> None:
        """Keep what a site found out in a round, for its own people to read: nothing here ever loads it."""
        ...


class RamMemory:
    """Remembers for as long as the process lives: the last two rounds of each site."""

    def __init__(self) -> None:
        self._kept: dict[SiteId, list[tuple[int, Bundle]]] = {}

    def load(self, site: SiteId, before: int) -> Bundle | None:
        return next((m for r, m in reversed(self._kept.get(site, [])) if r < before), None)

    def save(self, site: SiteId, round: int, memory: Bundle, durable: int) -> None:
        del durable
        earlier = [(r, m) for r, m in self._kept.get(site, []) if r < round]
        self._kept[site] = [
            *earlier[-1:],
            (round, {kind: _without_shared_storage(group) for kind, group in memory.items()}),
        ]

    def forget(self, site: SiteId, after: int, before: int) -> None:
        self._kept[site] = [(r, m) for r, m in self._kept.get(site, []) if not after < r < before]

    def save_report(self, site: SiteId, round: int, found: Bundle) -> None:
        """Without a folder there is nobody to read it."""


def _without_shared_storage(group: Tensors) -> Tensors:
    """The tensors without whatever else lies in their memory, such as all sites of a stack."""
    held = [group.vector] if isinstance(group, FlatTensors) else list(group.values())
    return group if all(t.untyped_storage().nbytes() == t.nbytes for t in held) else copy_tensors(group)


class DiskMemory:
    """One checksummed file per site and round, in the site's own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, site: SiteId, before: int) -> Bundle | None:
        for path in reversed(self._paths(site)):
            if int(path.stem) < before:
                try:
                    return messages.decode(path.read_bytes()).tensors
                except (Refused, OSError) as error:
                    raise StoreError(
                        f"what site {site} remembers in {path} is damaged ({error}); restore the file or start anew"
                    ) from error
        return None

    def save(self, site: SiteId, round: int, memory: Bundle, durable: int) -> None:
        """Save, then drop what no resume can need: all but the newest version at or before `durable`."""
        folder = self._folder(site)
        with explain_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{round:06d}.pcl", messages.encode({"round": round}, memory), "memory-half-written")
        settled = [path for path in self._paths(site) if int(path.stem) <= durable]
        with explain_os_errors(folder):
            for old in settled[:-1]:
                old.unlink(missing_ok=True)

    def forget(self, site: SiteId, after: int, before: int) -> None:
        with explain_os_errors(self._folder(site)):
            for path in self._paths(site):
                if after < int(path.stem) < before:
                    path.unlink(missing_ok=True)

    def save_report(self, site: SiteId, round: int, found: Bundle) -> None:
        folder = self._folder(site) / "scores"
        with explain_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{round:06d}.safetensors", messages.encode_body(found).data)

    def _folder(self, site: SiteId) -> Path:
        return self.folder / hashlib.sha256(site.encode()).hexdigest()[:16]

    def _paths(self, site: SiteId) -> list[Path]:
        return sorted(self._folder(site).glob("[0-9]*.pcl"))
