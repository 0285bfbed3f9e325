"""MOON: model-contrastive learning. Li, He, Song: Model-contrastive federated learning. CVPR 2021, Algorithm 1; the
authors' code: github.com/QinbinLi/MOON. z: what the extractor makes of an image.

    (1)  ℓ_con = −log( e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ}) ),   sim: the cosine
    (2)  w_k ← w trained on site k for E epochs (or τ steps) by cross-entropy + μ·ℓ_con
    (3)  w ← Σ_k (n_k / n) · w_k

z_glob is the received model's, z_prev that of the model which the site had at the end of its last training. As in the
authors' code, both models compute as in evaluation and get no gradient, and z is the training model's own. μ = 0 is
FedAvg, bit for bit. The paper tunes μ in {.1, 1, 5, 10} and settles at 1 or 5; τ = 0.5.

The first time a site trains, no model of its own came before. With the global one in its place both similarities
would be the same function of w: ℓ_con = log 2, with gradient 0. So (2) is then cross-entropy alone, as in the authors'
first round, which has no previous model either.

Departures: no projection head (two dense layers after the extractor): it would change the network, for MOON alone, and
the authors' classifier stands behind it, so that theirs too contrasts what the last layer is given; this is their
`--use_project_head 0`. A site that joins late starts as in round 1; the authors' then has its own random draw as the
previous model. The previous model is the site's own, before clipping, noise or quantisation on its way out.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyclinic.algorithms.base import network_weights
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core.contract import Bundle, Fit, Site, Stream, Update, Work
from polyclinic.core.errors import RecipeError
from polyclinic.training.losses import contrastive_loss, task_loss


@dataclass(frozen=True)
class Moon(FedAvg):
    mu: float = 1.0
    """μ, the contrast's weight."""
    tau: float = 0.5
    """τ, the contrast's temperature."""

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise RecipeError(f"algorithm.mu is {self.mu}, which pulls sites back to where they were; choose 0 or more")
        if self.tau <= 0:
            raise RecipeError(f"algorithm.tau is {self.tau}; choose more than 0, usually 0.5")

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        if memory:
            fitted = yield Fit(
                network_weights(received), contrastive_loss, self.training, self._loss_reference(received, memory)
            )  # (2)
        else:
            fitted = yield Fit(network_weights(received), task_loss, self.training)  # (2), where (1) is constant
        return Update(fitted.weights, site.examples), fitted.weights

    def _loss_reference(self, received: Bundle, memory: Bundle) -> Bundle:
        like = next(iter(received["model"].values()))
        teachers = {"global": network_weights(received), "previous": network_weights(memory)}
        parts = {f"{who} {kind}": dict(group) for who, model in teachers.items() for kind, group in model.items()}
        return {**parts, "scalars": {"mu": like.new_tensor(self.mu), "tau": like.new_tensor(self.tau)}}
