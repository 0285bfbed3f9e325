"""Gradients give images away exactly, or by a search; clipped and noised they do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyclinic.analysis.attack.gradient_inversion import (
    Search,
    compute_dp_gradient,
    compute_gradient,
    find_first_dense,
    invert_dense,
    invert_gradient,
    match_guesses,
    recover_labels,
)
from polyclinic.analysis.attack.image_similarity import mean_ssim, rms_distance
from polyclinic.core.jobs import Fit, Site
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.models import build_model
from polyclinic.models.classifier import Classifier
from polyclinic.training.fit import fit
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.algorithms.distillation.digits import parts

SHAPE = (1, 8, 8)


def network(name: str) -> Classifier:
    return build_model(name, classes=10, channels=1, size=8, dropout=0.0, seed=Stream(4)).eval()


def some(number: int, first: int = 0) -> tuple[Tensor, Tensor]:
    return parts()[0].batch(torch.arange(first, first + number))


def as_it_is(pixels: Tensor) -> Tensor:
    return pixels


@pytest.mark.parametrize("name", ["mlp", "linear"])
def test_a_dense_first_layer_gives_the_image_away_exactly(name: str) -> None:
    module = network(name).double()
    layer = find_first_dense(module)
    assert layer is not None
    for number in range(5):
        images, labels = some(1, number)
        found = compute_gradient(module, images.double(), labels)
        torch.testing.assert_close(invert_dense(found, layer).reshape(1, *SHAPE), images.double(), rtol=0, atol=1e-12)


def test_the_same_in_single_precision_and_through_normalisation() -> None:
    images, labels = some(1)

    def seen(pixels: Tensor) -> Tensor:
        return (pixels - 0.4) / 0.3

    found = compute_gradient(network("mlp"), seen(images), labels)
    guess, how = invert_gradient(network("mlp"), found, 1, SHAPE, seen, Search(), Stream(1))
    assert how == "exact"
    assert float(rms_distance(guess, images)) < 1e-5


def test_the_update_of_one_training_step_reveals_the_image() -> None:
    data = parts()[0].subset(torch.tensor([3]))
    module = network("mlp").double()
    before, lr = copy_module_weights(module), 0.1
    data = type(data)(data.images.double() / 255, data.labels)
    training = Training(Optimiser("sgd", lr), batch=1, epochs=1)
    after = fit(
        Fit(before, task_loss, training), LiveNetwork(module), data, Site("any", 1, 1, 1, lr), Stream(2)
    ).weights
    found = {name: (before["model"][name] - after["model"][name]) / lr for name in before["model"]}
    layer = find_first_dense(module)
    assert layer is not None
    torch.testing.assert_close(invert_dense(found, layer).reshape(1, *SHAPE), data.images, rtol=0, atol=1e-9)


def test_only_a_layer_whose_input_is_the_pixels_is_a_dense_first_layer() -> None:
    assert find_first_dense(network("cnn_c")) is None
    assert find_first_dense(network("mlp")) == "extractor.dense"
    assert find_first_dense(network("linear")) == "head"


@pytest.mark.parametrize("name", ["mlp", "cnn_c"])
def test_the_sign_of_the_last_bias_tells_the_class(name: str) -> None:
    module = network(name)
    for number in range(20):
        images, labels = some(1, number)
        assert torch.equal(recover_labels(compute_gradient(module, images, labels), module), labels)


def test_classes_of_several_images_are_recovered_with_repetitions() -> None:
    module, labels = network("cnn_c"), torch.tensor([2, 7, 7, 9])
    images = some(4)[0]
    assert torch.equal(recover_labels(compute_gradient(module, images, labels), module, 4), labels)


def test_protection_clips_each_image_and_averages() -> None:
    module, (images, labels) = network("cnn_c"), some(3)
    clip, alone = 0.5, []
    for row in range(3):
        found = compute_dp_gradient(module, images[row : row + 1], labels[row : row + 1], clip, 0.0, Stream(1))
        norm = torch.cat([g.flatten() for g in found.values()]).norm()
        assert float(norm) <= clip * (1 + 1e-6)
        alone.append(found)
    together = compute_dp_gradient(module, images, labels, clip, 0.0, Stream(1))
    for name, value in together.items():
        torch.testing.assert_close(value, sum(each[name] for each in alone) / 3)
    loose = compute_dp_gradient(module, images, labels, 1e6, 0.0, Stream(1))
    for name, value in compute_gradient(module, images, labels).items():
        torch.testing.assert_close(loose[name], value, rtol=1e-4, atol=1e-6)


def test_noise_stops_the_exact_recovery() -> None:
    module, (images, labels) = network("mlp"), some(1)
    hidden = compute_dp_gradient(module, images, labels, 1.0, 1.0, Stream(1))
    guess, _ = invert_gradient(module, hidden, 1, SHAPE, as_it_is, Search(), Stream(1))
    mean = parts()[1].batch(torch.arange(300))[0].mean(0, keepdim=True)
    assert float(rms_distance(guess, images)) > float(rms_distance(mean, images))


def test_a_search_finds_the_image_behind_a_convolution_unless_there_is_noise() -> None:
    module, (images, labels) = network("cnn_b"), some(1, 2)
    mean = parts()[1].batch(torch.arange(300))[0].mean(0, keepdim=True)
    plain, hidden = (
        compute_gradient(module, images, labels),
        compute_dp_gradient(module, images, labels, 1.0, 1.0, Stream(1)),
    )
    guess, how = invert_gradient(module, plain, 1, SHAPE, as_it_is, Search(200), Stream(1))
    noisy, _ = invert_gradient(module, hidden, 1, SHAPE, as_it_is, Search(200), Stream(1))
    assert how == "search"
    assert float(mean_ssim(guess, images)) > float(mean_ssim(mean, images)) > float(mean_ssim(noisy, images))
    assert float(rms_distance(guess, images)) < float(rms_distance(mean, images)) < float(rms_distance(noisy, images))


def test_guesses_without_an_order_are_matched_to_originals() -> None:
    images, _ = some(6)
    assert torch.equal(match_guesses(images[torch.tensor([4, 2, 0, 5, 1, 3])], images), images)


def test_a_gradient_leaves_the_network_as_it_was() -> None:
    module = network("cnn_c")
    before = copy_module_weights(module)
    compute_gradient(module, *some(2))
    assert all(torch.equal(t, before["model"][n]) and t.grad is None for n, t in module.named_parameters())
