"""Distillation and contrast against their formulas, closed forms and limits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

from polyclinic.algorithms.distillation import Teacher, supcon_loss
from polyclinic.core.rng import Stream
from polyclinic.training.losses import softened_kl
from tests.algorithms.distillation.digits import good, network, parts


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=Stream(seed, ("normal",)).generator())


@given(st.integers(0, 999), st.floats(0.1, 50), st.floats(-50, 50))
def test_equal_predictions_cost_nothing_and_others_something(seed: int, temperature: float, shift: float) -> None:
    """Adding a number to all logits of an image changes no prediction."""
    logits = normal(5, 4, seed=seed)
    assert float(softened_kl(logits, logits + shift, temperature)) == pytest.approx(0, abs=1e-9)
    assert float(softened_kl(logits, logits.flip(-1), temperature)) > 0


def test_distillation_is_the_divergence_of_the_teacher_from_the_student_written_out() -> None:
    student, teacher, T = normal(6, 3, seed=1), normal(6, 3, seed=2), 3.0
    p, q = ((z / T).exp() / (z / T).exp().sum(-1, keepdim=True) for z in (teacher, student))
    wanted = T**2 * sum(p[n, c] * math.log(p[n, c] / q[n, c]) for n in range(6) for c in range(3)) / 6
    assert float(softened_kl(student, teacher, T)) == pytest.approx(float(wanted), rel=1e-12)
    assert float(softened_kl(teacher, student, T)) != pytest.approx(float(wanted), rel=1e-3)


def test_two_classes_at_temperature_one_by_hand() -> None:
    """Teacher 3:1, student undecided: ¾·ln(3/2) + ¼·ln(1/2)."""
    found = softened_kl(torch.zeros(1, 2), torch.tensor([[math.log(3.0), 0.0]]), 1.0)
    assert float(found) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)


def test_its_gradient_is_the_difference_of_the_predictions() -> None:
    """∂L/∂z_student = T·(ỹ_student − ỹ_teacher)/N."""
    student, teacher, T = normal(4, 5, seed=3).requires_grad_(), normal(4, 5, seed=4), 2.5
    (found,) = torch.autograd.grad(softened_kl(student, teacher, T), student)
    wanted = T * (torch.softmax(student / T, -1) - torch.softmax(teacher / T, -1)) / 4
    torch.testing.assert_close(found, wanted.detach())


def test_at_high_temperature_it_matches_centred_logits() -> None:
    """Hinton, Vinyals and Dean 2015, section 2.1: the gradient tends to (z_student − z_teacher)/(N·C)."""
    student, teacher = normal(4, 5, seed=5).requires_grad_(), normal(4, 5, seed=6)
    (found,) = torch.autograd.grad(softened_kl(student, teacher, 1e5), student)
    difference = (student - teacher).detach()
    wanted = (difference - difference.mean(-1, keepdim=True)) / (4 * 5)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def khosla(embeddings: Tensor, labels: Tensor, tau: float) -> float:
    """L_out of their equation 2, word by word, as a mean over the anchors that have positives."""
    z = [row / row.norm() for row in embeddings.double()]
    losses = []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        positives = [p for p in others if labels[p] == labels[i]]
        total = sum(math.exp(float(z[i] @ z[a]) / tau) for a in others)
        terms = [math.log(math.exp(float(z[i] @ z[p]) / tau) / total) for p in positives]
        if positives:
            losses.append(-sum(terms) / len(positives))
    return sum(losses) / len(losses)


@given(st.integers(0, 999), st.floats(0.05, 5), st.integers(1, 4))
def test_contrast_equals_the_formula_of_its_paper(seed: int, tau: float, classes: int) -> None:
    embeddings = normal(12, 3, seed=seed)
    labels = torch.randint(classes, (6,), generator=Stream(seed).generator()).repeat(2)
    assert float(supcon_loss(embeddings, labels, tau)) == pytest.approx(khosla(embeddings, labels, tau), rel=1e-9)


def test_four_points_by_hand() -> None:
    """Two pairs at right angles, τ = 1: each anchor has e¹ for its positive and twice e⁰ for the others."""
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 0.0], [0.0, 0.1]])
    found = supcon_loss(points, torch.tensor([0, 1, 0, 1]), 1.0)
    assert float(found) == pytest.approx(math.log((math.e + 2) / math.e), rel=1e-6)
    apart = supcon_loss(points, torch.tensor([0, 0, 1, 1]), 1.0)
    assert float(apart) == pytest.approx(math.log(math.e + 2), rel=1e-6)


def test_where_all_embeddings_are_equal_it_is_a_guess_among_the_others() -> None:
    assert float(supcon_loss(torch.ones(8, 3), torch.arange(4).repeat(2), 0.1)) == pytest.approx(math.log(7))


def test_it_falls_as_images_of_a_class_come_together() -> None:
    labels, spread = torch.tensor([0, 0, 1, 1]), (1.2, 0.9, 0.6, 0.3, 0.0)
    angles = [torch.tensor([-s, s, math.pi - s, math.pi + s]) / 2 for s in spread]
    found = [float(supcon_loss(torch.stack([a.cos(), a.sin()], -1), labels, 0.5)) for a in angles]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


@given(st.integers(0, 999))
def test_only_directions_count_and_neither_order_nor_names_of_classes(seed: int) -> None:
    embeddings, labels = normal(10, 4, seed=seed), torch.tensor([0, 1, 2, 0, 1] * 2)
    lengths = normal(10, 1, seed=seed + 1).exp()
    order = torch.randperm(10, generator=Stream(seed).generator())
    found = supcon_loss(embeddings, labels, 0.3)
    for other in (
        supcon_loss(lengths * embeddings, labels, 0.3),
        supcon_loss(embeddings[order], labels[order], 0.3),
        supcon_loss(embeddings, 2 - labels, 0.3),
    ):
        torch.testing.assert_close(other, found)


def test_an_image_alone_in_its_class_is_no_anchor_but_a_negative() -> None:
    embeddings = normal(5, 3, seed=7)
    labels = torch.tensor([0, 0, 1, 1, 2])
    assert float(supcon_loss(embeddings, labels, 0.5)) == pytest.approx(khosla(embeddings, labels, 0.5))
    assert supcon_loss(embeddings, labels, 0.5) > supcon_loss(embeddings[:4], labels[:4], 0.5)


def test_without_any_positives_it_is_zero_and_moves_nothing() -> None:
    embeddings = normal(3, 2).requires_grad_()
    loss = supcon_loss(embeddings, torch.arange(3), 0.1)
    (moves,) = torch.autograd.grad(loss, embeddings)
    assert float(loss.detach()) == 0
    assert not moves.any()


@pytest.mark.parametrize("tau", [0.1, 1e-3])
def test_loss_and_gradient_stay_finite_at_low_temperatures_and_dead_features(tau: float) -> None:
    """e^(1/τ) is beyond any float32 at 1e-3; a ReLU may leave nothing but zeros."""
    embeddings = F.relu(normal(8, 4, seed=8)).float()
    embeddings[0] = 0
    embeddings.requires_grad_()
    loss = supcon_loss(embeddings, torch.tensor([0, 1] * 4), tau)
    loss.backward()  # type: ignore[no-untyped-call]
    assert embeddings.grad is not None
    assert math.isfinite(float(loss.detach()))
    assert bool(embeddings.grad.isfinite().all())


def test_a_teacher_speaks_in_evaluation_mode_without_a_graph_and_is_left_as_it_was() -> None:
    images, _ = parts()[2].batch(torch.arange(8))
    shared = network("student")
    first, second = ({k: {n: t.clone() for n, t in g.items()} for k, g in shared.live.items()} for _ in range(2))
    second["model"] = {name: 2 * tensor for name, tensor in second["model"].items()}
    one, other = (Teacher(name, shared, w) for name, w in (("one", first), ("other", second)))
    shared.set_training_mode(frozenset(shared.live["model"]))
    found = [teacher.logits(images) for teacher in (one, other, one)]
    assert torch.equal(found[0], found[2])  # a student drops half of its units in training mode
    assert not torch.allclose(found[0], found[1])
    assert not any(logits.requires_grad for logits in found)
    teacher = good()[0]
    before = {name: tensor.clone() for name, tensor in teacher.weights["model"].items()}
    teacher.logits(images)
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.weights["model"].items())
