"""Clipping and noise: whatever the tensors hold, they stay within the bound; noise is Gaussian, never used twice."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from polyclinic.core.errors import RecipeError
from polyclinic.core.rng import Stream
from polyclinic.core.types import Tensors
from polyclinic.privacy.mechanism import add_noise, clip, distance, gaussian_noise, noise_like
from polyclinic.training.dp.secure_random import draw_words

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
SHAPES = ((), (0,), (1,), (3,), (2, 4), (2, 0, 3), (17,))
ODD = (0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1e-45, 6e-8, 1e308, -1.7e308)


def random_tensor(dice: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, odd: bool) -> Tensor:
    values = np.asarray(dice.standard_normal(shape) * 10.0 ** dice.uniform(-30, 30, shape))
    if dice.random() < 0.7:
        values = np.asarray(dice.standard_normal(shape))
    if dtype == torch.int64:
        return torch.from_numpy(np.asarray(dice.integers(-5, 5, shape)))
    if odd and values.size:
        values.reshape(-1)[dice.integers(values.size)] = dice.choice(ODD)
    return torch.from_numpy(values).to(dtype)


def random_tree(dice: np.random.Generator) -> tuple[Tensors, Tensors]:
    """Named tensors and, for some, where they came from."""
    tree, origin = {}, {}
    odd = dice.random() < 0.4
    for number in range(dice.integers(0, 4)):
        shape, dtype = SHAPES[dice.integers(len(SHAPES))], DTYPES[dice.integers(len(DTYPES))]
        tree[f"t{number}"] = random_tensor(dice, shape, dtype, odd)
        if dice.random() < 0.5:
            origin[f"t{number}"] = random_tensor(dice, shape, dtype, False)
    return tree, {n: t for n, t in origin.items() if bool(torch.isfinite(t).all())}


def differences(tree: Tensors, origin: Tensors) -> list[float]:
    """Every value's way, in Python's own floats; integers do not count."""
    found: list[float] = []
    for name, tensor in tree.items():
        if tensor.is_floating_point():
            start = origin.get(name, torch.zeros_like(tensor)).double().reshape(-1).tolist()
            found += [a - b for a, b in zip(tensor.double().reshape(-1).tolist(), start, strict=True)]
    return found


def test_ten_thousand_random_trees_stay_within_their_bound() -> None:
    dice, seen = np.random.default_rng(1), {"same": 0, "clipped": 0, "refused": 0}
    for _ in range(10_000):
        (tree, origin), bound = random_tree(dice), 10.0 ** dice.uniform(-9, 6)
        before = differences(tree, origin)
        clipped, length = clip(tree, bound, origin)
        after = differences(clipped, origin)
        assert str(differences(tree, origin)) == str(before)  # NaN is not equal to itself
        assert math.hypot(*after) <= bound * (1 + 1e-6)  # hypot neither overflows nor loses what is tiny
        for name, tensor in tree.items():
            assert (clipped[name].dtype, clipped[name].shape) == (tensor.dtype, tensor.shape)
            assert tensor.is_floating_point() or torch.equal(clipped[name], tensor)
        if not math.isfinite(math.hypot(*before)):
            assert not math.isfinite(length)
            assert not any(after)
            seen["refused"] += 1
        else:
            assert length == pytest.approx(math.hypot(*before), rel=1e-12)
            seen["same" if clipped is tree else "clipped"] += 1
            assert (clipped is tree) == (length <= bound * (1 + 1e-6))
    assert min(seen.values()) > 500


def test_all_tensors_are_one_vector() -> None:
    clipped, length = clip({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]]), "n": torch.tensor([9])}, 1.0)
    assert length == 5
    assert (float(clipped["a"]), float(clipped["b"]), int(clipped["n"])) == pytest.approx((0.6, 0.8, 9))


def test_the_way_is_shortened_not_the_tensor() -> None:
    clipped, length = clip({"w": torch.tensor([13.0, 104.0])}, 1.0, {"w": torch.tensor([10.0, 100.0])})
    assert length == 5
    torch.testing.assert_close(clipped["w"], torch.tensor([10.6, 100.8]))


@pytest.mark.parametrize(("dtype", "lost"), [(torch.float64, 1e-9), (torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_no_more_is_cut_off_than_must_be(dtype: torch.dtype, lost: float) -> None:
    tree = {"w": torch.randn(1000, generator=Stream(3).generator()).to(dtype)}
    clipped, _ = clip(tree, 0.5)
    assert 0.5 * (1 - lost) <= distance(clipped) <= 0.5 * (1 + 1e-6)
    cosine = torch.cosine_similarity(clipped["w"].double(), tree["w"].double(), dim=0)
    assert float(cosine) == pytest.approx(1, abs=lost)


def test_clipping_twice_is_clipping_once_to_the_bit() -> None:
    """Also where rounding of large weights is coarse beside a short way."""
    for number in range(200):
        generator = Stream(4, (number,)).generator()
        start = {"w": torch.randn(300, generator=generator) * 10.0 ** (number % 5)}
        moved = {"w": start["w"] + torch.randn(300, generator=generator)}
        once, _ = clip(moved, 0.01, start)
        assert clip(once, 0.01, start)[0] is once


def test_a_million_draws_are_gaussian_of_this_size() -> None:
    drawn = noise_like({"w": torch.zeros(1000, 1000)}, 2.5, Stream(5))["w"].double().reshape(-1).numpy()
    assert drawn.std() == pytest.approx(2.5, rel=0.005)
    assert abs(drawn.mean()) < 4 * 2.5 / 1000
    assert stats.kstest(drawn / 2.5, "norm", method="asymp").pvalue > 0.01
    for scale in (0.98, 1.02):
        assert stats.kstest(drawn / 2.5 * scale, "norm", method="asymp").pvalue < 1e-6


def test_no_noise_is_used_twice() -> None:
    """Over runs, sites, rounds, tensors and values."""
    drawn: list[float] = []
    like = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}
    for seed in (0, 1, 2**32, 2**64, 2**200):
        for site in ("x", "y", "1", 1):
            for round in range(25):
                noise = noise_like(like, 1.0, Stream(seed).child("noise", site, round))
                drawn += [v for tensor in noise.values() for v in tensor.tolist()]
    assert len(drawn) == len(set(drawn)) == 5 * 4 * 25 * 6


def test_streams_have_noise_of_their_own_where_torch_has_one_for_two() -> None:
    """torch's generator keeps 32 bits of a seed: of 200,000 streams, about five pairs draw the same numbers there."""
    seen: dict[int, Stream] = {}
    pairs = []
    for stream in (Stream(6, (number,)) for number in range(200_000)):
        twin = seen.setdefault(stream.integer() & 0xFFFFFFFF, stream)
        pairs += [(stream, twin)] if twin is not stream else []
    assert pairs
    for one, other in pairs:
        assert int(draw_words(one, 1)) != int(draw_words(other, 1))
    assert len({int(draw_words(stream, 1)) for stream in list(seen.values())[:20_000]}) == 20_000


def test_noise_of_two_tensors_or_streams_is_unrelated() -> None:
    like = {"a": torch.zeros(100_000), "b": torch.zeros(100_000)}
    noise, other = noise_like(like, 1.0, Stream(8)), noise_like(like, 1.0, Stream(9))
    table = np.corrcoef([noise["a"].numpy(), noise["b"].numpy(), other["a"].numpy()])
    assert np.abs(table - np.eye(3)).max() < 5 / math.sqrt(100_000)


def test_noise_depends_on_names_not_on_their_order_and_fits_the_tensors() -> None:
    tree = {"b": torch.zeros(4, dtype=torch.float16), "a": torch.zeros(()), "n": torch.tensor([3])}
    noise, turned = noise_like(tree, 1.0, Stream(1)), noise_like(dict(reversed(tree.items())), 1.0, Stream(1))
    assert noise.keys() == {"a", "b"}
    for name, tensor in noise.items():
        assert (tensor.dtype, tensor.shape, tensor.device) == (tree[name].dtype, tree[name].shape, tree[name].device)
        assert torch.equal(tensor, turned[name])
    assert torch.equal(add_noise(tree, 1.0, Stream(1))["n"], tree["n"])


def test_no_noise_changes_nothing_and_impossible_noise_is_refused() -> None:
    tree = {"a": torch.ones(2)}
    assert add_noise(tree, 0.0, Stream(1)) is tree
    for std in (-1.0, math.nan, math.inf):
        with pytest.raises(RecipeError, match="noise of"):
            gaussian_noise((2,), std, Stream(1))
