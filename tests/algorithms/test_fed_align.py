"""Fed-Align: gradients that reach where they should, discriminators that stay at home, features that mix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from torch import Tensor

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.representation.fed_align import FedAlign
from polyclinic.algorithms.representation.fed_align_losses import (
    DISCRIMINATOR,
    Discriminator,
    alignment_loss,
    discriminator_loss,
)
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.core.jobs import Update
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import AUX_PREFIX, Bundle, SiteId
from polyclinic.data.builtin.digits import DigitsOptions, load_digit_images
from polyclinic.data.examples import Images, SiteData
from polyclinic.models import build_model
from polyclinic.runs.experiment import run
from polyclinic.training.network import LiveNetwork, with_auxiliary
from tests.laws.bench import CLASSES, clinics, noise, play, same, site, small, tapped
from tests.small import tiny

SGD = Training(Optimiser(lr=0.1), batch=5)
ADAM = Training(Optimiser("adam", lr=0.01), batch=5, epochs=2)
SITES = ("clinic-1", "clinic-2", "clinic-3")
NETWORKS: list[Callable[[], LiveNetwork]] = [small, lambda: small(norm=False), lambda: small(dropout=0.4)]


# Where it is FedAvg


@pytest.mark.parametrize("training", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("network", NETWORKS, ids=["batchnorm", "plain", "dropout"])
def test_without_alignment_and_while_it_warms_up_it_is_fedavg(
    network: Callable[[], LiveNetwork], training: Training
) -> None:
    fedavg = play(FedAvg(training), clinics(12, 7, 16), network(), 3).outcome.state
    assert same(play(FedAlign(training, align=0.0), clinics(12, 7, 16), network(), 3).outcome.state, fedavg)
    warming = play(FedAlign(training, warmup=3), clinics(12, 7, 16), network(), 3).outcome.state
    assert same({kind: warming[kind] for kind in ("model", "buffers")}, fedavg)
    aligned = play(FedAlign(training, warmup=0), clinics(12, 7, 16), network(), 3).outcome.state
    assert not same({kind: aligned[kind] for kind in ("model", "buffers")}, fedavg)


# The losses


def ready() -> tuple[LiveNetwork, Bundle, Bundle]:
    network = with_auxiliary(small(norm=False), FedAlign().auxiliary, (16,), CLASSES, Stream(1))
    own, others = torch.randn(2, 6, 16, generator=Stream(2).generator())
    reference = {
        "own": {"values": own, "there": torch.tensor([1.0, 1, 1, 0, 0, 0])},
        "others": {"values": others, "there": torch.tensor([1.0, 1, 1, 1, 0, 0])},
        "scalars": {"align": torch.tensor(0.5)},
    }
    network.require_gradients(frozenset(network.live["model"]))
    return network, network.live, reference


def moved(network: LiveNetwork) -> set[str]:
    found = {n.split(".")[0] for n, p in network.live["model"].items() if p.grad is not None and p.grad.abs().max() > 0}
    for parameter in network.live["model"].values():
        parameter.grad = None
    return found


def test_losses_are_those_of_the_equations_and_move_what_they_should() -> None:
    network, weights, reference = ready()
    batch = noise(8).batch(torch.arange(8))
    banks = reference["own"]["values"][:3], reference["others"]["values"][:4]
    mine, theirs = (network.auxiliary(weights, DISCRIMINATOR, bank).detach() for bank in banks)
    loss = discriminator_loss(network, weights, batch, reference)
    torch.testing.assert_close(loss, -torch.sigmoid(mine).log().mean() - (1 - torch.sigmoid(theirs)).log().mean())
    loss.backward()  # type: ignore[no-untyped-call]
    assert moved(network) == {AUX_PREFIX.rstrip(".")}
    doubt = torch.sigmoid(network.auxiliary(weights, DISCRIMINATOR, network.features(weights, batch[0]))).detach()
    wanted = network.loss(weights, batch) - 0.5 * (doubt.log() + (1 - doubt).log()).mean() / 2
    loss = alignment_loss(network, weights, batch, reference)
    torch.testing.assert_close(loss, wanted)


def test_alignment_alone_has_a_gradient_on_the_extractor_and_brings_doubt() -> None:
    """In the authors' released code it has none."""
    network, weights, reference = ready()
    batch = noise(8).batch(torch.arange(8))
    extractor = [p for n, p in weights["model"].items() if n.startswith("extractor.")]

    def certainty() -> Tensor:
        return network.auxiliary(weights, DISCRIMINATOR, network.features(weights, batch[0])).square().mean()

    alone = alignment_loss(network, weights, batch, reference) - network.loss(weights, batch)
    gradients = torch.autograd.grad(alone, extractor)
    assert min(float(gradient.abs().max()) for gradient in gradients) > 0
    before = certainty()
    with torch.no_grad():
        for parameter, gradient in zip(extractor, gradients, strict=True):
            parameter -= 0.1 * gradient
        assert bool(certainty() < before)


# Who has what


def test_discriminators_stay_at_their_sites_and_differ() -> None:
    played, letters = tapped(FedAlign(SGD, warmup=0), clinics(12, 7, 16), small(), 3)
    for letter in letters:
        for message in (letter.sent, letter.answer):
            assert not any(name.startswith(AUX_PREFIX) for group in message.tensors.values() for name in group)
    kept = [played.remembered(name) for name in SITES]
    weights = [own["model"][f"{AUX_PREFIX}{DISCRIMINATOR}.enter.weight"] for own in kept if own]
    assert len(weights) == 3
    assert not torch.equal(weights[0], weights[1])
    assert not any(name.startswith(AUX_PREFIX) for name in played.model)


def test_more_lessons_move_a_discriminator_further_and_warm_up_not_at_all() -> None:
    """Plain SGD on a loss that hardly changes: k steps go about k times as far."""
    still, once, often = (
        play(FedAlign(SGD, warmup=warmup, align=0.1, lessons=lessons), clinics(12, 7, 16), small(), 2).remembered(
            SITES[0]
        )
        for warmup, lessons in ((2, 1), (1, 1), (1, 5))
    )
    assert still is not None
    assert once is not None
    assert often is not None
    name = f"{AUX_PREFIX}{DISCRIMINATOR}.enter.weight"
    start, one, five = (own["model"][name] for own in (still, once, often))
    assert 3 < float((five - start).norm() / (one - start).norm()) < 6


def test_a_site_hears_the_last_features_of_others_without_labels() -> None:
    _, letters = tapped(FedAlign(SGD, warmup=0, bank=4, receive=5), clinics(12, 7, 16), small(), 3)
    for letter in (each for each in letters if each.round > 1):
        heard = letter.sent.tensors["others"]
        assert set(heard) == {"values", "held"}
        assert int(heard["held"]) == 5
        told = {  # what each told a round ago
            other.site: other.answer.tensors["features"]["values"][0]
            for other in letters
            if other.round == letter.round - 1
        }
        own = told.pop(letter.site)
        everyone = torch.cat(list(told.values()))
        for row in heard["values"][0][:5]:
            assert bool((row == everyone).all(1).any())
            assert not bool((row == own).all(1).any())
    assert int(letters[0].sent.tensors["others"]["held"]) == 0


def test_noise_is_on_parameters_and_features_and_never_on_statistics() -> None:
    made = (FedAlign(SGD, variance=variance, warmup=1) for variance in (0.0, 0.04))
    (_, plain), (_, noisy) = (tapped(algorithm, clinics(12, 7, 16), small(), rounds=2) for algorithm in made)
    for one, other in zip(plain[:3], noisy[:3], strict=True):  # round 1, which both begin with the same weights
        assert same({"buffers": one.answer.tensors["buffers"]}, {"buffers": other.answer.tensors["buffers"]})
        difference = torch.cat(
            [(other.answer.tensors["model"][n] - t).flatten() for n, t in one.answer.tensors["model"].items()]
        )
        assert 0.15 < float(difference.std()) < 0.25
        held = int(one.answer.tensors["features"]["held"])
        features = [letter.answer.tensors["features"]["values"][0, :held] for letter in (one, other)]
        assert 0.15 < float((features[1] - features[0]).std()) < 0.25


def test_features_leave_only_when_somebody_will_look_at_them() -> None:
    _, letters = tapped(FedAlign(SGD, warmup=2), clinics(12, 7, 16), small(), rounds=4)
    sent = {letter.round for letter in letters if "features" in letter.answer.tensors}
    assert sent == {2, 3}, "the warm-up ends with round 2, and after round 4 there is none"


def test_noise_without_clipping_is_called_no_guarantee() -> None:
    assert "no privacy guarantee" in FedAlign(variance=0.001).warning()
    assert FedAlign().warning() == ""


@pytest.mark.parametrize("held", [-1.0, 65.0, 0.5])
def test_a_site_cannot_claim_features_that_it_did_not_send(held: float) -> None:
    tensors = {"features": {"values": torch.zeros(1, 64, 16), "held": torch.tensor([held])}}
    with pytest.raises(Refused, match="not whole and from 0 to 64"):
        FedAlign().check_update(Update(tensors, 5))


@pytest.mark.parametrize("option", ["align", "warmup", "bank", "receive", "hidden", "lessons", "variance"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(RecipeError, match=rf"algorithm.{option} is -1, but should be "):
        FedAlign(**{option: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize(("unit", "told"), [("image", "algorithm.align: 0"), ("site", "this algorithm sends more")])
def test_a_privacy_plan_is_refused(unit: str, told: str) -> None:
    plan = {"unit": unit, "epsilon": 5, "delta": 1e-3, "clip": 1.0, "randomness": "seed"}
    with pytest.raises(RecipeError, match=told):
        run(tiny(algorithm="fed-align", privacy=plan))
    assert run(tiny(algorithm={"name": "fed-align", "align": 0}, privacy=plan)).summary.privacy


# What it is for


def two_scanners() -> dict[SiteId, SiteData]:
    """Real digits: at one site as they are, at the other of lower contrast and brighter; both noisy."""
    found = load_digit_images(DigitsOptions(), Stream(0))
    images, labels = found.images[:1200].float() / 255, found.labels[:1200]
    images = torch.cat([images[:600], 0.7 * images[600:] + 0.2])
    images = images + 0.3 * torch.randn(images.shape, generator=Stream(9).generator())
    halves = {"first": slice(0, 600), "second": slice(600, 1200)}
    return {name: site(name, Images(images[half], labels[half])) for name, half in halves.items()}


def told_and_right(algorithm: FedAvg, rounds: int) -> tuple[float, float]:
    """How often a probe tells the scanner by an image's features, and the network its class."""
    network = LiveNetwork(build_model("mlp", classes=10, channels=1, size=8, seed=Stream(5)))
    weights, sites = play(algorithm, two_scanners(), network, rounds).weights, two_scanners().values()
    network.set_eval_mode()
    with torch.no_grad():
        seen = [network.features(weights, held.train.batch(torch.arange(600))[0]) for held in sites]
        logits = torch.cat([network.head(weights, features) for features in seen])
    labels = torch.cat([held.train.labels for held in sites])
    probe = LogisticRegression(max_iter=3000)
    told = cross_val_score(probe, torch.cat(seen).numpy(), [0] * 600 + [1] * 600, cv=3).mean()
    return float(told), float((logits.argmax(1) == labels).float().mean())


def test_features_of_two_scanners_are_harder_to_tell_apart_than_after_fedavg() -> None:
    training = Training(Optimiser(lr=0.1), batch=32)
    told, right = told_and_right(FedAlign(training, warmup=2, hidden=16, bank=300, receive=300), 25)
    plainly_told, plainly_right = told_and_right(FedAvg(training), 25)
    assert told < plainly_told - 0.04
    assert right > plainly_right - 0.03


def test_a_discriminator_is_two_dense_layers() -> None:
    assert sum(p.numel() for p in Discriminator(256, 4).parameters()) == 256 * 4 + 4 + 4 + 1
