"""FedMP's loss by hand: what a step samples of others' features, prototypes, weights; and where nothing is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare
from torch import Tensor
from torch.func import grad_and_value, vmap

from polyclinic.algorithms.representation.fedmp_losses import (
    completion_loss,
    completion_loss_paper,
    prototype_alignment,
    rescale_term,
    sample_bank,
)
from polyclinic.core.network import Objective
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle, Tensors
from polyclinic.training.keyed_dropout import hash_uniform
from polyclinic.training.network import copy_module_weights
from tests.laws.bench import CLASSES, noise, small

VARIANTS = {False: completion_loss, True: completion_loss_paper}
HELD = [5, 0, 2, 9]


def random(*shape: int, name: str = "z") -> Tensor:
    return torch.randn(*shape, generator=Stream(5, (name, *shape)).generator(), dtype=torch.float64)


def a_bank(held: list[int] = HELD, room: int = 9, key: int = 12345) -> Tensors:
    """A feature tells where it lies: (class, place)."""
    places = torch.cartesian_prod(torch.arange(len(held)), torch.arange(room)).view(len(held), room, 2)
    return {"values": places.double(), "held": torch.tensor(held).double(), "key": torch.tensor(key)}


def in_turn(size: int) -> Tensor:
    return torch.arange(size)


def by_share(size: int) -> Tensor:
    return -1 - torch.arange(size)


# What a step samples


@settings(deadline=None)
@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=8), key=st.integers(0, 2**61 - 1))
def test_what_is_drawn_was_received_and_has_its_own_label(labels: list[int], key: int) -> None:
    for slots in (in_turn(40), by_share(40)):
        values, owners, there = sample_bank(a_bank(key=key), torch.tensor(labels), slots)
        assert torch.equal(values[:, 0].long(), owners)
        held = torch.tensor(HELD)[owners]
        assert torch.equal(there.bool(), held > 0), "a slot is empty only where its class has no features"
        assert bool((values[:, 1] < held)[held > 0].all()), "nothing beyond what is held"
        assert bool(there.all()) or bool((slots >= 0).all()), "by share, nobody asks for a class without features"


def test_in_turn_every_class_has_its_slots() -> None:
    _, owners, _ = sample_bank(a_bank(), torch.tensor([0, 1]), in_turn(10))
    assert owners.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def many(slots: Tensor, batches: int = 400) -> tuple[Tensor, Tensor]:
    """Classes and places that batches of random labels draw."""
    labels = torch.randint(4, (batches, 6), generator=Stream(1).generator())
    found = [sample_bank(a_bank(), batch, slots) for batch in labels]
    return torch.cat([owners for _, owners, _ in found]), torch.cat([values[:, 1].long() for values, _, _ in found])


def test_by_share_classes_come_as_often_as_they_were_received_and_each_feature_as_often_as_another() -> None:
    """χ² at 0.1 %."""
    owners, places = many(by_share(50))
    count = np.bincount(owners, minlength=4)
    assert count[1] == 0
    assert chisquare(count[[0, 2, 3]], np.array([5, 2, 9]) / 16 * len(owners)).pvalue > 1e-3
    for label in (0, 2, 3):
        assert chisquare(np.bincount(places[owners == label], minlength=HELD[label])).pvalue > 1e-3
    owners, places = many(in_turn(48))
    for label in (0, 2, 3):
        assert chisquare(np.bincount(places[owners == label], minlength=HELD[label])).pvalue > 1e-3


@pytest.mark.parametrize("slots", [in_turn(64), by_share(64)], ids=["in turn", "by share"])
def test_draws_depend_on_the_key_and_the_labels_in_their_order_and_on_nothing_else(slots: Tensor) -> None:
    def places(labels: list[int], key: int = 1) -> list[list[float]]:
        values, owners, _ = sample_bank(a_bank(key=key), torch.tensor(labels), slots)
        return torch.cat([values, owners[:, None]], 1).tolist()

    first = places([0, 1, 2])
    assert places([0, 1, 2]) == first
    others = [places([0, 1, 2], key=2), places([2, 1, 0]), places([0, 1, 1]), places([0, 1]), places([0, 1, 2, 0])]
    assert all(other != first for other in others)
    alike = [np.mean([a == b for a, b in zip(first, other, strict=True)]) for other in others]
    assert max(alike) < 0.7, "not the same sample shifted by one"


@pytest.mark.parametrize(("key", "place", "slots"), [(105823, 61, by_share(64)), (304093, 70, in_turn(64))])
def test_a_number_that_rounds_to_1_draws_nothing_that_is_not_there(key: int, place: int, slots: Tensor) -> None:
    """Single precision makes 1 of the last of 2³² numbers: one of these keys' is such a number."""
    assert float(hash_uniform(torch.tensor(key), 128)[place]) == 1.0
    bank = {name: t.float() if t.is_floating_point() else t for name, t in a_bank([3, 0, 3, 0], key=key - 1).items()}
    values, owners, there = sample_bank(bank, torch.tensor([0]), slots)
    assert bool((values[:, 1] < 3).all())
    if bool((slots < 0).all()):
        assert bool(there.all())
        assert set(owners.tolist()) == {0, 2}


def test_samples_stack() -> None:
    labels, slots = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.stack([in_turn(9), by_share(9)])
    banks = [a_bank(key=1), a_bank([1, 2, 3, 4], key=2)]
    stacked = {name: torch.stack([bank[name] for bank in banks]) for name in banks[0]}
    for number, found in enumerate(zip(*vmap(sample_bank)(stacked, labels, slots), strict=True)):
        alone = sample_bank(banks[number], labels[number], slots[number])
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))


# Equation 8


LABELS = [[0, 1, 0, 1, 0, 2, 1], [2, 2, 2], [0], [3, 1, 3]]


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("known", [[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]])
def test_alignment_by_hand(labels: list[int], known: list[int]) -> None:
    z, means = random(len(labels), 5), random(4, 5, name="means")
    cosines = []
    for c in sorted(set(labels)):
        if known[c]:
            own = [row for row, label in zip(z, labels, strict=True) if label == c]
            cosines.append(np.mean([float(row @ means[c] / (row.norm() * means[c].norm())) for row in own]))
    told = torch.tensor(known).double()
    corrected, paper = (
        float(prototype_alignment(z, torch.tensor(labels), means, told, paper=paper)) for paper in (False, True)
    )
    assert corrected == pytest.approx(1 - np.mean(cosines) if cosines else 0, abs=1e-12)
    assert paper == pytest.approx(-sum(cosines), abs=1e-12)


# Equation 1


@settings(deadline=None)
@given(term=st.floats(1e-3, 1e3), loss=st.floats(1e-3, 1e3))
def test_terms_are_brought_to_the_losses_size_within_bounds(term: float, loss: float) -> None:
    one, other = torch.tensor(term, dtype=torch.float64), torch.tensor(loss, dtype=torch.float64)
    slope, value = grad_and_value(rescale_term)(one, other, False)
    factor = min(max(term / loss, 0.1), 10)
    assert float(value) == pytest.approx(term / factor, rel=1e-9)
    assert float(slope) == pytest.approx(1 / factor, rel=1e-9), "no gradient through the ratio"
    for sign in (1, -1):
        slope, value = grad_and_value(rescale_term)(sign * one, other, True)
        assert float(value) == pytest.approx(sign * loss, rel=1e-9)
        assert float(slope) == pytest.approx(loss / term, rel=1e-9)


@pytest.mark.parametrize("paper", [False, True])
def test_nothing_divided_by_nothing_is_nothing(paper: bool) -> None:
    zero = torch.zeros((), dtype=torch.float64)
    for term, loss in ((zero, zero), (zero, zero + 1)):
        slope, value = grad_and_value(rescale_term)(term, loss, paper)
        assert (float(slope), float(value)) == (0.0, 0.0)
    slope, value = grad_and_value(rescale_term)(zero + 1, zero, paper)
    assert bool(torch.isfinite(slope))
    assert 0 < float(value) <= 0.1, "a network that makes no error learns little from others"


def reference_of(held: list[int], known: list[int], balanced: bool = True) -> Bundle:
    values = random(CLASSES, 7, 16, name="others")
    bank = {"values": values, "held": torch.tensor(held).double(), "key": torch.tensor(3)}
    prototypes = {"means": random(CLASSES, 16, name="prototypes"), "known": torch.tensor(known).double()}
    sample = in_turn(8) if balanced else by_share(8)
    return {"bank": bank, "scalars": {"sample": sample}, "prototypes": prototypes}


@pytest.mark.parametrize("paper", VARIANTS)
@pytest.mark.parametrize("balanced", [True, False])
def test_the_whole_loss_by_hand(paper: bool, balanced: bool) -> None:
    """Two networks, as those in training mode move their statistics."""
    networks = [small(dtype=torch.float64) for _ in range(2)]
    data, reference = noise(9, "batch", dtype=torch.float64), reference_of([4, 0, 7], [1, 1, 0], balanced)
    for network in networks:
        network.set_training_mode(frozenset(network.live["model"]))
    found = VARIANTS[paper](networks[0], networks[0].live, (data.images, data.labels), reference)
    z = networks[1].module.extractor(data.images)
    task = F.cross_entropy(networks[1].module.head(z), data.labels)
    values, owners, there = sample_bank(reference["bank"], data.labels, reference["scalars"]["sample"])
    chosen = there > 0
    completion = F.cross_entropy(networks[1].module.head(values[chosen]), owners[chosen])
    alignment = prototype_alignment(z, data.labels, **reference["prototypes"], paper=paper)
    if paper:
        hand = 2 * task + alignment / (alignment / task).abs()
    else:
        ratios = [float((term / task).detach().clamp(0.1, 10)) for term in (completion, alignment)]
        hand = task + completion / ratios[0] + alignment / ratios[1]
    assert found.item() == pytest.approx(hand.item(), rel=1e-12)


@pytest.mark.parametrize("objective", VARIANTS.values())
def test_where_nothing_is_known_it_is_cross_entropy(objective: Objective) -> None:
    """No class of the batch has a prototype, nobody holds features; or the reference is empty."""
    data, network = noise(9, "batch", dtype=torch.float64), small(dtype=torch.float64)
    weights, batch = copy_module_weights(network.module), (data.images, data.labels)
    own = dict(weights["model"])

    def loss(model: Tensors, reference: Bundle) -> Tensor:
        return objective(network, {**weights, "model": model}, batch, reference)

    network.set_eval_mode()
    wanted, value = grad_and_value(lambda model: network.loss({**weights, "model": model}, batch))(own)
    for reference in (reference_of([0, 0, 0], [0, 0, 0]), reference_of([0, 0, 0], [0, 0, 0], False), {}):
        slopes, found = grad_and_value(loss)(own, reference)
        assert torch.equal(found, value)
        for name, slope in slopes.items():
            torch.testing.assert_close(slope, wanted[name], rtol=1e-12, atol=1e-14)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**20))
def test_images_and_prototypes_of_zeros_do_no_harm(seed: int) -> None:
    """A ReLU network may make nothing of an image, or of a class."""
    z = torch.randn(6, 4, generator=Stream(seed).generator(), dtype=torch.float64).relu()
    z[0], labels = 0.0, torch.tensor([0, 0, 1, 1, 2, 2])
    means = torch.zeros(3, 4, dtype=torch.float64)
    means[0] = 1.0
    for paper in VARIANTS:
        call = grad_and_value(
            lambda z, paper=paper: rescale_term(
                prototype_alignment(z, labels, means, z.new_ones(3), paper), z.new_ones(()), paper
            )
        )
        slope, value = call(z)
        assert bool(slope.isfinite().all())
        assert bool(value.isfinite())
