"""Privacy loss distributions of Gaussian releases: those of dp-accounting, digit for digit, many times as fast.

The library inverts the privacy loss for one bucket after another; here all are inverted at once, by the same steps.
Import this module where it is needed: dp-accounting takes a second to load.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss, MixtureGaussianPrivacyLoss
from numpy.typing import NDArray
from scipy.stats import binom

Floats = NDArray[np.float64]


def gaussian(noise: float, rate: float, width: float) -> Any:
    """Return the distribution of one release of which a record is part with probability `rate`."""
    return _both_ways(lambda way: _Gaussian(noise, sampling_prob=rate, adjacency_type=way), width, rate == 1)


def gaussian_replaced(noise: float, rate: float, width: float) -> Any:
    """Return the distribution where a record takes the place of another. It is the library's own: seldom asked for."""
    relation = NeighboringRelation.REPLACE_ONE
    return pld.from_gaussian_mechanism(
        noise, sampling_prob=rate, neighboring_relation=relation, value_discretization_interval=width
    )


def gaussian_mixture(noise: float, group: int, rate: float, width: float) -> Any:
    """Return the distribution of one release of which each of a patient's images is part with probability `rate`."""
    count = range(group + 1)
    odds = binom.pmf(count, group, rate)
    return _both_ways(lambda way: _Mixture(noise, count, odds, adjacency_type=way), width, alike=False)


def _both_ways(loss: Callable[[AdjacencyType], Any], width: float, alike: bool) -> Any:
    """Return the distribution for a unit removed and for one added, which may be `alike`."""
    ways = (AdjacencyType.REMOVE,) if alike else (AdjacencyType.REMOVE, AdjacencyType.ADD)
    build = pld._create_pld_pmf_from_monotone_privacy_loss
    options = {"value_discretization_interval": width, "use_connect_dots": True}
    return pld.PrivacyLossDistribution(*(build(loss(way), **options) for way in ways))


class _Gaussian(GaussianPrivacyLoss):  # type: ignore[misc]
    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        adds, rate, losses = self.adjacency_type == AdjacencyType.ADD, self.sampling_prob, np.asarray(epsilon, float)
        deltas, bounded = np.zeros_like(losses), np.ones(losses.shape, bool)
        if rate < 1:
            end = math.log1p(-rate)
            bounded = losses < -end if adds else losses > end
            if not adds:
                deltas[~bounded] = -np.expm1(losses[~bounded])
        cuts = self._invert(losses[bounded])
        deltas[bounded] = self.mu_upper_cdf(cuts) - np.exp(losses[bounded] + self.mu_lower_log_cdf(cuts))
        return np.clip(deltas, 0, 1)

    def _invert(self, losses: Floats) -> Floats:
        """Return where the privacy loss is each of these."""
        adds, rate = self.adjacency_type == AdjacencyType.ADD, self.sampling_prob
        if rate < 1:
            sign = -1 if adds else 1
            end, signed = math.log(1 - rate), sign * losses
            with np.errstate(divide="ignore", invalid="ignore"):  # of losses that are at the end
                scaled = signed + np.log(1 / rate)
                inner = scaled + np.log1p(-np.exp(np.log(1 / rate - 1) - scaled))
            inner[signed == 0] = np.log(1 / rate + (1 - 1 / rate))
            close = np.abs(signed - end) <= 1e-9 * np.maximum(np.abs(signed), abs(end))
            losses = sign * np.where(close, -math.inf, inner)
        found: Floats = -0.5 * self.sensitivity - losses * (self._standard_deviation**2) / self.sensitivity
        return self.sensitivity + found if adds else found


class _Mixture(MixtureGaussianPrivacyLoss):  # type: ignore[misc]
    def _inverse_privacy_losses_with_range(
        self, privacy_losses: Floats, bounds: tuple[float, float], precision: float = 1e-6
    ) -> Floats:
        """Halve the range of each loss until it is narrow."""
        low, high = (np.full(privacy_losses.shape, float(bound)) for bound in bounds)
        while (wide := high - low > precision).any():
            middle = (low[wide] + high[wide]) / 2
            above = privacy_losses[wide] < self._losses(middle)
            low[wide], high[wide] = np.where(above, middle, low[wide]), np.where(above, high[wide], middle)
        return np.asarray(np.floor(high / precision) * precision)

    def _losses(self, points: Floats) -> Floats:
        """Return the privacy loss at each point."""
        moved = self.sensitivities[:, None] * points / self._variance
        constants = self._precompute_privacy_loss_constants[:, None]
        if self.adjacency_type == AdjacencyType.ADD:
            return np.asarray(-np.logaddexp.reduce(constants + moved, axis=0))
        return np.asarray(np.logaddexp.reduce(constants - moved, axis=0))
