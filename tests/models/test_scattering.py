"""Scattering: the laws of its papers, Kymatio's figures, and that nothing of it is learned, drawn or sent."""

from __future__ import annotations

from math import pi

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from scipy.signal import fftconvolve
from torch import Tensor, nn

from polyclinic.core.rng import Stream
from polyclinic.models import build_model
from polyclinic.models.scattering import (
    FLOOR,
    FixedFeatures,
    Scattering,
    _draw_strokes,
    _normalise_paths,
    _stroke_statistics,
    find_fixed_features,
)
from tests.models.networks import STREAM, fresh

ANGLES, STEP = 8, 4
WIDE = Scattering(1, 36).double()


def pictures(size: int, number: int = 2, channels: int = 1, margin: int = 0) -> Tensor:
    """Noise, with an empty border of `margin` pixels."""
    side = size - 2 * margin
    noise = torch.rand(number, channels, side, side, generator=Stream(3, (size, channels)).generator())
    return nn.functional.pad(noise.double(), (margin,) * 4)


def features(images: Tensor, **options: int) -> Tensor:
    found: Tensor = Scattering(images.shape[1], images.shape[-1], **options).double()(images)
    return found


@pytest.mark.parametrize(("size", "side"), [(8, 2), (28, 7), (29, 8), (30, 8), (64, 16)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_channel_has_81_paths_at_every_fourth_pixel(size: int, side: int, channels: int) -> None:
    assert features(pictures(size, channels=channels)).shape == (2, 81 * channels, side, side)


def test_three_scales_have_217_paths_and_other_angles_their_own_number() -> None:
    assert features(pictures(32), scales=3).shape == (2, 217, 4, 4)
    assert features(pictures(32), angles=4).shape == (2, 1 + 8 + 16, 8, 8)


def test_channels_are_treated_alike_and_lie_one_after_the_other() -> None:
    images = pictures(28, channels=3)
    apart = [features(images[:, [channel]]) for channel in range(3)]
    torch.testing.assert_close(features(images), torch.cat(apart, 1))


def test_a_flat_picture_has_its_brightness_as_average_and_no_waves() -> None:
    found = features(torch.full((1, 1, 28, 28), 0.7, dtype=torch.float64))
    torch.testing.assert_close(found[:, 0], torch.full((1, 7, 7), 0.7, dtype=torch.float64), rtol=1e-5, atol=0)
    assert found[:, 1:].abs().max() < 1e-6


def bell(size: int, sigma: float) -> NDArray[np.float64]:
    place = np.arange(size) - size // 2
    one = np.exp(-(place**2) / (2 * sigma**2)) / np.sqrt(2 * pi * sigma**2)
    return np.outer(one, one)


def wavelet(size: int, scale: int, angle: int) -> NDArray[np.complex128]:
    """The definition, in space: an elongated bell times a wave, less what makes its sum zero."""
    down, across = np.mgrid[:size, :size] - size // 2
    theta, sigma = (3 - angle) * pi / ANGLES, 0.8 * 2**scale
    along, beside = np.cos(theta) * down + np.sin(theta) * across, np.cos(theta) * across - np.sin(theta) * down
    window = np.exp(-(along**2 + beside**2 / 4) / (2 * sigma**2)) / (4 * pi * sigma**2)
    wave = window * np.exp(0.75j * pi / 2**scale * along)
    return np.asarray(wave - window * wave.sum() / window.sum())


def convolved(picture: NDArray[np.float64], *filters: NDArray[np.generic]) -> NDArray[np.float64]:
    """|…||x ⋆ f| ⋆ g|…| at full resolution, every fourth pixel of the result."""
    for one in filters:
        picture = np.abs(fftconvolve(picture, one, mode="same"))
    return picture[::STEP, ::STEP]


def test_paths_are_the_convolutions_of_the_definition() -> None:
    images = pictures(61, number=1, margin=20)
    found, picture, low = features(images)[0].numpy(), images[0, 0].numpy(), bell(61, 1.6)
    np.testing.assert_allclose(found[0], convolved(picture, low), atol=1e-4)
    for angle in range(ANGLES):
        np.testing.assert_allclose(found[1 + angle], convolved(picture, wavelet(61, 0, angle), low), atol=1e-4)
        wide = convolved(picture, wavelet(61, 1, angle), low)
        np.testing.assert_allclose(found[9 + angle], wide, atol=0.05 * wide.max())  # its moduli are at half resolution
        both = convolved(picture, wavelet(61, 0, 2), wavelet(61, 1, angle), low)
        np.testing.assert_allclose(found[17 + 8 * 2 + angle], both, atol=0.05 * both.max())


@pytest.mark.parametrize(("down", "across"), [(4, 0), (0, -4), (8, 4)])
def test_a_step_of_four_pixels_moves_the_features_by_one(down: int, across: int) -> None:
    images = pictures(60, margin=22)
    moved = features(images.roll((down, across), (2, 3)))
    torch.testing.assert_close(moved, features(images).roll((down // STEP, across // STEP), (2, 3)), atol=1e-4, rtol=0)


def test_a_quarter_turn_turns_the_features_and_renames_the_angles() -> None:
    images = pictures(61, margin=20)
    angles = torch.arange(ANGLES)
    turned = (angles + ANGLES // 2) % ANGLES
    second = 17 + (ANGLES * turned[:, None] + turned).flatten()
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + turned, 9 + turned, second])
    expected = features(images).rot90(1, (2, 3))[:, order]
    torch.testing.assert_close(features(images.rot90(1, (2, 3))), expected, atol=1e-4, rtol=0)


def test_filters_together_never_amplify_a_frequency() -> None:
    """Littlewood-Paley: |φ|² + ½ Σ (|ψ(ω)|² + |ψ(−ω)|²) ≤ 1; so scattering brings no two pictures further apart."""
    layer = Scattering(1, 28)
    waves = torch.cat([layer.get_buffer("waves0"), layer.get_buffer("waves1")]).square().sum(0)
    frequency = 2 * pi * torch.fft.fftfreq(len(waves))
    low = torch.exp(-(1.6**2) * (frequency[:, None] ** 2 + frequency**2))
    opposite = waves.flip((0, 1)).roll((1, 1), (0, 1))
    total = low + (waves + opposite) / 2
    assert total.max() <= 1 + 1e-5
    assert total[0, 0] == pytest.approx(1, abs=1e-5)


@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 10))
@settings(max_examples=30, deadline=None)
def test_two_pictures_never_move_apart(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = torch.rand(2, 1, 1, 12, 12, generator=generator, dtype=torch.float64)
    one, other = (nn.functional.pad(scale * image, (12,) * 4) for image in (one, other))
    apart = (WIDE(one) - WIDE(other)).norm() * STEP  # every fourth pixel stands for sixteen
    assert apart <= (one - other).norm()


def test_kymatios_figures() -> None:
    """Kymatio 0.3.0, Scattering2D(J=2, shape=(28, 28), L=8), on a picture given by a formula."""
    place = torch.arange(28, dtype=torch.float64)
    picture = 0.5 + 0.5 * torch.sin(place[:, None] * place / 9 + place)
    found = features(picture[None, None])[0]
    for (path, row, column), value in KYMATIO.items():
        assert found[path, row, column].item() == pytest.approx(value, rel=2e-4, abs=2e-6)


KYMATIO = {
    (0, 0, 0): 0.748664,
    (0, 3, 5): 0.500013,
    (1, 2, 2): 0.217199,
    (6, 6, 1): 0.018482,
    (12, 3, 3): 0.000005,
    (16, 0, 6): 0.006771,
    (17, 1, 4): 0.005594,
    (40, 5, 2): 0.000198,
    (63, 2, 6): 0.005826,
    (80, 3, 3): 0.005590,
}


def images_for(size: int, channels: int = 1) -> Tensor:
    return pictures(size, number=4, channels=channels).float()


def test_nothing_of_it_is_learned_or_travels() -> None:
    fixed = FixedFeatures(1, 12)
    assert list(fixed.parameters()) == []
    assert fixed.state_dict() == {}


def test_a_picture_s_features_do_not_depend_on_its_companions() -> None:
    fixed, images = FixedFeatures(3, 12).double(), pictures(12, number=4, channels=3)
    together = fixed(images)
    apart = torch.cat([fixed(image[None]) for image in images])
    torch.testing.assert_close(together, apart, rtol=1e-9, atol=1e-9)


def test_features_have_mean_square_one_and_ignore_contrast() -> None:
    fixed, images = FixedFeatures(1, 16).double(), pictures(16, number=3)
    found = fixed(images)
    torch.testing.assert_close(found.square().mean((1, 2, 3)), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(fixed(images), fixed(100 * images), rtol=1e-2, atol=1e-2)


def test_a_black_picture_has_finite_features() -> None:
    assert torch.isfinite(FixedFeatures(1, 12)(torch.zeros(1, 1, 12, 12))).all()


def test_common_directions_of_strokes_lose_variance_and_keep_their_order() -> None:
    """Along each direction a share √(floor / (variance + floor)) is kept; at right angles to all, everything."""
    mean, directions, kept = _stroke_statistics(12)
    count = len(kept)
    torch.testing.assert_close(directions.mT @ directions, torch.eye(count), atol=1e-4, rtol=0)
    strokes = _normalise_paths(Scattering(1, 12)(_draw_strokes(1000, 12)))
    variances = ((strokes - mean) @ directions).square().mean(0)
    torch.testing.assert_close(variances * kept**2, FLOOR * (1 - kept**2), rtol=1e-2, atol=1e-6)
    assert kept.min() > 0
    assert kept.max() < 1


def test_strokes_are_the_same_every_time_and_lie_about_the_middle() -> None:
    drawn = _draw_strokes(200, 28)
    assert torch.equal(drawn, _draw_strokes(200, 28))
    place = torch.arange(28.0)
    ink = drawn.sum((0, 1))
    for axis in (0, 1):
        assert (ink.sum(axis) @ place / ink.sum()).item() == pytest.approx(13.5, abs=0.3)


@pytest.mark.parametrize("name", ["scattering_linear", "scattering_cnn", "scattering_digits"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_fixed_part_may_be_computed_beforehand(name: str, channels: int) -> None:
    classifier = build_model(name, classes=3, channels=channels, size=14, seed=STREAM).eval()
    images, fixed = images_for(14, channels), find_fixed_features(classifier)
    assert fixed is not None
    assert torch.equal(classifier(fixed(images)), classifier(images))
    assert not any(parameter.requires_grad for parameter in fixed.parameters())


@pytest.mark.parametrize("name", ["linear", "cnn_a", "groupnorm_cnn"])
def test_ordinary_networks_have_no_fixed_part(name: str) -> None:
    assert find_fixed_features(fresh(name, 1)) is None


def test_pictures_can_be_worked_on_one_by_one_and_many_sites_at_once() -> None:
    fixed, images = FixedFeatures(1, 12).double(), pictures(12, number=6)
    one_by_one = torch.func.vmap(lambda image: fixed(image[None])[0])(images)
    torch.testing.assert_close(one_by_one, fixed(images))
    sites = torch.func.vmap(fixed)(images.reshape(2, 3, 1, 12, 12))
    torch.testing.assert_close(sites.flatten(0, 1), fixed(images))


def test_per_example_gradients_of_the_linear_network_are_error_times_features() -> None:
    classifier = build_model("scattering_linear", classes=3, channels=1, size=12, seed=STREAM).double()
    images, labels = pictures(12, number=4), torch.tensor([0, 1, 2, 1])
    weights: dict[str, Tensor] = dict(classifier.named_parameters())

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(classifier, weights, (image[None],))
        return nn.functional.cross_entropy(logits, label[None])

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, images, labels)["head.weight"]
    with torch.no_grad():
        error = classifier(images).softmax(1) - nn.functional.one_hot(labels, 3)
        expected = error[:, :, None] * classifier.extractor(images)[:, None]
    torch.testing.assert_close(found, expected)


def test_it_compiles_as_one_graph() -> None:
    fixed, images = FixedFeatures(1, 12), images_for(12)
    compiled = torch.compile(fixed, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), fixed(images))


def test_lower_precision_around_it_changes_nothing() -> None:
    fixed, images = FixedFeatures(1, 12), images_for(12)
    with torch.autocast("cpu", torch.bfloat16):
        found = fixed(images)
    assert found.dtype == torch.float32
    assert torch.equal(found, fixed(images))
