"""PFedCDP, one cluster of it. Shadin, Zhang, Wang, Pan: Heterogeneity-aware private personalized federated learning
for medical imaging via contrastive distillation. Algorithms 1 and 2. A recipe's `clusters` make the clusters, `stages`
and `privacy` clip, noise and quantise (Eq. 12 to 15), `finish: refine` makes the student (Eq. 16 to 19).

    (3)  F = (∂ log L / ∂w)²                       on site k's images, at the weights it had before the download
    (4)  M = 1 where F is among the `keep` largest of its tensor, else 0
    (6)  W_L,k ← M ⊙ W_L,k + (1 − M) ⊙ W_L         its own extractor where that matters to it, else the cluster's
         W_L,k, W_C,k ← E epochs of cross-entropy
   (11)  W_C,k ← `head_epochs` of (1 − λ)·CE + λ·T²·KL(teacher ‖ student), the extractor frozen
         W_L ← W_L + mean of (W_L,k − W_L);  W_C ← fitted on the public set, the extractor frozen

The head never leaves the site. With keep = 0 and head_epochs = 0 sites do what they do in FedPer, bit for bit.

Departures, `sound`: Fisher's information by examples, not of batches; a share of every tensor, not an absolute
threshold, whose scale nobody knows. The paper freezes the extractor before any training, so that its update would be
zero plus noise for ever: here it is trained first. The paper never trains the teacher's head: here the server fits it
after every aggregation, and nobody distils before. `paper`: squared gradients of batches, T_Fisher = `threshold`, one
training of all weights by (11), from the first round on, with the server's head as it was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from polyclinic.algorithms.personalisation.fedper import HEAD, FedPer, head_weights, shared_update
from polyclinic.algorithms.personalisation.fisher import squared_gradients, squared_mean_gradient
from polyclinic.core.contract import Bundle, Fit, Score, ServerWork, Site, Step, Stream, Tensors, Training, Work
from polyclinic.core.errors import RecipeError
from polyclinic.training.losses import distillation_loss, task_loss


@dataclass(frozen=True)
class PFedCDP(FedPer):
    idle: ClassVar = {"sound": ("threshold",), "paper": ("keep", "head_epochs", "server_epochs")}
    variant: Literal["sound", "paper"] = "sound"
    keep: float = 0.1
    """The share of every tensor that stays a site's own (sound); 0: no Fisher information is computed."""
    threshold: float = 0.01
    """Fisher information from which on a weight stays a site's own (paper)."""
    head_epochs: int = 1
    """Epochs of distillation into the head (sound); 0: none."""
    distil: float = 0.3
    """λ, the teacher's share in the loss."""
    temperature: float = 3.0
    server_epochs: int = 5
    """Epochs in which the server fits its head on the public set after every aggregation."""

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise RecipeError(problem)

    def _problems(self) -> list[str]:
        found = {
            f"algorithm.keep is {self.keep}; choose a share from 0 to 1": 0 <= self.keep <= 1,
            f"algorithm.threshold is {self.threshold}; choose 0 or more": self.threshold >= 0,
            f"algorithm.distil is {self.distil}; choose a share from 0 to 1": 0 <= self.distil <= 1,
            f"algorithm.temperature is {self.temperature}; choose more than 0, usually 3": self.temperature > 0,
            f"algorithm.head_epochs is {self.head_epochs}; choose 0 or more": self.head_epochs >= 0,
            f"algorithm.server_epochs is {self.server_epochs}; choose 1 or more": self.server_epochs >= 1,
        }
        return [sentence for sentence, holds in found.items() if not holds]

    @property
    def trains_on_server(self) -> bool:
        return self.variant == "sound"

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        weights = self.start_weights(received, memory)
        if self.variant == "paper":
            fitted = yield Fit(
                weights, distillation_loss, self.training, self._teacher_reference(received)
            )  # (11), of everything
        else:
            fitted = yield Fit(weights, task_loss, self.training)
            if self.head_epochs and self.distil and site.round > 1:  # in round 1 the teacher has learnt nothing
                step = Step(distillation_loss, train=(HEAD,))
                fitted = yield Fit(
                    fitted.weights,
                    (step,),
                    _with_epochs(self.training, self.head_epochs),
                    self._teacher_reference(received),
                )  # (11)
        mask: Tensors = {}
        if self.keep or self.variant == "paper":
            fisher = yield self._fisher_score(fitted.weights, site)  # (3)
            mask = {name: self.importance_mask(f) for name, f in fisher.items() if not name.startswith(HEAD)}  # (4)
        own = shared_update(fitted.weights, site)
        kept = {**own.tensors, "head": head_weights(fitted.weights["model"]), "mask": mask}
        return own, kept if mask else {"head": kept["head"]}

    def _fisher_score(self, weights: Bundle, site: Site) -> Score:
        if self.variant == "sound":
            return Score(weights, squared_gradients, reduce="mean")
        return Score(weights, squared_mean_gradient, reduce="mean", batch=self.training.batch_size(site.examples))

    def importance_mask(self, fisher: Tensor) -> Tensor:
        """(4): where a weight stays the site's own. Everywhere else it is the cluster's: (5)."""
        if self.variant == "paper":
            return fisher >= self.threshold
        count = round(self.keep * fisher.numel())
        chosen = torch.zeros(fisher.numel(), dtype=torch.bool, device=fisher.device)
        chosen[fisher.flatten().argsort(descending=True, stable=True)[:count]] = True
        return chosen.view(fisher.shape)

    def start_weights(self, received: Bundle, memory: Bundle | None) -> Bundle:
        weights = super().start_weights(received, memory)
        if not memory or "mask" not in memory:
            return weights
        mask, mine = memory["mask"], memory["model"]
        blend = {n: torch.where(mask[n], mine[n], t) if n in mask else t for n, t in weights["model"].items()}
        return {**weights, "model": blend}  # (6)

    def server_step(self, state: Bundle, server: Site, rng: Stream) -> ServerWork:
        weights = {"model": {**state["model"], **state["head"]}, "buffers": state.get("buffers", {})}
        training = replace(
            _with_epochs(self.training, self.server_epochs), private=None
        )  # the public set needs no protection
        fitted = yield "", Fit(weights, (Step(task_loss, train=(HEAD,)),), training)
        return {**state, "head": head_weights(fitted.weights["model"])}

    def warning(self) -> str:
        if self.variant == "sound":
            return ""
        return (
            "pfedcdp, variant paper: the server's head is never trained, so sites distil from a teacher that knows "
            "nothing; variant sound trains it"
        )

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return {"personal": self.start_weights(received, memory), "global": super().start_weights(received, None)}

    def _teacher_reference(self, received: Bundle) -> Bundle:
        like = next(iter(received["head"].values()))
        scalars = {"share": like.new_tensor(self.distil), "temperature": like.new_tensor(self.temperature)}
        teacher = {**received.get("model", {}), **received.get("head", {})}
        return {"teacher": teacher, "teacher buffers": dict(received.get("buffers", {})), "scalars": scalars}


def _with_epochs(training: Training, epochs: int) -> Training:
    return replace(training, epochs=epochs, steps=None)
