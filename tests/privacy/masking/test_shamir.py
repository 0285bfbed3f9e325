"""Shares: any `threshold` of them recover the secret, and fewer say nothing about it."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from polyclinic.core.errors import Refused
from polyclinic.privacy.masking.shamir import PRIME, recover_secret, split_secret

SMALL = 7


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_threshold_of_shares_recover_the_secret(data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, 8))
    points = data.draw(st.lists(st.integers(1, 1000), min_size=threshold, max_size=12, unique=True))
    secret = data.draw(st.integers(0, 2**256 - 1))
    coefficients = data.draw(st.lists(st.integers(0, PRIME - 1), min_size=threshold - 1, max_size=threshold - 1))
    shares = dict(zip(points, split_secret(secret, coefficients, points), strict=True))
    chosen = data.draw(st.permutations(points))[:threshold]
    assert recover_secret({point: shares[point] for point in chosen}, threshold) == secret


@pytest.mark.parametrize("threshold", [2, 3])
def test_fewer_shares_are_uniform_whatever_the_secret(threshold: int) -> None:
    """Exhaustively in a small field: every view of threshold − 1 sites is as frequent for each secret."""
    points = list(range(1, threshold))
    for secret in range(SMALL):
        views = Counter(
            tuple(split_secret(secret, coefficients, points, SMALL))
            for coefficients in product(range(SMALL), repeat=threshold - 1)
        )
        assert set(views) == set(product(range(SMALL), repeat=threshold - 1))
        assert set(views.values()) == {1}


def test_too_few_shares_are_refused() -> None:
    shares = dict(zip([1, 2, 3], split_secret(5, [7, 9], [1, 2, 3]), strict=True))
    with pytest.raises(Refused, match="2 shares where 3 are needed"):
        recover_secret({1: shares[1], 2: shares[2]}, 3)


@pytest.mark.parametrize("points", [[0, 1], [1, 1], [1, SMALL]])
def test_points_are_different_and_never_0(points: list[int]) -> None:
    with pytest.raises(ValueError, match="different numbers"):
        split_secret(1, [1], points, SMALL)
