"""FedNova. Wang, Liu, Liang, Joshi, Poor: Tackling the objective inconsistency problem in heterogeneous federated
optimization. NeurIPS 2020, Eq. 6 and section 4.

    (1)  ‖a‖₁ = τ for SGD;  (τ − ρ(1 − ρ^τ)/(1 − ρ)) / (1 − ρ) with momentum ρ
    (2)  d_k = (x − y_k) / ‖a_k‖₁
    (3)  τ_eff = Σ_k p_k · ‖a_k‖₁,   p_k = n_k / n
    (4)  x ← x − τ_eff · Σ_k p_k · d_k

Sites that take more steps have no more influence. Departures: none; BatchNorm statistics, which have no gradient, are
averaged as in FedAvg. The server computes ‖a_k‖₁ from the number of steps that a site reports.
"""

from dataclasses import dataclass
from typing import ClassVar

from polyclinic.algorithms.base import Algorithm, BundleMean
from polyclinic.core import Bundle, Fit, RecipeError, Refused, Site, Stream, Update, Updates, Work
from polyclinic.training.data_order import batches_per_epoch
from polyclinic.training.losses import task_loss


def normalised_steps(steps: float, momentum: float) -> float:
    """Return ‖a‖₁, the distance that a constant unit gradient moves in `steps` steps of learning rate 1."""
    rho = momentum
    return steps if rho == 0 else (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)  # (1)


@dataclass(frozen=True)
class FedNova(Algorithm):
    scalars: ClassVar = ("steps",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.optimiser.name != "sgd":
            raise RecipeError(
                f"fednova cannot use {self.training.optimiser.name}: its normalisation is defined for SGD, with or "
                "without momentum; set training.optimiser.name: sgd, or choose fedavg"
            )

    def needs_single_updates(self) -> str:
        return "fednova divides every site's update by its own number of steps"

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        fitted = yield Fit(received, task_loss, self.training)
        return Update(fitted.weights, site.examples, scalars={"steps": float(fitted.steps)}), None

    def check_update(self, update: Update) -> None:
        """Refuse a reported number of steps that its examples do not imply: it scales the site's weight and (3)."""
        steps, own = update.scalars.get("steps", 0.0), self.training
        size = own.batch_size(update.examples)
        implied = own.steps if own.epochs is None else own.epochs * batches_per_epoch(update.examples, size)
        if steps != implied and not (own.oversample and own.epochs and 1 <= steps <= 1e6):
            raise Refused("scalars", f"{steps:g} steps reported where {update.examples} examples imply {implied}")

    def aggregate(self, state: Bundle, updates: Updates) -> Bundle:
        x = state["model"]
        mean, lengths, total = BundleMean(), 0.0, 0.0
        for update in updates:
            a_k = normalised_steps(update.scalars["steps"], self.training.optimiser.momentum)
            d_k = {name: (x[name] - y) / a_k for name, y in update.tensors["model"].items()}  # (2)
            mean.add({**update.tensors, "model": d_k}, self.update_weight(update))
            lengths, total = lengths + self.update_weight(update) * a_k, total + self.update_weight(update)
        tau, means = lengths / total, mean.value()  # (3)
        return {**means, "model": {name: w - tau * means["model"][name] for name, w in x.items()}}  # (4)
