"""MOON: model-contrastive learning. Li, He, Song: Model-contrastive federated learning. CVPR 2021, Algorithm 1; the
authors' code: github.com/QinbinLi/MOON. z: the extractor's features of an image.

    (1)  ℓ_con = −log( e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ}) ),   sim: the cosine
    (2)  w_k ← w trained on site k for E epochs (or τ steps) by cross-entropy + μ·ℓ_con
    (3)  w ← Σ_k (n_k / n) · w_k

z_glob are the features of the received model, z_prev those of the site's model at the end of its last training. As in
the authors' code, both models are in evaluation mode and get no gradient. μ = 0 is FedAvg, bit for bit. The paper tunes
μ in {.1, 1, 5, 10} and settles at 1 or 5; τ = 0.5.

In a site's first training there is no previous model. With the global one in its place both similarities would be equal
for every w: ℓ_con = log 2, with gradient 0. So (2) is then cross-entropy alone, as in the authors' first round.

Departures: there is no projection head (two dense layers after the extractor). It would change the network for MOON
alone; this is the authors' `--use_project_head 0`. A site that joins late starts as in round 1; in the authors' code it
then has its own random initial model as the previous one. The previous model is the site's own, before clipping, noise
or quantisation of its update.
"""

from dataclasses import dataclass

from pydantic import NonNegativeFloat, PositiveFloat

from polyclinic.algorithms.base import network_weights, scalar_tensors
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core import Bundle, Fit, Site, Stream, Update, Work
from polyclinic.training.losses import contrastive_loss, task_loss


@dataclass(frozen=True)
class Moon(FedAvg):
    mu: NonNegativeFloat = 1.0
    """μ, the weight of the contrastive loss."""
    tau: PositiveFloat = 0.5
    """τ, the temperature of the contrastive loss."""

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        objective = contrastive_loss if memory else task_loss  # without a previous model (1) is constant
        reference = self._loss_reference(received, memory) if memory else {}
        fitted = yield Fit(network_weights(received), objective, self.training, reference)  # (2)
        return Update(fitted.weights, site.examples), fitted.weights

    def _loss_reference(self, received: Bundle, memory: Bundle) -> Bundle:
        teachers = {"global": network_weights(received), "previous": network_weights(memory)}
        parts = {f"{who} {kind}": dict(group) for who, model in teachers.items() for kind, group in model.items()}
        return {**parts, "scalars": scalar_tensors(received, {"mu": self.mu, "tau": self.tau})}
