"""L2: where one algorithm must be another, or ordinary training, bit for bit in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.baselines.centralised import Centralised
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.optimisation.fedcycle import FedCycle
from polyclinic.algorithms.optimisation.fednova import FedNova
from polyclinic.algorithms.optimisation.fedprox import FedProx
from polyclinic.algorithms.optimisation.fedsgd import FedSGD
from polyclinic.algorithms.optimisation.scaffold import Scaffold
from polyclinic.core.names import POOLED
from polyclinic.core.options import Optimiser, Training
from polyclinic.data.examples import Images, concatenate
from polyclinic.runs.experiment import pool_sites
from polyclinic.training.network import LiveNetwork, copy_module_weights
from tests.laws.bench import Weighting, clinics, plain_training, play, same, small

SGD = Training(Optimiser(lr=0.1), batch=5)
MOMENTUM = Training(Optimiser(lr=0.1, momentum=0.9, weight_decay=1e-3), batch=5, epochs=2)
ADAM = Training(Optimiser("adam", lr=0.01), batch=5)
NETWORKS: list[Callable[[], LiveNetwork]] = [small, lambda: small(norm=False), lambda: small(dropout=0.4)]
WITH_EACH_NETWORK = pytest.mark.parametrize("network", NETWORKS, ids=["batchnorm", "plain", "dropout"])


@WITH_EACH_NETWORK
@pytest.mark.parametrize("training", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_fedprox_without_its_term_is_fedavg(network: Callable[[], LiveNetwork], training: Training) -> None:
    sites = clinics(12, 7, 16)
    fedavg = play(FedAvg(training), sites, network(), 3)
    assert same(play(FedProx(training, mu=0.0), sites, network(), 3).outcome.state, fedavg.outcome.state)
    assert not same(play(FedProx(training, mu=0.1), sites, network(), 3).outcome.state, fedavg.outcome.state)


@WITH_EACH_NETWORK
@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_scaffolds_first_round_is_fedavg(network: Callable[[], LiveNetwork], weights: Weighting) -> None:
    training = replace(SGD, epochs=2, weights=weights)
    sites = clinics(12, 7, 16)
    for rounds, equal in ((1, True), (2, False)):
        fedavg, scaffold = (play(kind(training), sites, network(), rounds) for kind in (FedAvg, Scaffold))
        assert same(scaffold.weights, fedavg.weights) is equal


@WITH_EACH_NETWORK
@pytest.mark.parametrize("optimiser", [SGD.optimiser, ADAM.optimiser], ids=["sgd", "adam"])
def test_fedcycle_is_fedavg_after_every_epoch_with_uniform_weights(
    network: Callable[[], LiveNetwork], optimiser: Optimiser
) -> None:
    sites = clinics(12, 7, 16, 9)
    training = Training(optimiser, batch=5, epochs=7, weights="examples")
    fedcycle = play(FedCycle(training), sites, network(), 4)
    uniform = replace(training, epochs=1, weights="uniform")
    assert same(fedcycle.outcome.state, play(FedAvg(uniform), sites, network(), 4).outcome.state)
    for other in (replace(uniform, weights="examples"), replace(uniform, epochs=2)):
        assert not same(fedcycle.outcome.state, play(FedAvg(other), sites, network(), 4).outcome.state)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("training", [SGD, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize(
    "kind", [FedAvg, lambda t: FedProx(t, mu=0.0), FedCycle], ids=["fedavg", "fedprox", "fedcycle"]
)
def test_one_site_is_ordinary_training(kind: Callable[[Training], Algorithm], training: Training, norm: bool) -> None:
    """A new optimiser each round, everything else as in any PyTorch tutorial."""
    sites, network, algorithm = clinics(23), small(norm), kind(training)
    played = play(algorithm, sites, network, 3)
    each = 1 if isinstance(algorithm, FedCycle) else training.epochs or 1
    periods = [range(round * each, (round + 1) * each) for round in range(3)]
    train = sites["clinic-1"].train
    assert isinstance(train, Images)
    assert same(played.outcome.state, plain_training(network, train, training, "clinic-1", periods))


@pytest.mark.parametrize("training", [SGD, MOMENTUM], ids=["sgd", "momentum"])
def test_fednova_with_one_site_is_ordinary_training_up_to_rounding(training: Training) -> None:
    """x − τ·((x − y)/τ) is y only in exact arithmetic, so here equality is to a few units of the last place."""
    sites, network = clinics(23), small()
    train, each = sites["clinic-1"].train, training.epochs or 1
    assert isinstance(train, Images)
    played = play(FedNova(training), sites, network, 3)
    periods = [range(round * each, (round + 1) * each) for round in range(3)]
    expected = plain_training(network, train, training, "clinic-1", periods)
    for kind, tensors in expected.items():
        for name, value in tensors.items():
            torch.testing.assert_close(played.outcome.state[kind][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", [SGD, MOMENTUM, ADAM], ids=["sgd", "momentum", "adam"])
def test_centralised_is_ordinary_training_on_everything_with_one_optimiser(training: Training) -> None:
    sites, network, each = clinics(12, 7, 4), small(), training.epochs or 1
    played = play(Centralised(training), sites, network, 3)
    everything = pool_sites(sites).train
    assert isinstance(everything, Images)
    assert same(played.outcome.state, plain_training(network, everything, training, POOLED, [range(3 * each)]))


@pytest.mark.parametrize("weights", ["examples", "uniform"])
def test_one_fedsgd_step_is_a_step_along_the_mean_of_the_full_gradients(weights: Weighting) -> None:
    """By examples that is the gradient over everybody's images; with uniform weights each site counts the same."""
    sites, network = clinics(12, 7, 4, dtype=torch.float64), small(norm=False, dtype=torch.float64)
    training = replace(SGD, weights=weights)
    played = play(FedSGD(training), sites, network, 1)
    module = network.module.train().requires_grad_(True)
    trains = [held.train for held in sites.values() if isinstance(held.train, Images)]
    losses = [F.cross_entropy(module(train.images), train.labels, reduction="sum") for train in trains]
    shares = [1 / 23] * 3 if weights == "examples" else [1 / 12 / 3, 1 / 7 / 3, 1 / 4 / 3]
    module.zero_grad()
    sum(share * loss for share, loss in zip(shares, losses, strict=True)).backward()  # type: ignore[union-attr]
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(played.model[name], parameter.detach() - 0.1 * parameter.grad, rtol=0, atol=1e-13)


def test_fedsgd_on_any_division_of_the_images_is_full_gradient_descent_on_all_of_them() -> None:
    """Five rounds; pooled at one site, in one batch, or divided unequally: the same path, up to rounding."""
    sites, network = clinics(12, 7, 4, dtype=torch.float64), small(norm=False, dtype=torch.float64)
    divided = play(FedSGD(SGD), sites, network, 5)
    train = concatenate([held.train for held in sites.values() if isinstance(held.train, Images)])
    assert isinstance(train, Images)
    whole_batches = replace(SGD, batch=23)
    pooled = plain_training(network, train, whole_batches, "any", [range(5)])
    for name, value in pooled["model"].items():
        torch.testing.assert_close(divided.model[name], value, rtol=0, atol=1e-13)


def test_fedsgds_further_steps_are_further_full_gradient_steps() -> None:
    """With one site, R rounds of S steps are R·S rounds of one."""
    sites, network = clinics(13, dtype=torch.float64), small(norm=False, dtype=torch.float64)
    one = play(FedSGD(SGD), sites, network, 6)
    three = play(FedSGD(SGD, steps_per_round=3), sites, network, 2)
    assert same(one.outcome.state, three.outcome.state)


@WITH_EACH_NETWORK
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kind", [FedAvg, Scaffold, FedNova])
def test_averaging_every_e_epochs_is_averaging_every_tau_steps(
    kind: type[Algorithm], network: Callable[[], LiveNetwork], epochs: int
) -> None:
    """τ = E·(batches per epoch): 3 batches of 5, 5 and 6, since the sixteenth image joins the last batch."""
    sites = clinics(16, 15, 14)
    every_epochs = replace(SGD, epochs=epochs)
    every_steps = replace(SGD, epochs=None, steps=3 * epochs)
    by_epochs, by_steps = (play(kind(t), sites, network(), 3) for t in (every_epochs, every_steps))
    assert same(by_epochs.outcome.state, by_steps.outcome.state)


def test_the_plain_loop_leaves_the_network_as_it_found_it() -> None:
    """Else the comparisons above would compare a run with its own continuation."""
    network = small()
    before = copy_module_weights(network.module)
    train = clinics(12)["clinic-1"].train
    assert isinstance(train, Images)
    trained = plain_training(network, train, SGD, "clinic-1", [range(1)])
    assert same(before, copy_module_weights(network.module))
    assert not same(before, trained)
