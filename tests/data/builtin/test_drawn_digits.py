"""Drawn digits: as many of each class, prepared as MNIST's are, and readable as what they are meant to be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import recall_score
from torch import Tensor

from polyclinic.core import Stream
from polyclinic.data.builtin.drawn_digits import SKELETONS, DrawnDigitsOptions, draw_digits
from polyclinic.data.examples import Collection


def draw(number: int = 2000, size: int = 28, seed: int = 0) -> Collection:
    return draw_digits(DrawnDigitsOptions(number=number, size=size), Stream(seed))


def test_classes_and_their_ways_of_writing_are_equally_frequent() -> None:
    assert torch.bincount(draw().labels).tolist() == [200] * 10
    assert len(SKELETONS) == 10


def test_the_seed_alone_decides_what_is_drawn() -> None:
    first, again, other = draw(300), draw(300), draw(300, seed=1)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.images, other.images)
    assert len({image.numpy().tobytes() for image in first.images}) == 300


@pytest.mark.parametrize("size", [14, 28, 56])
def test_the_ink_lies_about_the_middle_and_fits_the_square(size: int) -> None:
    ink = draw(500, size).images[:, 0].double() / 255
    place = (torch.arange(size) + 0.5) * 28 / size - 14
    for axis in (1, 2):
        profile = ink.sum(axis)
        away = (profile @ place.double() / profile.sum(1)).abs()
        assert away.mean() < 0.3  # where strokes cross, ink counts once
        assert away.max() < 1.3
        inked = (profile > 0.5 * size / 28).double()
        extent = inked.sum(1) * 28 / size
        assert extent.max() < 23
    tall = torch.stack([(ink.sum(a) > 0.5 * size / 28).sum(1) * 28 / size for a in (1, 2)]).amax(0)
    assert (tall > 17).all()


def reduce_to_eight(images: Tensor) -> Tensor:
    """Cut each image to its ink, which is then stretched to 8 × 8 pixels, as the real set's are."""
    cut = []
    for image in images[:, 0].float():
        rows, columns = ((image > 64).any(axis).nonzero().squeeze(1) for axis in (1, 0))
        part = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        cut.append(F.interpolate(part[None, None], size=(8, 8), mode="bilinear", antialias=True).flatten() / 255)
    return torch.stack(cut)


def test_who_learns_digits_from_drawings_reads_real_ones() -> None:
    drawn, real = draw(4000), load_digits()
    model = LinearDiscriminantAnalysis().fit(reduce_to_eight(drawn.images).numpy(), drawn.labels.numpy())
    scans = torch.from_numpy(real.images)[:, None] * (255 / 16)
    recall = recall_score(real.target, model.predict(reduce_to_eight(scans).numpy()), average=None)
    assert recall.mean() > 0.7
    assert recall.min() > 0.25  # chance is 0.1, and two classes that are exchanged have hardly any
