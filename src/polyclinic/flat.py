"""Many tensors as one vector. A decoded message holds its tensors side by side, and one long pass over memory is
quicker than hundreds of short ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from polyclinic.core import Tensors

BLOCK = 1 << 17
"""Values handled at a time, so that what is made in between stays in the processor's cache."""


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors as one vector that shares their memory, where they lie in it without a gap, in this order; else None.

    Only for as long as the tensors themselves are held: the vector does not keep all of them alive.
    """
    filled = [t for t in tensors if t.numel()]
    if not filled or filled[0].dtype not in (torch.float32, torch.float64) or len({t.device for t in filled}) > 1:
        return None
    first, sizes = filled[0], [t.nbytes for t in filled]
    places = accumulate(sizes[:-1], initial=first.data_ptr())
    alike = {t.dtype for t in filled} == {first.dtype} and all(map(Tensor.is_contiguous, filled))
    if not alike or list(map(Tensor.data_ptr, filled)) != list(places):
        return None
    length, held = sum(sizes) // first.itemsize, first.untyped_storage()
    if held.data_ptr() == filled[-1].untyped_storage().data_ptr():
        return first.detach().as_strided((length,), (1,))
    if not first.is_cpu:
        return None
    # Tensors of a message each think that their bytes are their own, so torch would not look beyond the first.
    return torch.from_numpy(as_strided(first.detach().reshape(-1).numpy(), (length,)))


def apart(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a vector with the shapes of `tensors`: what `side_by_side` put together."""
    pieces = torch.split(vector, [t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def distance(tensors: Tensors, start: Tensors) -> float:
    """‖tensors − start‖₂ over all floating-point tensors; where there is no start, the norm itself."""
    names = [n for n, t in tensors.items() if t.is_floating_point()]
    if not names:
        return 0.0
    vector, origin = (side_by_side([group[n] for n in names if n in group]) for group in (tensors, start))
    if vector is not None and origin is not None and vector.shape == origin.shape:
        if vector.is_cuda:
            return float(torch.linalg.vector_norm(vector - origin))
        moved = (v - o for v, o in zip(torch.split(vector, BLOCK), torch.split(origin, BLOCK), strict=True))
        return math.sqrt(sum(float(torch.dot(m, m)) for m in moved))
    # One difference at a time: all at once would be another copy of the model.
    norms = [torch.linalg.vector_norm(tensors[n] - start[n] if n in start else tensors[n]) for n in names]
    return float(torch.linalg.vector_norm(torch.stack(norms).double()))
