"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks. MLSys 2020,
Algorithm 2.

    (1)  w_k ← argmin  F_k(w) + (μ/2)·‖w − wᵗ‖²   (inexactly: E epochs or τ steps)
    (2)  wᵗ⁺¹ ← Σ_k (n_k / n) · w_k

Departures: the paper samples sites with probability n_k/n and averages uniformly; here they are sampled uniformly and
weighted by n_k, as in all algorithms here. μ = 0 is FedAvg, bit for bit. The paper tunes μ in {.001, .01, .1, .5, 1}.
"""

from dataclasses import dataclass

from pydantic import NonNegativeFloat

from polyclinic.algorithms.base import scalar_tensors
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core import Bundle, Fit, Site, Stream, Update, Work
from polyclinic.training.losses import proximal_loss


@dataclass(frozen=True)
class FedProx(FedAvg):
    mu: NonNegativeFloat = 0.01
    """μ, the weight of the proximal term."""

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        reference = {"anchor": received["model"], "scalars": scalar_tensors(received, {"mu": self.mu})}
        fitted = yield Fit(received, proximal_loss, self.training, reference)  # (1)
        return Update(fitted.weights, site.examples), None
