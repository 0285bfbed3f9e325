"""Curricula: any algorithm, with the order of a site's images decided by how well the received model predicts them.
Jiménez-Sánchez, Tardy, González Ballester, Mateus, Piella: Memory-aware curriculum federated learning for breast cancer
classification. Computer Methods and Programs in Biomedicine 229, 2023, section III-D.

    (4)  ρ_i = e^q_i,  e: `training.curriculum.strength`, 2 in the paper
         forgotten  q_i = 1 if case i was predicted correctly before the deployment and is not after it, else 0
         hard       q_i = the rank of its loss after the deployment, from 0 (the lowest) to 1; easy: 1 − that rank
         an epoch is drawn case by case, without replacement, with probabilities proportional to ρ

"Before" are the weights with which the site's last training ended, predicted right then. "After" are those from which
its training starts, so that weights an algorithm keeps at a site count as the site's own; where nothing is deployed
(`local`, `centralised`) nothing is forgotten. Each takes one pass over the training images in evaluation mode, without
gradients or augmentation. `hard` and `easy` need the second only.

The order of an epoch is drawn when the epoch begins, from the scores of the last deployment. If sites average every τ
steps, an epoch that continues in the next round keeps its order; if it began while the site was absent, its order
follows the site's last scores. The first `training.curriculum.warmup_rounds` rounds are in random order, and so is a
site's first. Copies of an oversampled case are drawn separately, each with the case's weight.

Forgetting can be reported in any order (`evaluate.forgetting`): the shares of a site's cases that a deployment has
forgotten and gained. Which cases these are stays at the site, in a file per round beside its memory.

Departures: the authors' code compares two deployed models and draws with replacement. A case whose classes tie, or
whose loss equals another's to the last digits, may be ranked differently by another engine.
"""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from polyclinic.algorithms.base import Algorithm, classifier_weights
from polyclinic.algorithms.wrappers.base import Wrapper
from polyclinic.core import (
    Batch,
    Bundle,
    Fit,
    Fitted,
    Job,
    Network,
    Refused,
    Score,
    Site,
    Stream,
    Tensors,
    Training,
    Update,
    Work,
)
from polyclinic.training.data_order import batches_per_epoch, regular_rounds_before

CASES, SCORES = "cases", "scores"
"""The kinds of a site's memory about its cases, and of the scores that it stores in a file per round."""


def wrap_with_curriculum(algorithm: Algorithm, reports_forgetting: bool) -> Algorithm:
    """Return the algorithm with its curriculum, or itself if the order is random and forgetting is not reported."""
    if algorithm.training.curriculum.by == "random" and not reports_forgetting:
        return algorithm
    return Curriculum(algorithm.training, inner=algorithm, reports_forgetting=reports_forgetting)


@dataclass(frozen=True)
class Deployment:
    """Predictions of a site's cases before and after a deployment; empty if none were needed."""

    before: Tensor | None = None
    """Whether each case was predicted correctly."""
    after: Tensors = field(default_factory=dict)
    """For each case whether it is predicted correctly, its loss, its label."""
    weights: Tensor | None = None
    """ρ."""


@dataclass(frozen=True)
class Curriculum(Wrapper):
    reports_forgetting: bool = False
    """Whether sites report the shares of their cases that a deployment has forgotten and gained."""

    def local(self, received: Bundle, memory: Bundle | None, site: Site, rng: Stream) -> Work:
        known = {name: tensor.cpu() for name, tensor in (memory or {}).get(CASES, {}).items()}
        work = self.inner.local(received, _inner_memory(memory), site, rng)
        found: Deployment | None = None
        answer, trained, begun = cast(Any, None), dict[str, Tensors](), cast(Tensor | None, None)
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
                    job = replace(job, sampling_weights=(found.weights, begun))
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
        kind, before = self.training.curriculum.by, known.get("right")
        ordering = kind != "random" and site.round > self.training.curriculum.warmup_rounds
        ordering &= kind != "forgotten" or before is not None
        if not ordering and not (self.reports_forgetting and before is not None):
            return Deployment()
        scores = yield Score(classifier_weights(job.weights), score_cases, counts=False)
        after = {name: tensor.cpu() for name, tensor in scores.items()}
        early = case_preference(kind, after, before) if ordering else None
        return Deployment(before, after, None if early is None else self.training.curriculum.strength**early)

    def _update_cases(
        self, trained: Bundle, found: Deployment, begun: Tensor | None, site: Site
    ) -> Generator[Job, Any, Tensors]:
        """Return what the next round needs: the predictions to compare with, and the order of an unfinished epoch."""
        cases: Tensors = {}
        if (self.reports_forgetting or self.training.curriculum.by == "forgotten") and site.round < site.rounds:
            cases["right"] = (yield Score(classifier_weights(trained), score_cases, counts=False))["right"]
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


def score_cases(network: Network, weights: Bundle, batch: Batch, _reference: Bundle) -> Tensors:
    """Return for each case whether it is predicted correctly, its loss and its label."""
    images, labels = batch
    logits = network(weights, images)
    loss = nn.functional.cross_entropy(logits, labels, reduction="none")
    return {"right": logits.argmax(-1) == labels, "loss": loss, "labels": labels}


def case_preference(kind: str, after: Tensors, before: Tensor | None) -> Tensor:
    """Return q of (4), from 0 (late) to 1 (early)."""
    if kind == "forgotten":
        assert before is not None
        return (before & ~after["right"]).double()
    harder = fractional_ranks(after["loss"])
    return harder if kind == "hard" else 1 - harder


def fractional_ranks(values: Tensor) -> Tensor:
    """Return ranks from 0 (the smallest value) to 1. Ties share their mean rank; NaN ranks as the largest."""
    known = values.double().masked_fill(values.isnan(), torch.inf)
    below, upto = (torch.searchsorted(known.sort().values, known, right=right) for right in (False, True))
    return (below + upto - 1).double() / 2 / max(len(values) - 1, 1)


def ongoing_epoch_weights(training: Training, known: Tensors, found: Deployment, round: int) -> Tensor | None:
    """Return the sampling weights of the epoch in which the round begins, or None if it is in random order."""
    if training.steps is None or not found.after or "round" not in known:
        return None
    labels = found.after["labels"]
    per_epoch = batches_per_epoch(_epoch_length(labels, training), training.batch_size(len(labels)))
    first = regular_rounds_before(training, round) * training.steps // per_epoch * per_epoch
    began = first // training.steps + round - regular_rounds_before(training, round)
    return known.get("new" if began >= int(known["round"]) else "old")


def _epoch_length(labels: Tensor, training: Training) -> int:
    """Return the number of examples in an epoch, copies included."""
    counts = labels.bincount()
    return int(counts.max()) * int((counts > 0).sum()) if training.oversample else len(labels)


def forgetting_rates(found: Deployment) -> dict[str, float]:
    """Return the shares of cases that a deployment has forgotten and gained; nothing without an earlier prediction."""
    if found.before is None or not found.after:
        return {}
    before, after = found.before, found.after["right"]
    lost, gained = (before & ~after).double().mean(), (after & ~before).double().mean()
    return {"forgotten": float(lost), "gained": float(gained), "cases": float(len(after))}


def round_scores(found: Deployment) -> Tensors:
    """Return the scores of a round, which the site stores and never sends."""
    if not found.after:
        return {}
    after, loss = found.after["right"], found.after["loss"]
    scores = {"after": after, "loss": loss, "before": found.before, "weight": found.weights}
    return {name: tensor for name, tensor in scores.items() if tensor is not None}


def split_memory(memory: Bundle) -> tuple[Bundle | None, Bundle]:
    """Split a site's memory into the part to remember and the scores to store in a file."""
    filed = {kind: group for kind, group in memory.items() if kind.partition("@")[0] == SCORES}
    rest = {kind: group for kind, group in memory.items() if kind not in filed}
    return (rest or None if filed else rest), filed


def _inner_memory(memory: Bundle | None) -> Bundle | None:
    """Return the memory of the inner algorithm."""
    return {kind: group for kind, group in (memory or {}).items() if kind not in (CASES, SCORES)} or None
