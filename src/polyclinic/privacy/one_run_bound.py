"""A lower bound on ε from guesses about canaries: Privacy Auditing with One (1) Training Run (Steinke, Nasr, Jagielski,
NeurIPS 2023).

Canaries, examples made to be found, join the training images, each by the toss of a coin; whoever sees all that
training releases then guesses which of them took part. Guesses that are right more often than (ε, δ) allows refute the
claim.

Such a bound proves nothing if it stays below the claim: it bounds ε from below, the accountant bounds it from above.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

SHARES = ((0.03, 0.03), (0.1, 0.1), (0.25, 0.25), (0.5, 0.5), (0.1, 0.0), (0.25, 0.0), (0.4, 0.0))
"""Shares of the canaries that are called in (those of the highest scores) and out (the lowest), chosen beforehand.

Where steps are small, members who were never drawn look like outsiders: then it is better to call nobody out."""


@dataclass(frozen=True)
class CanaryBound:
    """The outcome of guessing which canaries took part."""

    claimed: float
    """ε of the steps that were attacked, by the accountant …"""
    bound: float
    """… and the lower bound on it that the guesses prove at this confidence."""
    delta: float
    confidence: float
    canaries: int
    guesses: int
    right: int
    statistic: str
    """The score that distinguished the canaries."""
    reach: float
    """The bound had every guess been right: no larger ε can be refuted with so many canaries."""

    @property
    def is_refuted(self) -> bool:
        return self.bound > self.claimed

    @property
    def sentence(self) -> str:
        found = (
            f"{self.right} of {self.guesses} guesses about {self.canaries} canaries were right, so ε is at least "
            f"{self.bound:.2f} with {100 * self.confidence:g} % confidence, and {self.claimed:.2f} is claimed"
        )
        if self.is_refuted:
            return f"{found} (by {self.statistic})"
        if self.reach <= self.claimed:
            return f"{found}; no guesses about so few canaries could show more than {self.reach:.2f}"
        return found


def canary_scores(released: Tensor, rate: float, per_round: int) -> dict[str, Tensor]:
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
        "how far a canary's weight moved in all": released.sum(0),
        "the likelihood of every step's sum": torch.logaddexp(torch.full_like(present, absent), present).sum(0),
    }
    for lag, name in ((1, "steps"), (per_round, "rounds")):
        if len(released) > lag and not (name == "rounds" and per_round == 1):
            found[f"what differs between {name}"] = (released[lag:] - released[:-lag]).square().sum(0)
    return found


def best_bound(
    scores: Mapping[str, Tensor], members: Tensor, *, claimed: float, delta: float, confidence: float
) -> CanaryBound:
    """Return the best bound of all scores and shares of guesses; each may err with its part of 1 − confidence only."""
    count = len(members)
    beta = (1 - confidence) / (len(scores) * len(SHARES))
    reach = lower_bound(count, count, count, delta, beta)
    best = CanaryBound(claimed, 0.0, delta, confidence, count, 0, 0, "", reach)
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
