"""A run's folder: atomic snapshots, an append-only ledger, metrics by round, what sites remember.

Whatever is read back is checked against a checksum. A file is either whole or absent: it is written beside its name,
synced, then renamed. The ledger is never rewritten: each row carries a hash over itself and the row before.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from polyclinic import wire
from polyclinic.core import Bundle, SiteId
from polyclinic.errors import Refused, StoreError
from polyclinic.faults import reach


@contextlib.contextmanager
def named_failure(path: Path) -> Iterator[None]:
    """Turn what the disk says into one sentence."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else error.strerror
        raise StoreError(
            f"cannot write {path}: {reason}; make room or choose another folder with --out, then resume the run"
        ) from error


def write_atomically(path: Path, data: bytes, half: str = "", unnamed: str = "") -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with named_failure(path):
        try:
            with open(temporary, "wb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                reach(half)
                file.write(data[len(data) // 2 :])
                file.flush()
                os.fsync(file.fileno())
            reach(unnamed)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def prepare(folder: Path) -> None:
    """Make a run's folder, or say why it cannot be."""
    with named_failure(folder):
        (folder / "snapshots").mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_bytes(b"")
        probe.unlink()


class Snapshots:
    """The server's state after a round; the newest two are kept, the newest sound one is loaded."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder / "snapshots", keep

    def save(self, round: int, state: Bundle, fields: Mapping[str, Any]) -> None:
        data = wire.encode({**fields, "round": round}, state)
        write_atomically(self._path(round), data, "snapshot-half-written", "snapshot-unnamed")
        for old in self._paths()[: -self.keep]:
            old.unlink(missing_ok=True)

    def load(self) -> tuple[int, wire.Message] | None:
        """The newest snapshot that passes its checksum; None when there is none at all."""
        paths = self._paths()
        for path in reversed(paths):
            with contextlib.suppress(Refused, OSError):
                message = wire.decode(path.read_bytes())
                return int(message.fields["round"]), message
        if paths:
            raise StoreError(
                f"every snapshot in {self.folder} is damaged (checksum); start the run anew in another folder"
            )
        return None

    def oldest(self) -> int:
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
            with named_failure(path):
                path.touch()

    def append(self, **row: Any) -> None:
        text = json.dumps(row, allow_nan=False)
        chain = _link(self.chain, text)
        line = f'{text[:-1]}{", " if row else ""}"chain": "{chain}"}}\n'.encode()
        with named_failure(self.path):
            start = self.path.stat().st_size
            try:
                with open(self.path, "ab", buffering=0) as file:
                    file.write(line[: len(line) // 2])
                    reach("ledger-half-written")
                    file.write(line[len(line) // 2 :])
                    os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, start)
                raise
        self.chain, self.rows = chain, self.rows + 1

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def includes(self, rows: int, chain: str) -> bool:
        """Whether the first `rows` rows end in `chain`: nothing a snapshot has seen was lost since."""
        lines = self.path.read_text().splitlines()
        return rows <= len(lines) and (rows == 0 or json.loads(lines[rows - 1])["chain"] == chain)

    def _verify(self) -> None:
        """Walk the chain. A half-written last line is what a crash leaves: it is cut off. Anything else is damage."""
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            text, mark, rest = line.decode(errors="replace").rpartition('"chain": "')
            row = text.rstrip().removesuffix(",") + "}"
            if not mark or rest != f'{_link(self.chain, row)}"}}':
                raise StoreError(
                    f"{self.path} is damaged at row {number} (checksum); what the run has cost can no longer be "
                    "shown, so it cannot be resumed: restore the file or start anew in another folder"
                )
            self.chain, self.rows = rest[:-2], number


def _link(chain: str, row: str) -> str:
    return hashlib.sha256(f"{chain}|{row}".encode()).hexdigest()[:32]


class Metrics:
    """`metrics.jsonl`: a row per round and site."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, rows: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        with named_failure(self.path), open(self.path, "ab", buffering=0) as file:
            file.write(lines.encode())
            os.fsync(file.fileno())

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def cut(self, size: int) -> None:
        """Forget what was written after the snapshot that is resumed from; those rounds run again."""
        if self.size() < size:
            raise StoreError(
                f"{self.path} is shorter than its snapshot says; restore it or start anew in another folder"
            )
        if self.path.exists():
            os.truncate(self.path, size)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


class MemoryStore(Protocol):
    """What sites remember between rounds, by round, so that a round can be played again."""

    def load(self, site: SiteId, before: int) -> Bundle | None: ...

    def save(self, site: SiteId, round: int, memory: Bundle, durable: int) -> None: ...


class RamMemory:
    """Remembers for as long as the process lives: the last two rounds of each site."""

    def __init__(self) -> None:
        self._kept: dict[SiteId, list[tuple[int, Bundle]]] = {}

    def load(self, site: SiteId, before: int) -> Bundle | None:
        return next((m for r, m in reversed(self._kept.get(site, [])) if r < before), None)

    def save(self, site: SiteId, round: int, memory: Bundle, durable: int) -> None:
        del durable
        earlier = [(r, m) for r, m in self._kept.get(site, []) if r < round]
        self._kept[site] = [*earlier[-1:], (round, memory)]


class DiskMemory:
    """One checksummed file per site and round, in the site's own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, site: SiteId, before: int) -> Bundle | None:
        for path in reversed(self._paths(site)):
            if int(path.stem) < before:
                try:
                    return wire.decode(path.read_bytes()).tensors
                except Refused as refusal:
                    raise StoreError(
                        f"what site {site} remembers in {path} is damaged ({refusal}); restore the file or start anew"
                    ) from refusal
        return None

    def save(self, site: SiteId, round: int, memory: Bundle, durable: int) -> None:
        """Save, then drop what no resume can need: all but the newest version at or before `durable`."""
        folder = self._folder(site)
        with named_failure(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{round:06d}.pcl", wire.encode({"round": round}, memory), "memory-half-written")
        settled = [path for path in self._paths(site) if int(path.stem) <= durable]
        for old in settled[:-1]:
            old.unlink(missing_ok=True)

    def _folder(self, site: SiteId) -> Path:
        return self.folder / hashlib.sha256(site.encode()).hexdigest()[:16]

    def _paths(self, site: SiteId) -> list[Path]:
        return sorted(self._folder(site).glob("[0-9]*.pcl"))
