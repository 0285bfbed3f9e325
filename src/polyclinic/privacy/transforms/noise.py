"""Gaussian noise on updates, at the site or at the server: differential privacy for a whole site. Shadin, Zhang,
Wang, Pan (PFedCDP), Eq. 13; at the server: McMahan, Ramage, Talwar, Zhang: Learning differentially private recurrent
language models. ICLR 2018, section 2.

    (13)  Δ ← Δ + N(0, (σC)²)                                  at the site, after Eq. 12
    (1)   w ← Σ_k w_k·(w + Δ_k) + N(0, (z·C·max_k w_k)²)       at the server: Σ_k w_k = 1, every ‖Δ_k‖ ≤ C

The neighbour in (1) is the same round in which one site returns what it received: removing its images moves the mean by
w_k·C at most. Its weight stays, as it depends on public facts only: the images it registered, and that it answered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polyclinic.core import Bundle, Refused, Stream
from polyclinic.privacy.mechanism import add_noise, check_std, join_kinds, split_kinds


@dataclass(frozen=True)
class Noise:
    """Adds noise to these kinds as they leave the site. `rng` of `encode` must be the site's secret stream."""

    std: float
    """σC, the standard deviation of every value's noise."""
    kinds: tuple[str, ...] = ("model",)

    def __post_init__(self) -> None:
        check_std(self.std)

    def encode(self, tensors: Bundle, received: Bundle, rng: Stream) -> Bundle:
        return add_noise_to(tensors, self.kinds, self.std, rng.child("noise"))  # (13)

    def decode(self, tensors: Bundle, received: Bundle) -> Bundle:
        return tensors


def add_noise_to(bundle: Bundle, kinds: Sequence[str], std: float, stream: Stream) -> Bundle:
    """Return the bundle with N(0, std²) added to these kinds: an update (13), or the state after aggregation (1)."""
    return split_kinds(add_noise(join_kinds(bundle, kinds), std, stream), bundle, kinds) if std else bundle


def largest_weight(weights: Sequence[float]) -> float:
    """Return max_k w_k of the normalised weights: the largest part of the mean that comes from one site."""
    total = math.fsum(weights)
    if not (weights and min(weights) >= 0 and 0 < total < math.inf):
        raise Refused("weights", f"the weights of {len(weights)} updates cannot be normalised; each must be 0 or more")
    return max(weights) / total
