"""FLOPs against closed forms: a product of m × k by k × n costs 2mkn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyclinic.core.errors import DataError
from polyclinic.evaluation.flops import count_parameters, training_step_flops


def test_a_linear_layer_costs_one_product_forward_and_one_for_its_weights() -> None:
    assert training_step_flops(nn.Linear(20, 3), (8, 20)) == 2 * (2 * 8 * 20 * 3)


def test_a_later_layer_also_pays_for_the_gradient_of_its_input() -> None:
    network = nn.Sequential(nn.Linear(20, 7), nn.ReLU(), nn.Linear(7, 3))
    assert training_step_flops(network, (8, 20)) == 2 * (2 * 8 * 20 * 7) + 3 * (2 * 8 * 7 * 3)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_convolution_costs_a_product_at_every_output_pixel(groups: int) -> None:
    layer = nn.Conv2d(3, 6, kernel_size=5, stride=2, padding=1, groups=groups)
    height, width = layer(torch.zeros(1, 3, 17, 14)).shape[2:]
    forward = 2 * 4 * height * width * 6 * (3 // groups) * 25
    assert training_step_flops(layer, (4, 3, 17, 14)) == 2 * forward


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_costs_a_product_at_every_input_pixel(groups: int) -> None:
    layer = nn.ConvTranspose2d(4, 6, kernel_size=3, stride=2, groups=groups)
    forward = 2 * 5 * (7 * 9) * 4 * (6 // groups) * 9
    assert training_step_flops(layer, (5, 4, 7, 9)) == 2 * forward


def test_a_later_convolution_also_pays_for_the_gradient_of_its_input() -> None:
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8)
    costs = 2 * (4 * 100) * 8 * 3 * 9, 2 * (4 * 25) * 8 * 9
    assert training_step_flops(nn.Sequential(first, second), (4, 3, 10, 10)) == 2 * costs[0] + 3 * costs[1]


def test_frozen_layers_cost_their_forward_only() -> None:
    network = nn.Sequential(nn.Linear(20, 7), nn.Linear(7, 3))
    network[0].requires_grad_(False)
    assert training_step_flops(network, (8, 20)) == 2 * 8 * 20 * 7 + 2 * (2 * 8 * 7 * 3)
    network.requires_grad_(False)
    assert training_step_flops(network, (8, 20)) == 2 * 8 * 20 * 7 + 2 * 8 * 7 * 3


def test_cost_is_proportional_to_the_batch() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    assert training_step_flops(network, (6, 1, 8, 8)) == 3 * training_step_flops(network, (2, 1, 8, 8))


def test_counting_leaves_the_module_as_it_was() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    training_step_flops(network, (2, 1, 8, 8))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(layer.training for layer in network.modules())


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 1, 2, 2)])
def test_a_batch_that_does_not_fit_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="cannot take a batch of shape"):
        training_step_flops(nn.Conv2d(1, 4, 3), shape)


def test_shared_parameters_count_once() -> None:
    layer = nn.Linear(20, 20)
    assert count_parameters(layer) == 20 * 20 + 20
    assert count_parameters(nn.Sequential(layer, nn.ReLU(), layer)) == 20 * 20 + 20
