"""FedCycle. FedCycle: An improved federated learning framework for assessment across modalities and domains.
Electronics 15(8), 1752, 2026, Algorithm 1 and Eq. 1.

    (line 7)  w_k ← w trained on site k for ONE local epoch
    (Eq. 1)   w ← (1/K) · Σ_k w_k,  all K sites, BatchNorm statistics included

It is FedAvg with E = 1 and uniform weights; tests/laws asserts that bit for bit. A round is one epoch, whatever
`training.epochs` is, so compare it with FedAvg both at equal communication and at equal epochs: the paper's own
"FedAvg" is one-shot (ten epochs, one average), as its communication table shows.

Departures: none in the update. The paper implicitly restarts Adam in every round; so do all algorithms here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from polyclinic.algorithms.base import Algorithm, BundleMean
from polyclinic.core import Bundle, Fit, Site, Stream, Update, Work
from polyclinic.training.losses import task_loss


@dataclass(frozen=True)
class FedCycle(Algorithm):
    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        one_epoch = replace(self.training, epochs=1, steps=None)
        fitted = yield Fit(received, task_loss, one_epoch)  # line 7
        return Update(fitted.weights, site.examples), None

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        mean = BundleMean()
        for update in updates:
            mean.add(update.tensors)  # Eq. 1: all sites have the same weight
        return mean.value()
