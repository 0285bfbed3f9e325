"""Private releases besides weights: statistics, features, class means, metrics. Each is clipped, noised and charged.

All are Gaussian mechanisms: an example contributes a vector no longer than a sensitivity s; N(0, (σ·s)²) is added to
the sum (or, for `rows`, to each vector). `noise` is σ; a release costs one `accounting.Spend(noise)`, without sampling.

Neighbours: one example is removed and contributes 0; the number of examples (`examples`) is public and unchanged. An
example whose value is NaN contributes 0 as well. A patient with m examples is a group of m: s grows m-fold at most.

Values with `noise = 0` are exact, for tests; the accountant prices them at ε = ∞.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from polyclinic.core import DataError, RecipeError, Stream, Tensors
from polyclinic.privacy.mechanism import gaussian_noise

LARGEST_LOSS = 5.0
"""Losses are clipped to this (a probability of 0.7 % for the true class), since the noise grows with it."""


class Release(NamedTuple):
    """The tensors that may leave, and the noise multiplier to charge once."""

    tensors: Tensors
    noise: float


def release_mean(
    values: Tensor, low: float, high: float, noise: float, stream: Stream, examples: int | None = None
) -> Release:
    """Return `sum` and `mean` of one value per example, clipped to [low, high].

    Values are measured from the middle, so that s = (high − low)/2.
    """
    n = _count_examples(values, examples)
    middle, half = _check_interval(low, high)
    total = _noised_sum(_center(values, middle, half)[:, None], half, noise, stream)[0]
    return Release({"sum": total + n * middle, "mean": middle + total / max(n, 1)}, noise)


def release_variance(
    values: Tensor, bound: float, noise: float, stream: Stream, examples: int | None = None
) -> Release:
    """Return `mean` and `variance` (divided by n) of one value per example, clipped to [0, bound].

    With h = bound/2 and u = value − h, an example contributes (u, u²/h − h). As (u/h)² = t lies in [0, 1] its length is
    h·√(t + (1−t)²) ≤ h: so s = bound/2, and the second moment costs nothing besides the first. The bias (σs/n)² that
    noise adds to the square of the mean is subtracted; the result is clamped to [0, h²].
    """
    n = max(_count_examples(values, examples), 1)
    middle, half = _check_interval(0.0, bound)
    u = _center(values, middle, half)
    seen = ~torch.isnan(values.reshape(-1)).unsqueeze(1)
    first, second = _noised_sum(torch.stack([u, u.square() / half - half], 1) * seen, half, noise, stream) / n
    spread = half * (second + half) - first.square() + (noise * half / n) ** 2
    return Release({"mean": middle + first, "variance": spread.clamp(0.0, half**2)}, noise)


def release_counts(
    correct: Tensor,
    losses: Tensor,
    bound: float,
    noise: float,
    stream: Stream,
    examples: int | None = None,
    share: float = 0.5,
) -> Release:
    """Return the number `right`, `accuracy`, the `total` of losses clipped to [0, bound], and `loss`.

    An example contributes (±√(1−p), √p·(loss − bound/2)/(bound/2)), p = `share` being the losses' share of the budget:
    s = 1. So the noise of `right` is σ/(2√(1−p)), that of `total` σ·bound/(2√p).
    """
    n, p = _count_examples(losses, examples), _check_share(share)
    middle, half = _check_interval(0.0, bound)
    if correct.shape != losses.shape:
        raise DataError(f"{tuple(correct.shape)} hits and {tuple(losses.shape)} losses; give one of each per example")
    hits = _center(correct.double(), 0.5, 0.5) * 2
    rows = torch.stack([hits * math.sqrt(1 - p), _center(losses, middle, half) / half * math.sqrt(p)], 1)
    first, second = _noised_sum(rows, 1.0, noise, stream)
    right = n / 2 + first / (2 * math.sqrt(1 - p))
    total = n * middle + second * half / math.sqrt(p)
    accuracy, loss = (right / max(n, 1)).clamp(0, 1), (total / max(n, 1)).clamp(0, bound)
    return Release({"right": right, "accuracy": accuracy, "total": total, "loss": loss}, noise)


def release_metrics(probabilities: Tensor, labels: Tensor, noise: float, stream: Stream) -> dict[str, float]:
    """Return accuracy and loss of predictions by `release_counts`, for one charge of `noise`."""
    table = probabilities.double()
    losses = -table.gather(1, labels[:, None]).squeeze(1).log().nan_to_num(nan=-LARGEST_LOSS)
    counts = release_counts(table.argmax(1) == labels, losses, LARGEST_LOSS, noise, stream).tensors
    return {name: float(counts[name]) for name in ("accuracy", "loss")}


def release_rows(features: Tensor, clip: float, noise: float, stream: Stream) -> Release:
    """Return `rows`: one vector per example, each clipped to the length `clip`, with noise of its own.

    An example moves one row, and taken out leaves zeros: s = clip. Its label does not belong to what is protected here.
    """
    clipped = clip_rows(features, clip)
    rows = clipped + gaussian_noise(clipped.shape, noise * clip, stream).to(clipped.device)
    return Release({"rows": rows.to(features.dtype).view(features.shape)}, noise)


def release_class_means(
    features: Tensor,
    labels: Tensor,
    classes: int,
    clip: float,
    noise: float,
    minimum: float,
    stream: Stream,
    share: float = 0.1,
) -> Release:
    """Return `means` of each class's clipped rows (prototypes), noised `counts`, and `known`: the classes released.

    How many examples a class has is private, so sums are divided by noised counts, released with them as one vector:
    an example contributes (row·√(1−p)/clip, √p) to its class and nothing to others, p = `share` being the counts' share
    of the budget: s = 1. So the noise of a sum is σ·clip/√(1−p) a value, that of a count σ/√p. A class whose noised
    count is below `minimum` is withheld: zeros. The mean errs by about σ·clip/count a value: ask for many.
    """
    p, flat = _check_share(share), clip_rows(features, clip)
    if labels.shape != (len(flat),) or (len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes):
        raise DataError(f"class means need one label from 0 to {classes - 1} for each of the {len(flat)} rows")
    scale = math.sqrt(1 - p) / clip
    member = one_hot(labels.long(), classes).double().to(flat.device)
    joint = member.T @ torch.cat([flat * scale, flat.new_full((len(flat), 1), math.sqrt(p))], 1)
    joint = joint + gaussian_noise(joint.shape, noise, stream).to(joint.device)
    number = joint[:, -1] / math.sqrt(p)
    known = number >= minimum
    means = joint[:, :-1] / scale / number.clamp(min=1.0)[:, None] * known[:, None]
    return Release({"means": means.to(features.dtype), "counts": number, "known": known}, noise)


def clip_rows(features: Tensor, clip: float) -> Tensor:
    """Return each example's features as one row in float64, no longer than `clip`; zeros where they are not finite."""
    if not 0 < clip < math.inf:
        raise RecipeError(f"features are clipped to {clip}; choose a positive length")
    flat = features.detach().double().flatten(1) if features.dim() > 1 else features.detach().double()[:, None]
    length = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    shorter = flat * (clip / length).clamp(max=1.0)
    return torch.where(length.isfinite(), torch.where(length > clip, shorter, flat), 0.0)


def _noised_sum(contributions: Tensor, sensitivity: float, noise: float, stream: Stream) -> Tensor:
    """Return the sum over examples plus N(0, (σ·s)²)."""
    total = contributions.sum(0)
    return total + gaussian_noise(total.shape, noise * sensitivity, stream).to(total.device)


def _center(values: Tensor, middle: float, half: float) -> Tensor:
    """Return one number per example, clipped to middle ± half and measured from the middle; 0 for NaN."""
    return (values.detach().reshape(-1).double() - middle).clamp(-half, half).nan_to_num(nan=0.0)


def _check_interval(low: float, high: float) -> tuple[float, float]:
    if not -math.inf < low < high < math.inf:
        raise RecipeError(f"values are clipped to [{low}, {high}]; choose a finite interval")
    return (low + high) / 2, (high - low) / 2


def _check_share(share: float) -> float:
    if not 0 < share < 1:
        raise RecipeError(f"a share of {share} of the budget; choose one between 0 and 1")
    return share


def _count_examples(values: Tensor, examples: int | None) -> int:
    """Return the public number of examples, which may exceed the number of values."""
    if examples is None:
        return values.numel()
    if examples < values.numel():
        raise DataError(f"{values.numel()} values of {examples} registered examples; give the number registered")
    return examples
