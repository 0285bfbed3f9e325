"""Elastic Aggregation: parameters to which the outputs are sensitive are updated less. Chen, Hu, Tan, Wei, Wu: Elastic
aggregation for federated optimization. CVPR 2023. F: the network's logits; labels are not used; p_k = n_k / n.

    (1)  Ω_k = mean over batches of |∂ mean_x ‖F(x; θ)‖² / ∂θ|     at the θ that site k received, on its images
    (2)  Ω = Σ_k p_k · Ω_k
    (3)  ζ = 1 + τ − Ω / max(Ω)                                    for every parameter by itself
    (4)  θ ← θ − ζ ⊙ Σ_k p_k · (θ − θ_k)

ζ lies between τ (for the most sensitive parameter) and 1 + τ (for one without influence). If all parameters are equally
sensitive, ζ = τ; with τ = 1 this is FedAvg, bit for bit. If no parameter has any influence, ζ = 1, which is FedAvg too.

Departures. Ω_k is a plain mean over batches. The paper's is an exponential average with μ = .95, updated batch by
batch: it can be computed while training, but it weights the last images of a site most and is smaller for sites with
fewer batches. All training images are used, in evaluation mode. BatchNorm statistics are averaged. (1) to (4) are the
equations as other papers quote them: the full text and the authors' code were not available, and public implementations
differ in the maximum in (3). Here it is over all parameters (`within: network`), so that most of them, far less
sensitive than the most sensitive one, have ζ near 1 + τ; `within: tensor` takes the maximum of each tensor. FL-bench
uses one number per tensor, of the labelled loss, divided by the maximum over all sites.

It is refused under a privacy plan: Ω_k depends on all images and has as many values as the model, so that the necessary
noise would leave no signal.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.algorithms.base import WEIGHT_KINDS, Algorithm
from polyclinic.core import (
    Batch,
    Bundle,
    Exchange,
    Fit,
    Network,
    RecipeError,
    Refused,
    Score,
    Site,
    Stream,
    Tensors,
    Update,
    Updates,
    Work,
)
from polyclinic.training.losses import task_loss


def parameter_sensitivity(network: Network, weights: Bundle, batch: Batch, _reference: Bundle) -> Tensors:
    """Return |∂ mean_x ‖F(x)‖² / ∂θ| of a batch."""

    def length(model: Tensors) -> Tensor:
        return network({**weights, "model": model}, batch[0]).square().sum(-1).mean()

    return {name: slope.abs() for name, slope in torch.func.grad(length)(dict(weights["model"])).items()}


@dataclass(frozen=True)
class Elastic(Algorithm):
    tau: Annotated[float, Field(ge=0, le=10)] = 0.5
    """τ: ζ of the most sensitive parameter; the least sensitive ones have 1 + τ."""
    within: Literal["network", "tensor"] = "network"
    """Whether the maximum in (3) is over the network or over each tensor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.private is not None:
            raise RecipeError(
                "elastic sends the sensitivity of every parameter, computed on all training images, and noise that "
                "protects an image would leave no signal in it; choose fedavg or fedprox, or leave privacy out"
            )

    def exchanges(self) -> tuple[Exchange, ...]:
        return (*super().exchanges(), Exchange("sensitivity", like="model"))

    def averaged_kinds(self) -> tuple[str, ...]:
        return (*super().averaged_kinds(), "sensitivity")

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield Fit(received, task_loss, self.training)
        omega = yield Score(
            received, parameter_sensitivity, reduce="mean", batch=self.training.batch_size(site.examples)
        )  # (1)
        return Update({**fitted.weights, "sensitivity": omega}, site.examples), None

    def check_update(self, update: Update) -> None:
        if any(bool((omega < 0).any()) for omega in update.tensors["sensitivity"].values()):
            raise Refused("norm", "sensitivity holds values below 0, but it is a mean of absolute values")

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        means = self.mean_update(updates, *WEIGHT_KINDS, "sensitivity")  # (2)
        zeta, trained = self.aggregation_coefficients(means["sensitivity"]), means["model"]
        moved = {name: torch.lerp(w, trained[name], zeta[name]) for name, w in state["model"].items()}  # (4)
        return {"model": moved, "buffers": means["buffers"]}

    def aggregation_coefficients(self, omega: Tensors) -> Tensors:
        largest = {name: tensor.max() for name, tensor in omega.items()}
        if self.within == "network":
            largest = dict.fromkeys(largest, torch.stack(list(largest.values())).max())
        return {
            name: torch.where(largest[name] > 0, 1 + self.tau - tensor / largest[name], 1.0)  # (3)
            for name, tensor in omega.items()
        }
