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

import copy
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from polyclinic.algorithms.base import scalar_tensors, with_prefix
from polyclinic.algorithms.personalisation.fedper import HEAD, FedPer, shared_update
from polyclinic.core import Batch, Bundle, Fit, Network, Score, ServerWork, Share, Site, Step, Stream, Tensors, Work
from polyclinic.training.dp.per_example_gradients import GradientTape, NotRecordableError, copy_with_record
from polyclinic.training.losses import distillation_loss, task_loss
from polyclinic.training.network import LiveNetwork

CHUNK_SIZE = 8
"""Examples whose gradients are computed at a time, for networks without the quicker way."""


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
                training = replace(self.training, epochs=self.head_epochs, steps=None)
                steps = (Step(distillation_loss, train=(HEAD,)),)
                fitted = yield Fit(fitted.weights, steps, training, self._teacher_reference(received))  # (11)
        mask: Tensors = {}
        if self.keep or self.variant == "paper":
            job = Score(fitted.weights, squared_gradients, reduce="mean")
            if self.variant == "paper":
                size, draws = self.training.batch_size(site.examples), rng.child("fisher batches", site.round)
                order = torch.randperm(site.examples, generator=draws.generator())
                job = replace(job, function=squared_mean_gradient, batch=size, order=order)
            fisher = yield job  # (3)
            mask = {name: self.importance_mask(f) for name, f in fisher.items() if not name.startswith(HEAD)}  # (4)
        own = shared_update(fitted.weights, site)
        kept = {**own.tensors, "head": with_prefix(HEAD, fitted.weights["model"]), "mask": mask}
        return own, kept if mask else {"head": kept["head"]}

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
        # The public set needs no protection.
        training = replace(self.training, epochs=self.server_epochs, steps=None, private=None)
        fitted = yield "", Fit(weights, (Step(task_loss, train=(HEAD,)),), training)
        return {**state, "head": with_prefix(HEAD, fitted.weights["model"])}

    def warning(self) -> str:
        paper = (
            "pfedcdp, variant paper: the server's head is never trained, so sites distil from an untrained teacher; "
            "variant corrected trains it"
        )
        return paper if self.variant == "paper" else ""

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return {"personal": self.start_weights(received, memory), "global": super().start_weights(received, None)}

    def _teacher_reference(self, received: Bundle) -> Bundle:
        teacher = super().start_weights(received, None)
        scalars = scalar_tensors(teacher, {"share": self.distil, "temperature": self.temperature})
        return {"teacher": teacher["model"], "teacher buffers": dict(teacher["buffers"]), "scalars": scalars}


def squared_gradients(network: Network, weights: Bundle, batch: Batch, _reference: Bundle) -> Tensors:
    """Return the mean over examples of the squared gradient of each example's log-likelihood."""
    if isinstance(network, LiveNetwork) and weights is network.live:
        with suppress(NotRecordableError):
            return _squared_gradients_from_tape(network, weights, batch)
    return per_example_squared_gradients(network, weights, batch)


def squared_mean_gradient(network: Network, weights: Bundle, batch: Batch, _reference: Bundle) -> Tensors:
    """Return the squared gradient of a batch's mean loss. It is no Fisher information: it shrinks with the batch."""
    found = torch.func.grad(lambda model: network.loss({**weights, "model": model}, batch))(dict(weights["model"]))
    return {name: g.square() for name, g in found.items()}


def _squared_gradients_from_tape(network: LiveNetwork, weights: Bundle, batch: Batch) -> Tensors:
    """Compute `squared_gradients` in one forward and one backward pass."""
    names, tape, other = frozenset(weights["model"]), GradientTape(network.device), copy.copy(network)
    other.module = copy_with_record(network.module, names, tape)
    tape.begin_pass(len(batch[1]))
    with torch.enable_grad():
        parts = tape.backward(other.loss(weights, batch) * len(batch[1]))
    if parts.keys() != names:
        raise NotRecordableError("a layer is not called")
    return {name: parts[name].sum_of_squares() / len(batch[1]) for name in weights["model"]}


def per_example_squared_gradients(network: Network, weights: Bundle, batch: Batch) -> Tensors:
    """Compute `squared_gradients` of any network, example by example."""

    def loss(model: Tensors, image: Tensor, label: Tensor) -> Tensor:
        return network.loss({**weights, "model": model}, (image[None], label[None]))

    found: Tensors = {}
    for images, labels in zip(*(torch.split(t, CHUNK_SIZE) for t in batch), strict=True):
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(dict(weights["model"]), images, labels)
        sums = {name: g.square().sum(0) / len(batch[1]) for name, g in each.items()}
        found = {name: found[name] + t for name, t in sums.items()} if found else sums
    return found
