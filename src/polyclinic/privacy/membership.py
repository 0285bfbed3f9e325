"""Membership inference: which examples was a model trained on?

Membership Inference Attacks From First Principles (Carlini et al., S&P 2022): LiRA. Shadow models, trained on random
halves of the examples, show how confident a model is of each example's label when it has seen it and when it has not:
two normal distributions on the logit scale. The likelihood ratio of the two at the attacked model's confidence is the
score. What counts is how many members are found while hardly any outsider is accused.

Departure: one deviation for all examples, within and without, as the paper advises for few shadow models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyclinic.core import DataError, RecipeError, Stream
from polyclinic.evaluation.metrics import Floats, Predictions, measure
from polyclinic.evaluation.statistics import bootstrap_intervals

Train: TypeAlias = Callable[[NDArray[np.intp], Stream], Floats]
"""(members, stream) -> the confidence in every example's true label of a model trained on `members` alone."""

RATES = (0.01, 0.001)
"""False-positive rates at which the true-positive rate is reported."""
SMALLEST = 1e-12
"""Confidences are kept this far from 0 and 1, and deviations from 0."""


@dataclass(frozen=True)
class MembershipResult:
    """How well the attack distinguishes members from non-members."""

    auc: float
    low: float
    high: float
    """The 95 % interval of the area, over examples."""
    found: Mapping[float, float]
    """True-positive rate by false-positive rate."""
    examples: int
    models: int

    @property
    def sentence(self) -> str:
        found = ", ".join(f"{100 * share:.1f} % at {100 * rate:g} %" for rate, share in self.found.items())
        return (
            f"Members are told from non-members with an AUC of {self.auc:.3f} ({self.low:.3f} to {self.high:.3f}; 0.5 "
            f"is guessing); true-positive rate: {found} false positives ({self.models} shadow models, {self.examples} "
            "images)."
        )


def attack_membership(
    train: Train, examples: int, stream: Stream, models: int = 16, rates: Sequence[float] = RATES
) -> MembershipResult:
    """Train `models` shadow models and one target, each on a random half of the examples, and attack the target."""
    if models < 4 or models % 2:
        raise RecipeError(f"{models} shadow models cannot be halved into two pairs; take an even number from 4, say 16")
    if examples < 4:
        raise DataError(f"a membership attack on {examples} examples shows nothing; give it some hundreds")
    inside = random_halves(examples, models, stream.child("halves"))
    shadows = np.stack([_train_logits(train, who, stream.child("shadow", k)) for k, who in enumerate(inside)])
    members = random_halves(examples, 2, stream.child("attacked"))[0]
    scores = likelihood_ratios(_train_logits(train, members, stream.child("target")), shadows, inside)
    return membership_result(scores, members, stream.child("bootstrap"), models, rates)


def random_halves(examples: int, models: int, stream: Stream) -> NDArray[np.bool_]:
    """Draw the training sets (models × examples): every example is in a random half of them."""
    drawn = np.random.default_rng(stream.integer()).random((models, examples))
    return drawn.argsort(axis=0).argsort(axis=0) < models // 2


def likelihood_ratios(attacked: Floats, shadows: Floats, inside: NDArray[np.bool_]) -> Floats:
    """Return the log-likelihood ratio, for each example, of being a member (shadows: models × examples)."""
    return _log_likelihood(attacked, shadows, inside) - _log_likelihood(attacked, shadows, ~inside)


def membership_result(
    scores: Floats, members: NDArray[np.bool_], stream: Stream, models: int, rates: Sequence[float] = RATES
) -> MembershipResult:
    """Evaluate scores that are higher for likelier members."""
    # Ranks keep the area, and lie between 0 and 1 as probabilities must.
    ranks = np.searchsorted(np.sort(scores), scores) / len(scores)
    guessed, truth = np.stack([1 - ranks, ranks], axis=1), members.astype(np.int64)
    low, high = bootstrap_intervals(Predictions(guessed, truth), ["auc"], stream=stream)["auc"]
    found = {rate: true_positive_rate(scores, members, rate) for rate in rates}
    return MembershipResult(measure(guessed, truth)["auc"], low, high, found, len(scores), models)


def true_positive_rate(scores: Floats, members: NDArray[np.bool_], rate: float) -> float:
    """Return the share of members above the threshold that at most this share of non-members exceeds; ties do not."""
    outsiders = np.sort(scores[~members])[::-1]
    threshold = outsiders[int(rate * len(outsiders))]
    return float((scores[members] > threshold).mean())


def _log_likelihood(attacked: Floats, shadows: Floats, who: NDArray[np.bool_]) -> Floats:
    count = who.sum(axis=0)
    mean = np.where(who, shadows, 0.0).sum(axis=0) / count
    left = np.where(who, shadows - mean, 0.0)
    deviation = max(float(np.sqrt((left**2).sum() / (count - 1).sum())), SMALLEST)
    density: Floats = -(((attacked - mean) / deviation) ** 2) / 2 - np.log(deviation)
    return density


def _train_logits(train: Train, who: NDArray[np.bool_], stream: Stream) -> Floats:
    """log(p / (1 − p)): confidences near 1 differ there, too."""
    confidence = np.asarray(train(np.flatnonzero(who), stream), dtype=np.float64)
    if confidence.shape != who.shape or not ((confidence >= 0) & (confidence <= 1)).all():
        raise DataError(f"a shadow model must give a confidence from 0 to 1 for each of the {len(who)} examples")
    kept = confidence.clip(SMALLEST, 1 - SMALLEST)
    logits: Floats = np.log(kept) - np.log1p(-kept)
    return logits
