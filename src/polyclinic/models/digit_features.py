"""Fixed features of handwritten digits: scattering of upright digits, with the ways of writing one digit shrunk.

Like `scattering`, without weights and without a look at anybody's images: all statistics are those of drawn digits
(`data.builtin.drawn_digits`). Two things are taken out of every image's features:

    slant       each image is sheared until its ink has no covariance across and down (LeCun et al. 1998, "deslanting")
    variation   directions in which drawn digits of the same class vary are shrunk by √(floor / (variance + floor)): a
                whitening by the within-class covariance, as in Fisher's linear discriminant
"""

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.core import Stream
from polyclinic.data.builtin.drawn_digits import CLASSES, DrawnDigitsOptions, draw_digits
from polyclinic.models.classifier import ModelBuilder
from polyclinic.models.scattering import FixedFeatures, find_directions, scatter_blocks, scattering_linear

NUMBER = 2000
"""Drawn digits of 28 pixels, of which the statistics are taken."""
FLOOR = 1e-4


class DigitFeatures(FixedFeatures):
    """Scattering features of upright digits, with what drawn digits of a class do not share shrunk; mean square 1."""

    def compute_statistics(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        return _digit_statistics(size)

    def prepare_images(self, images: Tensor) -> Tensor:
        return remove_slant(images)


scattering_digits: ModelBuilder = partial(scattering_linear, features=DigitFeatures)


def remove_slant(images: Tensor) -> Tensor:
    """Return the images sheared so that their ink is upright, with its centre of mass in the middle.

    Ink is what is brighter than the darkest pixel: x ← x + (s_xy / s_yy)·y about the centre of mass, where s are the
    second moments of the ink.
    """
    size = images.shape[-1]
    place = ((torch.arange(size, device=images.device) + 0.5) * (2 / size) - 1).to(images.dtype)
    ink = images.mean(1) - images.mean(1).amin((1, 2), keepdim=True)
    ink = ink / ink.sum((1, 2), keepdim=True).clamp(min=1e-6)
    across, down = (ink.sum(axis) @ place for axis in (1, 2))
    x, y = place - across[:, None], place - down[:, None]
    shear = (y * (ink * x[:, None]).sum(2)).sum(1) / (y**2 * ink.sum(2)).sum(1).clamp(min=1e-6)
    columns = across[:, None, None] + place + shear[:, None, None] * place[:, None]
    rows = (down[:, None] + place)[..., None].expand_as(columns)
    grid = torch.stack([columns, rows], -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


@cache
def _digit_statistics(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of drawn digits' features, the directions in which classes vary, and what is kept of each."""
    number = min(NUMBER, max(300, round(NUMBER * (28 / size) ** 2)))
    drawn = draw_digits(DrawnDigitsOptions(number=number, size=size), Stream(1998, ("digits", size)))
    features = scatter_blocks(remove_slant(drawn.images / 255)).double()
    means = torch.stack([features[drawn.labels == label].mean(0) for label in range(len(CLASSES))])
    directions, kept = find_directions(features - means[drawn.labels], number // 2, FLOOR)
    return features.mean(0).float(), directions, kept
