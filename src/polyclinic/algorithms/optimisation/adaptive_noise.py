"""Adaptive noise. Purokayisto, Hossain, Du, Salman, Ali: Privacy-preserving federated learning with adaptive noise
scaling and enhanced CNN models. EJCSIT 13(52), 2025, Algorithm 1.

    (2)  g ← (Σ_x clip(∇ℓ(x), C) + N(0, σ_k²C²)) / B      in every step, at the site (training/dp)
    (3)  σ_k = min(σ·(1 + Var(ℓ_k)), 2σ)                   before each round's training; σ: the plan's noise
    (A)  w ← Σ_k (n_k / n) · w_k                           as FedAvg

Two rules: `equation` is (3), whose noise rises with the variance of the losses; the text says that it falls, which is
`rule: text`: σ_k = min(σ·(1 + 1/(1 + Var(ℓ_k))), 2σ).

Departures. As printed, (2) adds noise to the mean. Here it is added to the sum, as in Opacus and as the accountant
assumes; images are drawn by Poisson sampling for the same reason. `variant: paper` takes Var(ℓ_k) of the losses of
random batches as they are. σ_k then depends on private data, and the noise on a million weights reveals σ_k, so no
guarantee is claimed. `variant: corrected` clips every image's loss to [0, L] and releases their mean and variance once
per round with noise `loss_noise`, which is charged. The mean of B random losses has the B-th part of the variance of
one: with this Var(ℓ_k) σ_k follows from the release. Training is charged as if σ_k were σ, its least value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core import Batch, Bundle, Fit, Network, RecipeError, Score, Site, Stream, Tensors, Update, Work
from polyclinic.privacy.releases import release_variance
from polyclinic.training.losses import task_loss


def per_example_losses(network: Network, weights: Bundle, batch: Batch, _reference: Bundle) -> Tensors:
    """Return the loss of every image."""
    return {"losses": network.output_loss(network(weights, batch[0]), batch[1], "none")}


def scale_noise(sigma: float, spread: float, rule: Literal["equation", "text"]) -> float:
    """Return σ_k by (3), or by the rule in the paper's text."""
    return min(sigma * (1 + (spread if rule == "equation" else 1 / (1 + spread))), 2 * sigma)


@dataclass(frozen=True)
class AdaptiveNoise(FedAvg):
    averages: ClassVar[bool] = False  # every site tells its σ_k
    unused_options: ClassVar = {"paper": ("largest_loss", "loss_noise")}
    scalars: ClassVar = ("noise",)
    variant: Literal["corrected", "paper"] = "corrected"
    rule: Literal["equation", "text"] = "equation"
    largest_loss: PositiveFloat = 4.0
    """L, usually 4."""
    loss_noise: float = 200.0
    """The noise multiplier of the released mean and variance, usually 50 to 500: divided by B, they may be rough."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "corrected" and not self.loss_noise > 0:
            raise RecipeError(
                f"algorithm.loss_noise is {self.loss_noise}, so σ would depend on private losses that nothing charges "
                "for; choose 50 to 500, or variant: paper, which claims nothing"
            )

    def privacy_releases(self) -> Mapping[str, float]:
        return {"variance of losses": self.loss_noise} if self.variant == "corrected" else {}

    def no_guarantee_reason(self) -> str:
        return "" if self.variant == "corrected" else "the noise depends on private losses, which nothing charges for"

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        private = self.training.private
        if private is None:  # no noise to adapt, and FedAvg, bit for bit; recipes are refused before they come here
            return (yield from super().local(received, memory, site, rng))
        shuffled = torch.randperm(site.examples, generator=rng.child("loss batches", site.round).generator())
        found = yield Score(received, per_example_losses, order=shuffled if self.variant == "paper" else None)
        sigma = scale_noise(private.noise, self.loss_variance(found["losses"], site), self.rule)  # (3)
        fitted = yield Fit(received, task_loss, replace(self.training, private=replace(private, noise=sigma)))  # (2)
        return Update(fitted.weights, site.examples, scalars={"noise": sigma}), None

    def loss_variance(self, losses: Tensor, site: Site) -> float:
        """Return Var(ℓ_k), of the means of batches."""
        size = self.training.batch_size(len(losses))
        if self.variant == "paper":
            means = torch.stack([batch.mean() for batch in torch.split(losses, size)])
            return float(means.var(correction=0).nan_to_num(0.0))
        assert site.secret is not None
        secret = site.secret.child("losses")
        released = release_variance(losses.cpu(), self.largest_loss, self.loss_noise, secret).tensors
        return float(released["variance"]) / min(size, len(losses))
