"""The Gaussian mechanism on named tensors: clipping to a bound, and noise in proportion to it.

Lengths are measured in float64, whatever the tensors are. Noise is drawn in float64 and then rounded: its tails are
whole, where torch's own single-precision normals never exceed 5.77 σ. It comes from a cipher whose key is the
secret's (`training.dp.secure_random`).

A limit of all mechanisms in floating point: the last bits of a noised value depend on the value before the noise
(Mironov: On significance of the least significant bits for differential privacy. CCS 2012).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from polyclinic.core import BLOCK_SIZE, Bundle, RecipeError, Stream, Tensors
from polyclinic.training.dp import secure_random

SLACK = 1e-6
"""Relative tolerance of a bound, so that rounding alone never clips an update a second time."""
ATTEMPTS = 10
NOTHING: Tensors = {}


def clip(tensors: Tensors, bound: float, origin: Tensors = NOTHING) -> tuple[Tensors, float]:
    """Clip all floating-point tensors as ONE vector to a distance of `bound` from `origin` (0 for a tensor not in it).

    Returns the result and the distance before.

    Within the bound, the very same tensors are returned. Beyond it, ‖result − origin‖ ≤ bound·(1 + 10⁻⁶) after
    rounding to the tensors' own type, too. With NaN or infinity in any tensor, the result is the origin and the
    distance is not finite.
    """
    length = distance(tensors, origin)
    if math.isfinite(length) and length <= bound * (1 + SLACK):
        return tensors, length
    return _shorten(tensors, bound, origin, length), length


def _shorten(tensors: Tensors, bound: float, origin: Tensors, length: float) -> Tensors:
    """Scale the difference to the bound, and again if rounding has made it longer."""
    share = bound / length if math.isfinite(length) else 0.0
    for attempt in range(ATTEMPTS if share > 0 else 0):
        moved = {name: _move_towards(tensor, origin.get(name), share) for name, tensor in tensors.items()}
        found = distance(moved, origin)
        if found <= bound * (1 + SLACK):
            return moved
        share *= bound / found * (1 - 4.0 ** (attempt - ATTEMPTS))
    return {n: _origin_of(t, origin.get(n)) if t.is_floating_point() else t for n, t in tensors.items()}


def _move_towards(tensor: Tensor, origin: Tensor | None, share: float) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    start = _origin_of(tensor, origin).double()
    return (tensor.detach().double() - start).mul_(share).add_(start).to(tensor.dtype)


def _origin_of(tensor: Tensor, origin: Tensor | None) -> Tensor:
    """Return the origin of this tensor on its device and in its type."""
    if origin is None or not _is_comparable(tensor, origin):
        return torch.zeros_like(tensor)
    return origin.detach().to(tensor)


def _is_comparable(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and other.is_floating_point()


def distance(tensors: Tensors, origin: Tensors = NOTHING) -> float:
    """Return ‖tensors − origin‖₂ in float64 over all floating-point tensors; without an origin the norm."""
    named = {n: t for n, t in tensors.items() if t.is_floating_point() and t.numel() and t is not origin.get(n)}
    pairs = [(tensor.detach(), origin.get(name)) for name, tensor in named.items()]
    plain = math.sqrt(sum(float(torch.dot(m, m)) for m in _differences(pairs)))
    if math.isnan(plain) or 1e-140 < plain < 1e140:
        return plain
    # Squares may have over- or underflowed.
    largest = max((float(m.abs().max()) for m in _differences(pairs)), default=0.0)
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(sum(float((m / largest).square().sum()) for m in _differences(pairs)))


def _differences(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> Iterator[Tensor]:
    """Yield differences in float64 by blocks; all at once they would be two more copies of the model."""
    for tensor, start in pairs:
        size = BLOCK_SIZE if tensor.is_cpu else tensor.numel()
        new = torch.split(tensor.reshape(-1), size)
        if start is None or not _is_comparable(tensor, start):
            yield from (block.double() for block in new)
        else:
            old = torch.split(start.detach().to(tensor.device).reshape(-1), size)
            yield from (a.double() - b.double() for a, b in zip(new, old, strict=True))


def gaussian_noise(shape: Sequence[int], std: float, stream: Stream) -> Tensor:
    """Return a sample of N(0, std²) in float64."""
    drawn = secure_random.draw_normals([stream], math.prod(shape), torch.device("cpu"), torch.float64)
    return drawn.view(tuple(shape)) * check_std(std)


def noise_like(tensors: Tensors, std: float, stream: Stream) -> Tensors:
    """Return N(0, std²) for every floating-point tensor, in its type, on its device; every name has a stream."""
    names = sorted(name for name, tensor in tensors.items() if tensor.is_floating_point())
    return {n: gaussian_noise(tensors[n].shape, std, stream.child(n)).to(tensors[n]) for n in names}


def add_noise(tensors: Tensors, std: float, stream: Stream) -> Tensors:
    """Return the tensors plus noise; integers are unchanged, and everything is if `std` is 0."""
    if check_std(std) == 0:
        return tensors
    noise = noise_like(tensors, std, stream)
    return {name: tensor + noise[name] if name in noise else tensor for name, tensor in tensors.items()}


def check_std(std: float) -> float:
    """Return `std`; raises `RecipeError` if it is negative, infinite or NaN."""
    if not 0 <= std < math.inf:
        raise RecipeError(f"noise of {std} standard deviations cannot be drawn; choose a number of 0 or more")
    return float(std)


def join_kinds(bundle: Bundle, kinds: Iterable[str]) -> Tensors:
    """Return several kinds of a bundle as one dictionary, by `kind/name`."""
    return {f"{kind}/{name}": tensor for kind in kinds for name, tensor in bundle.get(kind, {}).items()}


def split_kinds(tree: Mapping[str, Tensor], bundle: Bundle, kinds: Iterable[str]) -> Bundle:
    """Return the bundle with these kinds taken from `tree`, as `join_kinds` names them."""
    return bundle | {k: {name: tree[f"{k}/{name}"] for name in bundle[k]} for k in kinds if k in bundle}
