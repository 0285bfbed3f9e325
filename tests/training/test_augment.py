"""Augmentation: each change is what it says, on its own image only, and drawn from the site and the step alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from scipy import ndimage, stats
from torch import Tensor

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.optimisation.fedcycle import FedCycle
from polyclinic.algorithms.optimisation.fedsgd import FedSGD
from polyclinic.core.jobs import Score, Step
from polyclinic.core.network import Network
from polyclinic.core.options import Augment, Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle, Tensors
from polyclinic.data.examples import Images
from polyclinic.training.augment import AugmentParameters, apply_parameters, augment_images, draw_parameters
from polyclinic.training.data_order import draw_epoch_batches
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.laws.bench import clinics, noise, play, same, small
from tests.training.jobs import at_round, job

ALL = Augment(rotation=30, flip=True, brightness=0.3, contrast=0.4, crop=0.3, blur=1.5)
STREAM = Stream(0, ("site", "here"))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
KINDS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
CHANNELS = pytest.mark.parametrize("channels", [1, 3], ids=["grey", "colour"])


def pictures(count: int = 5, channels: int = 1, height: int = 12, width: int = 12) -> Tensor:
    generator = Stream(3, ("pictures",)).generator()
    return torch.randn(count, channels, height, width, dtype=torch.float64, generator=generator) + 0.7


def same_for_all(count: int, **values: float) -> AugmentParameters:
    """Every image of the batch changed in the same, given way; by default not at all."""
    plain: dict[str, float] = {field.name: 0.0 for field in fields(AugmentParameters)} | {
        "crop_side": 1.0,
        "contrast": 1.0,
    }
    chosen = {name: torch.full((count,), v, dtype=torch.float64) for name, v in (plain | values).items()}
    return AugmentParameters(**chosen | {"flip": chosen["flip"].bool()})


def row(changes: AugmentParameters, number: int) -> AugmentParameters:
    return AugmentParameters(
        **{field.name: getattr(changes, field.name)[number : number + 1] for field in fields(AugmentParameters)}
    )


def close(found: Tensor, expected: Tensor, atol: float = 1e-11) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# Each change is what it says.


@KINDS
@CHANNELS
def test_without_options_nothing_changes(dtype: torch.dtype, channels: int) -> None:
    images = pictures(channels=channels).to(dtype)
    assert torch.equal(augment_images(images, Augment(), STREAM), images)


@CHANNELS
def test_a_flip_changes_left_and_right_over_and_back(channels: int) -> None:
    images = pictures(channels=channels, width=9)
    once = apply_parameters(images, same_for_all(5, flip=1))
    close(once, images.flip(-1))
    close(apply_parameters(once, same_for_all(5, flip=1)), images)


@CHANNELS
@pytest.mark.parametrize("turns", [-1, 1, 2, 3])
def test_quarter_turns_go_counter_clockwise(turns: int, channels: int) -> None:
    images = pictures(channels=channels)
    close(apply_parameters(images, same_for_all(5, rotation=90 * turns)), torch.rot90(images, turns, (-2, -1)))


def test_half_a_turn_of_an_oblong_image() -> None:
    images = pictures(height=7, width=12)
    close(apply_parameters(images, same_for_all(5, rotation=180)), torch.rot90(images, 2, (-2, -1)))


@settings(max_examples=30, deadline=None)
@given(angle=st.floats(-180, 180), height=st.integers(2, 13), width=st.integers(2, 13))
def test_turning_is_scipys(angle: float, height: int, width: int) -> None:
    """Also of oblong images, which must turn without being sheared."""
    image = pictures(1, 1, height, width)
    expected = ndimage.rotate(image[0, 0].numpy(), angle, reshape=False, order=1, mode="nearest")
    close(apply_parameters(image, same_for_all(1, rotation=angle))[0, 0], torch.from_numpy(expected))


@pytest.mark.parametrize(("top", "left"), [(0, 0), (6, 0), (0, 6), (2, 5), (3, 3)])
def test_a_crop_is_the_enlarged_window(top: int, left: int) -> None:
    """The middle of a window of half the side lies at (left + 3 − 6)/6 half sides from the image's."""
    images = pictures()
    found = apply_parameters(images, same_for_all(5, crop_side=0.5, shift_x=(left - 3) / 6, shift_y=(top - 3) / 6))
    expected = F.interpolate(images[..., top : top + 6, left : left + 6], (12, 12), mode="bilinear")
    close(found[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1])  # its outermost pixels look at the window's neighbours


@settings(max_examples=30, deadline=None)
@given(angle=st.floats(-90, 90), side=st.floats(0.3, 1), place=st.tuples(st.floats(-1, 1), st.floats(-1, 1)))
def test_one_look_up_turns_then_crops_then_flips(angle: float, side: float, place: tuple[float, float]) -> None:
    """On a plane a + b·x + c·y, which interpolation meets exactly wherever it does not look beyond the edge."""
    at = (torch.arange(16, dtype=torch.float64) * 2 + 1) / 16 - 1
    plane = (0.3 + 1.5 * at + 0.8 * at[:, None]).expand(1, 1, 16, 16)
    across, down = ((1 - side) * where for where in place)
    found = apply_parameters(
        plane, same_for_all(1, rotation=angle, crop_side=side, shift_x=across, shift_y=down, flip=1)
    )
    x, y = (-side * at + across)[None, :], (side * at + down)[:, None]
    cos, sin = np.cos(np.deg2rad(angle)), np.sin(np.deg2rad(angle))
    from_x, from_y = cos * x - sin * y, sin * x + cos * y
    inside = (from_x.abs() <= 15 / 16) & (from_y.abs() <= 15 / 16)
    close(found[0, 0][inside], (0.3 + 1.5 * from_x + 0.8 * from_y)[inside])


@CHANNELS
@settings(max_examples=20, deadline=None)
@given(factor=st.floats(0, 2))
def test_contrast_keeps_the_mean_and_scales_the_deviation(channels: int, factor: float) -> None:
    images = pictures(channels=channels)
    found = apply_parameters(images, same_for_all(5, contrast=factor))
    close(found.mean((1, 2, 3)), images.mean((1, 2, 3)))
    close(found.std((1, 2, 3)), factor * images.std((1, 2, 3)))


@CHANNELS
@settings(max_examples=20, deadline=None)
@given(share=st.floats(-2, 2))
def test_brightness_adds_a_share_of_the_images_own_deviation(channels: int, share: float) -> None:
    images = pictures(channels=channels) * torch.arange(1, 6).reshape(5, 1, 1, 1)
    added = share * images.numpy().std((1, 2, 3), keepdims=True)
    close(apply_parameters(images, same_for_all(5, brightness=share)), images + torch.from_numpy(added))


def test_brightness_and_contrast_go_by_the_whole_image_not_by_what_a_crop_leaves() -> None:
    images = pictures()
    mean, deviation = images.mean((1, 2, 3), keepdim=True), images.std((1, 2, 3), correction=0, keepdim=True)
    cropped = same_for_all(5, crop_side=0.5, shift_x=0.5, shift_y=-0.25, blur=0.7)
    found = apply_parameters(images, replace(cropped, **{n: torch.full((5,), 0.6) for n in ("brightness", "contrast")}))
    close(found, mean + 0.6 * (apply_parameters(images, cropped) - mean) + 0.6 * deviation, 1e-6)


@CHANNELS
@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.2, 0.5, 1.3, 4.0])
def test_blur_is_scipys(sigma: float, channels: int) -> None:
    """To the very edge; and wider than the image, at the largest σ."""
    images = pictures(channels=channels, height=9)
    expected = ndimage.gaussian_filter(images.numpy(), (0, 0, sigma, sigma), mode="nearest")
    close(apply_parameters(images, same_for_all(5, blur=sigma)), torch.from_numpy(expected))


def test_blur_keeps_what_is_even_and_evens_out_the_rest() -> None:
    even = torch.full((5, 3, 12, 12), 0.4, dtype=torch.float64)
    close(apply_parameters(even, same_for_all(5, blur=2.0)), even)
    spreads = [
        apply_parameters(pictures(), same_for_all(5, blur=sigma)).var((1, 2, 3)) for sigma in (0.0, 0.5, 1.0, 2.0)
    ]
    assert all(bool((after < before).all()) for before, after in pairwise(spreads))


# Each image on its own.


@CHANNELS
def test_a_batch_is_its_images_one_by_one(channels: int) -> None:
    """Also where some images stay sharp, unturned or whole beside others that do not."""
    images, drawn = pictures(17, channels, 11, 14), draw_parameters(ALL, 17, STREAM)
    spared = torch.arange(17) < 3
    changes = replace(
        drawn,
        blur=drawn.blur * ~spared,
        rotation=drawn.rotation * ~spared.roll(2),
        crop_side=drawn.crop_side.where(~spared, 1.0),
    )
    alone = [apply_parameters(images[i : i + 1], row(changes, i)) for i in range(17)]
    close(apply_parameters(images, changes), torch.cat(alone))


def test_the_images_handed_in_stay_as_they_are() -> None:
    images = pictures()
    before = images.clone()
    augment_images(images, ALL, STREAM)
    assert torch.equal(images, before)


@KINDS
@CHANNELS
@pytest.mark.parametrize("device", DEVICES)
def test_every_device_and_precision_sees_the_same_images(device: str, dtype: torch.dtype, channels: int) -> None:
    images = pictures(8, channels)
    found = augment_images(images.to(device, dtype), ALL, STREAM)
    assert (found.dtype, found.device.type, found.shape) == (dtype, device, images.shape)
    close(found.cpu().double(), augment_images(images, ALL, STREAM), 1e-11 if dtype == torch.float64 else 1e-4)


# What is drawn.


def test_equal_streams_draw_equal_changes_and_others_do_not() -> None:
    images = pictures()
    assert torch.equal(augment_images(images, ALL, STREAM), augment_images(images, ALL, Stream(0, ("site", "here"))))
    assert not torch.equal(augment_images(images, ALL, STREAM), augment_images(images, ALL, STREAM.child(1)))


def test_an_option_leaves_the_draws_of_the_others_alone() -> None:
    changes = draw_parameters(ALL, 50, STREAM)
    without = draw_parameters(replace(ALL, blur=0, flip=False, rotation=0), 50, STREAM)
    same_draws = {
        f.name for f in fields(AugmentParameters) if torch.equal(getattr(changes, f.name), getattr(without, f.name))
    }
    assert same_draws == {"crop_side", "shift_x", "shift_y", "brightness", "contrast"}


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("rotation", -30, 30), ("crop_side", 0.7, 1), ("brightness", -0.3, 0.3), ("contrast", 0.6, 1.4), ("blur", 0, 1.5)],
)
def test_draws_are_uniform_within_their_limits(name: str, low: float, high: float) -> None:
    drawn = getattr(draw_parameters(ALL, 20_000, STREAM), name).numpy()
    assert drawn.min() >= low
    assert drawn.max() <= high
    assert stats.kstest(drawn, stats.uniform(low, high - low).cdf).pvalue > 1e-3


def test_crops_lie_anywhere_within_the_image() -> None:
    changes = draw_parameters(ALL, 20_000, STREAM)
    for middle in (changes.shift_x, changes.shift_y):
        place = (middle / (1 - changes.crop_side)).numpy()
        assert stats.kstest(place, stats.uniform(-1, 2).cdf).pvalue > 1e-3


def test_half_of_the_images_are_flipped() -> None:
    flipped = int(draw_parameters(ALL, 20_000, STREAM).flip.sum())
    assert stats.binomtest(flipped, 20_000).pvalue > 1e-3


def test_draws_do_not_follow_one_another() -> None:
    """Neither from change to change within an image, nor from image to image, nor from step to step."""
    changes, later = (draw_parameters(ALL, 20_000, STREAM.child(step)) for step in (0, 1))
    within = changes.crop_side
    columns = [changes.rotation, changes.flip.double(), within, changes.shift_x / (1 - within)]
    columns += [changes.shift_y / (1 - within), changes.brightness, changes.contrast, changes.blur]
    columns += [changes.rotation.roll(1), later.rotation]
    found = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns))
    assert float(found.abs().max()) < 5 / 20_000**0.5


# In training.

SGD = Training(Optimiser(lr=0.1), batch=5, augment=ALL)
ADAM = replace(SGD, optimiser=Optimiser("adam", lr=0.01))


def plain_augmented_training(network: LiveNetwork, data: Images, training: Training, epochs: int) -> Bundle:
    """An ordinary PyTorch loop in which every batch is augmented from the number of its step."""
    module, start, number = network.module, copy_module_weights(network.module), 0
    module.train().requires_grad_(True)
    optimiser = torch.optim.SGD(module.parameters(), lr=training.optimiser.lr)
    for epoch in range(epochs):
        for index in draw_epoch_batches(data.labels, training, Stream(0, ("site", "clinic-1", "order", epoch))):
            images = augment_images(data.images[index], ALL, Stream(0, ("site", "clinic-1", "augment", number, 0)))
            optimiser.zero_grad()
            torch.autograd.backward(F.cross_entropy(module(images), data.labels[index]))
            optimiser.step()
            number += 1
    trained = copy_module_weights(module)
    network.load_weights(start)
    return trained


@pytest.mark.parametrize("oversample", [False, True])
@pytest.mark.parametrize("norm", [True, False], ids=["batchnorm", "plain"])
def test_rounds_of_an_epoch_see_what_one_round_of_epochs_sees(norm: bool, oversample: bool) -> None:
    """And what an ordinary loop sees: bit for bit."""
    sites, network, training = clinics(23), small(norm), replace(SGD, oversample=oversample)
    train = sites["clinic-1"].train
    assert isinstance(train, Images)
    expected = plain_augmented_training(network, train, training, 4)
    ways: list[tuple[Algorithm, int]] = [
        (FedCycle(training), 4),
        (FedAvg(replace(training, epochs=2)), 2),
        (FedAvg(replace(training, epochs=4)), 1),
    ]
    for algorithm, rounds in ways:
        assert same(play(algorithm, sites, network, rounds).outcome.state, expected)
    assert not same(play(FedCycle(replace(training, augment=None)), sites, network, 4).outcome.state, expected)


def test_averaging_every_e_epochs_is_averaging_every_tau_steps() -> None:
    sites = clinics(16, 15, 14)
    every_steps = replace(ADAM, epochs=None, steps=6)
    by_epochs, by_steps = (play(FedAvg(t), sites, small(), 3) for t in (replace(ADAM, epochs=2), every_steps))
    assert same(by_epochs.outcome.state, by_steps.outcome.state)


def test_fedsgds_further_steps_see_what_further_rounds_see() -> None:
    sites, network = clinics(13, dtype=torch.float64), small(norm=False, dtype=torch.float64)
    one, three = play(FedSGD(SGD), sites, network, 6), play(FedSGD(SGD, steps_per_round=3), sites, network, 2)
    assert same(one.outcome.state, three.outcome.state)


def test_options_that_change_nothing_leave_training_as_it_was_bit_for_bit() -> None:
    sites = clinics(12, 7)
    for kind in (FedAvg, FedSGD):
        off, nothing = (play(kind(replace(SGD, augment=a)), sites, small(), 2) for a in (None, Augment()))
        assert same(off.outcome.state, nothing.outcome.state)


class Witness:
    """An objective that keeps the images it is shown."""

    def __init__(self) -> None:
        self.shown: list[Tensor] = []

    def __call__(self, network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensor:
        self.shown.append(batch[0])
        return task_loss(network, weights, batch, reference)


def shown_in(training: Training, **options: object) -> list[Tensor]:
    """Twelve times the same image, so that what differs is what was drawn."""
    alike, witness, network = Images(noise(1).images.repeat(12, 1, 1, 1), torch.arange(12) % 3), Witness(), small()
    asked: Callable[..., Tensor] | tuple[Step, ...] = (
        (Step(witness, ("extractor.",)), Step(witness, ("head.",))) if options.pop("twice", False) else witness
    )
    fit(job(network, training, steps=asked, **options), network, alike, at_round(1), STREAM)
    return witness.shown


@pytest.mark.parametrize("whole", [False, True], ids=["step by step", "full gradient"])
def test_every_image_of_every_batch_is_changed_in_its_own_way(whole: bool) -> None:
    shown = torch.cat(shown_in(replace(SGD, batch=4, epochs=2), full_batch=whole))
    assert len(shown) == len({tuple(image.flatten().tolist()) for image in shown}) == 24


def test_the_objectives_of_one_step_see_the_same_images() -> None:
    shown = shown_in(replace(SGD, batch=4), twice=True)
    assert len(shown) == 6
    assert all(torch.equal(one, other) for one, other in zip(shown[::2], shown[1::2], strict=True))


def test_sites_draw_their_own_changes() -> None:
    images = noise(4).images
    one, other = (augment_images(images, ALL, Stream(0, ("site", name, "augment", 0, 0))) for name in ("here", "there"))
    assert not torch.equal(one, other)


def as_shown(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    return {"images": batch[0]}


def test_evaluation_sees_the_images_as_they_are() -> None:
    network, data = small(), noise(16)
    fitted = fit(job(network, SGD), network, data, at_round(1), STREAM)
    assert torch.equal(score(Score(fitted.weights, as_shown), network, data, 5)["images"], data.images)
