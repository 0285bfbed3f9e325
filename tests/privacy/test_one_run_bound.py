"""The lower bound of a one-run audit against closed forms, randomised response, and an attack whose ε is known."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from polyclinic.core.rng import Stream
from polyclinic.privacy.one_run_bound import CanaryBound, best_bound, canary_scores, lower_bound, p_value
from tests.privacy.scale_attack import is_louder, scale_epsilon


def response(canaries: int, epsilon: float, delta: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Randomised response: each coin is told truly with probability e^ε/(1 + e^ε), and for certain with probability δ.

    Scores are what was told, certain answers first, in an order that has nothing else to say.
    """
    members = rng.random(canaries) < 0.5
    certain = rng.random(canaries) < delta
    told = np.where(certain | (rng.random(canaries) < 1 / (1 + math.exp(-epsilon))), members, ~members)
    scores = (2.0 * told - 1) * (1 + certain) + rng.random(canaries) / 2
    return torch.from_numpy(scores), torch.from_numpy(members)


def attack(
    canaries: int, epsilon: float, delta: float, rng: np.random.Generator, confidence: float = 0.95
) -> CanaryBound:
    scores, members = response(canaries, epsilon, delta, rng)
    return best_bound({"answer": scores}, members, claimed=epsilon, delta=delta, confidence=confidence)


@pytest.mark.parametrize(("right", "guesses"), [(0, 7), (9, 12), (20, 20), (31, 40)])
def test_without_delta_it_is_the_binomial_tail(right: int, guesses: int) -> None:
    chance = Fraction(3, 4)
    exact = sum(math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k) for k in range(right, guesses + 1))
    assert p_value(right, guesses, 50, math.log(3), 0.0) == pytest.approx(float(exact), rel=1e-12)


def test_with_delta_it_is_the_theorem_written_out() -> None:
    right, guesses, canaries, chance, delta = 16, 20, 30, 0.6, 1e-3
    mass = [math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k) for k in range(guesses + 1)]
    steepest = max(sum(mass[right - i : right]) / i for i in range(1, right + 1))
    exact = sum(mass[right:]) + 2 * canaries * delta * steepest
    assert p_value(right, guesses, canaries, math.log(chance / (1 - chance)), delta) == pytest.approx(exact, rel=1e-12)


def test_the_bound_is_where_the_p_value_crosses() -> None:
    bound = lower_bound(180, 200, 1000, 1e-5, 0.05)
    assert p_value(180, 200, 1000, bound, 1e-5) == pytest.approx(0.05, rel=1e-3)
    assert lower_bound(100, 200, 1000, 1e-5, 0.05) == 0.0
    assert lower_bound(0, 0, 1000, 1e-5, 0.05) == 0.0


def test_p_values_rise_with_epsilon() -> None:
    """Or the largest ε refuted would not be a bound."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        canaries = int(rng.integers(10, 2000))
        guesses = int(rng.integers(1, canaries + 1))
        right = int(rng.integers(guesses // 2, guesses + 1))
        delta = 10 ** rng.uniform(-7, -3)
        values = [p_value(right, guesses, canaries, e, delta) for e in np.linspace(0, 10, 60)]
        small = [v for v in values if v < 0.5]
        assert small == sorted(small)
        assert all(v >= 0.5 for v in values[len(small) :])


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 0.0), (3.0, 0.0), (1.0, 0.005)])
def test_no_honest_mechanism_is_refuted_more_often_than_allowed(epsilon: float, delta: float) -> None:
    """Randomised response is the mechanism the theorem is tight for, so this is as near to a false alarm as can be."""
    rng = np.random.default_rng(1)
    alarms = sum(attack(400, epsilon, delta, rng, confidence=0.9).is_refuted for _ in range(300))
    assert alarms <= 30 + 3 * math.sqrt(300 * 0.1 * 0.9)


def test_the_bound_wastes_little_where_every_coin_is_guessed() -> None:
    """A bound of zero would never raise a false alarm; this one does, and about as often as it may."""
    told = np.random.default_rng(5).binomial(400, 1 / (1 + math.exp(-1.0)), 4000)
    alarms = np.mean([p_value(int(right), 400, 400, 1.0, 0.0) < 0.1 for right in told])
    assert 0.07 < alarms < 0.1 + 3 * math.sqrt(0.1 * 0.9 / 4000)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_approaches_the_truth_as_canaries_grow(epsilon: float) -> None:
    rng = np.random.default_rng(2)
    bounds = [np.mean([attack(m, epsilon, 0.0, rng).bound for _ in range(5)]) for m in (100, 1000, 10_000, 100_000)]
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(epsilon, abs=0.06)


def test_it_says_what_no_guesses_could_have_shown() -> None:
    found = attack(200, 9.0, 1e-6, np.random.default_rng(3))
    assert not found.is_refuted
    assert found.bound <= found.reach < 9.0
    assert "no guesses about so few canaries" in found.sentence
    assert "no guesses" not in attack(200, 1.0, 0.0, np.random.default_rng(3)).sentence


def test_members_score_higher_in_noised_sums() -> None:
    """Each score: of sums in which members take part with probability q, and of noise that comes twice."""
    rng = np.random.default_rng(6)
    members, noise = rng.random(2000) < 0.5, rng.normal(size=(10, 2000))
    joined = (rng.random((20, 2000)) < 0.3) & members
    released = torch.from_numpy(joined + np.concatenate([noise, noise]))
    scores = canary_scores(released, 0.3, 10)
    assert len(scores) == 4
    for name, score in scores.items():
        own = score.numpy()
        shift = own[members].mean() - own[~members].mean()
        assert shift > (6 if name == "what differs between rounds" else 2) * own.std() / math.sqrt(500), name


def test_noise_scaled_by_private_losses_gives_the_data_away() -> None:
    """Eq. 3 of the adaptive-noise paper, σ·(1 + Var(losses)), on a site of 600 with and without one odd image.

    The paper prints ε = 1.78. The length of 62,006 numbers of noise, the size of its network's gradient, tells the two
    data sets apart every time.
    """
    rng = np.random.default_rng(4)
    losses = rng.exponential(0.3, 599)
    quiet, loud = (float(1.02 * (1 + np.var(data))) for data in (losses, np.append(losses, 8.0)))
    coordinates, runs = 62_006, 300
    with_it = torch.from_numpy(rng.random(runs) < 0.5)
    scale = quiet + (loud - quiet) * with_it.float()
    released = scale[:, None] * torch.randn(runs, coordinates, generator=Stream(4).generator())
    right = int((is_louder(released, quiet, loud) == with_it).sum())
    assert lower_bound(right, runs, runs, 1e-5, 0.05) > 2 * 1.78
    assert scale_epsilon(quiet, loud, coordinates, 1e-5) > 20 * 1.78
    assert scale_epsilon(quiet, quiet, coordinates, 1e-5) == 0.0


def test_the_price_of_a_scale_is_that_of_its_densities() -> None:
    """One number: δ(ε) = ∫ (p − e^ε·q)₊, integrated."""
    quiet, loud, delta = 1.0, 1.3, 1e-3
    epsilon = scale_epsilon(quiet, loud, 1, delta)
    x = np.linspace(-20, 20, 400_001)
    p, q = (np.exp(-(x**2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi)) for s in (loud, quiet))
    worst = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() * (x[1] - x[0]) for a, b in ((p, q), (q, p)))
    assert worst == pytest.approx(delta, rel=1e-3)
    assert scale_epsilon(loud, quiet, 1, delta) == epsilon
