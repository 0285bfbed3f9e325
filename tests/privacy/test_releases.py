"""Releases that are not weights: exact without noise, no example moves one by more than claimed, noise as claimed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from polyclinic.core.errors import DataError, RecipeError
from polyclinic.core.rng import Stream
from polyclinic.evaluation.metrics import measure
from polyclinic.privacy.releases import (
    clip_rows,
    release_class_means,
    release_counts,
    release_mean,
    release_metrics,
    release_rows,
    release_variance,
)

PAIRS = 220
SILENT = Stream(0)


def wild(dice: np.random.Generator, *shape: int) -> Tensor:
    """Values far beyond any clip, some of them no numbers."""
    values = dice.standard_normal(shape) * 10.0 ** dice.uniform(-3, 4, shape)
    return torch.from_numpy(np.where(dice.random(shape) < 0.03, dice.choice([np.nan, np.inf, -np.inf]), values))


def without(values: Tensor, gone: int) -> Tensor:
    return torch.cat([values[:gone], values[gone + 1 :]])


def of_statistic(dice: np.random.Generator, n: int, gone: int) -> float:
    values, low = wild(dice, n), float(dice.normal())
    high = low + float(dice.uniform(0.1, 9))
    one, other = (release_mean(v, low, high, 0, SILENT, n).tensors["sum"] for v in (values, without(values, gone)))
    return abs(float(one - other)) / ((high - low) / 2)


def of_variance(dice: np.random.Generator, n: int, gone: int) -> float:
    """The released vector, computed back from mean and variance: Σu and Σ(u²/h − h)."""
    values, bound = wild(dice, n).abs(), float(dice.uniform(0.1, 9))
    half = bound / 2
    sums = []
    for held in (values, without(values, gone)):
        told = release_variance(held, bound, 0, SILENT, n).tensors
        first = told["mean"] - half
        sums.append(torch.stack([first, (told["variance"] + first**2) / half - half]) * n)
    return float(torch.linalg.vector_norm(sums[0] - sums[1])) / half


def of_counts(dice: np.random.Generator, n: int, gone: int) -> float:
    losses, bound, share = wild(dice, n).abs(), float(dice.uniform(0.1, 9)), float(dice.uniform(0.05, 0.95))
    correct = torch.from_numpy(dice.random(n) < 0.5)
    one, other = (
        release_counts(c, v, bound, 0, SILENT, n, share).tensors
        for c, v in ((correct, losses), (without(correct, gone), without(losses, gone)))
    )
    right = 2 * math.sqrt(1 - share) * float(one["right"] - other["right"])
    total = 2 * math.sqrt(share) / bound * float(one["total"] - other["total"])
    return math.hypot(right, total)


def of_rows(dice: np.random.Generator, n: int, gone: int) -> float:
    features, clip = wild(dice, n, 3, 2), float(dice.uniform(0.1, 9))
    neighbour = features.clone()
    neighbour[gone] = 0
    one, other = (release_rows(f, clip, 0, SILENT).tensors["rows"] for f in (features, neighbour))
    return float(torch.linalg.vector_norm(one - other)) / clip


def of_class_means(dice: np.random.Generator, n: int, gone: int) -> float:
    """The released vector, computed back from means and counts."""
    features, clip, share = wild(dice, n, 4), float(dice.uniform(0.1, 9)), float(dice.uniform(0.05, 0.95))
    labels = torch.from_numpy(dice.integers(0, 3, n))
    joint = []
    for f, y in ((features, labels), (without(features, gone), without(labels, gone))):
        told = release_class_means(f, y, 3, clip, 0, 0, SILENT, share).tensors
        sums = told["means"] * told["counts"][:, None] * math.sqrt(1 - share) / clip
        joint.append(torch.cat([sums, told["counts"][:, None] * math.sqrt(share)], 1))
    return float(torch.linalg.vector_norm(joint[0] - joint[1]))


@pytest.mark.parametrize("release", [of_statistic, of_variance, of_counts, of_rows, of_class_means])
def test_no_example_moves_a_release_by_more_than_its_sensitivity(
    release: Callable[[np.random.Generator, int, int], float],
) -> None:
    """Neighbouring data sets; and the claim is no larger than it must be."""
    dice = np.random.default_rng(1)
    moved = [release(dice, n, int(dice.integers(n))) for n in dice.integers(2, 30, PAIRS).tolist()]
    assert max(moved) <= 1 + 1e-6
    assert max(moved) > 0.99


def test_without_noise_statistics_are_those_of_the_clipped_values() -> None:
    values = torch.tensor([-3.0, 0.5, 1.0, 9.0])
    told = release_mean(values, 0.0, 2.0, 0, SILENT).tensors
    assert (float(told["sum"]), float(told["mean"])) == pytest.approx((3.5, 0.875))
    spread = release_variance(values, 2.0, 0, SILENT).tensors
    clipped = np.clip(values.numpy(), 0, 2)
    assert float(spread["mean"]) == pytest.approx(clipped.mean())
    assert float(spread["variance"]) == pytest.approx(clipped.var())


def test_without_noise_metrics_are_those_of_the_metrics_module() -> None:
    table = torch.softmax(torch.randn(50, 4, generator=Stream(1).generator()), 1)
    labels = torch.arange(50) % 4
    exact = measure(table.double().numpy(), labels.numpy())
    told = release_metrics(table, labels, 0, SILENT)
    assert told == pytest.approx({"accuracy": exact["accuracy"], "loss": exact["loss"]})
    assert release_metrics(torch.full((3, 2), math.nan), torch.zeros(3).long(), 0, SILENT)["loss"] == 5


def test_without_noise_class_means_are_means_and_small_classes_are_withheld() -> None:
    features = torch.tensor([[0.3, 0.4], [0.1, 0.0], [30.0, 40.0], [0.0, 0.2]])
    told = release_class_means(features, torch.tensor([0, 0, 0, 2]), 4, 1.0, 0, 2, SILENT).tensors
    torch.testing.assert_close(told["means"][0], torch.tensor([(0.3 + 0.1 + 0.6) / 3, (0.4 + 0.0 + 0.8) / 3]))
    assert told["counts"].tolist() == pytest.approx([3, 0, 1, 0])
    assert told["known"].tolist() == [True, False, False, False]
    assert not bool(told["means"][1:].any())


def test_without_noise_rows_within_the_clip_keep_their_bits() -> None:
    features = torch.randn(20, 3, 2, generator=Stream(2).generator())
    long = features.flatten(1).norm(dim=1) > 2
    told = release_rows(features, 2.0, 0, SILENT).tensors["rows"]
    assert 0 < int(long.sum()) < 20
    assert torch.equal(told[~long], features[~long])
    torch.testing.assert_close(told[long].flatten(1).norm(dim=1), torch.full((int(long.sum()),), 2.0))
    assert torch.equal(clip_rows(torch.tensor([[math.inf, 1.0], [0.0, 0.0]]), 1.0), torch.zeros(2, 2).double())


def test_a_million_values_of_rows_carry_gaussian_noise_of_the_size_claimed() -> None:
    told = release_rows(torch.zeros(1000, 1000), 0.5, 1.2, Stream(3))
    drawn = told.tensors["rows"].double().reshape(-1).numpy() / (1.2 * 0.5)
    assert told.noise == 1.2
    assert drawn.std() == pytest.approx(1, rel=0.005)
    assert stats.kstest(drawn, "norm", method="asymp").pvalue > 0.01
    assert max(stats.kstest(drawn * s, "norm", method="asymp").pvalue for s in (0.98, 1.02)) < 1e-6


def told_sum(stream: Stream) -> float:
    return float(release_mean(torch.ones(10), 0.0, 4.0, 1.5, stream).tensors["sum"])


def told_mean(stream: Stream) -> float:
    return float(release_variance(torch.ones(10), 4.0, 1.5, stream).tensors["mean"])


def told_right(stream: Stream) -> float:
    return float(release_counts(torch.ones(10) > 0, torch.ones(10), 4.0, 1.5, stream, share=0.25).tensors["right"])


def told_total(stream: Stream) -> float:
    return float(release_counts(torch.ones(10) > 0, torch.ones(10), 4.0, 1.5, stream, share=0.25).tensors["total"])


def told_count(stream: Stream) -> float:
    tensors = release_class_means(
        torch.ones(10, 1), torch.zeros(10).long(), 2, 2.0, 1.5, -99, stream, share=0.25
    ).tensors
    return float(tensors["counts"][1])


def told_class(stream: Stream) -> float:
    tensors = release_class_means(
        torch.ones(10, 1), torch.zeros(10).long(), 2, 2.0, 1.5, -99, stream, share=0.25
    ).tensors
    return float(tensors["means"][0, 0] * tensors["counts"][0].clamp(min=1))


@pytest.mark.parametrize(
    ("told", "exact", "std"),
    [
        (told_sum, 10, 1.5 * 2),
        (told_mean, 1, 1.5 * 2 / 10),
        (told_right, 10, 1.5 / (2 * math.sqrt(0.75))),
        (told_total, 10, 1.5 * 4 / (2 * math.sqrt(0.25))),
        (told_count, 0, 1.5 / math.sqrt(0.25)),
        (told_class, 10, 1.5 * 2 / math.sqrt(0.75)),
    ],
)
def test_sums_are_unbiased_and_carry_the_noise_claimed(told: Any, exact: float, std: float) -> None:
    drawn = np.array([told(Stream(4, ("noise", number))) for number in range(3000)])
    assert len(set(drawn)) == 3000
    assert stats.kstest((drawn - exact) / std, "norm", method="asymp").pvalue > 1e-3
    assert drawn.std() == pytest.approx(std, rel=4 / math.sqrt(2 * 3000))
    assert abs(drawn.mean() - exact) < 4 * std / math.sqrt(3000)


def test_the_variance_is_right_on_average_and_never_impossible() -> None:
    values = torch.linspace(0.0, 4.0, 40)
    told = np.array(
        [float(release_variance(values, 4.0, 2.0, Stream(5, (number,))).tensors["variance"]) for number in range(3000)]
    )
    exact, error = float(values.numpy().var()), told.std() / math.sqrt(3000)
    assert abs(told.mean() - exact) < 4 * error < (2.0 * 2 / 40) ** 2 * 2  # the correction would be seen if forgotten
    few = [float(release_variance(torch.ones(2), 4.0, 5.0, Stream(6, (n,))).tensors["variance"]) for n in range(200)]
    assert (min(few), max(few)) == (0, 4)


def test_metrics_never_leave_their_range() -> None:
    table, labels = torch.eye(2)[[0, 1, 0]], torch.tensor([0, 1, 0])
    told = [release_metrics(table, labels, 9.0, Stream(7, (n,))) for n in range(200)]
    assert {min(t["accuracy"] for t in told), max(t["accuracy"] for t in told)} == {0, 1}
    assert {min(t["loss"] for t in told), max(t["loss"] for t in told)} == {0, 5}


def test_an_empty_part_is_told_without_an_error() -> None:
    nothing = torch.zeros(0)
    assert math.isfinite(float(release_mean(nothing, 0.0, 1.0, 1.0, SILENT).tensors["mean"]))
    assert math.isfinite(float(release_variance(nothing, 1.0, 1.0, SILENT).tensors["variance"]))
    assert math.isfinite(float(release_counts(nothing, nothing, 1.0, 1.0, SILENT).tensors["loss"]))
    assert release_rows(torch.zeros(0, 3), 1.0, 1.0, SILENT).tensors["rows"].shape == (0, 3)
    assert release_class_means(torch.zeros(0, 3), nothing.long(), 2, 1.0, 1.0, 1, SILENT).tensors["means"].shape == (
        2,
        3,
    )


def test_what_cannot_be_released_is_refused() -> None:
    one = torch.ones(3)
    with pytest.raises(RecipeError, match="finite interval"):
        release_mean(one, 1.0, 1.0, 1.0, SILENT)
    with pytest.raises(DataError, match="registered"):
        release_mean(one, 0.0, 1.0, 1.0, SILENT, examples=2)
    with pytest.raises(RecipeError, match="noise of"):
        release_variance(one, 1.0, -1.0, SILENT)
    with pytest.raises(DataError, match="one of each"):
        release_counts(one[:2], one, 1.0, 1.0, SILENT)
    with pytest.raises(RecipeError, match="share"):
        release_counts(one, one, 1.0, 1.0, SILENT, share=1.0)
    with pytest.raises(RecipeError, match="positive length"):
        release_rows(one[:, None], 0.0, 1.0, SILENT)
    with pytest.raises(DataError, match="label"):
        release_class_means(one[:, None], torch.tensor([0, 1, 2]), 2, 1.0, 1.0, 1, SILENT)
