"""Accounting (D1, D2, D7): against published figures, closed forms, and integrals of the densities themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from hypothesis import given, settings, strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, norm

from polyclinic.core.errors import RecipeError
from polyclinic.privacy import accounting
from polyclinic.privacy.accounting import Accountant, Neighbours, Spend, epsilon, merge_spends, noise_for

TABLE = [  # rate, noise, times, ε by Google's dp-accounting at δ = 1e-5: RDP, PLD
    (0.04, 1.5, 2250, 7.3293, 6.7688),
    (0.01, 1.0, 1000, 2.1014, 1.8282),
    (256 / 60000, 1.1, 14062, 2.5966, 2.3817),
    (1.0, 10.0, 100, 4.7285, 4.3772),
]
ROUNDED = 5e-5
JITTER = 5e-4
"""PLD's own precision: its buckets differ between two calls."""


@pytest.mark.parametrize(("rate", "noise", "times", "rdp", "pld"), TABLE)
def test_google_s_figures(rate: float, noise: float, times: int, rdp: float, pld: float) -> None:
    spends = [Spend(noise, rate, times)]
    for ours, theirs in ((epsilon(spends, 1e-5, "rdp"), rdp), (epsilon(spends, 1e-5, "pld"), pld)):
        assert theirs - ROUNDED <= ours <= theirs + 1e-3


@pytest.mark.parametrize(("rate", "noise", "times", "_rdp", "_pld"), TABLE[1:])
def test_never_optimistic(rate: float, noise: float, times: int, _rdp: float, _pld: float) -> None:
    """A lower bound of the true ε: losses rounded down instead of up."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    below = pld.from_gaussian_mechanism(
        noise,
        pessimistic_estimate=False,
        sampling_prob=rate,
        use_connect_dots=False,
        value_discretization_interval=1e-3,
    )
    lower = below.self_compose(times).get_epsilon_for_delta(1e-5)
    assert lower <= epsilon([Spend(noise, rate, times)], 1e-5)


@pytest.mark.parametrize(
    ("noise", "rate", "group"),
    [(0.5, 0.02, 1), (1.1, 0.5, 1), (8.0, 0.003, 1), (2.0, 1.0, 1), (1.0, 0.1, 2), (8.0, 0.5, 4)],
)
def test_distributions_are_the_library_s_to_the_last_bit(noise: float, rate: float, group: int) -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    width, counts = 2.0**-7, range(group + 1)
    ours = accounting._release_pld(noise, rate, group, width, "add or remove")
    if group == 1:
        theirs = pld.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=width)
    else:
        odds = binom.pmf(counts, group, rate)
        theirs = pld.from_mixture_gaussian_mechanism(noise, counts, odds, value_discretization_interval=width)
    for way in ("_pmf_remove", "_pmf_add"):
        one, other = getattr(ours, way).to_dense_pmf(), getattr(theirs, way).to_dense_pmf()
        assert (one._lower_loss, one._infinity_mass) == (other._lower_loss, other._infinity_mass)
        assert np.array_equal(one._probs, other._probs)


def test_prv_and_the_paper_s_own_metric() -> None:
    assert epsilon([Spend(1.0, 0.01, 1000)], 1e-5, "prv") == pytest.approx(1.838, abs=0.01)
    for noise, printed in ((1.02, 1.77), (2.04, 0.66)):  # ten rounds, added up, of one client's epoch
        round_ = epsilon([Spend(noise, 64 / 45600, 712)], 1 / 60000, "prv")
        assert 10 * round_ == pytest.approx(printed, abs=0.03)


def delta_for(spends: Iterable[Spend], target: float, accountant: Accountant = "pld") -> float:
    """δ of all spends together at this ε: that of the accountants themselves, or for PRV to 1 % by bisection."""
    merged = merge_spends(spends, "add or remove")
    if not merged or merged[0].noise == 0:
        return float(bool(merged))
    if accountant == "pld":
        return float(accounting.compose_pld(merged, "add or remove").get_delta_for_epsilon(target))
    if accountant == "rdp":
        return float(compute_delta(*accounting._compose_rdp(merged, "add or remove"), target)[0])
    too_little, enough = 1e-9, 1.0  # below 1e-9 Opacus loses its precision
    while enough > 1.01 * too_little:
        middle = math.sqrt(enough * too_little)
        if epsilon(merged, middle, "prv") <= target:
            enough = middle
        else:
            too_little = middle
    return enough


def gaussian_delta(eps: float, mu: float) -> float:
    """Balle & Wang 2018, Theorem 8: δ of a Gaussian release whose reach is μ standard deviations."""
    return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu))


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
@pytest.mark.parametrize(("noise", "times", "group"), [(1.0, 1, 1), (4.0, 20, 1), (0.5, 3, 1), (30.0, 50, 4)])
def test_unsampled_releases_follow_the_closed_form(noise: float, times: int, group: int, delta: float) -> None:
    mu = group * math.sqrt(times) / noise
    exact = brentq(lambda eps: gaussian_delta(eps, mu) - delta, 0, 200, xtol=1e-9)
    assert exact <= epsilon([Spend(noise, times=times, group=group)], delta) <= exact + 1e-3
    assert delta_for([Spend(noise, times=times, group=group)], exact) == pytest.approx(delta, rel=0.01)
    doubled = brentq(lambda eps: gaussian_delta(eps, 2 * mu) - delta, 0, 400, xtol=1e-9)
    replaced = epsilon([Spend(noise, times=times, group=group)], delta, neighbours="replace")
    assert doubled <= replaced <= doubled + 2e-3


def test_accountants_agree_and_mixed_releases_compose() -> None:
    spends = [Spend(1.0, 0.02, 300), Spend(8.0, times=4), Spend(2.0, 0.1, 50)]
    pld, prv, rdp = (epsilon(spends, 1e-5, each) for each in ("pld", "prv", "rdp"))
    assert pld <= prv <= pld + 0.02
    assert pld <= rdp <= 1.25 * pld
    for each in ("pld", "prv", "rdp"):
        assert delta_for(spends, epsilon(spends, 1e-5, each), each) == pytest.approx(1e-5, rel=0.02)


Density = Callable[[np.ndarray], np.ndarray]


def mixture(noise: float, rate: float, group: int, sign: int = 1) -> Density:
    """The density of sign · (how many of `group` images were sampled) + noise."""
    odds = binom.pmf(range(group + 1), group, rate)
    return lambda x: sum(p * norm.pdf(x, sign * i, noise) for i, p in enumerate(odds))


def integrated_epsilon(one: Density, other: Density, noise: float, reach: int, delta: float) -> float:
    """The larger ε of both directions, by summing what one density has above e^ε times the other."""
    x, step = np.linspace(-reach - 12 * noise, reach + 12 * noise, 40_001, retstep=True)
    p, q = one(x), other(x)

    def solved(p: np.ndarray, q: np.ndarray) -> float:
        def excess(eps: float) -> float:
            return float(np.maximum(p - math.exp(eps) * q, 0).sum() * step) - delta

        return 0.0 if excess(0) <= 0 else float(brentq(excess, 0, 100, xtol=1e-9))

    return max(solved(p, q), solved(q, p))


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize(("noise", "rate", "delta"), [(1.0, 0.1, 1e-5), (2.0, 0.5, 1e-4), (0.8, 0.01, 1e-3)])
def test_patients_with_several_images(group: int, noise: float, rate: float, delta: float) -> None:
    exact = integrated_epsilon(mixture(noise, rate, group), mixture(noise, 0, 1), noise, group, delta)
    ours = epsilon([Spend(noise, rate, group=group)], delta)
    assert exact - 1e-6 <= ours <= exact + 1e-3
    assert ours >= epsilon([Spend(noise, rate)], delta)
    assert ours <= epsilon([Spend(noise, group=group)], delta) + JITTER


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.1), (2.0, 0.5)])
def test_a_record_replaced_by_another(noise: float, rate: float) -> None:
    exact = integrated_epsilon(mixture(noise, rate, 1), mixture(noise, rate, 1, -1), noise, 1, 1e-4)
    assert exact - 1e-6 <= epsilon([Spend(noise, rate)], 1e-4, neighbours="replace") <= exact + 1e-3


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    nothing = [Spend(math.inf), Spend(0.0, rate=0.0), Spend(0.0, times=0)]
    for accountant in ("pld", "rdp", "prv"):
        assert epsilon([], 1e-5, accountant) == epsilon(nothing, 1e-5, accountant) == 0.0
        assert epsilon([Spend(1.0), Spend(0.0, 0.1)], 1e-5, accountant) == math.inf
        assert delta_for(nothing, 1.0, accountant) == 0.0
        assert delta_for([Spend(0.0)], 1.0, accountant) == 1.0
    assert epsilon([Spend(1e-6, 0.5)], 1e-5) > 1e6


NOISES, RATES, TIMES, DELTAS = (0.8, 1.7, 4.0), (0.01, 0.1, 1.0), (1, 10, 300), (1e-7, 1e-4)


@st.composite
def ordered(draw: st.DrawFn) -> tuple[tuple[Spend, float], tuple[Spend, float]]:
    """A release and δ, and another that costs no less: less noise, more often, of more, at a smaller δ."""
    values = [sorted(draw(st.tuples(st.sampled_from(v), st.sampled_from(v)))) for v in (NOISES, RATES, TIMES, DELTAS)]
    (loud, quiet), (rare, often), (few, many), (strict, loose) = values
    return (Spend(quiet, rare, int(few)), loose), (Spend(loud, often, int(many)), strict)


@settings(max_examples=200, deadline=None)
@given(ordered())
def test_rdp_is_monotone(pair: tuple[tuple[Spend, float], tuple[Spend, float]]) -> None:
    (less, loose), (more, strict) = pair
    assert epsilon([less], loose, "rdp") <= epsilon([more], strict, "rdp") + 1e-9


@settings(max_examples=150, deadline=None)
@given(ordered())
def test_pld_is_monotone(pair: tuple[tuple[Spend, float], tuple[Spend, float]]) -> None:
    (less, loose), (more, strict) = pair
    cheap, dear = epsilon([less], loose), epsilon([more], strict)
    assert cheap <= dear + JITTER + 1e-4 * dear


pool = [Spend(1.0, 0.01, 300), Spend(1.7, 0.1, 11), Spend(4.0), Spend(0.6)]
spend_lists = st.lists(st.sampled_from(pool), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(spend_lists.flatmap(lambda spends: st.tuples(st.just(spends), st.permutations(spends))))
def test_order_does_not_matter(lists: tuple[list[Spend], list[Spend]]) -> None:
    """Nor whether equal releases are counted or repeated."""
    once, shuffled = lists
    halves = [Spend(s.noise, s.rate, part) for s in shuffled for part in (s.times // 2, s.times - s.times // 2)]
    assert epsilon(once, 1e-5, "rdp") == epsilon(shuffled, 1e-5, "rdp") == epsilon(halves, 1e-5, "rdp")


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([(0.1, 20, "rdp"), (1.0, 7, "rdp"), (1.0, 300, "pld"), (0.3, 5, "pld")]),
    st.sampled_from([0.4, 1.0, 3.0, 12.0]),
)
def test_calibration_never_overshoots(release: tuple[float, int, Accountant], target: float) -> None:
    rate, times, accountant = release
    noise = noise_for(lambda sigma: epsilon([Spend(sigma, rate, times)], 1e-5, accountant), target)
    assert epsilon([Spend(noise, rate, times)], 1e-5, accountant) <= target
    assert epsilon([Spend(0.997 * noise, rate, times)], 1e-5, accountant) > target - JITTER


def test_a_true_five_over_twenty_rounds() -> None:
    """The published σ for ε = 5 over 20 full releases is about 4.0."""
    assert noise_for(lambda sigma: epsilon([Spend(sigma, times=20)], 1e-5), 5) == pytest.approx(4.0, abs=0.03)


@pytest.mark.parametrize(
    ("accountant", "neighbours", "group", "way_out"),
    [
        ("rdp", "add or remove", 3, "accountant: pld"),
        ("prv", "add or remove", 3, "accountant: pld"),
        ("rdp", "replace", 1, "accountant: pld"),
        ("pld", "replace", 3, "neighbours: add or remove"),
    ],
)
def test_what_an_accountant_cannot_price(
    accountant: Accountant, neighbours: Neighbours, group: int, way_out: str
) -> None:
    with pytest.raises(RecipeError, match=way_out):
        epsilon([Spend(1.0, 0.1, 5, group)], 1e-5, accountant, neighbours)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(RecipeError, match="larger epsilon"):
        noise_for(lambda sigma: epsilon([Spend(sigma), Spend(0.5)], 1e-5), 1.0)
    for bad in ({"noise": -1.0}, {"noise": math.nan}, {"noise": 1.0, "rate": 1.5}, {"noise": 1.0, "group": 0}):
        with pytest.raises(RecipeError, match="cannot be priced"):
            Spend(**bad)  # type: ignore[arg-type]
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(RecipeError, match="delta"):
            epsilon([Spend(1.0)], delta)
    with pytest.raises(RecipeError, match="positive"):
        noise_for(lambda sigma: epsilon([Spend(sigma)], 1e-5), 0.0)
