"""Where teachers look: laws of Shapley values, patch by patch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from polyclinic.algorithms.distillation import Teacher
from polyclinic.algorithms.distillation.patch_attribution import (
    attribute_patches,
    loss_factor,
    patch_index,
    sample_balanced,
)
from polyclinic.core.rng import Stream
from polyclinic.data.examples import Images
from polyclinic.models.classifier import Classifier
from polyclinic.reporting.teacher_figure import draw_teacher_maps
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.algorithms.distillation.digits import good, parts

STREAM = Stream(5)


def test_an_images_values_add_up_to_what_it_has_over_the_mean_image() -> None:
    """Efficiency holds in every order, so also of few."""
    teachers = good()
    found = attribute_patches(teachers, parts()[2], STREAM, per_class=1, orders=2)
    assert found.images.shape == (10, 1, 8, 8)
    assert found.labels.tolist() == list(range(10))
    for teacher in teachers:
        seen, mean = (torch.softmax(teacher.logits(x), -1) for x in (found.images, found.images.mean(0, keepdim=True)))
        wanted = seen.gather(1, found.labels[:, None]).squeeze(1) - mean[0, found.labels]
        torch.testing.assert_close(found.psi[teacher.name].sum((1, 2)), wanted, atol=1e-5, rtol=0)


def test_the_same_stream_gives_the_same_maps_and_leaves_torchs_own_draws_alone() -> None:
    torch_state, name = torch.get_rng_state(), good()[0].name
    one, two, other = (
        attribute_patches(good()[:1], parts()[2], s, per_class=1, orders=1) for s in (STREAM, STREAM, Stream(6))
    )
    assert torch.equal(one.psi[name], two.psi[name])
    assert not torch.equal(one.images, other.images)
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_orders_depend_on_the_stream_even_where_images_do_not() -> None:
    """All images there are, so their choice is the same; their order is put right by what they show."""
    data = Images(*parts()[2].batch(torch.arange(3)))
    found = [attribute_patches(good()[:1], data, Stream(seed), per_class=3, orders=1) for seed in (1, 2)]
    first, second = (each.psi[good()[0].name][each.images.sum((1, 2, 3)).argsort()] for each in found)
    torch.testing.assert_close(first.sum((1, 2)), second.sum((1, 2)), atol=1e-5, rtol=0)
    assert not torch.allclose(first, second, atol=1e-4)


class Corner(torch.nn.Module):
    """Looks at the upper left quarter only."""

    def forward(self, images: Tensor) -> Tensor:
        dark = images[:, :, :4, :4].mean((1, 2, 3))
        return torch.stack([dark, -dark], -1)


def test_patches_that_a_teacher_does_not_look_at_are_worth_nothing() -> None:
    network = LiveNetwork(Classifier(Corner(), torch.nn.Identity()))
    teacher = Teacher("corner", network, copy_module_weights(network.module))
    images = torch.rand(6, 1, 8, 8, generator=STREAM.generator())
    found = attribute_patches(
        [teacher], Images(images, torch.tensor([0, 1] * 3)), STREAM, per_class=2, grid=4, orders=3
    )
    psi = found.psi["corner"]
    assert psi.shape == (4, 4, 4)
    assert bool((psi[:, :2, :2].abs() > 1e-4).all())
    assert not psi[:, 2:].any()
    assert not psi[:, :, 2:].any()


@pytest.mark.parametrize(("height", "width", "grid"), [(8, 8, 7), (28, 28, 7), (5, 9, 3), (2, 9, 4), (6, 6, 1)])
def test_patches_cover_the_image_in_order_and_are_nearly_equal(height: int, width: int, grid: int) -> None:
    mask = patch_index(height, width, grid)
    counts = mask.flatten().bincount()
    assert mask.shape == (height, width)
    assert len(counts) == min(grid, height) * min(grid, width)
    assert int(counts.min()) >= (height // min(grid, height)) * (width // min(grid, width))
    assert bool((mask.diff(dim=0) >= 0).all())
    assert bool((mask.diff(dim=1) >= 0).all())


def test_a_balanced_choice_has_as_many_of_every_class_as_there_are() -> None:
    labels = torch.tensor([2] * 9 + [0] * 5 + [5])
    chosen = sample_balanced(labels, 3, STREAM)
    assert labels[chosen].tolist() == [0, 0, 0, 2, 2, 2, 5]
    assert len(set(chosen.tolist())) == 7
    assert chosen.tolist() != sample_balanced(labels, 3, Stream(6)).tolist()


def test_the_factor_is_the_mean_size_over_teachers_images_and_patches() -> None:
    one, other = torch.tensor([[[1.0, -3.0]], [[0.0, 2.0]]]), torch.tensor([[[0.0, 0.0]], [[0.0, -2.0]]])
    assert loss_factor({"one": one, "other": other}) == pytest.approx((1.5 + 0.5) / 2)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_picture_is_one_and_says_whose_maps_it_shows(tmp_path: Path, channels: int) -> None:
    images, psi = torch.rand(3, channels, 8, 8), torch.rand(3, 4, 4) - 0.5
    draw_teacher_maps({"one": psi, "a $ b": -psi}, images, tmp_path / "maps.png", ["x", "y_1", "$"])
    with Image.open(tmp_path / "maps.png") as picture:
        assert "one, a $ b" in picture.info["Description"]
        assert min(picture.size) > 500
        red, green, blue = np.asarray(picture.convert("RGB"), dtype=int).reshape(-1, 3).T
    assert bool(((red > 200) & (blue < 120)).any())  # orange: for the class
    assert bool(((blue > red) & (red > green) & (blue - green > 40)).any())  # violet: against it


def test_a_teacher_that_looks_nowhere_can_be_drawn(tmp_path: Path) -> None:
    draw_teacher_maps({"one": torch.zeros(1, 4, 4)}, torch.zeros(1, 1, 8, 8), tmp_path / "maps.png")
    assert (tmp_path / "maps.png").stat().st_size > 0
