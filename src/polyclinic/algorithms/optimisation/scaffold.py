"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic controlled averaging for federated
learning. ICML 2020, Algorithm 1, option II.

    (1)  y ← y − η·(g_k(y) − c_k + c)                S steps from y = x
    (2)  c_k⁺ = c_k − c + (x − y) / (S·η)
    (3)  x ← x + η_g · mean_k(y_k − x)
    (4)  c ← c + (1/N) · Σ_k (c_k⁺ − c_k)            N: all sites, not only those of the round

The correction in (1) is the gradient of the linear term ⟨c − c_k, y⟩, so it is added to the objective. Only parameters
have control variates; BatchNorm statistics are averaged. The optimiser must be plain SGD: (2) infers the mean gradient
from the distance moved, which momentum, Adam or weight decay would change.

Departures: the mean in (3) follows `training.weights` (uniform, as in the paper, or by examples).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from polyclinic.algorithms.base import Algorithm, BundleMean, RunningMean, network_weights
from polyclinic.core import Bundle, Exchange, Federation, Fit, RecipeError, Site, Stream, Update, Updates, Work
from polyclinic.training.losses import corrected_loss


@dataclass(frozen=True)
class Scaffold(Algorithm):
    averages: ClassVar[bool] = True
    global_lr: Annotated[float, Field(gt=0, le=100)] = 1.0
    """η_g, usually 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        options = self.training.optimiser
        if options.name != "sgd" or options.momentum or options.weight_decay:
            raise RecipeError(
                "scaffold needs plain SGD: its control variates are computed from the distance moved; set "
                "training.optimiser to {name: sgd, momentum: 0, weight_decay: 0}"
            )

    def exchanges(self) -> tuple[Exchange, ...]:
        return (*super().exchanges(), Exchange("control", like="control", weighted=False))

    def averaged_kinds(self) -> tuple[str, ...]:
        return (*super().averaged_kinds(), "control")

    def init(self, federation: Federation) -> Bundle:
        zero = {name: torch.zeros_like(w) for name, w in federation.initial["model"].items()}
        return {**federation.initial, "control": zero, "all": {"sites": torch.tensor(len(federation.sites))}}

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        x, c = received["model"], received["control"]
        c_k = memory["control"] if memory else {name: torch.zeros_like(v) for name, v in c.items()}
        correction = {name: c[name] - c_k[name] for name in c}
        fitted = yield Fit(network_weights(received), corrected_loss, self.training, {"correction": correction})  # (1)
        y, distance = fitted.weights["model"], fitted.steps * site.lr
        moved = {name: (x[name] - y[name]) / distance - c[name] for name in c}  # (2): c_k⁺ − c_k
        update = Update({**fitted.weights, "control": moved}, site.examples)
        return update, {"control": {name: c_k[name] + moved[name] for name in c}}

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        mean, moved, sites = BundleMean(), RunningMean(), 0
        for update in updates:
            mean.add(update.tensors, self.update_weight(update))
            moved.add(update.tensors["control"])
            sites += len(update.sites)
        x, mean_y, mean_moved = state["model"], mean.value(), moved.value()
        share = sites / int(state["all"]["sites"])
        model = {name: torch.lerp(x[name], mean_y["model"][name], self.global_lr) for name in x}  # (3)
        control = {name: c + share * mean_moved[name] for name, c in state["control"].items()}  # (4)
        return {**state, **mean_y, "model": model, "control": control}
