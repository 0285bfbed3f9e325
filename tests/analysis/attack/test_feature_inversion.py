"""A decoder reads early features, not noise, and never learns from what it attacks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from polyclinic.analysis.attack.attacker_data import AttackSplit, split_for_attack, split_rows
from polyclinic.analysis.attack.decoder import Decoder, DecoderTraining, count_halvings, decode_features, train_decoder
from polyclinic.analysis.attack.feature_inversion import (
    FeatureAttack,
    clip_and_noise,
    does_leak,
    extract_features,
    invert_features,
    mean_scores,
)
from polyclinic.analysis.attack.figure import select_spread
from polyclinic.analysis.attack.image_similarity import rms_distance
from polyclinic.core.errors import DataError
from polyclinic.core.rng import Stream
from polyclinic.data.examples import Images
from polyclinic.models.classifier import Classifier
from polyclinic.models.modifications import cut_after
from tests.algorithms.distillation.digits import network, parts, taught

CPU = torch.device("cpu")
QUICK = DecoderTraining(steps=80, batch=16)


def trained() -> Classifier:
    teacher = taught("cnn_c", 0)
    teacher.network.load_weights(teacher.weights)
    return teacher.network.module.eval()


def halves() -> AttackSplit:
    return split_for_attack("one", parts()[0], Stream(1), 240, CPU)


def attack(
    stage: int, here: AttackSplit, protect: tuple[float, float] | None = None, module: Classifier | None = None
) -> FeatureAttack:
    def judge(pixels: Tensor) -> Tensor:
        return pixels.flatten(1)

    untrained, disguise = network("cnn_c", "other").module.eval(), protect and clip_and_noise(*protect)
    return invert_features(module or trained(), untrained, stage, here, judge, QUICK, Stream(2), disguise or None)


@cache
def early() -> FeatureAttack:
    """Features of the first stage, as they are and with clip and noise."""
    return attack(1, halves(), (1.0, 2.0))


def patients() -> Images:
    """Forty people with one to four images each."""
    whole = parts()[0].subset(torch.arange(100))
    names = [f"p{number}" for number in range(40) for _ in range(1 + number % 4)]
    return replace(whole, patients=tuple(names[:100]))


def test_halves_share_no_patient_and_leave_no_image_out() -> None:
    images = patients()
    own, attacked = (part.tolist() for part in split_rows(images, Stream(1)))
    assert sorted(own + attacked) == list(range(100))
    assert images.patients is not None
    assert not {images.patients[row] for row in own} & {images.patients[row] for row in attacked}
    assert abs(len(own) - len(attacked)) <= 4


def test_halves_follow_the_seed_and_hold_the_images_they_name() -> None:
    images = patients()
    first, again, other = (split_for_attack("one", images, Stream(seed), 60, CPU) for seed in (1, 1, 2))
    assert first.rows == again.rows
    assert first.rows != other.rows
    assert len(first.attacker_images) == len(first.target_images) == 30
    for pixels, rows in zip((first.attacker_images, first.target_images), first.rows, strict=True):
        shown, _ = images.batch(torch.tensor(rows))
        torch.testing.assert_close(first.normalise(pixels), shown)
    torch.testing.assert_close(first.target_labels, images.labels[torch.tensor(first.rows[1])])


def test_images_stored_as_numbers_are_brought_to_the_same_range() -> None:
    whole = parts()[0]
    numbers = replace(whole, images=whole.images.float() * 3 - 70, mean=5.0, std=2.0)
    here = split_for_attack("one", numbers, Stream(1), 60, CPU)
    assert float(min(here.attacker_images.min(), here.target_images.min())) == 0
    assert float(max(here.attacker_images.max(), here.target_images.max())) == pytest.approx(1)
    torch.testing.assert_close(here.normalise(here.attacker_images), numbers.batch(torch.tensor(here.rows[0]))[0])


def test_a_site_with_few_images_or_one_patient_is_refused() -> None:
    few = parts()[0].subset(torch.arange(12))
    with pytest.raises(DataError, match="site one has 12 training images, too few"):
        split_for_attack("one", few, Stream(1), 60, CPU)
    with pytest.raises(DataError, match="too few"):
        split_for_attack("one", replace(parts()[0], patients=("same",) * len(parts()[0])), Stream(1), 60, CPU)


@pytest.mark.parametrize(
    ("shape", "picture"),
    [
        ((8, 4, 4), (1, 8, 8)),
        ((32,), (1, 8, 8)),
        ((16, 7, 7), (3, 28, 28)),
        ((12,), (3, 30, 30)),
        ((5, 4, 4), (1, 25, 25)),
    ],
)
def test_a_decoder_makes_pictures_of_the_right_shape_and_range(
    shape: tuple[int, ...], picture: tuple[int, ...]
) -> None:
    found = decode_features(Decoder(shape, picture), torch.randn(2, *shape, generator=Stream(1).generator()))
    assert found.shape == (2, *picture)
    assert 0 < float(found.min()) < float(found.max()) < 1


def test_there_is_one_transposed_convolution_for_every_halving() -> None:
    assert [count_halvings(64, small) for small in (64, 32, 16, 4)] == [0, 1, 2, 4]
    decoder = Decoder((8, 4, 4), (1, 32, 32))
    assert sum(isinstance(layer, torch.nn.ConvTranspose2d) for layer in decoder.modules()) == 3


def test_a_large_dense_layer_is_made_of_two_small_ones() -> None:
    decoder = Decoder((40_000,), (3, 100, 100))
    assert sum(p.numel() for p in decoder.parameters()) < 2**25


def test_as_many_features_as_pixels_are_taken_for_a_picture() -> None:
    here = halves()
    decoder = train_decoder(here.attacker_images.flatten(1), here.attacker_images, QUICK, Stream(1))
    guesses, mean = (
        decode_features(decoder, here.target_images.flatten(1)),
        here.attacker_images.mean(0).expand_as(here.target_images),
    )
    assert (
        float(rms_distance(guesses, here.target_images).mean())
        < float(rms_distance(mean, here.target_images).mean()) / 2
    )


def test_early_features_leak_and_noise_stops_it() -> None:
    found = early().findings
    assert found.features == (8, 4, 4)
    here, extractor = halves(), cut_after(trained(), 1).extractor
    lengths = sorted(float(extractor(here.normalise(image[None])).detach().norm()) for image in here.target_images)
    assert lengths[len(lengths) // 2 - 1] - 1e-4 <= found.length <= lengths[len(lengths) // 2] + 1e-4
    assert found.leaks["decoder"]
    assert not found.leaks["protected"]
    decoder, hidden, mean, nearest = (found.guesses[n] for n in ("decoder", "protected", "mean", "nearest"))
    assert decoder.ssim > max(mean.ssim, nearest.ssim)
    assert decoder.l2 < min(mean.l2, nearest.l2)
    assert decoder.recognised > 0.9
    assert decoder.frechet < hidden.frechet
    assert hidden.ssim < max(mean.ssim, nearest.ssim)
    assert hidden.recognised < 0.05


def test_later_features_tell_less() -> None:
    here = halves()
    first, last = (found.findings.guesses["decoder"] for found in (early(), attack(3, here)))
    assert last.ssim < first.ssim
    assert last.l2 > first.l2


def test_features_that_say_nothing_leak_nothing() -> None:
    blank = network("cnn_c").module.eval()
    with torch.no_grad():
        for weight in blank.parameters():
            weight.zero_()
    assert not attack(2, halves(), module=blank).findings.leaks["decoder"]


def test_a_guess_does_not_depend_on_who_else_is_attacked() -> None:
    """So nothing was learnt from attacked images; and the seed decides everything."""
    here = halves()
    fewer = replace(here, target_images=here.target_images[:20], target_labels=here.target_labels[:20])
    whole, part, again = early(), attack(1, fewer), attack(1, fewer)
    for name in ("decoder", "untrained", "nearest", "mean"):
        torch.testing.assert_close(whole.guesses[name][:20], part.guesses[name])
        assert torch.equal(part.guesses[name], again.guesses[name])


def test_noise_is_that_of_the_release_and_fresh_for_every_stream() -> None:
    given = torch.randn(200, 6, 3, 3, generator=Stream(1).generator()) * 10
    clip, noise = 2.0, 0.5
    exact, one, other = (
        clip_and_noise(clip, sigma)(given, Stream(seed)) for sigma, seed in ((0.0, 1), (noise, 1), (noise, 2))
    )
    assert float(exact.flatten(1).norm(dim=1).max()) <= clip * (1 + 1e-6)
    assert float((one - exact).std()) == pytest.approx(noise * clip, rel=0.05)
    correlation = float(torch.corrcoef(torch.stack([(one - exact).flatten(), (other - exact).flatten()]))[0, 1])
    assert abs(correlation) < 0.05


def test_a_leak_is_a_difference_beyond_chance() -> None:
    level = torch.linspace(0.3, 0.5, 50, dtype=torch.float64)
    tilt = torch.linspace(-0.1, 0.1, 50, dtype=torch.float64)
    same = (level, level)
    assert not does_leak("decoder", {"decoder": same, "mean": same, "nearest": same}, 1 / 50)
    assert does_leak("decoder", {"decoder": (level + 0.1, level), "mean": same, "nearest": same}, 1 / 50)
    assert does_leak("decoder", {"decoder": (level, level - 0.1), "mean": same, "nearest": same}, 1 / 50)
    assert not does_leak("decoder", {"decoder": (level + tilt + 0.01, level), "mean": same, "nearest": same}, 1 / 50)
    better = (level + 0.2, level - 0.2)
    assert not does_leak("decoder", {"decoder": (level + 0.1, level - 0.1), "mean": same, "nearest": better}, 1 / 50)
    blurred = {"decoder": same, "mean": same, "nearest": same}
    assert [does_leak("decoder", blurred, count / 50) for count in (0, 1, 4, 5, 50)] == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_means_over_sites_and_pictures_from_best_to_worst() -> None:
    one = early().findings.guesses
    assert mean_scores([one, one]) == one
    assert select_spread(torch.tensor([0.1, 0.9, 0.5, 0.3]), 3).tolist() in ([1, 2, 0], [1, 3, 0])
    assert select_spread(torch.tensor([0.1, 0.9])).tolist() == [1, 0]


def test_features_are_computed_in_evaluation_mode() -> None:
    module, here = trained(), halves()
    torch.testing.assert_close(
        extract_features(module.extractor, here.normalise, here.attacker_images),
        module.extractor(here.normalise(here.attacker_images)),
    )
