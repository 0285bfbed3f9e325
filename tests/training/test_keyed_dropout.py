"""Dropout by keys: fair, repeatable, and nobody else's business."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from polyclinic.core.rng import Stream
from polyclinic.models.classifier import Classifier
from polyclinic.training.keyed_dropout import KeyedDropout, dropout_key, first_key, hash_uniform, key_dropout_layers
from polyclinic.training.network import LiveNetwork, copy_module_weights

MANY = 200_000


def key(number: int) -> torch.Tensor:
    return torch.tensor(dropout_key(first_key(Stream(number)), 0, 0))


def test_the_numbers_are_uniform() -> None:
    """Kolmogorov's distance at one in a million."""
    drawn = hash_uniform(key(1), MANY).double().sort().values
    steps = torch.arange(1, MANY + 1, dtype=torch.float64) / MANY
    distance = float(torch.maximum(steps - drawn, drawn - steps + 1 / MANY).max())
    assert distance < math.sqrt(math.log(2e6) / (2 * MANY))
    assert drawn[0] >= 0
    assert drawn[-1] < 1


def test_numbers_of_different_sites_steps_batches_and_layers_do_not_go_together() -> None:
    """Correlations of independent numbers have the variance 1/n; six deviations are one in a billion."""
    first = first_key(Stream(0))
    keys = [first, first + 1, dropout_key(first, 1, 0), dropout_key(first, 0, 1), first_key(Stream(1))]
    drawn = torch.stack([hash_uniform(torch.tensor(k), MANY) for k in keys]).double()
    found = torch.corrcoef(drawn)
    for i, j in itertools.combinations(range(len(keys)), 2):
        assert abs(float(found[i, j])) < 6 / math.sqrt(MANY)
    neighbours = torch.corrcoef(torch.stack([drawn[0, :-1], drawn[0, 1:]]))[0, 1]
    assert abs(float(neighbours)) < 6 / math.sqrt(MANY)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_it_drops_its_share_and_keeps_the_mean(rate: float) -> None:
    layer = nn.Sequential(nn.Dropout(rate)).train()
    (keyed,) = key_dropout_layers(layer.named_modules(), torch.device("cpu")).values()
    keyed.key.fill_(int(key(3)))
    found = layer(torch.ones(MANY))
    dropped = float((found == 0).double().mean())
    assert abs(dropped - rate) < 6 * math.sqrt(rate * (1 - rate) / MANY)
    assert set(found.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - rate))}


def test_it_is_off_when_evaluating_and_at_zero() -> None:
    values = torch.rand(50)
    for layer in (nn.Sequential(nn.Dropout(0.5)).eval(), nn.Sequential(nn.Dropout(0.0)).train()):
        key_dropout_layers(layer.named_modules(), torch.device("cpu"))
        assert torch.equal(layer(values), values)


def test_keys_are_no_part_of_a_model() -> None:
    module = Classifier(nn.Sequential(nn.Flatten(), nn.Dropout(0.5)), nn.Linear(4, 2))
    network = LiveNetwork(module)
    assert isinstance(module.extractor[1], KeyedDropout)  # type: ignore[index]
    assert network.live["buffers"] == copy_module_weights(module)["buffers"] == {}
    assert set(module.state_dict()) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("step", [1, 256, 1 << 20], ids=["layers", "batches", "steps"])
def test_how_many_are_dropped_varies_as_chance_would_have_it(step: int) -> None:
    """Masks that were each other's permutations would all drop as many; χ² of 399 degrees, six deviations."""
    size, many, first = 1024, 400, first_key(Stream(5))
    kept = torch.tensor([float((hash_uniform(torch.tensor(first + step * n), size) >= 0.5).sum()) for n in range(many)])
    spread = float(kept.var() / (size / 4)) * (many - 1)
    assert abs(spread - (many - 1)) < 6 * math.sqrt(2 * (many - 1))
