"""Likeness has closed forms, and other libraries to agree with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from skimage.metrics import structural_similarity
from torch import Tensor

from polyclinic.analysis.attack.image_similarity import (
    K1,
    frechet_distance,
    gaussian_window,
    identification_rate,
    mean_ssim,
    rms_distance,
)
from polyclinic.core.rng import Stream


def pictures(number: int, channels: int = 1, side: int = 24, name: str = "pictures") -> Tensor:
    """Smooth ones, so that windows hold more than noise."""
    rough = torch.rand(number, channels, side // 4, side // 4, generator=Stream(5, (name,)).generator())
    return torch.nn.functional.interpolate(rough, size=(side, side), mode="bilinear")


def test_ssim_is_one_for_equal_pictures_and_symmetric() -> None:
    one, other = pictures(5, 3), pictures(5, 3, name="others")
    torch.testing.assert_close(mean_ssim(one, one), torch.ones(5, dtype=torch.float64))
    assert torch.equal(mean_ssim(one, other), mean_ssim(other, one))
    assert bool((mean_ssim(one, other) < 0.9).all())


def test_ssim_of_flat_pictures_is_the_closed_form() -> None:
    a, b = 0.3, 0.8
    found = mean_ssim(torch.full((1, 1, 16, 16), a).double(), torch.full((1, 1, 16, 16), b).double())
    wanted = (2 * a * b + K1**2) / (a**2 + b**2 + K1**2)
    torch.testing.assert_close(found, torch.tensor([wanted], dtype=torch.float64))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("amount", [0.02, 0.2, 1.0])
def test_ssim_agrees_with_scikit_image(channels: int, amount: float) -> None:
    one = pictures(3, channels).double()
    other = one + amount * (pictures(3, channels, name="others").double() - 0.5)
    wanted = [
        structural_similarity(  # type: ignore[no-untyped-call]
            a.numpy(),
            b.numpy(),
            channel_axis=0,
            data_range=1.0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
        )
        for a, b in zip(one, other, strict=True)
    ]
    np.testing.assert_allclose(mean_ssim(one, other).numpy(), wanted, atol=1e-12)


@pytest.mark.parametrize(("side", "width"), [(64, 11), (11, 11), (10, 9), (8, 7), (3, 3)])
def test_a_small_picture_gets_a_window_that_fits(side: int, width: int) -> None:
    weights = gaussian_window(side)
    assert len(weights) == width
    assert float(weights.sum()) == pytest.approx(1)
    assert torch.equal(weights, weights.flip(0))
    one = torch.rand(2, 1, side, side, generator=Stream(1).generator())
    torch.testing.assert_close(mean_ssim(one, one), torch.ones(2, dtype=torch.float64))


def test_l2_is_the_root_of_the_mean_square() -> None:
    one = pictures(4, 3).double()
    torch.testing.assert_close(rms_distance(one, one + 0.07), torch.full((4,), 0.07, dtype=torch.float64))
    assert float(rms_distance(torch.zeros(1, 1, 2, 2), torch.eye(2)[None, None])) == pytest.approx(0.5**0.5)
    assert float(rms_distance(torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8))) == 1.0


def test_guesses_are_recognised_by_their_own_original() -> None:
    originals = pictures(6)
    assert identification_rate(originals + 0.001, originals) == 1.0
    assert identification_rate(originals.roll(1, 0), originals) == 0.0
    assert identification_rate(originals.mean(0).expand_as(originals), originals) == pytest.approx(1 / 6)


def rows(number: int, width: int, name: str) -> Tensor:
    generator = Stream(3, (name,)).generator()
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return torch.randn(number, width, generator=generator, dtype=torch.float64) @ mixing


def test_frechet_of_equal_sets_is_zero_and_of_a_shift_its_square() -> None:
    one, shift = rows(50, 7, "one"), torch.arange(7, dtype=torch.float64)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(one, one.flip(0)) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(one, one + shift) == pytest.approx(float(shift.square().sum()))


def test_frechet_of_one_feature_is_that_of_two_normal_distributions() -> None:
    one, other = rows(40, 1, "one"), 3 * rows(60, 1, "other") + 2
    gap = (one.mean() - other.mean()) ** 2 + (one.std() - other.std()) ** 2
    assert frechet_distance(one, other) == pytest.approx(float(gap))
    assert frechet_distance(one, other) == pytest.approx(frechet_distance(other, one))


@pytest.mark.parametrize("number", [60, 4])
def test_frechet_agrees_with_the_root_of_the_matrix(number: int) -> None:
    """Also where there are fewer vectors than features; the root of a singular matrix is known to fewer digits."""
    one, other = rows(number, 6, "one"), rows(number + 1, 6, "other")
    a, b = (np.cov(each.numpy(), rowvar=False) for each in (one, other))
    root = np.real(sqrtm(a @ b + (0 if number > 6 else 1e-12) * np.eye(6)))
    wanted = float((one.mean(0) - other.mean(0)).square().sum()) + np.trace(a + b - 2 * root)
    assert frechet_distance(one, other) == pytest.approx(wanted, rel=1e-6 if number > 6 else 1e-4)
