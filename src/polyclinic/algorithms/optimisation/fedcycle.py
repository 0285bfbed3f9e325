"""FedCycle. FedCycle: An improved federated learning framework for assessment across modalities and domains.
Electronics 15(8), 1752, 2026, Algorithm 1 and Eq. 1.

    (line 7)  w_k ← w trained on site k for ONE local epoch
    (Eq. 1)   w ← (1/K) · Σ_k w_k,  all K sites, BatchNorm statistics included

It is FedAvg with E = 1 and uniform weights; tests/laws asserts that bit for bit. A round is one epoch, whatever
`training.epochs` is, so compare it with FedAvg both at equal communication and at equal epochs: the paper's own
"FedAvg" is one-shot (ten epochs, one average), as its communication table shows.

Departures: none in the update. The paper implicitly restarts Adam in every round; so do all algorithms here.
"""

from dataclasses import dataclass, replace

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core import Bundle, Fit, Site, Stream, Update, Work
from polyclinic.training.losses import task_loss


@dataclass(frozen=True)
class FedCycle(FedAvg):
    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield Fit(received, task_loss, replace(self.training, epochs=1, steps=None))  # line 7
        return Update(fitted.weights, site.examples), None

    def update_weight(self, update: Update) -> float:
        return 1.0  # Eq. 1: all sites have the same weight
