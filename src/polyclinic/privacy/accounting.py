"""ε of Gaussian releases, computed by the accountants of dp-accounting (PLD, RDP) and Opacus (PRV).

A list of `Spend`s describes all that is released; everything here is a pure function of such lists. No figure is
optimistic: where a number cannot be exact (losses sorted into buckets) it is an upper bound.

Noise is in units of the clipping norm. Neighbouring data sets differ by one unit that is there or not ("add or
remove"); with "replace" one unit takes the place of another, which may move a sum by twice the norm.
Both libraries are imported where they are needed: they take a second to load.
"""

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, Literal, TypeAlias

from polyclinic.core import RecipeError
from polyclinic.privacy import loss_distributions

Accountant: TypeAlias = Literal["pld", "rdp", "prv"]
Neighbours: TypeAlias = Literal["add or remove", "replace"]

SMALLEST_NOISE, LARGEST_NOISE = 0.01, 1e4
"""The range that `noise_for` searches."""
FINEST, COARSEST = 1e-5, 1e-2
"""Bounds on the width of PLD's buckets: any width is pessimistic, a finer one takes longer."""
EPSILON_TOLERANCE = 2e-4
"""About how much PLD's buckets may add to ε (or a quarter of that share of ε, where it is more)."""
TAIL = 1e-15
"""Probability that PLD may count as certain loss, each time it composes."""


@dataclass(frozen=True, order=True)
class Spend:
    """One kind of release, `times` times."""

    noise: float
    """σ, in units of the clipping norm; infinity releases nothing."""
    rate: float = 1.0
    """The probability with which each example joins by itself (Poisson); 1 is no sampling."""
    times: int = 1
    group: int = 1
    """Images of one unit (a patient), each sampled by itself."""

    def __post_init__(self) -> None:
        if not (self.noise >= 0 and 0 <= self.rate <= 1 and self.times >= 0 and self.group >= 1):
            raise RecipeError(
                f"{self} cannot be priced: noise and times are at least 0, rate lies in 0 … 1, group is at least 1"
            )

    def repeated(self, count: int) -> "Spend":
        """Return `count` times the same release."""
        return replace(self, times=self.times * count)


def epsilon(
    spends: Iterable[Spend],
    delta: float,
    accountant: Accountant = "pld",
    neighbours: Neighbours = "add or remove",
) -> float:
    """Return ε of all spends together at this δ; 0 without spends, infinity for a release without noise."""
    if not 0 < delta < 1:
        raise RecipeError(
            f"delta is {delta:g}, but must lie between 0 and 1: choose less than one over the number of records"
        )
    return _cached_epsilon(merge_spends(spends, neighbours), delta, accountant, neighbours)


def noise_for(spent: Callable[[float], float], target: float) -> float:
    """Return the least noise at which ε, `spent(noise)`, is at most `target`.

    Never too little, at most 0.1 % too much, and never below 0.01.
    """
    if not target > 0:
        raise RecipeError(f"epsilon is {target:g}, but must be positive: no noise buys an ε of 0")
    enough = 1.0
    while spent(enough) > target:
        if enough == LARGEST_NOISE:
            raise RecipeError(
                f"even a noise of {LARGEST_NOISE:g} spends ε = {spent(enough):.3g}, above {target:g}: allow a larger "
                "epsilon, fewer rounds, smaller batches, or more noise on other releases"
            )
        enough = min(2 * enough, LARGEST_NOISE)
    while enough > SMALLEST_NOISE:
        too_little = max(enough / 2, SMALLEST_NOISE)
        if spent(too_little) > target:
            return _refine_noise(spent, too_little, enough, target)
        enough = too_little
    return enough


def merge_spends(spends: Iterable[Spend], neighbours: Neighbours) -> tuple[Spend, ...]:
    """Return the same privacy loss in one form: equal releases added up, all unsampled ones as one release."""
    times: Counter[tuple[float, float, int]] = Counter()
    for spend in spends:
        if spend.times and spend.rate and spend.noise < math.inf:
            times[spend.noise, spend.rate, spend.group] += spend.times
    if any(noise == 0 for noise, _, _ in times):
        return (Spend(0.0),)
    reach = 2 if neighbours == "replace" else 1
    precision = math.fsum(n * (reach * group / noise) ** 2 for (noise, rate, group), n in times.items() if rate == 1)
    sampled = [Spend(noise, rate, n, group) for (noise, rate, group), n in times.items() if rate < 1]
    return tuple(sorted(sampled + ([Spend(precision**-0.5)] if precision else [])))


@lru_cache(maxsize=4096)
def _cached_epsilon(merged: tuple[Spend, ...], delta: float, accountant: Accountant, neighbours: Neighbours) -> float:
    if not merged:
        return 0.0
    if merged[0].noise == 0:
        return math.inf
    if accountant == "pld":
        try:
            return float(compose_pld(merged, neighbours).get_epsilon_for_delta(delta))
        except OverflowError:  # losses beyond what a float's exponent holds: no finite figure is safe
            return math.inf
    if accountant == "rdp":
        from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

        return float(compute_epsilon(*_compose_rdp(merged, neighbours), delta)[0])
    return _prv_epsilon(merged, delta, neighbours)


def compose_pld(merged: Sequence[Spend], neighbours: Neighbours, width: float | None = None) -> Any:
    """Return the privacy loss distribution of all releases, in buckets of `width` (None: as fine as is useful)."""
    width = width or bucket_width(merged)
    parts = (_repeated_pld(spend, width, neighbours) for spend in merged)
    return reduce(lambda total, part: total.compose(part, tail_mass_truncation=TAIL), parts)


def bucket_width(merged: Sequence[Spend]) -> float:
    """Return the width of the buckets into which losses are sorted: a power of two, so that calls share cached results.

    Buckets of width h add about h²/6 to the variance of each step's loss. ε is about 5·sd + variance/2 at the usual
    δ, from which follows how much that adds to ε. A large ε needs no more than 1e-5 of itself.
    """
    steps = sum(spend.times for spend in merged)
    variance = sum(s.times * (s.rate * s.group) ** 2 * math.expm1(min(s.noise**-2, 99.0)) for s in merged)
    unsampled = sum(s.times * (s.group / s.noise) ** 2 for s in merged)
    spent = min(5 * math.sqrt(v) + v / 2 for v in (variance, unsampled))
    slope = 5 / (2 * math.sqrt(variance)) + 0.5
    width = math.sqrt(6 * max(EPSILON_TOLERANCE, EPSILON_TOLERANCE * spent / 4) / (steps * slope))
    return float(2.0 ** math.floor(math.log2(max(min(max(width, FINEST), COARSEST), 1e-5 * spent))))


@lru_cache(maxsize=256)
def _release_pld(noise: float, rate: float, group: int, width: float, neighbours: Neighbours) -> Any:
    """Return the privacy loss distribution of one release."""
    if rate < 1 and group > 1:
        if neighbours == "replace":
            raise RecipeError(
                f"no accountant prices {group} sampled images of a patient who is replaced by another:"
                " take neighbours: add or remove"
            )
        return loss_distributions.gaussian_mixture(noise, group, rate, width)
    if rate < 1 and neighbours == "replace":
        return loss_distributions.gaussian_replaced(noise, rate, width)
    return loss_distributions.gaussian(noise, rate, width)  # `merge_spends` has counted the double reach of rate 1


@lru_cache(maxsize=256)
def _repeated_pld(spend: Spend, width: float, neighbours: Neighbours) -> Any:
    """Return the privacy loss distribution of all times of a release."""
    return _release_pld(spend.noise, spend.rate, spend.group, width, neighbours).self_compose(spend.times)


def _compose_rdp(merged: Sequence[Spend], neighbours: Neighbours) -> tuple[Any, Any]:
    """Return Rényi orders and the divergence of all releases at each."""
    _check_no_pld_needed(merged, neighbours, "rdp")
    curves = [_release_rdp(spend.noise, spend.rate) for spend in merged]
    return curves[0][0], sum(spend.times * curve for spend, (_, curve) in zip(merged, curves, strict=True))


@lru_cache(maxsize=4096)
def _release_rdp(noise: float, rate: float) -> tuple[Any, Any]:
    """Return Rényi orders and the divergence of one release at each."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns about every order that it skips
    release = GaussianDpEvent(noise)
    accountant = RdpAccountant().compose(PoissonSampledDpEvent(rate, release) if rate < 1 else release)
    return accountant.orders, accountant.rdp


def rdp_curve(merged: Sequence[Spend], neighbours: Neighbours) -> tuple[Any, Any] | None:
    """Return Rényi orders and the divergence of all releases at each; None where no accountant knows it."""
    if any(_needs_pld(spend, neighbours) for spend in merged):
        return None
    return _compose_rdp(merged, neighbours)


def _prv_epsilon(merged: Sequence[Spend], delta: float, neighbours: Neighbours) -> float:
    """Return the upper end of Opacus' interval, which is 0.01 above its estimate."""
    import numpy as np

    _check_no_pld_needed(merged, neighbours, "prv")
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        # Opacus advises on the orders of a bound it takes on the way, and passes log 0 where nothing is sampled.
        warnings.simplefilter("ignore")
        from opacus.accountants import PRVAccountant

        accountant = PRVAccountant()
        accountant.history = [(spend.noise, spend.rate, spend.times) for spend in merged]
        try:
            return float(accountant.get_epsilon(delta))
        except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
            raise RecipeError(f"the PRV accountant cannot price this run ({error}): take accountant: pld") from error


def _check_no_pld_needed(merged: Iterable[Spend], neighbours: Neighbours, accountant: Accountant) -> None:
    if any(_needs_pld(spend, neighbours) for spend in merged):
        what = "a record that is replaced" if neighbours == "replace" else "several sampled images of one patient"
        raise RecipeError(f"the {accountant} accountant cannot price {what}: take accountant: pld")


def _needs_pld(spend: Spend, neighbours: Neighbours) -> bool:
    return spend.rate < 1 and (spend.group > 1 or neighbours == "replace")


def _refine_noise(spent: Callable[[float], float], too_little: float, enough: float, epsilon: float) -> float:
    """Return the least noise between the two, rounded up. Brent's method, as a call of `spent` may take seconds."""
    from scipy.optimize import brentq

    def excess(log_noise: float) -> float:
        return math.log(min(max(spent(math.exp(log_noise)), 1e-9), 1e99) / epsilon)

    noise = math.exp(brentq(excess, math.log(too_little), math.log(enough) + 1e-9, xtol=1e-4))
    while spent(noise := _round_up(noise)) > epsilon:
        noise *= 1.0002
    return noise


def _round_up(value: float) -> float:
    """Round up to five significant digits."""
    scale: float = 10.0 ** (4 - math.floor(math.log10(value)))
    return float(math.ceil(value * scale) / scale)
