"""An attack on our own claim: does training give away more than the plan says?

Privacy Auditing with One (1) Training Run (Steinke, Nasr, Jagielski, NeurIPS 2023). Canaries, examples made to be
found, join a site's training images, each by the toss of a coin; whoever sees all that training releases then guesses
which of them took part. Guesses that are right more often than (ε, δ) allows refute the claim.

A canary's gradient is ten clips long and lies on one weight of its own (their section 6, "Dirac"). Canaries are images
among images: a network is given a layer that knows them, and from there on nothing treats them differently. They are
drawn, differentiated, clipped, summed and noised by the very code that trains on patients.

An audit that finds nothing proves nothing: it bounds ε from below, the accountant bounds it from above. And canaries
see their own layer only: a mistake confined to the gradients of another is not theirs to find.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from polyclinic.core import Batch, Examples, Fit, Private, RecipeError, Site, Stream, Training
from polyclinic.models.classifier import Classifier
from polyclinic.training.data_order import batches_per_epoch
from polyclinic.training.fit import fit
from polyclinic.training.losses import task_loss
from polyclinic.training.network import LiveNetwork, copy_module_weights

LENGTH = 10.0
"""A canary's gradient, in clips: far too long, so that a clip that lets more through than it should is noticed."""
GAP = 1e4
"""Canary i is an image of pixels −GAP·(i + 1), which turning, cropping and blurring leave alone; no scan is so dark."""
EMPTY = 2**30
"""The number in the place of a canary that lost its toss."""
SHARES = ((0.03, 0.03), (0.1, 0.1), (0.25, 0.25), (0.5, 0.5), (0.1, 0.0), (0.25, 0.0), (0.4, 0.0))
"""Shares of the canaries that are called in (those of the highest scores) and out (the lowest), chosen beforehand.

Where steps are small, members who were never drawn look like outsiders: then it is better to call nobody out."""


@dataclass(frozen=True)
class AuditResult:
    """The outcome of an attack on a claim."""

    claimed: float
    """ε of the steps that were attacked, by the accountant …"""
    bound: float
    """… and the lower bound on it that the attack proves at this confidence."""
    delta: float
    confidence: float
    canaries: int
    guesses: int
    right: int
    statistic: str
    """The score that distinguished the canaries."""
    steps: int
    reach: float
    """The bound had every guess been right: no larger ε can be refuted with so many canaries."""

    @property
    def is_refuted(self) -> bool:
        return self.bound > self.claimed

    @property
    def verdict(self) -> str:
        found = (
            f"{self.right} of {self.guesses} guesses about {self.canaries} canaries were right, so ε is at least "
            f"{self.bound:.2f} with {100 * self.confidence:g} % confidence, and {self.claimed:.2f} is claimed"
        )
        if self.is_refuted:
            return f"The claim is refuted: {found}; training gives away more than planned (by {self.statistic})."
        if self.reach <= self.claimed:
            return (
                f"This audit could not have refuted the claim: {self.canaries} canaries show no more than "
                f"{self.reach:.2f}, and {self.claimed:.2f} is claimed; take more canaries."
            )
        return f"No contradiction found: {found}. That is no proof: a better attack might find more."

    def as_json(self) -> dict[str, object]:
        fields = {name: None if value == math.inf else value for name, value in vars(self).items()}
        return {**fields, "refuted": self.is_refuted, "verdict": self.verdict}


def run_audit(
    network: Classifier,
    data: Examples,
    training: Training,
    *,
    rounds: int,
    delta: float,
    claimed: float,
    stream: Stream,
    canaries: int = 1000,
    confidence: float = 0.95,
    whole: bool = False,
    device: torch.device | None = None,
) -> AuditResult:
    """Train one site as planned, with canaries among its images, and guess which of them took part.

    `claimed` is ε of `rounds` rounds of `training` on `data` (`whole`: each step on all of it). With canaries a site is
    larger, so its batches grow: every image keeps its chance of coming into a step (rounded down), and steps stay as
    many. Canaries that lost their toss leave an empty place, as the number of examples is public.
    """
    private = _check_auditable(training, canaries, confidence)
    members = torch.rand(canaries, generator=stream.child("coins").generator()) < 0.5
    seated = CanaryExamples(data, members)
    live = LiveNetwork(CanaryNetwork(copy.deepcopy(network), canaries, LENGTH * private.clip), device)
    altered = adjust_batches(training, len(data), len(seated), whole)
    start = weights = copy_module_weights(live.module)
    with record_gradients(live.live["model"]["seats.weight"]) as heard:
        for number in range(1, rounds + 1):
            site = Site("audit", len(seated), number, rounds, training.optimiser.lr)
            job = Fit(weights, task_loss, altered, full_batch=whole)
            weights = fit(job, live, seated, site, stream, stream.child("secret", number)).weights
    expected = len(seated) if whole else min(altered.batch_size(len(seated)), len(seated))
    released = torch.stack(heard)[:, :canaries].double() * (expected / private.clip)
    moved = (start["model"]["seats.weight"] - weights["model"]["seats.weight"]).flatten()[:canaries].cpu()
    scores = canary_scores(released, moved, expected / len(seated), len(heard) // rounds)
    return best_bound(scores, members, claimed=claimed, delta=delta, confidence=confidence, steps=len(heard))


def _check_auditable(training: Training, canaries: int, confidence: float) -> Private:
    private = training.private
    if private is None or private.noise == 0 or math.isinf(private.clip):
        raise RecipeError(
            "there is no claim to audit: without noise and a clip nothing is private; give privacy.epsilon"
        )
    if canaries < 100:
        raise RecipeError(f"{canaries} canaries can show next to nothing; take 1000 or more")
    if not 0.5 <= confidence < 1:
        raise RecipeError(f"a confidence of {confidence} says nothing; choose 0.95, or another from 0.5 to below 1")
    return private


def adjust_batches(training: Training, before: int, after: int, whole: bool = False) -> Training:
    """Return the training of a site that has grown by canaries, with the same sampling rate and number of steps."""
    if whole:
        return training
    size = training.batch_size(before)
    training = replace(training, batch=after if size >= before else size * after // before, batches=None)
    if training.epochs is None or (training.private and training.private.sampling == "shuffle"):
        return training
    return replace(training, epochs=None, steps=training.epochs * batches_per_epoch(before, size))


class CanaryNetwork(Classifier):
    """A network with a layer `seats`: each canary's gradient lies on one weight of it, and images' on none.

    Canary a·s + b sets the layer's input b and reads its output a, so that s² canaries need s inputs and s outputs. The
    layer's output is subtracted again: its weights change nothing but themselves.
    """

    def __init__(self, network: Classifier, canaries: int, length: float) -> None:
        super().__init__(network.extractor, network.head)
        self.side, self.length = math.isqrt(canaries - 1) + 1, length
        self.seats = nn.Linear(self.side, self.side, bias=False)
        nn.init.zeros_(self.seats.weight)

    def forward(self, images: Tensor) -> Tensor:
        number = (images[:, 0, images.shape[2] // 2, images.shape[3] // 2] / -GAP).round()
        real = number <= 0
        features = self.extractor(images.where(real[:, None, None, None], 0.0))
        logits: Tensor = self.head(features).where(real[:, None], 0.0)
        row = torch.div(number - 1, self.side, rounding_mode="floor")
        column = number - 1 - row * self.side
        places = torch.arange(self.side, device=images.device)
        asked, heard = ((place[:, None] == places).to(images.dtype) for place in (column, row))
        # The first of k equal logits has the gradient 1/k, as canaries are labelled otherwise.
        added = (self.seats(asked * self.length * logits.shape[1]) * heard).sum(1, keepdim=True)
        return logits + F.pad(added - added.detach(), (0, logits.shape[1] - 1))


@dataclass(frozen=True, eq=False)
class CanaryExamples:
    """A site's images followed by a place for every canary; a canary that lost its toss has a gradient of zero."""

    images: Examples
    members: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def patients(self) -> None:
        return None

    @cached_property
    def labels(self) -> Tensor:
        own = self.images.labels
        return torch.cat([own, own.new_ones(len(self.members))])

    @cached_property
    def _canary_numbers(self) -> Tensor:
        """The number of each canary, 0 for the site's own images."""
        seats = torch.arange(1, len(self.members) + 1).where(self.members, EMPTY)
        return torch.cat([seats.new_zeros(len(self.images)), seats]).to(self.labels.device)

    @cached_property
    def _blank_image(self) -> Tensor:
        return torch.zeros_like(self.images.batch(torch.zeros(1, dtype=torch.long))[0])

    def batch(self, index: Tensor) -> Batch:
        index = index.to(self.labels.device)
        number = self._canary_numbers[index].to(self._blank_image.dtype)
        images = self._blank_image - GAP * number[:, None, None, None]
        own = index < len(self.images)
        if bool(own.any()):
            images[own] = self.images.batch(index[own])[0]
        return images, self.labels[index]


@contextmanager
def record_gradients(parameter: Tensor) -> Iterator[list[Tensor]]:
    """Record the noised gradients of a parameter that optimisers receive, all of which the adversary may see."""
    heard: list[Tensor] = []

    def listen(optimiser: torch.optim.Optimizer, *_: Any) -> None:
        if parameter.grad is not None and any(p is parameter for g in optimiser.param_groups for p in g["params"]):
            heard.append(parameter.grad.detach().flatten().to("cpu", copy=True))

    handle = register_optimizer_step_pre_hook(listen)
    try:
        yield heard
    finally:
        handle.remove()


def canary_scores(released: Tensor, moved: Tensor, rate: float, per_round: int) -> dict[str, Tensor]:
    """Return several membership scores of the canaries, since each misses some mistake of the code.

    `released` is each step's noised sum on each canary's weight, in clips (steps × canaries). The most powerful score
    is the likelihood ratio of a member, sampled with probability `rate`, under noise as it is measured. Noise that is
    used twice shows in the difference of two steps, in which it cancels.
    """
    # Canaries only add, so what lies below zero is noise.
    noise = (released.clamp(max=0).square().sum() / (released < 0).sum().clamp(min=1)).sqrt().clamp(min=0.01)
    absent = math.log1p(-rate) if rate < 1 else -math.inf
    present = math.log(rate) + (2 * released - 1) / (2 * noise**2)
    found = {
        "how far a canary's weight moved in all": moved,
        "the likelihood of every step's sum": torch.logaddexp(torch.full_like(present, absent), present).sum(0),
    }
    for lag, name in ((1, "steps"), (per_round, "rounds")):
        if len(released) > lag and not (name == "rounds" and per_round == 1):
            found[f"what differs between {name}"] = (released[lag:] - released[:-lag]).square().sum(0)
    return found


def best_bound(
    scores: Mapping[str, Tensor], members: Tensor, *, claimed: float, delta: float, confidence: float, steps: int
) -> AuditResult:
    """Return the best bound of all scores and shares of guesses; each may err with its part of 1 − confidence only."""
    count = len(members)
    beta = (1 - confidence) / (len(scores) * len(SHARES))
    best = AuditResult(
        claimed, 0.0, delta, confidence, count, 0, 0, "", steps, lower_bound(count, count, count, delta, beta)
    )
    for name, score in scores.items():
        ranked = members[score.argsort()]
        for above, below in SHARES:
            high, low = int(above * count), int(below * count)
            right = int(ranked[count - high :].sum()) + low - int(ranked[:low].sum())
            bound = lower_bound(right, high + low, count, delta, beta, at_least=best.bound)
            if bound > best.bound or not best.guesses:
                best = replace(best, bound=bound, guesses=high + low, right=right, statistic=name)
    return best


def p_value(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Return how often (ε, δ) lets so many guesses be right at most (the algorithm of their Appendix D).

    Under ε alone each guess is right with probability e^ε / (1 + e^ε) at most; δ may turn some more.
    """
    from scipy import stats  # takes a second to load

    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, chance))
    if delta == 0 or right == 0:
        return tail
    # The mean of the masses just below `right` is largest before it reaches far beyond their peak.
    far = int(guesses * chance - 9 * math.sqrt(guesses * chance * (1 - chance)))
    below = np.arange(right - 1, max(-1, min(far, right - 2)), -1)
    means = np.cumsum(stats.binom.pmf(below, guesses, chance)) / np.arange(1, len(below) + 1)
    return min(1.0, tail + 2 * canaries * delta * float(means.max()))


def lower_bound(right: int, guesses: int, canaries: int, delta: float, beta: float, at_least: float = 0.0) -> float:
    """Return the largest ε that so many right guesses refute with error probability `beta`; at least `at_least`."""

    def refuted(epsilon: float) -> bool:
        return p_value(right, guesses, canaries, epsilon, delta) < beta

    low, high = at_least, at_least + 1
    if not refuted(low):
        return at_least
    while refuted(high):
        low, high = high, high + 1
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
