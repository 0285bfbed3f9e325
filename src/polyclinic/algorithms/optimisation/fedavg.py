"""FedAvg. McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks from
decentralized data. AISTATS 2017, Algorithm 1.

    (1)  w_k ← w trained on site k for E epochs (or τ steps)
    (2)  w ← Σ_k (n_k / n) · w_k

Departures: n is the number of examples of the sites that replied, not of all sites (as in the arXiv version's
correction); `training.weights: uniform` replaces n_k by 1. BatchNorm statistics are averaged like parameters.
"""

from dataclasses import dataclass
from typing import ClassVar

from polyclinic.algorithms.base import Algorithm
from polyclinic.core import Bundle, Fit, Site, Stream, Update, Updates, Work
from polyclinic.training.losses import task_loss


@dataclass(frozen=True)
class FedAvg(Algorithm):
    averages: ClassVar[bool] = True

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield Fit(received, task_loss, self.training)  # (1)
        return Update(fitted.weights, site.examples), None

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        return self.mean_update(updates)  # (2)
