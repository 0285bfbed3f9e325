"""Looking without touching: `Score` over all of a part, in its own order, in evaluation mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyclinic.core.jobs import Score
from polyclinic.core.network import Network
from polyclinic.core.options import Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Batch, Bundle, Tensors
from polyclinic.training.fit import fit, score
from polyclinic.training.losses import predict_probabilities
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.laws.bench import noise, same, small
from tests.training.jobs import at_round, job

DATA = noise(23, "scored")


def mean_image_and_loss(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    return {"image": batch[0].mean(0) + reference["shift"]["by"], "loss": network.loss(weights, batch)}


def trained() -> tuple[LiveNetwork, Bundle]:
    """A network whose BatchNorm has moved and whose dropout is on: evaluation mode must matter."""
    network = small(dropout=0.5)
    fitted = fit(job(network, Training(batch=5)), network, noise(16), at_round(1), Stream(0))
    network.module.train()
    return network, fitted.weights


def in_evaluation_mode(weights: Bundle) -> Tensor:
    network = small(dropout=0.5)
    network.load_weights(weights)
    with torch.no_grad():
        logits: Tensor = network.module.eval()(DATA.images)
    return logits


@pytest.mark.parametrize("batch", [1, 4, 22, 23, 100])
def test_rows_come_in_the_parts_own_order_whatever_the_batch(batch: int) -> None:
    network, weights = trained()
    found = score(Score(weights, predict_probabilities), network, DATA, batch)
    torch.testing.assert_close(found["probabilities"], in_evaluation_mode(weights).softmax(-1))
    assert torch.equal(found["labels"], DATA.labels)


@pytest.mark.parametrize("batch", [1, 4, 22, 23, 100])
def test_means_are_over_examples_not_over_batches(batch: int) -> None:
    network, weights = trained()
    ask = Score(weights, mean_image_and_loss, {"shift": {"by": torch.tensor(2.0)}}, reduce="mean")
    found = score(ask, network, DATA, batch)
    expected = torch.nn.functional.cross_entropy(in_evaluation_mode(weights), DATA.labels)
    torch.testing.assert_close(found["loss"], expected)
    torch.testing.assert_close(found["image"], DATA.images.mean(0) + 2)


def test_looking_changes_nothing() -> None:
    network, weights = trained()
    copy = {kind: {n: t.clone() for n, t in group.items()} for kind, group in weights.items()}
    score(Score(weights, predict_probabilities), network, DATA, 7)
    assert same(weights, copy)
    assert same(copy_module_weights(network.module), copy)


def test_a_part_without_examples_has_no_rows() -> None:
    network, weights = trained()
    found = score(Score(weights, predict_probabilities), network, DATA.subset(torch.arange(0)), 7)
    assert found["probabilities"].shape == (0, 3)


def test_other_weights_than_the_loaded_ones_are_called_functionally() -> None:
    """A teacher beside the student: same answers as if it had been loaded, the live weights untouched."""
    network, weights = trained()
    other = copy_module_weights(small().module)
    network.load_weights(weights)
    network.module.eval()
    with torch.no_grad():
        beside, features = network(other, DATA.images), network.features(other, DATA.images)
        assert same(copy_module_weights(network.module), weights)
        live = network.load_weights(other)
        torch.testing.assert_close(network(live, DATA.images), beside)
        torch.testing.assert_close(network.features(live, DATA.images), features)
