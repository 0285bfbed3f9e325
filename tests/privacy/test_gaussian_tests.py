"""Tests of noise and sensitivity: honest mechanisms are accused as seldom as promised, and dishonest ones always."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from polyclinic.privacy.gaussian_tests import (
    LEVEL,
    GaussianTest,
    Samples,
    check_deviation,
    check_independence,
    check_normality,
    check_rate,
    check_release,
    check_sensitivity,
)

RNG = np.random.default_rng(0)


Check = Callable[[], GaussianTest]


def p_values(check: Check, times: int = 400) -> list[float]:
    return [check().p_value for _ in range(times)]


def are_seldom_small(values: list[float]) -> bool:
    """Whether p-values below 1, 5 and 20 % come no oftener than that, as far as so many can tell."""
    counts = ((sum(value < level for value in values), level) for level in (0.01, 0.05, 0.2))
    return all(stats.binomtest(n, len(values), level, "greater").pvalue > 1e-4 for n, level in counts)


def unit(values: Samples) -> Samples:
    return np.asarray(values / math.sqrt(np.mean(values**2)))


def test_honest_noise_is_accused_as_seldom_as_promised() -> None:
    def check() -> GaussianTest:
        return check_deviation("weights", "noise", float(np.square(RNG.normal(size=500)).sum()), 500)

    found = p_values(check)
    assert are_seldom_small(found)
    assert min(found) < 0.05  # and no more seldom


@pytest.mark.parametrize(("factor", "count"), [(0.5, 100), (0.7, 400), (0.95, 20_000)])
def test_too_little_noise_is_found(factor: float, count: int) -> None:
    for _ in range(20):
        values = factor * RNG.normal(size=count)
        assert check_deviation("weights", "noise", float(np.square(values).sum()), count).p_value < 1e-3


def test_power_is_the_share_of_half_the_noise_that_is_found() -> None:
    for count in (10, 20, 40):
        power = check_deviation("weights", "noise", 1.0, count).power
        halves = np.square(RNG.normal(size=(4000, count)) / 2).sum(1)
        found = np.mean([check_deviation("weights", "noise", float(h), count).p_value < LEVEL for h in halves])
        assert found == pytest.approx(power, abs=4 * math.sqrt(0.25 / 4000) + 0.02)
    assert check_deviation("weights", "noise", 0.0, 0).power == 0


def test_noise_is_normal_or_not() -> None:
    assert are_seldom_small(p_values(lambda: check_normality("weights", unit(RNG.normal(size=5000))), 200))
    for wrong in (RNG.laplace(size=20_000), RNG.uniform(-1, 1, 20_000), RNG.standard_t(5, 20_000)):
        assert check_normality("weights", unit(wrong)).p_value < 1e-6


def test_shared_noise_is_correlated() -> None:
    def check() -> GaussianTest:
        return check_independence("weights", "shared", [RNG.normal(size=n) for n in (50, 50, 50, 30, 30)])

    assert are_seldom_small(p_values(check))
    own = [RNG.normal(size=60) for _ in range(30)]
    assert check_independence("weights", "shared", [*own, own[3] * 2]).p_value < 1e-9
    assert check_independence("weights", "shared", [*own, own[3][:40]]).p_value < 1e-9  # the first values of another
    assert check_independence("weights", "shared", own).p_value > 1e-3
    assert check_independence("weights", "shared", []).p_value == 1


def test_nobody_may_move_a_sum_further_than_charged() -> None:
    assert check_sensitivity("weights", np.array([0.0, 1.0000001, -0.3])).p_value == 1
    assert check_sensitivity("weights", np.array([0.0, 1.01])).p_value == 0
    assert check_sensitivity("weights", np.array([0.0, -1.01])).p_value == 0
    assert check_sensitivity("weights", np.zeros(100)).power == 0  # nobody was drawn


def test_the_rate_of_sampling() -> None:
    for group, rate in ((1, 0.1), (1, 1.0), (3, 0.2)):

        def draw(factor: float = 1.0, group: int = group, rate: float = rate) -> GaussianTest:
            movements = RNG.binomial(group, min(1.0, rate * factor), size=2000).astype(float)
            return check_rate("weights", movements, group, rate)

        assert are_seldom_small(p_values(draw))
        if rate < 1:
            assert max(draw(1.5).p_value for _ in range(20)) < 1e-3
            assert draw().power > 0.999
    assert check_rate("weights", np.full(10, 1.5), 1, 1.0).p_value == 0
    assert check_rate("weights", np.zeros(3), 1, 0.01).power < 0.1


def test_a_release_gives_no_more_than_its_mu() -> None:
    """Sensitivity 2 and noise 2σ is 1/σ-GDP; noise σ is not."""
    sigma = 20.0
    honest = float(np.square(RNG.normal(size=2000) * 2 * sigma).sum())
    assert check_release("features", "noise", 2.0, honest, 2000, sigma).p_value > 1e-3
    assert check_release("features", "noise", 2.0, honest / 4, 2000, sigma).p_value < 1e-12
    assert check_release("features", "noise", 2.0, honest, 2000, sigma).measured == pytest.approx(sigma, rel=0.06)
    assert check_release("features", "noise", 2.0, 0.0, 2000, sigma).p_value == 0  # no noise at all
