"""Made-up features: FRAug's networks and objectives by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.func import grad_and_value, vmap

from polyclinic.algorithms.representation.fraug import FRAug
from polyclinic.algorithms.representation.fraug_losses import (
    ClassMeans,
    FeatureGenerator,
    FeatureTransform,
    augmentation_loss,
    generator_loss,
    mean_entropy,
    sample_seen_labels,
    squared_mmd,
    transform_loss,
)
from polyclinic.core.network import Objective
from polyclinic.core.options import Optimiser, Training
from polyclinic.core.rng import Stream
from polyclinic.core.types import Bundle
from polyclinic.training.keyed_dropout import hash_uniform
from polyclinic.training.network import build_with_seed
from tests.laws.bench import CLASSES, clinics, noise, small, with_beside

SGD = Training(Optimiser(lr=0.1), batch=5)
WIDTH, LATENT = 16, 8
MET = torch.tensor([3, 0, 2])
"""In how many batches a site has met each class: never the second."""
IMAGES, LABELS = noise(6, "fraug", dtype=torch.float64).images, torch.tensor([0, 2, 2, 0, 2, 0])


def random(*shape: int, name: str = "v") -> Tensor:
    return torch.randn(*shape, generator=Stream(5, (name, *shape)).generator(), dtype=torch.float64)


# The networks, equations 1 and 6


def normalised(rows: Tensor, training: bool) -> Tensor:
    """BatchNorm as it begins: by the batch, or by a mean of 0 and a variance of 1."""
    centre, spread = (rows.mean(0), rows.var(0, unbiased=False)) if training else (0.0, torch.ones(1))
    return (rows - centre) / (spread + 1e-5).sqrt()


@pytest.mark.parametrize("training", [False, True])
def test_the_generator_and_the_transformation_by_hand(training: bool) -> None:
    z, y, made = random(5, LATENT, name="z"), F.one_hot(torch.tensor([0, 1, 2, 1, 0])).double(), random(5, WIDTH)
    generator = build_with_seed(lambda: FeatureGenerator(LATENT, CLASSES, WIDTH), Stream(1)).double().train(training)
    transform = build_with_seed(lambda: FeatureTransform(LATENT, CLASSES, WIDTH), Stream(2)).double().train(training)
    for network, rows, last in ((generator, z, torch.relu), (transform, made, torch.nn.Identity())):
        inner = torch.relu(normalised(network.enter(torch.cat([rows, y], 1)), training))
        torch.testing.assert_close(network(rows, y), last(normalised(network.leave(inner), training)))


def test_means_of_classes_by_hand() -> None:
    means = ClassMeans(3, 2, momentum=0.3).double()
    first, second = torch.tensor([[2.0, 0], [4, 2], [7, 7]]).double(), torch.tensor([[5.0, 5]]).double()
    after = means(first, F.one_hot(torch.tensor([0, 0, 2]), 3).double())
    assert after.tolist() == [[3.0, 1.0], [0.0, 0.0], [7.0, 7.0]], "the first value starts a mean"
    after = means(second, F.one_hot(torch.tensor([0]), 3).double())
    torch.testing.assert_close(after[0], torch.tensor([0.7 * 3 + 0.3 * 5, 0.7 * 1 + 0.3 * 5]).double())
    assert torch.equal(means.value, after)
    assert means.times.tolist() == [2, 0, 1]
    means.eval()(second, F.one_hot(torch.tensor([1]), 3).double())
    assert torch.equal(means.value, after), "evaluation moves nothing"
    assert means.times.tolist() == [2, 0, 1]


@given(
    met=st.lists(st.integers(0, 3), min_size=2, max_size=7).filter(any), count=st.integers(2, 12), key=st.integers(0)
)
def test_labels_are_of_all_classes_alike_that_were_met(met: list[int], count: int, key: int) -> None:
    weights: Bundle = {"buffers": {"auxiliary.means.times": torch.tensor(met)}}
    found = sample_seen_labels(weights, count, torch.tensor(key % 2**60)).tolist()
    there = [c for c, times in enumerate(met) if times]
    counts = [found.count(c) for c in there]
    assert len(found) == count == sum(counts)
    assert max(counts) - min(counts) <= 1


def test_labels_begin_anywhere() -> None:
    weights: Bundle = {"buffers": {"auxiliary.means.times": torch.tensor([1, 1, 0, 1, 1])}}
    assert {int(sample_seen_labels(weights, 2, torch.tensor(key))[0]) for key in range(60)} == {0, 1, 3, 4}


# The distance of two samples, and uncertainty


def mmd_by_hand(one: Tensor, other: Tensor) -> float:
    """Pair by pair, as the authors' code has it for samples of one size."""
    rows = [*one.numpy(), *other.numpy()]
    far = np.array([[float(((a - b) ** 2).sum()) for b in rows] for a in rows])
    width = far.sum() / (len(rows) ** 2 - len(rows)) / 2.0 ** (5 // 2)
    kernel = sum(np.exp(-far / (width * 2.0**i)) for i in range(5))
    n = len(one)
    return float(kernel[:n, :n].mean() + kernel[n:, n:].mean() - kernel[:n, n:].mean() - kernel[n:, :n].mean())


@settings(deadline=None)
@given(
    one=st.integers(1, 7), other=st.integers(1, 7), offset=st.sampled_from([0.0, 1.0, 40.0]), width=st.integers(1, 5)
)
def test_discrepancy_by_hand(one: int, other: int, offset: float, width: int) -> None:
    x, y = random(one, width, name="x"), random(other, width, name="y") + offset
    assert float(squared_mmd(x, y)) == pytest.approx(mmd_by_hand(x, y), abs=1e-9)
    assert float(squared_mmd(x, x)) == pytest.approx(0, abs=1e-12)
    assert -1e-12 <= float(squared_mmd(x, y)) <= 10


def test_discrepancy_has_a_slope_everywhere_falls_along_it_and_stacks() -> None:
    x, y = random(6, 4, name="x"), random(5, 4, name="y") + 1
    slope, before = grad_and_value(squared_mmd)(x, y)
    assert float(squared_mmd(x - 0.01 * slope, y)) < float(before)
    for same_rows in (torch.zeros(3, 4), torch.ones(3, 4)):
        slope, _ = grad_and_value(squared_mmd)(same_rows, same_rows)
        assert bool((slope == 0).all()), "features that are all dead"
    many = torch.stack([x, 2 * x, x + 1])
    alone = torch.stack([squared_mmd(rows, y) for rows in many])
    torch.testing.assert_close(vmap(squared_mmd, (0, None))(many, y), alone, rtol=1e-12, atol=1e-12)


def test_entropy_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.25, 0.5], [1 / 3, 1 / 3, 1 / 3]]).double()) + 4
    assert float(mean_entropy(logits)) == pytest.approx((1.5 * math.log(2) + math.log(3)) / 2)
    assert float(mean_entropy(torch.tensor([[900.0, -900.0]]))) == 0.0


# The objectives, equations 2 to 5


class Scene:
    """A network with something of its own in every part, and the same parts as plain modules."""

    def __init__(self, **network: Any) -> None:
        self.method = FRAug(SGD, away=0.7, near=1.3)
        self.network = with_beside(self.method, clinics(8, dtype=torch.float64), small(dtype=torch.float64, **network))
        weights, draw = self.network.copy_weights(), Stream(3, ("scene",)).generator()
        for name, tensor in weights["buffers"].items():
            if tensor.is_floating_point():
                weights["buffers"][name] = torch.rand(tensor.shape, generator=draw, dtype=tensor.dtype) + 0.5
        weights["buffers"]["auxiliary.means.times"] = MET
        self.weights = self.network.load_weights(weights)
        self.means = weights["buffers"]["auxiliary.means.value"]
        self.network.set_training_mode(frozenset(self.weights["model"]))
        self.key = 1 << 40
        numbers = {"rho": 0.6, "lambda": 0.4, "away": 0.7, "near": 1.3}
        scalars = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
        self.reference: Bundle = {"scalars": {**scalars, "key": torch.tensor(self.key)}}
        self.module, parts = self.network.module, self.network.auxiliary_modules
        self.generator, self.transform = parts["generator"], parts["transform"]

    def slopes(self, objective: Objective) -> tuple[Tensor, dict[str, Tensor | None]]:
        loss = objective(self.network, self.weights, (IMAGES, LABELS), self.reference)
        names = list(self.weights["model"])
        found = torch.autograd.grad(loss, [self.weights["model"][n] for n in names], allow_unused=True)
        return loss.detach(), dict(zip(names, found, strict=True))

    def drawn(self, which: int, met: int, rows: int) -> Tensor:
        """The noise of a step's `which`-th draw."""
        key = torch.tensor(self.key + met * 256 + which)
        return hash_uniform(key, rows * LATENT).reshape(rows, LATENT).double()

    def even(self, which: int, met: int) -> Tensor:
        """Six labels, evenly of the two classes that were met."""
        begin = int(hash_uniform(torch.tensor(self.key + met * 256 + which), 1) * 2)
        return torch.tensor([[0, 2], [2, 0]][begin] * 3)


def hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels, CLASSES).double()


@pytest.mark.parametrize("norm", [False, True])
def test_the_models_loss_by_hand(norm: bool) -> None:
    scene, hand = Scene(norm=norm), Scene(norm=norm)
    loss, slopes = scene.slopes(augmentation_loss)
    v = hand.module.extractor(IMAGES)
    task = F.cross_entropy(hand.module.head(v), LABELS)
    means = hand.means.clone()
    for c in (0, 2):
        means[c] = 0.7 * means[c] + 0.3 * v[LABELS.eq(c)].detach().mean(0)  # (6)
    torch.testing.assert_close(scene.weights["buffers"]["auxiliary.means.value"], means)
    met = int(MET.sum()) + 2
    y = torch.cat([LABELS, hand.even(0, met)])
    own = torch.cat([v.detach(), means[y[6:]]])
    made = hand.generator.eval()(hand.drawn(1, met, 12), hot(y))  # (1)
    around = own + 0.6 * hand.transform.eval()(made, hot(y)).detach()  # (2)
    synthetic = F.cross_entropy(hand.module.head(around), y)
    assert float(loss) == pytest.approx((0.6 * task + 0.4 * synthetic).item(), abs=1e-12)  # (3)
    names = [n for n in slopes if n.startswith(("extractor.", "head."))]
    moved = [hand.weights["model"][n] for n in names]
    alone = dict(zip(names, torch.autograd.grad(0.6 * task, moved, retain_graph=True), strict=True))
    both = dict(zip(names, torch.autograd.grad(0.6 * task + 0.4 * synthetic, moved), strict=True))
    for name in names:
        wanted = both if name.startswith("head.") else alone
        torch.testing.assert_close(slopes[name], wanted[name], msg=f"{name}: only the head learns of made-up features")
    still = "auxiliary.generator.enter_norm.running_mean"
    assert torch.equal(scene.weights["buffers"][still], hand.weights["buffers"][still])


@pytest.mark.parametrize("norm", [False, True])
def test_the_generators_loss_by_hand(norm: bool) -> None:
    scene, hand = Scene(norm=norm), Scene(norm=norm)
    before = hand.network.copy_weights()
    loss, slopes = scene.slopes(generator_loss)
    v, met = hand.module.eval().extractor(IMAGES).detach(), int(MET.sum())
    y = hand.even(2, met)
    made = hand.generator(hand.drawn(3, met, 6), hot(y))  # (1)
    wanted = F.cross_entropy(hand.module.head(made), y) - 0.7 * squared_mmd(made, v)  # (4)
    assert float(loss) == pytest.approx(float(wanted.detach()), abs=1e-12)
    assert {n for n, slope in slopes.items() if slope is not None} == {
        n for n in slopes if n.startswith(("auxiliary.generator.", "head."))
    }
    changed = {n for n, t in scene.weights["buffers"].items() if not torch.equal(t, before["buffers"][n])}
    layers = {"auxiliary.generator.enter_norm", "auxiliary.generator.leave_norm"}
    assert {n.rpartition(".")[0] for n in changed} == layers


@pytest.mark.parametrize("norm", [False, True])
def test_the_transformations_loss_by_hand(norm: bool) -> None:
    scene, hand = Scene(norm=norm), Scene(norm=norm)
    before = hand.network.copy_weights()
    loss, _ = scene.slopes(transform_loss)
    v, met = hand.module.eval().extractor(IMAGES).detach(), int(MET.sum())
    y = torch.cat([LABELS, hand.even(4, met)])
    own = torch.cat([v, hand.means[y[6:]]])
    made = hand.generator.eval()(hand.drawn(5, met, 12), hot(y)).detach()
    around = own + hand.transform(made, hot(y))  # (2)
    far = (squared_mmd(around[:6], own[:6]) + squared_mmd(around[6:], own[6:])) / 2
    chance = torch.softmax(hand.module.head(around), 1)
    wanted = 1.3 * far + (chance * chance.log()).sum(1).mean()  # (5)
    assert float(loss) == pytest.approx(float(wanted.detach()), abs=1e-12)
    changed = {n for n, t in scene.weights["buffers"].items() if not torch.equal(t, before["buffers"][n])}
    layers = {"auxiliary.transform.enter_norm", "auxiliary.transform.leave_norm"}
    assert {n.rpartition(".")[0] for n in changed} == layers


def test_each_network_steps_where_its_equation_says() -> None:
    """A generator's step makes it known and far, a transformation's makes heads unsure: each alone, by its weight."""
    for objective, part in ((generator_loss, "auxiliary.generator."), (transform_loss, "auxiliary.transform.")):
        scene = Scene()
        before, slopes = scene.slopes(objective)
        mine = {name: slope for name, slope in slopes.items() if name.startswith(part) and slope is not None}
        length = float(torch.cat([slope.flatten() for slope in mine.values()]).norm())
        with torch.no_grad():
            for name, slope in mine.items():
                scene.weights["model"][name] -= 1e-4 / length * slope
        after, _ = scene.slopes(objective)
        assert float(after) < float(before)
