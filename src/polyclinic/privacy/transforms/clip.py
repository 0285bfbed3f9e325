"""Clipping of updates to a length C. Shadin, Zhang, Wang, Pan: Heterogeneity-aware private personalized federated
learning for medical imaging via contrastive distillation (PFedCDP), Eq. 12; the idea is McMahan, Ramage, Talwar, Zhang:
Learning differentially private recurrent language models. ICLR 2018.

    (12)  Δ ← Δ / max(1, ‖Δ‖₂ / C),   Δ = (what the site would send) − (what it received), the WHOLE vector

Departures: an update within C·(1 + 10⁻⁶) is not changed, so that it keeps its bits, at the site and at the server; one
that holds NaN or infinity becomes Δ = 0, because a missing reply would reveal something as well.
"""

import math
from dataclasses import dataclass

from polyclinic.core import Bundle, RecipeError, Stream
from polyclinic.privacy.mechanism import clip, join_kinds, split_kinds

DEVIATIONS = 10
"""Gaussian noise in d dimensions is longer than (√d + t)·σ with a probability of e^(−t²/2) at most."""


@dataclass(frozen=True)
class Clip:
    """Clips these kinds together as one vector; a tensor that the site did not receive is measured from 0.

    Integers (BatchNorm's counters) are not changed.
    """

    bound: float
    kinds: tuple[str, ...] = ("model",)
    noise: float = 0.0
    """The standard deviation of noise that the site adds afterwards, which makes an update longer than `bound`."""

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise RecipeError(f"privacy.clip is {self.bound}; choose a positive length")
        if not 0 <= self.noise < math.inf:
            raise RecipeError(f"the noise after clipping is {self.noise}; choose a number of 0 or more")

    def encode(self, tensors: Bundle, received: Bundle, rng: Stream) -> Bundle:
        return self._clip_kinds(tensors, received, self.bound)[0]

    def decode(self, tensors: Bundle, received: Bundle) -> Bundle:
        """Clip once more, as the server cannot know whether the site has. NaN and infinity are refused later."""
        values = sum(t.numel() for t in join_kinds(tensors, self.kinds).values() if t.is_floating_point())
        reach = self.noise * (math.sqrt(values) + DEVIATIONS)
        clipped, length = self._clip_kinds(tensors, received, self.bound + reach)
        return clipped if math.isfinite(length) else tensors

    def _clip_kinds(self, tensors: Bundle, received: Bundle, bound: float) -> tuple[Bundle, float]:
        update = join_kinds(tensors, self.kinds)
        clipped, length = clip(update, bound, join_kinds(received, self.kinds))  # (12)
        return tensors if clipped is update else split_kinds(clipped, tensors, self.kinds), length
