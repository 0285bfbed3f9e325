"""The attack on noise whose scale depends on private data: the length of many numbers gives their deviation away."""

from __future__ import annotations

import math

from scipy import optimize, stats
from torch import Tensor


def is_louder(released: Tensor, quiet: float, loud: float) -> Tensor:
    """Of each row of noise, whether it is likelier of deviation `loud` than `quiet`: its length tells (χ²).

    Why noise must not be scaled by private data: the length of many numbers gives their deviation away.
    """
    evidence = released.double().square().sum(-1) * (quiet**-2 - loud**-2) / 2
    return evidence > released.shape[-1] * math.log(loud / quiet)


def scale_epsilon(quiet: float, loud: float, coordinates: int, delta: float) -> float:
    """ε of publishing noise of deviation `quiet` on one data set and `loud` on its neighbour, exactly.

    The likelihood ratio grows with the squared length, which is χ² distributed, so the best test for δ(ε) asks whether
    that exceeds the point where the ratio is e^ε (or, for the other direction, falls short of it).
    """
    if loud < quiet:
        quiet, loud = loud, quiet
    if loud == quiet:
        return 0.0
    gain, offset = (quiet**-2 - loud**-2) / 2, coordinates * math.log(loud / quiet)

    def excess(epsilon: float) -> float:
        over, under = (offset + epsilon) / gain, (offset - epsilon) / gain
        chi = stats.chi2(coordinates)
        up = chi.sf(over / loud**2) - math.exp(epsilon + chi.logsf(over / quiet**2))
        down = chi.cdf(under / quiet**2) - math.exp(epsilon + chi.logcdf(under / loud**2))
        return float(max(up, down)) - delta

    if excess(0.0) <= 0:
        return 0.0
    top = 1.0
    while excess(top) > 0:
        top *= 2
    return float(optimize.brentq(excess, 0.0, top))
