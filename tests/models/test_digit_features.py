"""Features of upright digits: what is removed from them, and by which statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyclinic.core import Stream
from polyclinic.data.builtin.drawn_digits import DrawnDigitsOptions, draw_digits
from polyclinic.models import build_model
from polyclinic.models.digit_features import FLOOR, NUMBER, DigitFeatures, _digit_statistics, remove_slant
from polyclinic.models.scattering import scatter_blocks


def drawings(number: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    found = draw_digits(DrawnDigitsOptions(number=number, size=size), Stream(seed))
    return found.images / 255, found.labels


def ink_moments(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The centre of mass across and down, and the covariance over the variance down, in half sides."""
    size = images.shape[-1]
    place = (torch.arange(size) + 0.5) * 2 / size - 1
    ink = images[:, 0] / images[:, 0].sum((1, 2), keepdim=True)
    across, down = ink.sum(1) @ place, ink.sum(2) @ place
    x, y = place - across[:, None], place - down[:, None]
    covariance = (ink * y[:, :, None] * x[:, None]).sum((1, 2))
    return across, down, covariance / (ink.sum(2) * y**2).sum(1)


def test_upright_ink_has_no_covariance_and_lies_in_the_middle() -> None:
    slanted = torch.roll(drawings(200, 56, 1)[0], (3, -2), (2, 3))
    assert ink_moments(slanted)[2].abs().mean() > 0.1
    for moment in ink_moments(remove_slant(slanted)):
        assert moment.abs().max() < 0.03


@pytest.mark.parametrize("offset", [0.0, -1.0])
def test_a_bar_that_leans_is_set_upright_whatever_the_grey_of_its_background(offset: float) -> None:
    rows, columns = torch.meshgrid(torch.arange(28.0) - 13.5, torch.arange(28.0) - 13.5, indexing="ij")
    bars = [torch.sigmoid(3 * (2 - (columns - lean * rows).abs())) * (rows.abs() < 9) for lean in (0.0, 0.3, -0.4)]
    for bar in remove_slant(torch.stack(bars)[:, None] + offset):
        assert (bar - offset - bars[0]).abs().mean() < 0.02


def test_directions_in_which_a_class_varies_keep_the_floor_of_their_variance() -> None:
    _, directions, kept = _digit_statistics(14)
    torch.testing.assert_close(directions.mT @ directions, torch.eye(len(kept)), atol=1e-4, rtol=0)
    found = draw_digits(DrawnDigitsOptions(number=NUMBER, size=14), Stream(1998, ("digits", 14)))
    features = scatter_blocks(remove_slant(found.images / 255))
    within = torch.stack([features[found.labels == k] - features[found.labels == k].mean(0) for k in range(10)])
    variances = (within.flatten(0, 1) @ directions).square().mean(0)
    torch.testing.assert_close(variances * kept**2, FLOOR * (1 - kept**2), rtol=1e-2, atol=1e-7)


def test_the_nearest_class_mean_is_more_often_right_in_them() -> None:
    """On drawings that neither the statistics nor the means were taken of."""
    (images, labels), (others, wanted), fixed = drawings(1000, 14, 2), drawings(1000, 14, 3), DigitFeatures(1, 14)

    def error(known: Tensor, asked: Tensor) -> float:
        means = torch.stack([known[labels == label].mean(0) for label in range(10)])
        return float((torch.cdist(asked, means).argmin(1) != wanted).float().mean())

    shrunk = error(fixed(images).flatten(1), fixed(others).flatten(1))
    assert shrunk < 0.7 * error(scatter_blocks(images), scatter_blocks(others))


def test_a_picture_without_ink_has_finite_features() -> None:
    assert DigitFeatures(1, 14)(torch.zeros(2, 1, 14, 14)).isfinite().all()


def test_other_numbers_of_classes_are_possible() -> None:
    assert build_model("scattering_digits", classes=3, channels=3, size=14, seed=Stream(0))(
        torch.rand(2, 3, 14, 14)
    ).shape == (2, 3)
