from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from polyclinic.core.errors import DataError, RecipeError
from polyclinic.core.rng import Stream
from polyclinic.data.patients import Patients
from polyclinic.data.splits import PARTS, Fractions, split_by_patient
from tests.data.samples import Sample, sample

samples = st.builds(sample, st.integers(0, 10_000), st.integers(5, 120), st.integers(1, 5), st.integers(1, 4))
shares = st.tuples(st.floats(0.3, 0.9), st.floats(0.1, 0.9)).map(
    lambda pair: Fractions(train=pair[0], validation=(1 - pair[0]) * pair[1], test=(1 - pair[0]) * (1 - pair[1]))
)
BOUND = 4 / 3
"""Each patient goes to the part furthest behind, so no part is ever further behind than 4/3 of the largest patient."""


def parts_of(made: Sample, fractions: Fractions, seed: int = 0, official: list[str] | None = None) -> dict[Any, Any]:
    return dict(split_by_patient(made.labels, made.patients, fractions, Stream(seed), official))


@settings(deadline=None, max_examples=60)
@given(samples, shares, st.integers(0, 1000))
def test_parts_divide_patients(made: Sample, fractions: Fractions, seed: int) -> None:
    parts = parts_of(made, fractions, seed)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(made)))
    owners = [made.owners(rows) for rows in parts.values()]
    assert sum(map(len, owners)) == len(set(made.patients))
    assert all(owners), "every part has patients when there are three"


@settings(deadline=None, max_examples=60)
@given(samples, shares, st.integers(0, 1000))
def test_fractions_hold_to_within_a_patient_or_two(made: Sample, fractions: Fractions, seed: int) -> None:
    largest = Patients.from_names(made.labels, made.patients).sizes.max()
    for part, rows in parts_of(made, fractions, seed).items():
        moved = 2  # to fill empty parts, at most two patients change
        assert abs(len(rows) - fractions.fraction_of(part) * len(made)) <= (BOUND + moved) * largest


@settings(deadline=None, max_examples=60)
@given(samples, shares, st.integers(0, 1000))
def test_every_class_is_divided_alike(made: Sample, fractions: Fractions, seed: int) -> None:
    people = Patients.from_names(made.labels, made.patients)
    label = people.labels[people.of_image]
    for part, rows in parts_of(made, fractions, seed).items():
        for value in set(people.labels):
            expected = fractions.fraction_of(part) * (label == value).sum()
            assert abs((label[rows] == value).sum() - expected) <= (2 * BOUND + 2) * people.sizes.max()


def test_eighty_ten_ten_of_a_hundred_patients_is_exact() -> None:
    made = Sample(np.repeat([0, 1], [30, 70]), [f"p{row}" for row in range(100)], [])
    parts = parts_of(made, Fractions())
    assert [len(parts[part]) for part in PARTS] == [80, 10, 10]
    assert [int(made.labels[parts[part]].sum()) for part in PARTS] == [56, 7, 7]


@pytest.mark.parametrize("patients", [3, 4, 5, 7])
def test_few_patients_still_fill_every_part(patients: int) -> None:
    made = Sample(np.arange(patients) % 2, [f"p{row}" for row in range(patients)], [])
    for seed in range(20):
        parts = parts_of(made, Fractions(), seed)
        assert all(len(rows) for rows in parts.values())
        assert len(parts["train"]) == patients - 2 or patients > 5


@pytest.mark.parametrize("common", range(3, 30))
def test_the_only_patient_of_a_rare_class_is_trained_on(common: int) -> None:
    """The rarest class comes first, and the first patients go to training."""
    made = Sample(np.array([0] * common + [1]), [f"p{row}" for row in range(common + 1)], [])
    for seed in range(5):
        assert common in parts_of(made, Fractions(), seed)["train"]


def test_streams_decide() -> None:
    made = sample(0, 100, 2)
    one, again, other = (parts_of(made, Fractions(), seed)["train"].tolist() for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_every_patient_can_land_in_every_part() -> None:
    made = Sample(np.repeat([0, 1], 10), [f"p{row}" for row in range(20)], [])
    tested = set().union(*(parts_of(made, Fractions(), seed)["test"].tolist() for seed in range(120)))
    assert tested == set(range(20))


def test_a_part_with_share_zero_stays_empty() -> None:
    parts = parts_of(sample(0, 40, 2), Fractions(train=0.75, validation=0.25, test=0))
    assert len(parts["test"]) == 0
    assert len(parts["validation"]) > 0


def official_halves(made: Sample, names: tuple[str, ...]) -> list[str]:
    return [names[int(patient[1:]) % len(names)] for patient in made.patients]


def test_an_official_split_is_kept() -> None:
    made = sample(0, 60, 2)
    official = official_halves(made, PARTS)
    parts = parts_of(made, Fractions(), official=official)
    assert {part: rows.tolist() for part, rows in parts.items()} == {
        part: [row for row, name in enumerate(official) if name == part] for part in PARTS
    }


def test_a_missing_validation_part_is_cut_from_the_official_training_part() -> None:
    made = sample(0, 200, 2)
    official = official_halves(made, ("train", "test"))
    parts = parts_of(made, Fractions(), official=official)
    assert parts["test"].tolist() == [row for row, name in enumerate(official) if name == "test"]
    assert len(parts["validation"]) / (len(made) - len(parts["test"])) == pytest.approx(1 / 9, abs=0.03)
    assert not made.owners(parts["train"]) & made.owners(parts["validation"])


def test_an_official_split_can_be_set_aside() -> None:
    made = sample(0, 100, 2)
    official = ["test"] * len(made)
    assert len(parts_of(made, Fractions(official=False), official=official)["train"]) > len(made) / 2


def test_an_official_split_that_leaks_patients_is_refused_without_names() -> None:
    made = Sample(np.array([0, 1, 0]), ["Jane Doe", "Jane Doe", "x"], [])
    with pytest.raises(DataError, match=r"puts 1 patients into more than one part; set official: false") as caught:
        parts_of(made, Fractions(), official=["train", "test", "train"])
    assert "Jane" not in str(caught.value)


def test_an_unknown_official_part_is_refused() -> None:
    with pytest.raises(DataError, match=r"names 1 part\(s\) other than train, validation and test \(1 images\)"):
        parts_of(Sample(np.array([0, 1]), ["a", "b"], []), Fractions(), official=["train", "dev"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train": 0.5}, "add up to 0.7; make them 1"),
        ({"train": 0, "validation": 0.5, "test": 0.5}, "'train' of Fractions should be greater than 0"),
        ({"train": 1.1, "validation": -0.1, "test": 0}, "'validation' of Fractions should be greater than or equal"),
        ({"training": 0.8}, "Fractions has no option 'training'"),
    ],
)
def test_wrong_fractions_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Fractions.model_validate(options)
