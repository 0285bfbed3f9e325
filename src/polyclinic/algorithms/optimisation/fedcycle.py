"""FedCycle. FedCycle: An improved federated learning framework for assessment across modalities and domains.
Electronics 15(8), 1752, 2026, Algorithm 1 and Eq. 1.

    (line 7)  w_k ← w trained on site k for ONE local epoch
    (Eq. 1)   w ← (1/K) · Σ_k w_k,  all K sites, BatchNorm statistics included

It is FedAvg with E = 1 and uniform weights; tests/laws asserts that bit for bit. A round here is one epoch, whatever
`training.epochs` says, so compare it with FedAvg at equal communication AND at equal epochs: the paper's own "FedAvg"
is one-shot (ten epochs, one average), as its communication table shows.

Departures: none in the update. The paper restarts Adam at every round implicitly; so do we, for every algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from polyclinic.algorithms.base import Averaging, RunningMean
from polyclinic.core.contract import Bundle, Fit, Site, Stream, Update, Work
from polyclinic.training.losses import task_loss


@dataclass(frozen=True)
class FedCycle(Averaging):
    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        one_epoch = replace(self.training, epochs=1, steps=None)
        fitted = yield Fit(received, task_loss, one_epoch)  # line 7
        return Update(fitted.weights, site.examples), None

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        parameters, statistics = RunningMean(), RunningMean()
        for update in updates:
            parameters.add(update.tensors["model"])  # Eq. 1: every site counts the same
            statistics.add(update.tensors.get("buffers", {}))
        return {"model": parameters.value(), "buffers": statistics.value()}
