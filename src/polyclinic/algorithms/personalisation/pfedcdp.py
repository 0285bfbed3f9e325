"""PFedCDP within one cluster. Shadin, Zhang, Wang, Pan: Heterogeneity-aware private personalized federated learning for
medical imaging via contrastive distillation. Algorithms 1 and 2. In a recipe `clusters` make the clusters, `stages` and
`privacy` clip, noise and quantise (Eq. 12 to 15), and `finish: refine` trains the student (Eq. 16 to 19).

    (3)  F = (∂ log L / ∂w)²                       on site k's images, at the weights it had before the download
    (4)  M = 1 where F is among the `keep` largest of its tensor, else 0
    (6)  W_L,k ← M ⊙ W_L,k + (1 − M) ⊙ W_L         the site's own extractor where M = 1, else the cluster's
         W_L,k, W_C,k ← E epochs of cross-entropy
   (11)  W_C,k ← `head_epochs` of (1 − λ)·CE + λ·T²·KL(teacher ‖ student), the extractor frozen
         W_L ← W_L + mean of (W_L,k − W_L);  W_C ← fitted on the public set, the extractor frozen

The head never leaves the site. With keep = 0 and head_epochs = 0 sites do the same as in FedPer, bit for bit.

Departures, `corrected`: the Fisher information is of examples, not of batches; M keeps a share of every tensor instead
of the paper's absolute threshold, whose scale is unknown. The paper freezes the extractor before any training, so that
its update would be zero plus noise for ever; here it is trained first. The paper never trains the teacher's head; here
the server fits it after every aggregation, and distillation starts in round 2. `paper`: squared gradients of batches,
T_Fisher = `threshold`, and one training of all weights by (11) from round 1 on, with the server's initial head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from polyclinic.algorithms.personalisation.fedper import HEAD, FedPer, head_weights, shared_update
from polyclinic.algorithms.personalisation.fisher import squared_gradients, squared_mean_gradient
from polyclinic.core import Bundle, Fit, Score, ServerWork, Share, Site, Step, Stream, Tensors, Training, Work
from polyclinic.training.losses import distillation_loss, task_loss


@dataclass(frozen=True)
class PFedCDP(FedPer):
    unused_options: ClassVar = {"corrected": ("threshold",), "paper": ("keep", "head_epochs", "server_epochs")}
    variant: Literal["corrected", "paper"] = "corrected"
    keep: Share = 0.1
    """The share of every tensor that a site keeps (corrected); 0: no Fisher information is computed."""
    threshold: NonNegativeFloat = 0.01
    """The least Fisher information of a weight that a site keeps (paper)."""
    head_epochs: NonNegativeInt = 1
    """Epochs of distillation into the head (corrected); 0: none."""
    distil: Share = 0.3
    """λ, the weight of the teacher in the loss."""
    temperature: PositiveFloat = 3.0
    server_epochs: PositiveInt = 5
    """Epochs in which the server fits its head on the public set after every aggregation."""

    @property
    def trains_on_server(self) -> bool:
        return self.variant == "corrected"

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        weights = self.start_weights(received, memory)
        if self.variant == "paper":
            fitted = yield Fit(
                weights, distillation_loss, self.training, self._teacher_reference(received)
            )  # (11), of everything
        else:
            fitted = yield Fit(weights, task_loss, self.training)
            if self.head_epochs and self.distil and site.round > 1:  # in round 1 the teacher is untrained
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
        if self.variant == "corrected":
            return Score(weights, squared_gradients, reduce="mean")
        return Score(weights, squared_mean_gradient, reduce="mean", batch=self.training.batch_size(site.examples))

    def importance_mask(self, fisher: Tensor) -> Tensor:
        """Return M of (4), which is true where the site keeps its own weight. Elsewhere it takes the cluster's: (5)."""
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
        if self.variant == "corrected":
            return ""
        return (
            "pfedcdp, variant paper: the server's head is never trained, so sites distil from an untrained teacher; "
            "variant corrected trains it"
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
