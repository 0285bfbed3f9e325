"""Privacy loss distributions of Gaussian releases: those of dp-accounting, digit for digit, many times as fast.

The library inverts the privacy loss for one bucket after another; here all are inverted at once, by the same steps.
dp-accounting is imported where it is needed: it takes a second to load.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def gaussian(noise: float, rate: float, width: float) -> Any:
    """Return the distribution of one release of which a record is part with probability `rate`."""
    return _both_ways(_Gaussian, width, noise, sampling_prob=rate)


def gaussian_replaced(noise: float, rate: float, width: float) -> Any:
    """Return the distribution where a record takes the place of another. It is the library's own: seldom asked for."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    relation = NeighboringRelation.REPLACE_ONE
    return pld.from_gaussian_mechanism(
        noise, sampling_prob=rate, neighboring_relation=relation, value_discretization_interval=width
    )


def gaussian_mixture(noise: float, group: int, rate: float, width: float) -> Any:
    """Return the distribution of one release of which each of a patient's images is part with probability `rate`."""
    from scipy.stats import binom

    count = range(group + 1)
    return _both_ways(_MixtureGaussian, width, noise, sensitivities=count, sampling_probs=binom.pmf(count, group, rate))


def _both_ways(kind: type, width: float, noise: float, **options: Any) -> Any:
    """Return the distribution for a unit removed and for one added, which are alike without sampling."""
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType

    alike = options.get("sampling_prob") == 1
    losses = [
        _faster(kind)(noise, adjacency_type=way, **options)
        for way in (AdjacencyType.REMOVE, AdjacencyType.ADD)[: 1 if alike else 2]
    ]
    build = pld._create_pld_pmf_from_monotone_privacy_loss
    return pld.PrivacyLossDistribution(
        *(build(loss, value_discretization_interval=width, use_connect_dots=True) for loss in losses)
    )


@cache
def _faster(kind: type) -> Any:
    """Return the library's class of this kind with the methods below."""
    from dp_accounting.pld import privacy_loss_mechanism as library

    return type(kind.__name__, (kind, getattr(library, f"{kind.__name__[1:]}PrivacyLoss")), {})


class _Gaussian:
    adjacency_type: Any
    sampling_prob: float
    sensitivity: float
    mu_upper_cdf: Any
    mu_lower_log_cdf: Any
    _standard_deviation: float

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        adds, rate, losses = self.adjacency_type.name == "ADD", self.sampling_prob, np.asarray(epsilon, float)
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
        adds, rate = self.adjacency_type.name == "ADD", self.sampling_prob
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


class _MixtureGaussian:
    adjacency_type: Any
    sensitivities: Floats
    _variance: float
    _precompute_privacy_loss_constants: Floats

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
        if self.adjacency_type.name == "ADD":
            return np.asarray(-np.logaddexp.reduce(constants + moved, axis=0))
        return np.asarray(np.logaddexp.reduce(constants - moved, axis=0))
