"""Tests of a Gaussian mechanism by what it releases: is its noise as large as charged, and its sensitivity no larger?

A release with sensitivity s and noise N(0, (σs)²) is 1/σ-GDP (Dong, Roth, Su 2022), whatever the data. So whoever can
measure its noise and how far one member moves it knows the privacy that it gives; distinguishing members is the blunter
way (Nasr et al.: Tight auditing of differentially private machine learning. USENIX Security 2023). All figures are in
units of what the plan charges: a release that gives away more has a noise below 1, or a sensitivity above.

Each function returns a p-value: how often an honest mechanism looks at least so bad, at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float64]
ROUNDING = 1e-3
"""The relative error that float32 may cause."""
FAR = 3.0
"""Beyond so many deviations lies a tail."""
HALF = 0.5
"""An audit has power if it would have found noise of half the charged deviation, or twice the sensitivity …"""
SURE = 0.95
"""… with this probability."""


@dataclass(frozen=True)
class GaussianTest:
    """One test of one kind of release."""

    kind: str
    """What was released …"""
    what: str
    """… and what of it was tested."""
    measured: float
    charged: float
    p_value: float
    samples: int
    power: float = 0.0
    """The probability with which the test would have refuted noise of half, or a sensitivity of twice, what is charged,
    at the 1e-4 level; 0 for tests that are not about either."""

    def as_json(self) -> dict[str, object]:
        return {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in vars(self).items()}


LEVEL = 1e-4
"""The level at which power is computed: a share of 1 − confidence that hundreds of tests leave to each."""


def check_deviation(kind: str, what: str, squares: float, count: int, charged: float = 1.0) -> GaussianTest:
    """Test whether the deviation of noise is at least `charged`, by the χ² test of `count` values.

    `squares`: the sum of squares of the values, whose mean is 0.
    """
    from scipy import stats

    squares = squares * (1 + ROUNDING) ** 2
    p = float(stats.chi2.cdf(squares / charged**2, count)) if count else 1.0
    power = float(stats.chi2.cdf(stats.chi2.ppf(LEVEL, count) / HALF**2, count)) if count else 0.0
    return GaussianTest(kind, what, math.sqrt(squares / max(count, 1)), charged, p, count, power)


def check_normality(kind: str, values: Samples) -> GaussianTest:
    """Test whether values of mean 0 and deviation 1 (both as measured) are normal: their bulk (Kolmogorov and Smirnov),
    and how many lie beyond three deviations.

    As the deviation is measured on the same values, both tests err less often than they may.
    """
    from scipy import stats

    expected = 2 * float(stats.norm.sf(FAR))
    beyond = int((np.abs(values) > FAR).sum())
    tails = stats.binomtest(beyond, len(values), expected).pvalue
    bulk = stats.kstest(values, "norm").pvalue
    share = beyond / max(len(values), 1)
    return GaussianTest(kind, "normal distribution", share, expected, min(1.0, 2 * min(tails, bulk)), len(values))


def check_independence(kind: str, what: str, vectors: Sequence[Samples]) -> GaussianTest:
    """Test whether vectors of noise are uncorrelated: the largest correlation of all pairs, for shared or reused noise.

    Of two vectors of unequal length the first values are compared, as one generator would have drawn them.
    """
    from scipy import stats

    largest, likeliest, pairs = 0.0, 1.0, 0
    for length, first, second in _pairs_by_length(vectors):
        products = np.abs(_unit_rows(first, length) @ _unit_rows(second, length).T)
        if first is second:
            products = products[np.triu_indices(len(first), 1)]
        if products.size:
            pairs += products.size
            largest = max(largest, float(products.max()))
            # With known means of 0, r·√((n − 1)/(1 − r²)) follows Student's t with n − 1 degrees of freedom.
            r = min(float(products.max()), 1 - 1e-15)
            likeliest = min(likeliest, 2 * float(stats.t.sf(r * math.sqrt((length - 1) / (1 - r * r)), length - 1)))
    return GaussianTest(kind, what, largest, 0.0, min(1.0, likeliest * max(pairs, 1)), pairs)


def _pairs_by_length(
    vectors: Sequence[Samples],
) -> list[tuple[int, list[Samples], list[Samples]]]:
    groups: dict[int, list[Samples]] = {}
    for vector in vectors:
        if len(vector) > 2:
            groups.setdefault(len(vector), []).append(vector)
    lengths = sorted(groups)
    found = [(length, groups[length], groups[length]) for length in lengths]
    return found + [(a, groups[a], groups[b]) for a in lengths for b in lengths if a < b]


def _unit_rows(vectors: Sequence[Samples], length: int) -> Samples:
    rows = np.stack([vector[:length] for vector in vectors])
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30))


def check_sensitivity(kind: str, movements: Samples, charged: float = 1.0) -> GaussianTest:
    """Test whether no member moves a sum by more than `charged`. `movements` are exact, without noise.

    The test errs never, and has power as soon as one member has moved a sum at all.
    """
    largest = float(np.abs(movements).max(initial=0.0))
    too_far = largest > charged * (1 + ROUNDING)
    return GaussianTest(
        kind, "sensitivity", largest, charged, 0.0 if too_far else 1.0, len(movements), float(largest > charged / 2)
    )


def check_rate(kind: str, movements: Samples, group: int, rate: float) -> GaussianTest:
    """Test whether members move sampled sums no more on average than charged: a share `rate` of sums by `group`.

    A member's images are sampled one by one, or together: of all such laws the latter has the largest variance.
    """
    from scipy import stats

    charged, count = group * rate, len(movements)
    deviation = group * math.sqrt(max(rate * (1 - rate), 0.0) / max(count, 1))
    mean = float(movements.mean()) if count else 0.0
    if group == 1 and count:
        p = float(stats.binom.sf(math.floor(mean * count / (1 + ROUNDING) - 1e-9), count, rate)) if rate < 1 else 1.0
        p = 0.0 if rate == 1 and mean > 1 + ROUNDING else p
    else:
        excess = mean / (1 + ROUNDING) - charged
        p = float(stats.norm.sf(excess / deviation)) if deviation else float(excess <= 0)
    power = float(stats.norm.sf(stats.norm.isf(LEVEL) - charged / deviation)) if deviation else float(count > 0)
    return GaussianTest(kind, "mean movement of a sum", mean, charged, p, count, power)


def check_release(kind: str, what: str, reach: float, squares: float, count: int, charged: float) -> GaussianTest:
    """Test whether the noise of a release is at least `charged` times how far one member was seen to move it (`reach`).

    `squares`: the sum of squares of `count` independent values of its noise, in the unit of `reach`.
    """
    if reach == 0:
        return GaussianTest(kind, what, math.inf, charged, 1.0, count)
    return check_deviation(kind, what, squares / reach**2, count, charged)
