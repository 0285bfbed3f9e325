"""The accepted updates of a cohort, kept until all have arrived: in memory up to a limit, beyond it on disk."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from polyclinic.core import Bundle, StoreError, Update, flatten_if_contiguous
from polyclinic.storage.files import explain_os_errors

MEMORY = 64 << 20
"""Bytes of updates that a server of real sites keeps in memory."""
BLOCK = 1 << 22
"""Values of all updates together that are compared at a time."""


class _Place(NamedTuple):
    """Where a tensor is in a file, and what it is."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class UpdateFile:
    """The tensors of one update, one after the other in a temporary file."""

    def __init__(self, tensors: Bundle) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self.places: dict[str, dict[str, _Place]] = {}
        with explain_os_errors(Path(tempfile.gettempdir())):
            for kind, group in tensors.items():
                self.places[kind] = {name: self._write(tensor) for name, tensor in group.items()}
            self.file.flush()

    def _write(self, tensor: Tensor) -> _Place:
        place = _Place(self.file.tell(), tensor.dtype, tensor.shape, tensor.device)
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        self.file.write(plain.view(torch.uint8).numpy().data)
        return place

    def read(self, kind: str, name: str, values: slice) -> Tensor:
        """Return some consecutive values of one tensor."""
        place = self.places[kind][name]
        start, stop, _ = values.indices(place.shape.numel())
        found = torch.empty(stop - start, dtype=place.dtype)
        self._read_into(place.offset + start * place.dtype.itemsize, found.view(torch.uint8))
        return found.to(place.device)

    def _read_into(self, offset: int, target: Tensor) -> None:
        with explain_os_errors(Path(tempfile.gettempdir()), "read"):
            self.file.seek(offset)
            if self.file.readinto(target.numpy().data) != len(target):  # type: ignore[attr-defined]
                raise StoreError("a temporary file of an update was cut short; free space and resume the run")

    def read_all(self) -> Bundle:
        """Return all tensors; those of a kind are consecutive parts of one vector, as in a decoded message."""
        found: Bundle = {}
        for kind, places in self.places.items():
            room = sum(place.shape.numel() * place.dtype.itemsize for place in places.values())
            start = min((place.offset for place in places.values()), default=0)
            whole = torch.empty(room, dtype=torch.uint8)
            self._read_into(start, whole)
            group = {name: _view_place(whole, start, place) for name, place in places.items()}
            found[kind] = flatten_if_contiguous(group)
        return found

    def close(self) -> None:
        """Delete the file."""
        self.file.close()


def _view_place(whole: Tensor, start: int, place: _Place) -> Tensor:
    begin = place.offset - start
    size = place.shape.numel() * place.dtype.itemsize
    piece = whole[begin : begin + size]
    aligned = piece if (piece.storage_offset() % place.dtype.itemsize) == 0 else piece.clone()
    return aligned.view(place.dtype).view(place.shape).to(place.device)


@dataclass
class _Kept:
    """One update, whose tensors are in a file or in the update itself."""

    update: Update
    file: UpdateFile | None = None


class UpdateStore:
    """Keeps the updates of a cohort, whose tensors have the same names and shapes.

    Args:
        limit: The bytes kept in memory; the tensors of further updates are written to temporary files.
    """

    def __init__(self, limit: int = MEMORY) -> None:
        self.limit, self.held = limit, 0
        self._kept: list[_Kept] = []

    def add(self, update: Update) -> None:
        """Keep an update. The caller may empty its dict of tensors afterwards."""
        size = sum(tensor.nbytes for group in update.tensors.values() for tensor in group.values())
        if self.held + size <= self.limit:
            self.held += size
            self._kept.append(_Kept(replace(update, tensors=dict(update.tensors))))
        else:
            self._kept.append(_Kept(replace(update, tensors={}), UpdateFile(update.tensors)))

    @property
    def updates(self) -> list[Update]:
        """The updates in the order in which they were added. Those on disk have no tensors here."""
        return [kept.update for kept in self._kept]

    def __len__(self) -> int:
        return len(self._kept)

    def tensors(self, place: int) -> Bundle:
        """Return the tensors of one update, read from disk if they are there."""
        kept = self._kept[place]
        return kept.update.tensors if kept.file is None else kept.file.read_all()

    def blocks(self, kind: str, name: str) -> Iterator[Tensor]:
        """Yield the values of one tensor of all updates, a row for each, so many columns at a time as fit in memory."""
        values, columns = self._size(kind, name), max(1, BLOCK // len(self))
        for start in range(0, values, columns):
            part = slice(start, min(values, start + columns))
            yield torch.stack(
                [
                    kept.file.read(kind, name, part) if kept.file else kept.update.tensors[kind][name].reshape(-1)[part]
                    for kept in self._kept
                ]
            )

    def _size(self, kind: str, name: str) -> int:
        first = self._kept[0]
        found = first.file.places[kind][name].shape if first.file else first.update.tensors[kind][name].shape
        return found.numel()

    def take_all(self) -> Iterator[Update]:
        """Yield the updates with their tensors, and keep none of them."""
        while self._kept:
            update = replace(self._kept[0].update, tensors=self.tensors(0))
            self._drop_first()
            yield update

    def close(self) -> None:
        """Delete everything that is kept."""
        while self._kept:
            self._drop_first()

    def _drop_first(self) -> None:
        kept = self._kept.pop(0)
        if kept.file is not None:
            kept.file.close()
