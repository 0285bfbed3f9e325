"""What DP-SGD draws, and by how much it clips."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from polyclinic.core.rng import Stream
from polyclinic.training.dp.dp_sgd import clip_factors, draw_poisson_batches

SECRET = Stream(11, ("secret",))


def test_clip_factors() -> None:
    norms = torch.tensor([0.0, 1e-30, 0.5, 1.0, 2.0, 1e30, math.inf, math.nan])
    found = clip_factors(norms, 1.0)
    assert found.tolist() == pytest.approx([1, 1, 1, 1, 0.5, 1e-30, 0, 0])
    assert clip_factors(norms, math.inf).tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    drawn = torch.rand(10_000, generator=SECRET.generator()).mul(80).sub(40).exp()
    for clip in (1e-3, 1.0, 1.5, 7e4):
        assert float((drawn.double() * clip_factors(drawn, clip).double()).max()) <= clip * (1 + 1e-6)


def test_automatic_clipping_scales_every_gradient_to_less_than_the_clip() -> None:
    """AUTO-S of Bu et al. (2023): C‖g‖ / (‖g‖ + 0.01)."""
    norms = torch.tensor([0.0, 0.01, 1.0, 1e30, math.inf, math.nan], dtype=torch.float64)
    lengths = norms[:4] * clip_factors(norms, 2.0, normalise=True)[:4]
    assert lengths.tolist() == pytest.approx([0, 1.0, 2 / 1.01, 2.0])
    assert clip_factors(norms, 2.0, normalise=True)[4:].tolist() == [0, 0]
    drawn = torch.rand(10_000, generator=SECRET.generator()).mul(80).sub(40).exp()
    for clip in (1e-3, 1.0, 7e4):
        assert float((drawn.double() * clip_factors(drawn, clip, normalise=True).double()).max()) <= clip * (1 + 1e-6)


def test_m5_poisson_draws_everyone_alike_and_by_itself() -> None:
    people, rate, steps = 12, 0.3, 10_000
    joined = np.zeros((steps, people))
    for step, who in enumerate(draw_poisson_batches(people, rate, steps, SECRET)):
        assert len(set(who.tolist())) == len(who)
        joined[step, who.numpy()] = 1
    marginal = ((joined.sum(0) - steps * rate) ** 2 / (steps * rate * (1 - rate))).sum()
    assert stats.chi2.sf(marginal, people) > 1e-3
    standard = (joined - rate) / math.sqrt(rate * (1 - rate))
    pairs = (standard.T @ standard / math.sqrt(steps))[np.triu_indices(people, 1)]
    assert stats.chi2.sf((pairs**2).sum(), len(pairs)) > 1e-3
    follow = (standard[1:] * standard[:-1]).sum(0) / math.sqrt(steps - 1)
    assert stats.chi2.sf((follow**2).sum(), people) > 1e-3
    sizes = np.bincount(joined.sum(1).astype(int), minlength=people + 1)
    wanted = steps * stats.binom.pmf(np.arange(people + 1), people, rate)
    common = wanted > 5
    found = [*sizes[common], sizes[~common].sum()]
    assert stats.chisquare(found, [*wanted[common], wanted[~common].sum()]).pvalue > 1e-3


def test_poisson_at_its_edges() -> None:
    assert [who.tolist() for who in draw_poisson_batches(3, 1.0, 2, SECRET)] == [[0, 1, 2]] * 2
    assert [who.tolist() for who in draw_poisson_batches(3, 0.0, 2, SECRET)] == [[], []]
    assert [who.tolist() for who in draw_poisson_batches(0, 0.5, 2, SECRET)] == [[], []]
    assert draw_poisson_batches(5, 0.5, 0, SECRET) == []
    assert sum(len(who) for who in draw_poisson_batches(7, 1e-12, 3, SECRET)) == 0
    large = draw_poisson_batches(45_600, 64 / 45_600, 712, SECRET)
    drawn = sum(len(who) for who in large)
    assert len(large) == 712
    assert abs(drawn - 64 * 712) < 5 * math.sqrt(64 * 712)
