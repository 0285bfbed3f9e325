"""L1: where the algorithms come to rest on two hospitals that disagree, against closed forms, in float64.

Hospital k's loss is f_k(w) = a_k/2·(w − b_k)². Gradient descent from x shrinks the distance to b_k by r_k = 1 − η·a_k
a step, so after τ steps y_k = b_k + r_k^τ·(x − b_k): a geometric series. An algorithm rests where its server's step is
zero; each docstring derives where that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from polyclinic.algorithms.base import Algorithm
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.algorithms.optimisation.fednova import FedNova, normalised_steps
from polyclinic.algorithms.optimisation.fedprox import FedProx
from polyclinic.algorithms.optimisation.scaffold import Scaffold
from polyclinic.core.options import Optimiser, Training
from tests.laws.bench import QuadraticNetwork, Weighting, play, quadratic

BAR = 1e-12
ETA = 0.1
A, B = (9.0, 2.0), (1.0, 0.0)
OPTIMUM = 9 / 11
"""(a_1·b_1 + a_2·b_2) / (a_1 + a_2) = (9·1 + 2·0) / (9 + 2)."""
ROUNDS = 70
"""Every map below shrinks the distance to its resting point to 0.6 or less a round, so 70 rounds leave 1e-15 of it."""


@dataclass(frozen=True)
class Case:
    steps: tuple[int, int]
    shares: tuple[float, float]
    training: Training
    counts: tuple[int, int]


def same_steps(tau: int) -> Case:
    training = Training(Optimiser(lr=ETA), batch=1, epochs=None, steps=tau, weights="uniform")
    return Case((tau, tau), (0.5, 0.5), training, (1, 1))


def own_steps(first: int, second: int, optimiser: Optimiser = Optimiser(lr=ETA), weighted: bool = False) -> Case:
    """One epoch of single examples: as many steps as a site has examples."""
    shares = (first / (first + second), second / (first + second)) if weighted else (0.5, 0.5)
    weights: Weighting = "examples" if weighted else "uniform"
    return Case((first, second), shares, Training(optimiser, batch=1, weights=weights), (first, second))


def rest(algorithm: Algorithm, case: Case, start: float) -> float:
    sites = {f"site-{k}": quadratic(f"site-{k}", A[k], B[k], case.counts[k]) for k in range(2)}
    played = play(algorithm, sites, QuadraticNetwork(start), ROUNDS)
    return float(played.model["head.weight"])


def balance(pulls: Sequence[float]) -> float:
    """The x at which Σ_k pull_k·(b_k − x) = 0."""
    return float(np.dot(pulls, B) / np.sum(pulls))


CASES = [same_steps(1), same_steps(4), own_steps(2, 5), own_steps(7, 1), own_steps(3, 6, weighted=True)]


def test_the_two_hospitals_have_their_optimum_at_nine_elevenths() -> None:
    assert balance(A) == pytest.approx(OPTIMUM, abs=1e-15)


@pytest.mark.parametrize("case", CASES)
def test_fedavg_rests_where_the_sites_pulls_balance(case: Case) -> None:
    """x = Σp_k·y_k  ⇔  Σ p_k·(1 − r_k^τ_k)·(b_k − x) = 0."""
    pulls = [p * (1 - (1 - ETA * a) ** tau) for p, a, tau in zip(case.shares, A, case.steps, strict=True)]
    assert abs(rest(FedAvg(case.training), case, 5.0) - balance(pulls)) <= BAR


@pytest.mark.parametrize("mu", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("case", [same_steps(4), own_steps(3, 6, weighted=True)])
def test_fedprox_rests_where_the_held_back_pulls_balance(case: Case, mu: float) -> None:
    """The site descends a curve of steepness a + μ around m = (a·b + μ·x)/(a + μ), so y − x = (1 − R^τ)·(m − x) with
    R = 1 − η(a + μ), and m − x = a/(a + μ)·(b − x):  Σ p_k·a_k/(a_k + μ)·(1 − R_k^τ_k)·(b_k − x) = 0.
    """
    pulls = [
        p * a / (a + mu) * (1 - (1 - ETA * (a + mu)) ** tau)
        for p, a, tau in zip(case.shares, A, case.steps, strict=True)
    ]
    assert abs(rest(FedProx(case.training, mu=mu), case, 5.0) - balance(pulls)) <= BAR


@pytest.mark.parametrize("case", CASES)
def test_fednova_rests_where_the_pulls_per_step_balance(case: Case) -> None:
    """Σ p_k·(x − y_k)/τ_k = 0  ⇔  Σ p_k·(1 − r_k^τ_k)/τ_k·(b_k − x) = 0."""
    pulls = [p * (1 - (1 - ETA * a) ** tau) / tau for p, a, tau in zip(case.shares, A, case.steps, strict=True)]
    assert abs(rest(FedNova(case.training), case, 5.0) - balance(pulls)) <= BAR


@pytest.mark.parametrize("rho", [0.5, 0.9])
def test_fednova_with_momentum_rests_where_the_pulls_per_length_balance(rho: float) -> None:
    """Heavy ball is linear in (y − b, v): v ← ρv + a(y − b), y ← y − ηv, from v = 0; ‖a‖₁ by adding it up."""
    eta = 0.05
    case, pulls = own_steps(2, 4, Optimiser(lr=eta, momentum=rho)), []
    for p, a, tau in zip(case.shares, A, case.steps, strict=True):
        one_step = np.array([[1 - eta * a, -eta * rho], [a, rho]])
        left = np.linalg.matrix_power(one_step, tau)[0, 0]
        pulls.append(p * (1 - left) / brute_force_length(tau, rho))
    assert abs(rest(FedNova(case.training), case, 5.0) - balance(pulls)) <= BAR


def brute_force_length(steps: int, rho: float) -> float:
    """Sum of the coefficient vector a: how often each gradient ends up in the sum of velocities."""
    carried = np.zeros(steps)
    velocity = np.zeros(steps)
    for step in range(steps):
        velocity = rho * velocity
        velocity[step] += 1
        carried += velocity
    return float(carried.sum())


@pytest.mark.parametrize("rho", [0.0, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 137])
def test_fednovas_length_is_the_sum_of_its_coefficient_vector(steps: int, rho: float) -> None:
    assert normalised_steps(steps, rho) == pytest.approx(brute_force_length(steps, rho), rel=1e-12)


@pytest.mark.parametrize(
    ("case", "global_lr", "start"),
    [(same_steps(4), 1.0, 5.0), (own_steps(2, 5), 1.0, -3.0), (same_steps(4), 0.7, 5.0)],
)
def test_scaffold_reaches_the_true_optimum_where_fedavg_does_not(case: Case, global_lr: float, start: float) -> None:
    assert abs(rest(Scaffold(case.training, global_lr), case, start) - OPTIMUM) <= BAR
    assert abs(rest(FedAvg(case.training), case, start) - OPTIMUM) > 0.1


def test_at_rest_scaffolds_controls_are_the_gradients_at_the_optimum() -> None:
    """c_k = f_k'(9/11), and c = (c_1 + c_2)/2 = 0."""
    case = same_steps(4)
    sites = {f"site-{k}": quadratic(f"site-{k}", A[k], B[k]) for k in range(2)}
    played = play(Scaffold(case.training), sites, QuadraticNetwork(5.0), ROUNDS)
    assert abs(float(played.outcome.state["control"]["head.weight"])) <= BAR
    for k in range(2):
        memory = played.remembered(f"site-{k}")
        assert memory is not None
        assert abs(float(memory["control"]["head.weight"]) - A[k] * (OPTIMUM - B[k])) <= BAR * A[k]
