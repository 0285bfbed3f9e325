"""Many tensors as one vector. The tensors of a decoded message are contiguous, and one operation on a long vector is
faster than hundreds of short ones.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from polyclinic.core.types import Tensors

Layout: TypeAlias = tuple[tuple[str, torch.Size], ...]
BLOCK_SIZE = 1 << 17
"""Values computed at a time, so that intermediate results stay in the processor's cache."""


class FlatDifference(NamedTuple):
    """A distance that was computed earlier, and the vector it is measured from."""

    start: Tensor
    length: float


class FlatTensors(dict[str, Tensor]):
    """An immutable dict of named tensors that are, in this order, consecutive parts of one vector."""

    def __init__(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        vector: Tensor,
        layout: Layout | None = None,
        difference: FlatDifference | None = None,
    ) -> None:
        """`difference`: the distance of the vector from another one, if it is known."""
        super().__init__(tensors)
        self.vector = vector
        self.layout = layout_of(self) if layout is None else layout
        self._difference, self._version = difference, vector._version

    def distance_from(self, start: "FlatTensors") -> float:
        """Return ‖self − start‖₂: the known distance, unless a tensor was changed in place since."""
        known = self._difference
        if known is not None and known.start is start.vector and self.vector._version == self._version:
            return known.length
        return _vector_distance(self.vector, start.vector)

    def __copy__(self) -> Tensors:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensors:
        return {name: copy.deepcopy(tensor, memo) for name, tensor in self.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def has_layout_of(self, other: Tensors) -> bool:
        """Return whether the other is flat with the same names, shapes and dtypes in the same order."""
        return (
            isinstance(other, FlatTensors) and self.layout == other.layout and self.vector.dtype == other.vector.dtype
        )

    def _raise_immutable(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("flat tensors cannot be changed; make a new dict of them")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _raise_immutable


def layout_of(tensors: Tensors) -> Layout:
    return tuple((name, tensor.shape) for name, tensor in tensors.items())


def copy_tensors(tensors: Tensors) -> Tensors:
    """Return a copy, which is flat if all tensors have one floating-point dtype."""
    plain = [t.detach() for t in tensors.values()]
    if len({t.dtype for t in plain}) != 1 or not plain[0].is_floating_point():
        return {n: t.clone(memory_format=torch.contiguous_format) for n, t in zip(tensors, plain, strict=True)}
    vector = torch.cat([t.reshape(-1) for t in plain])
    return FlatTensors(zip(tensors, split_vector(vector, plain), strict=True), vector)


def flatten_if_contiguous(tensors: Tensors) -> Tensors:
    """Return the tensors as `FlatTensors` if they are contiguous in memory, else as they are."""
    vector = contiguous_vector(list(tensors.values()))
    return tensors if vector is None else FlatTensors(tensors.items(), vector)


def contiguous_vector(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one vector that shares the tensors' memory, if they are contiguous in this order, else None.

    The vector is valid only as long as the tensors exist: it does not keep their memory alive.
    """
    if not tensors or tensors[0].dtype not in (torch.float32, torch.float64):
        return None
    first = last = next((t for t in tensors if t.numel()), tensors[0])
    start = place = first.data_ptr()
    device, dtype = first.device, first.dtype
    for tensor in tensors:
        if tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
            return None
        if size := tensor.nbytes:
            if tensor.data_ptr() != place:
                return None
            place, last = place + size, tensor
    if place == start:
        return None
    length = (place - start) // first.itemsize
    if first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr():
        return first.detach().as_strided((length,), (1,))
    if not first.is_cpu:
        return None
    # Each tensor of a message has a storage of its own, so torch would not read beyond the first.
    return torch.from_numpy(as_strided(first.detach().reshape(-1).numpy(), (length,)))


def split_vector(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a vector with the shapes of `tensors`, in this order."""
    pieces = torch.split(vector, [t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def l2_distance(tensors: Tensors, start: Tensors) -> float:
    """Return ‖tensors − start‖₂ over all floating-point tensors. A tensor that `start` lacks is compared with zero."""
    if isinstance(tensors, FlatTensors) and isinstance(start, FlatTensors) and tensors.has_layout_of(start):
        return tensors.distance_from(start)
    names = [n for n, t in tensors.items() if t.is_floating_point()]
    if not names:
        return 0.0
    vector, origin = (contiguous_vector([group[n] for n in names if n in group]) for group in (tensors, start))
    if vector is not None and origin is not None and vector.shape == origin.shape:
        return _vector_distance(vector, origin)
    # One difference at a time: all at once would need another copy of the model.
    norms = [torch.linalg.vector_norm(tensors[n] - start[n] if n in start else tensors[n]) for n in names]
    return float(torch.linalg.vector_norm(torch.stack(norms).double()))


def _vector_distance(vector: Tensor, origin: Tensor) -> float:
    if not vector.is_cpu:
        return float(torch.linalg.vector_norm(vector - origin))
    moved = (v - o for v, o in zip(torch.split(vector, BLOCK_SIZE), torch.split(origin, BLOCK_SIZE), strict=True))
    return math.sqrt(sum(float(torch.dot(m, m)) for m in moved))
