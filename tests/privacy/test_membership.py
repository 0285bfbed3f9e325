"""The membership attack on models whose memory is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import norm

from polyclinic.core.errors import DataError, RecipeError
from polyclinic.core.rng import Stream
from polyclinic.evaluation.metrics import Floats
from polyclinic.privacy.membership import Train, attack_membership, membership_result, random_halves, true_positive_rate

EXAMPLES = 3000


def remembers(by: float) -> Train:
    """Every example has a difficulty of its own; having seen it adds `by` to the logit, beside noise of deviation 1."""
    difficulty = np.random.default_rng(1).normal(0, 3, EXAMPLES)

    def train(members: NDArray[np.intp], stream: Stream) -> Floats:
        logits: Floats = difficulty + np.random.default_rng(stream.integer()).normal(size=EXAMPLES)
        logits[members] += by
        confidence: Floats = expit(logits)
        return confidence

    return train


def test_a_model_that_ignores_its_data_gives_nobody_away() -> None:
    report = attack_membership(remembers(0.0), EXAMPLES, Stream(1))
    assert report.low < 0.5 < report.high
    assert report.auc == pytest.approx(0.5, abs=0.04)
    assert report.found[0.01] < 0.03


def test_a_model_that_memorises_gives_everybody_away() -> None:
    report = attack_membership(remembers(12.0), EXAMPLES, Stream(2))
    assert report.auc > 0.9999
    assert report.found[0.01] == 1.0
    assert report.found[0.001] > 0.99


@pytest.mark.parametrize("by", [1.0, 2.0])
def test_in_between_it_reaches_the_best_test_there_is(by: float) -> None:
    report = attack_membership(remembers(by), EXAMPLES, Stream(3), models=128)
    assert report.auc == pytest.approx(norm.cdf(by / math.sqrt(2)), abs=0.02)
    assert report.low < norm.cdf(by / math.sqrt(2)) < report.high
    assert report.found[0.01] == pytest.approx(norm.sf(norm.isf(0.01) - by), abs=0.06)


def test_it_finds_what_the_plain_confidence_does_not() -> None:
    """Some examples are easy for everybody: that is why a model's confidence by itself accuses the wrong ones."""
    train, stream = remembers(2.0), Stream(4)
    members = random_halves(EXAMPLES, 2, stream.child("attacked"))[0]
    plain = membership_result(train(np.flatnonzero(members), stream.child("target")), members, Stream(5), 0)
    assert attack_membership(train, EXAMPLES, stream).auc > plain.auc + 0.1


def test_a_model_without_any_randomness_is_attacked_too() -> None:
    def train(members: NDArray[np.intp], stream: Stream) -> Floats:
        confidence = np.full(EXAMPLES, 0.5)
        confidence[members] = 1.0
        return confidence

    assert attack_membership(train, EXAMPLES, Stream(6), models=4).auc == 1.0


def test_every_example_is_in_half_of_the_training_sets() -> None:
    inside = random_halves(1000, 16, Stream(7))
    assert (inside.sum(axis=0) == 8).all()
    assert abs(inside.mean(axis=1) - 0.5).max() < 5 * 0.5 / math.sqrt(1000)


def test_no_more_outsiders_are_accused_than_allowed() -> None:
    scores = np.arange(200.0)
    members = np.arange(200) % 2 == 0
    assert (
        true_positive_rate(scores, members, 0.01) == 1 / 100
    )  # above 197: 198; 199 is the one outsider who may be accused
    assert true_positive_rate(np.ones(200), members, 0.01) == 0.0


def test_what_cannot_be_attacked_is_refused() -> None:
    with pytest.raises(RecipeError, match="even number"):
        attack_membership(remembers(1.0), EXAMPLES, Stream(1), models=5)
    with pytest.raises(DataError, match="some hundreds"):
        attack_membership(remembers(1.0), 2, Stream(1))
    with pytest.raises(DataError, match="each of the 10 examples"):
        attack_membership(remembers(1.0), 10, Stream(1))
