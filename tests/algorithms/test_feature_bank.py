"""What a site tells of its images' features and what it hears of others': who, how many, how often, how noisy."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare
from torch import Tensor

from polyclinic.algorithms.representation.feature_bank import (
    FeatureRelease,
    features_of_others,
    release_features,
    release_features_privately,
)
from polyclinic.core.rng import Stream
from polyclinic.core.types import Tensors

LABELS = torch.tensor([0] * 6 + [1] * 2 + [2] * 4)
FEATURES = torch.arange(1.0, 13.0, dtype=torch.float64)[:, None, None] * torch.tensor([[1.0, -1.0]])
"""Image number n has the feature ±(n + 1), so that a feature tells whose it is; 1 × 2, as before a pooling layer."""


def images(values: Tensor) -> list[int]:
    """Whose features they are; −1 for zeros."""
    return [round(float(value)) - 1 for value in values.reshape(-1, 2)[:, 0]]


def plain(slots: int = 4, fewest: int = 3, seed: int = 1, labels: Tensor = LABELS) -> FeatureRelease:
    return release_features(FEATURES, labels, 4, slots, fewest, Stream(seed))


def test_a_site_tells_of_so_many_images_of_each_class_and_of_all_if_there_are_fewer() -> None:
    found = plain()
    assert found.held.tolist() == [4, 0, 4, 0], "class 1 has fewer than three images, class 3 none"
    assert found.images.tolist() == [6, 0, 4, 0]
    assert found.values.shape == (4, 4, 1, 2)
    assert len(set(images(found.values[0])) & set(range(6))) == 4, "four different ones"
    assert sorted(images(found.values[2])) == [8, 9, 10, 11]
    torch.testing.assert_close(found.means[0], FEATURES[:6].mean(0).flatten())
    torch.testing.assert_close(found.means[2], FEATURES[8:].mean(0).flatten())
    roomy = plain(slots=9)
    assert roomy.held.tolist() == [6, 0, 4, 0]
    assert sorted(images(roomy.values[0])) == [-1, -1, -1, *range(6)]
    assert images(roomy.values[0])[6:] == [-1, -1, -1], "those that are held come first"


@pytest.mark.parametrize("fewest", [1, 2, 3, 5, 7])
def test_of_a_class_of_fewer_images_nothing_at_all_is_told(fewest: int) -> None:
    found = plain(fewest=fewest)
    number = torch.bincount(LABELS, minlength=4)
    for part in found:
        silent = part.flatten(1).abs().sum(1) == 0 if part.ndim > 1 else part == 0
        assert torch.equal(silent, (number < fewest) | (number == 0))


def test_who_is_told_of_is_drawn_anew_and_evenly() -> None:
    """χ² at 0.1 %: each of six images in 400 rounds of four."""
    rounds = [images(plain(seed=seed).values[0]) for seed in range(400)]
    assert any(one != other for one, other in pairwise(rounds))
    assert plain(seed=7).values.tolist() == plain(seed=7).values.tolist()
    count = Counter(image for chosen in rounds for image in chosen)
    assert set(count) == set(range(6))
    assert chisquare(list(count.values())).pvalue > 1e-3


# What others told


def a_bank(held: dict[str, list[int]], slots: int = 3) -> Tensors:
    """Every feature tells its site, class and place; what is not held is there too, and must not be seen."""
    bank = {}
    for number, (name, numbers) in enumerate(held.items()):
        places = torch.cartesian_prod(torch.tensor([number]), torch.arange(len(numbers)), torch.arange(slots))
        bank[f"{name}/values"] = places.view(len(numbers), slots, 3).double() + 1
        bank[f"{name}/held"] = torch.tensor(numbers).double()
    return bank


HELD = {"a": [3, 0, 1], "b/x": [2, 3, 0], "c": [1, 1, 0], "d": [0, 0, 0]}


def heard(site: str, most: int) -> list[list[tuple[str, int]]]:
    """By class: whose features, and which of them."""
    found = features_of_others(a_bank(HELD), site, most)
    names = list(HELD)
    told = []
    for label, number in enumerate(found["held"].long().tolist()):
        rows = (found["values"][label, :number].long() - 1).tolist()
        assert all(row[1] == label for row in rows)
        assert bool((found["values"][label, number:] == 0).all())
        told.append([(names[row[0]], row[2]) for row in rows])
    return told


def test_a_site_hears_of_all_others_in_turn_beginning_with_the_next_and_never_of_itself() -> None:
    assert heard("b/x", 9) == [[("c", 0), ("a", 0), ("a", 1), ("a", 2)], [("c", 0)], [("a", 0)]]
    assert heard("d", 3) == [[("a", 0), ("b/x", 0), ("c", 0)], [("b/x", 0), ("c", 0), ("b/x", 1)], [("a", 0)]]
    assert heard("a", 2) == [[("b/x", 0), ("c", 0)], [("b/x", 0), ("c", 0)], []]


@settings(deadline=None)
@given(
    held=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=5),
    most=st.integers(1, 12),
)
def test_it_hears_as_much_as_there_is_and_from_nobody_much_more_than_from_another(
    held: list[list[int]], most: int
) -> None:
    names = [f"site-{number}" for number in range(len(held))]
    bank = a_bank(dict(zip(names, held, strict=True)))
    for number, name in enumerate(names):
        found = features_of_others(bank, name, most)
        assert found["values"].shape[1] <= min(most, 3 * (len(names) - 1)), "no bytes for what nobody can send"
        for label in range(2):
            elsewhere = {other: held[other][label] for other in range(len(held)) if other != number}
            got = int(found["held"][label])
            assert got == min(most, sum(elsewhere.values()))
            rows = found["values"][label, :got].long() - 1
            assert len({tuple(row) for row in rows.tolist()}) == got, "each once"
            count = Counter(rows[:, 0].tolist())
            assert number not in count
            short = [count[other] for other, number in elsewhere.items() if count[other] < number]
            assert not short or max(count.values()) <= min(short) + 1


def test_before_anybody_has_told_anything_nothing_is_sent() -> None:
    silent = features_of_others(a_bank({"a": [0, 0], "b": [0, 0]}), "a", 32)
    assert silent["values"].shape == (2, 0, 3)
    assert silent["held"].tolist() == [0, 0]
    lonely = features_of_others(a_bank({"a": [3, 3]}), "a", 32)
    assert lonely["held"].tolist() == [0, 0]


# Under a privacy plan


def private(
    features: Tensor, labels: Tensor, slots: int, noise: tuple[float, float], clip: float = 100.0, seed: int = 3
) -> FeatureRelease:
    return release_features_privately(features, labels, 3, slots, 3, clip, noise, Stream(seed, ("secret",)))


def test_slots_have_noise_of_twice_the_clip() -> None:
    """Of zeros, noise alone is left: its standard deviation is 2·σ·clip, as an image may make room for another."""
    labels = torch.arange(3).repeat(400)
    found = private(torch.zeros(1200, 50), labels, 300, (4.0, 1.0), clip=0.5)
    assert found.held.tolist() == [300.0] * 3
    spread = float(found.values.double().std())
    assert spread == pytest.approx(2 * 4.0 * 0.5, rel=0.02), "five standard errors of 45,000 values"
    assert abs(float(found.values.mean())) < 5 * 4.0 / 45000**0.5


def test_features_are_clipped_and_those_that_are_not_numbers_count_as_nothing() -> None:
    features = torch.full((90, 4), 1e6)
    features[0] = torch.nan
    found = private(features, torch.zeros(90, dtype=torch.int64), 90, (1e-9, 1e-9), clip=2.0)
    lengths = found.values[0].norm(dim=1).sort().values
    torch.testing.assert_close(lengths, torch.tensor([0.0] + [2.0] * 89), rtol=0, atol=1e-5)


@pytest.mark.parametrize("present", [4, 12])
def test_slots_are_drawn_from_the_secret_evenly(present: int) -> None:
    """The proof that one image changes one slot: images lie in slots at random, with gaps where they are few.

    Were those of a class in a row, taking out one would move all after it. χ² at 0.1 %.
    """
    features = torch.arange(1.0, present + 1)[:, None] * torch.tensor([[1.0, -1.0]])
    labels, slots = torch.zeros(present, dtype=torch.int64), 6
    where: Counter[tuple[int, int]] = Counter()
    for seed in range(300):
        found = images(private(features, labels, slots, (1e-9, 1e-9), seed=seed).values[0])
        chosen = [image for image in found if image >= 0]
        assert len(chosen) == len(set(chosen)) == min(present, slots)
        where.update(enumerate(found))
    for image in range(present):
        assert chisquare([where[slot, image] for slot in range(slots)]).pvalue > 1e-3 / present
    if present < slots:
        assert chisquare([where[slot, -1] for slot in range(slots)]).pvalue > 1e-3
    same = [private(features, labels, slots, (1e-9, 1e-9), seed=5).values for _ in range(2)]
    assert torch.equal(*same), "a repeated round tells the same"


def test_a_class_whose_count_may_be_noise_is_withheld_though_its_slots_exist() -> None:
    """Counts have a noise of σ/√0.1; below three times of it a class is as good as not there."""
    labels = torch.tensor([0] * 500 + [1] * 10)
    found = private(torch.ones(510, 4), labels, 8, (1.0, 2.0))
    assert found.held.tolist() == [8.0, 0.0, 0.0]
    assert bool((found.values[1:] == 0).all())
    assert bool((found.means[1:] == 0).all())
    assert found.images[1:].tolist() == [0.0, 0.0]
    assert float(found.images[0]) == pytest.approx(500, abs=5 * 2 / 0.1**0.5)
    assert float(found.images.sum()) <= 510


def test_all_slots_of_a_class_count_filled_or_not() -> None:
    """Else their number would tell how many images there are."""
    found = private(torch.ones(40, 4), torch.zeros(40, dtype=torch.int64), 64, (1.0, 0.1))
    assert found.held.tolist() == [64.0, 0.0, 0.0]
    assert bool((found.values[0].abs().sum(1) > 0).all()), "noise is in empty ones too"
