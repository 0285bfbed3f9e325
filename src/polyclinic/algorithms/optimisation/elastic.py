"""Elastic Aggregation: weights that move the outputs much are moved little. Chen, Hu, Tan, Wei, Wu: Elastic aggregation
for federated optimization. CVPR 2023. F: the network's logits; labels are not looked at; p_k = n_k / n.

    (1)  Ω_k = mean over batches of |∂ mean_x ‖F(x; θ)‖² / ∂θ|     at the θ that site k received, on its images
    (2)  Ω = Σ_k p_k · Ω_k
    (3)  ζ = 1 + τ − Ω / max(Ω)                                    for every weight by itself
    (4)  θ ← θ − ζ ⊙ Σ_k p_k · (θ − θ_k)

So ζ lies between τ (for the most sensitive weight) and 1 + τ (for one without influence). Weights that are all equally
sensitive have ζ = τ: with τ = 1 that is FedAvg, bit for bit; so it is where no weight has any influence (ζ = 1).

Departures. A plain mean over batches, where the paper's Ω_k is an exponential average with μ = .95 that batches enter
one after another: that serves to measure on the go, weighs the last images of a site's list most, and is the smaller
the fewer batches a site has. All training images are used, in evaluation mode. BatchNorm statistics are averaged.
(1) to (4) are the paper's equations as others quote them: its full text and the authors' code were not at hand, and
public implementations differ in what the maximum in (3) is of. Here: of all weights (`within: network`), so that most,
far below the most sensitive one, have ζ near 1 + τ; `within: tensor` compares the weights of each tensor. FL-bench has
one figure a tensor instead, of the labelled loss, and divides it by the largest of all sites.

Under a privacy plan it is refused: Ω_k looks at all images and has as many values as the model; noise would drown them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from polyclinic.algorithms.base import WEIGHT_KINDS, Averaging, RunningMean
from polyclinic.core.contract import Batch, Bundle, Exchange, Fit, Network, Score, Site, Stream, Tensors, Update, Work
from polyclinic.core.errors import RecipeError, Refused
from polyclinic.training.losses import task_loss


def parameter_sensitivity(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    """|∂ mean_x ‖F(x)‖² / ∂θ| of a batch."""
    del reference

    def length(model: Tensors) -> Tensor:
        return network({**weights, "model": model}, batch[0]).square().sum(-1).mean()

    return {name: slope.abs() for name, slope in grad(length)(dict(weights["model"])).items()}


@dataclass(frozen=True)
class Elastic(Averaging):
    tau: float = 0.5
    """τ: ζ of the most sensitive weight; the least sensitive ones have 1 + τ."""
    within: Literal["network", "tensor"] = "network"
    """Where the most sensitive weight is looked for."""

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 10:
            raise RecipeError(f"algorithm.tau is {self.tau}; choose 0 or more, usually 0.5")
        if self.training.private is not None:
            raise RecipeError(
                "elastic measures on all training images how much every weight matters, and sends that: no noise that "
                "would protect an image leaves anything of it; choose fedavg or fedprox, or leave privacy out"
            )

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return (*super().exchanges, Exchange("sensitivity", like="model"))

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield Fit(received, task_loss, self.training)
        omega = yield Score(
            received, parameter_sensitivity, reduce="mean", batch=self.training.batch_size(site.examples)
        )  # (1)
        return Update({**fitted.weights, "sensitivity": omega}, site.examples), None

    def check_update(self, update: Update) -> None:
        if any(bool((omega < 0).any()) for omega in update.tensors["sensitivity"].values()):
            raise Refused("norm", "sensitivity holds values below 0, but it is a mean of absolute values")

    def aggregate(self, state: Bundle, updates: Iterable[Update]) -> Bundle:
        means = {kind: RunningMean() for kind in (*WEIGHT_KINDS, "sensitivity")}
        for update in updates:
            for kind, mean in means.items():
                mean.add(update.tensors.get(kind, {}), self.update_weight(update))  # (2)
        zeta, trained = self.aggregation_coefficients(means["sensitivity"].value()), means["model"].value()
        moved = {name: torch.lerp(w, trained[name], zeta[name]) for name, w in state["model"].items()}  # (4)
        return {"model": moved, "buffers": means["buffers"].value()}

    def aggregation_coefficients(self, omega: Tensors) -> Tensors:
        largest = {name: tensor.max() for name, tensor in omega.items()}
        if self.within == "network":
            largest = dict.fromkeys(largest, torch.stack(list(largest.values())).max())
        return {
            name: torch.where(largest[name] > 0, 1 + self.tau - tensor / largest[name], 1.0)  # (3)
            for name, tensor in omega.items()
        }
