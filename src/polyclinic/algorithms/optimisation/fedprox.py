"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks. MLSys 2020,
Algorithm 2.

    (1)  w_k ← argmin  F_k(w) + (μ/2)·‖w − wᵗ‖²   (inexactly: E epochs or τ steps)
    (2)  wᵗ⁺¹ ← Σ_k (n_k / n) · w_k

Departures: the paper samples sites with probability n_k/n and averages uniformly; we sample uniformly and weight by
n_k, as every other algorithm here does. μ = 0 is FedAvg, bit for bit. The paper tunes μ in {.001, .01, .1, .5, 1}.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.contract import Bundle, Fit, Site, Stream, Update, Work
from polyclinic.core.errors import RecipeError
from polyclinic.training.losses import proximal_loss


@dataclass(frozen=True)
class FedProx(FedAvg):
    mu: float = 0.01

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise RecipeError(f"algorithm.mu is {self.mu}, which pushes sites apart; choose 0 or more")

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        anchor = received["model"]
        scalars = {"mu": torch.tensor(self.mu, dtype=next(iter(anchor.values())).dtype)}
        fitted = yield Fit(received, proximal_loss, self.training, {"anchor": anchor, "scalars": scalars})  # (1)
        return Update(fitted.weights, site.examples), None
