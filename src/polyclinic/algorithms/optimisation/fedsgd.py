"""FedSGD. McMahan et al., AISTATS 2017, section 2: one step on the gradient over all of a site's examples.

    (1)  g_k = ∇F_k(w), over ALL examples of site k (accumulated in batches)
    (2)  w_k ← w − η·g_k           repeated `steps_per_round` times
    (3)  w ← Σ_k (n_k / n) · w_k   = w − η·Σ_k (n_k / n)·g_k for one step

Departures: with BatchNorm each batch of (1) is normalised by its own statistics, so that the gradient is that of the
batch-normalised loss. Further steps are an option (FedCycle's comparison uses them); the original takes one.
"""

from dataclasses import dataclass, replace

from pydantic import PositiveInt

from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core import Bundle, Fit, RecipeError, Site, Stream, Update, Work
from polyclinic.training.losses import task_loss


@dataclass(frozen=True)
class FedSGD(FedAvg):
    steps_per_round: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        options = self.training.optimiser
        if options.name != "sgd" or options.momentum:
            raise RecipeError("fedsgd takes plain gradient steps; set training.optimiser to {name: sgd, momentum: 0}")

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        full = replace(self.training, epochs=self.steps_per_round, steps=None)
        fitted = yield Fit(received, task_loss, full, full_batch=True)  # (1), (2)
        return Update(fitted.weights, site.examples), None
