"""Curricula: any algorithm, with the order of a site's cases decided by what the model it received makes of them.
Jiménez-Sánchez, Tardy, González Ballester, Mateus, Piella: Memory-aware curriculum federated learning for breast cancer
classification. Computer Methods and Programs in Biomedicine 229, 2023, section III-D.

    (4)  ρ_i = e^q_i,  e: `training.emphasis`, 2 in the paper
         forgotten  q_i = 1 where case i was right before the deployment and is wrong after it, else 0
         hard       q_i = the rank of its loss after the deployment, from 0 (the lowest) to 1; easy: 1 − that
         an epoch is drawn case by case, without replacement, in proportion to ρ (learning.fit.order)

Before: with the weights that the site's last training ended with, predicted right then. After: with those that its
training starts from, so that what an algorithm keeps at a site counts as the site's own; where nothing is deployed
(`local`, `centralised`) nothing is forgotten. Each is one pass over the training images as in evaluation, without
gradients and unaugmented; its time is the site's like any other. `hard` and `easy` need the second alone.

An epoch's order is drawn when it begins, by the scores of the last deployment. Where sites meet every τ steps, an epoch
that goes on in the next round goes on in the order it began with; one that began while a site was away goes by the
scores it had last. The first `training.order_after` rounds are in random order, and so is a site's first. Copies of an
oversampled case are drawn each by itself, with the case's weight.

Forgetting can be told whatever the order is (`evaluate.forgetting`): the shares of a site's cases that a deployment has
lost and gained. Which cases these are stays at the site, a file a round beside what it remembers.

Departures: the authors' code compares two deployed models and draws with replacement. Ranks and rounding: a case whose
classes tie, or whose loss another's equals, to the last digits may score differently on another engine.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyclinic.algorithms.base import Averaging, classifier_weights
from polyclinic.algorithms.wrappers.base import Wrapper
from polyclinic.core.contract import (
    Batch,
    Bundle,
    Fit,
    Fitted,
    Job,
    Network,
    Score,
    Site,
    Stream,
    Tensors,
    Training,
    Update,
    Work,
)
from polyclinic.core.errors import Refused
from polyclinic.training.fit import batches_per_epoch, regular_rounds_before

CASES, SCORES = "cases", "scores"
"""What a site remembers of its cases, and what it files of a round."""


def wrap_with_curriculum(algorithm: Averaging, reports_forgetting: bool) -> Averaging:
    """The algorithm with its recipe's order of cases; itself, where that is random and nobody asks for forgetting."""
    if algorithm.training.order == "random" and not reports_forgetting:
        return algorithm
    return Curriculum(algorithm.training, inner=algorithm, reports_forgetting=reports_forgetting)


@dataclass(frozen=True)
class Deployment:
    """What a deployment did to a site's cases; empty where nobody looked."""

    before: Tensor | None = None
    """Whether each was right."""
    after: Tensors = field(default_factory=dict)
    """Whether each is right, its loss, its label."""
    weights: Tensor | None = None
    """ρ."""


@dataclass(frozen=True)
class Curriculum(Wrapper):
    reports_forgetting: bool = False
    """Sites tell which shares of their cases a deployment has lost and gained."""

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        known = {name: tensor.cpu() for name, tensor in (memory or {}).get(CASES, {}).items()}
        work = self.inner.local(received, _inner_memory(memory), site, rng)
        answer: Any = None
        found: Deployment | None = None
        trained: Bundle = {}
        begun: Tensor | None = None
        while True:
            try:
                job = work.send(answer)
            except StopIteration as end:
                update, kept = end.value
                break
            if isinstance(job, Fit):
                if found is None:
                    found = yield from self._score_deployment(job, known, site)
                    begun = ongoing_epoch_weights(job.training, known, found, site.round)
                if found.weights is not None:
                    job = replace(job, order=(found.weights, begun))
            answer = yield job
            trained = answer.weights if isinstance(answer, Fitted) else trained
        cases = known if found is None else (yield from self._update_cases(trained, found, begun, site))
        found = found or Deployment()
        if self.reports_forgetting:
            update = replace(update, scalars={**update.scalars, **forgetting_rates(found)})
        own = {kind: group for kind, group in ((CASES, cases), (SCORES, round_scores(found))) if group}
        if own and kept is None:
            kept = _inner_memory(memory)  # it stays as it was
        return update, {**(kept or {}), **own} if own else kept

    def _score_deployment(self, job: Fit, known: Tensors, site: Site) -> Generator[Job, Any, Deployment]:
        kind, before = self.training.order, known.get("right")
        ordering = kind != "random" and site.round > self.training.order_after
        ordering &= kind != "forgotten" or before is not None
        if not ordering and not (self.reports_forgetting and before is not None):
            return Deployment()
        after = yield Score(classifier_weights(job.weights), score_cases, aside=True)
        after = {name: tensor.cpu() for name, tensor in after.items()}
        early = case_preference(kind, after, before) if ordering else None
        return Deployment(before, after, None if early is None else self.training.emphasis**early)

    def _update_cases(
        self, trained: Bundle, found: Deployment, begun: Tensor | None, site: Site
    ) -> Generator[Job, Any, Tensors]:
        """What the next deployment is compared with, and the order of an epoch that may go on then."""
        cases: Tensors = {}
        if (self.reports_forgetting or self.training.order == "forgotten") and site.round < site.rounds:
            cases["right"] = (yield Score(classifier_weights(trained), score_cases, aside=True))["right"]
        if self.training.epochs is None:
            orders = {"new": found.weights, "old": begun}
            cases |= {name: weights for name, weights in orders.items() if weights is not None}
        return {**cases, "round": torch.tensor(site.round)} if cases else {}

    def check_update(self, update: Update) -> None:
        self.inner.check_update(update)
        lost, gained, cases = (update.scalars.get(name, 0.0) for name in ("forgotten", "gained", "cases"))
        if min(lost, gained, cases) < 0 or lost + gained > 1 + 1e-9 or cases > update.examples:
            raise Refused("scalars", f"shares {lost:g} and {gained:g} of {cases:g} cases forgotten and gained")

    def models(self, received: Bundle, memory: Bundle | None) -> dict[str, Bundle]:
        return self.inner.models(received, _inner_memory(memory))


def score_cases(network: Network, weights: Bundle, batch: Batch, reference: Bundle) -> Tensors:
    """Whether each case is right, its loss, its label."""
    del reference
    images, labels = batch
    logits = network(weights, images)
    loss = F.cross_entropy(logits, labels, reduction="none")
    return {"right": logits.argmax(-1) == labels, "loss": loss, "labels": labels}


def case_preference(kind: str, after: Tensors, before: Tensor | None) -> Tensor:
    """q of (4), from 0 (late) to 1 (early)."""
    if kind == "forgotten":
        assert before is not None
        return (before & ~after["right"]).double()
    harder = fractional_ranks(after["loss"])
    return harder if kind == "hard" else 1 - harder


def fractional_ranks(values: Tensor) -> Tensor:
    """Of each value, from 0 (the least) to 1; equal ones share the mean of theirs. What is no number is the largest."""
    known = values.double().masked_fill(values.isnan(), torch.inf)
    line = known.sort().values
    below, upto = (torch.searchsorted(line, known, right=right) for right in (False, True))
    return (below + upto - 1).double() / 2 / max(len(values) - 1, 1)


def ongoing_epoch_weights(training: Training, known: Tensors, found: Deployment, round: int) -> Tensor | None:
    """The weights by which the epoch was drawn that the round begins in the midst of; None: it is in random order."""
    if training.steps is None or not found.after or "round" not in known:
        return None
    labels = found.after["labels"]
    per_epoch = batches_per_epoch(_epoch_length(labels, training), training.batch_size(len(labels)))
    first = regular_rounds_before(training, round) * training.steps // per_epoch * per_epoch
    began = first // training.steps + round - regular_rounds_before(training, round)
    return known.get("new" if began >= int(known["round"]) else "old")


def _epoch_length(labels: Tensor, training: Training) -> int:
    """Of an epoch, copies included."""
    counts = labels.bincount()
    return int(counts.max()) * int((counts > 0).sum()) if training.oversample else len(labels)


def forgetting_rates(found: Deployment) -> dict[str, float]:
    """The shares of cases that a deployment lost and gained; nothing where there is none to compare with."""
    if found.before is None or not found.after:
        return {}
    before, after = found.before, found.after["right"]
    lost, gained = (before & ~after).double().mean(), (after & ~before).double().mean()
    return {"forgotten": float(lost), "gained": float(gained), "cases": float(len(after))}


def round_scores(found: Deployment) -> Tensors:
    """What a site files of a round: never sent."""
    if not found.after:
        return {}
    known = {"before": found.before, "weight": found.weights}
    filed = {name: tensor for name, tensor in known.items() if tensor is not None}
    return {"after": found.after["right"], "loss": found.after["loss"], **filed}


def split_memory(memory: Bundle) -> tuple[Bundle | None, Bundle]:
    """What a site is to remember, and what it is to file."""
    filed = {kind: group for kind, group in memory.items() if kind.partition("@")[0] == SCORES}
    rest = {kind: group for kind, group in memory.items() if kind not in filed}
    return (rest or None if filed else rest), filed


def _inner_memory(memory: Bundle | None) -> Bundle | None:
    """What the algorithm itself remembers."""
    return {kind: group for kind, group in (memory or {}).items() if kind not in (CASES, SCORES)} or None
