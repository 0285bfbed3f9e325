from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from polyclinic.core.errors import DataError, RecipeError
from polyclinic.core.rng import Stream
from polyclinic.data import DATASETS
from polyclinic.data.partitioning.partitions import (
    PARTITIONS,
    Admixture,
    Dirichlet,
    Iid,
    Natural,
    Partition,
    Quantity,
    Shards,
)
from polyclinic.data.patients import Indices, Patients
from tests.data.samples import Sample, sample

alphas = st.floats(0.02, 50)
sites = st.integers(1, 8)
disjoint = st.one_of(
    st.builds(Natural),
    st.builds(Iid, sites=sites, minimum=st.just(0)),
    st.builds(Quantity, sites=sites, minimum=st.just(0), alpha=alphas),
    st.builds(Dirichlet, sites=sites, minimum=st.just(0), alpha=alphas),
    st.builds(Shards, sites=st.integers(3, 8), minimum=st.just(0), classes_per_site=st.integers(2, 4)),
)
every = st.one_of(disjoint, st.builds(Admixture, sites=sites, admixture=st.floats(0, 1), minimum=st.just(0)))
samples = st.builds(sample, st.integers(0, 10_000), st.integers(6, 80), st.integers(2, 5), st.integers(1, 4))
streams = st.builds(Stream, st.integers(0, 2**32))


def assign(partition: Partition, made: Sample, stream: Stream) -> list[Indices]:
    return partition.assign_images(made.labels, made.patients, stream, made.column)


def singles(labels: Any) -> Sample:
    """Every image its own patient."""
    return Sample(np.asarray(labels, dtype=np.int64), [str(row) for row in range(len(labels))], ["a"] * len(labels))


@settings(deadline=None, max_examples=40)
@given(disjoint, samples, streams)
def test_sites_are_disjoint_and_complete(partition: Partition, made: Sample, stream: Stream) -> None:
    rows = np.concatenate(assign(partition, made, stream))
    assert sorted(rows.tolist()) == list(range(len(made)))


@settings(deadline=None, max_examples=40)
@given(disjoint, samples, streams)
def test_no_patient_is_on_two_sites(partition: Partition, made: Sample, stream: Stream) -> None:
    owners = [made.owners(rows) for rows in assign(partition, made, stream)]
    assert sum(map(len, owners)) == len(set().union(*owners))


@settings(deadline=None, max_examples=40)
@given(every, samples, streams)
def test_a_patient_comes_to_a_site_with_all_its_images(partition: Partition, made: Sample, stream: Stream) -> None:
    for rows in assign(partition, made, stream):
        owners = made.owners(rows)
        assert len(rows) == sum(patient in owners for patient in made.patients)


@settings(deadline=None, max_examples=50)
@given(every, samples, streams)
def test_the_same_stream_gives_the_same_sites(partition: Partition, made: Sample, stream: Stream) -> None:
    for one, other in zip(assign(partition, made, stream), assign(partition, made, stream), strict=True):
        assert np.array_equal(one, other)
    assert len(partition.site_names(made.column)) == len(assign(partition, made, stream))


@pytest.mark.parametrize(
    "partition", [Iid(sites=4), Quantity(sites=4), Dirichlet(sites=4), Shards(sites=4), Admixture(sites=4)]
)
def test_another_stream_gives_other_sites(partition: Partition) -> None:
    made = sample(0, 200, 4)
    one, other = (assign(partition, made, Stream(seed)) for seed in (1, 2))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([Quantity, Dirichlet]), st.integers(2, 5), st.integers(1, 12), streams)
def test_every_site_has_its_minimum(kind: Any, count: int, minimum: int, stream: Stream) -> None:
    made = sample(1, 80, 2)
    parts = assign(kind(sites=count, alpha=1.0, minimum=minimum), made, stream)
    assert min(map(len, parts)) >= minimum


def test_dirichlet_draws_the_shares_of_every_class_independently() -> None:
    made = singles(np.repeat(np.arange(4), 500))
    correlations = []
    for seed in range(20):
        parts = assign(Dirichlet(sites=10, alpha=0.5, minimum=0), made, Stream(seed))
        counts = np.array([np.bincount(made.labels[rows], minlength=4) for rows in parts])
        correlations += np.corrcoef(counts.T)[np.triu_indices(4, 1)].tolist()
    assert abs(np.mean(correlations)) < 0.1, "the sites have the same share of every class: there is no label skew"


def plain(topped: Dirichlet) -> Dirichlet:
    """The draw before it is topped up: no minimum asks for another."""
    return topped.model_copy(update={"top_up": False, "minimum": 0})


def reachable(made: Sample, count: int) -> int:
    """A minimum that is surely reached: sites that cannot spare a patient have fewer than minimum + largest images."""
    largest = int(Patients.from_names(made.labels, made.patients).sizes.max())
    return max(len(made) // count - largest + 1, 0)


@settings(deadline=None, max_examples=60)
@given(samples, sites, alphas, streams)
def test_topping_up_gives_everyone_the_minimum_and_parts_nobody(
    made: Sample, count: int, alpha: float, stream: Stream
) -> None:
    minimum = reachable(made, count)
    partition = Dirichlet(sites=count, alpha=alpha, minimum=minimum, top_up=True)
    parts = assign(partition, made, stream)
    assert min(map(len, parts)) >= minimum
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(made)))
    owners = [made.owners(rows) for rows in parts]
    assert sum(map(len, owners)) == len(set().union(*owners))
    assert all(np.array_equal(a, b) for a, b in zip(parts, assign(partition, made, stream), strict=True))


@settings(deadline=None, max_examples=40)
@given(samples, st.integers(1, 4), st.floats(1, 50), streams)
def test_nothing_is_topped_up_where_nobody_is_below(made: Sample, count: int, alpha: float, stream: Stream) -> None:
    drawn = assign(Dirichlet(sites=count, alpha=alpha, minimum=0), made, stream)
    topped = Dirichlet(sites=count, alpha=alpha, minimum=min(map(len, drawn)), top_up=True)
    assert all(np.array_equal(a, b) for a, b in zip(drawn, assign(topped, made, stream), strict=True))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=40, max_size=120), st.integers(2, 10), alphas, streams)
def test_the_largest_give_of_what_they_have_most_and_no_more_than_is_needed(
    labels: list[int], count: int, alpha: float, stream: Stream
) -> None:
    """With one image a patient: to the very minimum, from the largest, and the minimum holds one of each class."""
    made, minimum = singles(labels), 4
    topped = Dirichlet(sites=count, alpha=alpha, minimum=minimum, top_up=True)
    before, after = (assign(p, made, stream) for p in (plain(topped), topped))
    largest = max(map(len, after))
    for drawn, rows in zip(before, after, strict=True):
        if len(drawn) < minimum:
            assert len(rows) == minimum
            assert set(drawn) <= set(rows)
            continue
        assert set(rows) <= set(drawn)
        assert set(made.labels[rows]) == set(made.labels[drawn])
        assert len(rows) == len(drawn) or len(rows) >= largest - 1


def test_a_hundred_sites_have_ten_images_each_where_no_draw_gives_it() -> None:
    made = singles(np.repeat([0, 1], [1214, 3494]))
    asked = Dirichlet(sites=100, alpha=0.5, minimum=10)
    assert "or set top_up: true" in refused(asked, made)
    parts = assign(asked.model_copy(update={"top_up": True}), made, Stream(0))
    assert min(map(len, parts)) == 10


def test_topping_up_cannot_make_images() -> None:
    few = Dirichlet(sites=10, minimum=4, top_up=True)
    assert refused(few, singles([0, 1] * 19)).endswith("(500 draws at most); ask for fewer sites or a lower minimum.")
    pairs = Sample(np.zeros(12, dtype=np.int64), [f"p{row // 3}" for row in range(12)], ["a"] * 12)
    assert "12 images of 4 patients could not be divided among 3 sites" in refused(
        Dirichlet(sites=3, minimum=4, top_up=True), pairs
    )
    assert {len(rows) for rows in assign(Dirichlet(sites=4, minimum=3, top_up=True), pairs, Stream(0))} == {3}


def test_site_names_are_unique_and_sort_in_order() -> None:
    names = Iid(sites=120).site_names()
    assert names == sorted(set(names))
    assert len(names) == 120


@settings(deadline=None, max_examples=40)
@given(samples, sites, streams)
def test_iid_sites_are_equal_to_within_a_patient(made: Sample, count: int, stream: Stream) -> None:
    largest = Patients.from_names(made.labels, made.patients).sizes.max()
    for rows in assign(Iid(sites=count, minimum=0), made, stream):
        assert abs(len(rows) - len(made) / count) <= largest


@settings(deadline=None, max_examples=40)
@given(samples, st.integers(3, 8), st.integers(2, 4), streams)
def test_shards_give_a_site_few_classes(made: Sample, count: int, most: int, stream: Stream) -> None:
    people = Patients.from_names(made.labels, made.patients)
    for rows in assign(Shards(sites=count, classes_per_site=most, minimum=0), made, stream):
        assert len(set(people.labels[people.of_image[rows]])) <= most


def test_shards_of_equal_classes_are_equal() -> None:
    parts = assign(Shards(sites=50, classes_per_site=2), singles(np.repeat(np.arange(10), 100)), Stream(0))
    assert {len(rows) for rows in parts} == {20}


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
@pytest.mark.parametrize("kind", [Dirichlet, Quantity])
def test_shares_have_the_variance_of_a_dirichlet_draw(kind: Any, alpha: float) -> None:
    """Var(share) = (K − 1) / (K² (Kα + 1)), of each class for `Dirichlet`, of everything for `Quantity`."""
    count, made = 5, singles(np.repeat([0, 1], 1000))
    partition = kind(sites=count, alpha=alpha, minimum=0)
    shares = []
    for seed in range(200):
        for rows in assign(partition, made, Stream(seed)):
            ones = int(made.labels[rows].sum())
            shares += [ones / 1000, (len(rows) - ones) / 1000] if kind is Dirichlet else [len(rows) / 2000]
    assert np.mean(shares) == pytest.approx(1 / count)
    assert np.var(shares) == pytest.approx((count - 1) / (count**2 * (count * alpha + 1)), rel=0.2)


def test_admixture_takes_all_of_the_primary_classes_and_a_share_of_the_rest() -> None:
    classes, each, p = 10, 200, 0.7
    made = singles(np.repeat(np.arange(classes), each))
    for site, rows in enumerate(assign(Admixture(sites=20, admixture=p), made, Stream(3))):
        counts = np.bincount(made.labels[rows], minlength=classes)
        primary = {(2 * site) % classes, (2 * site + 1) % classes}
        assert all(counts[label] == each for label in primary)
        rest, others = counts.sum() - 2 * each, (classes - 2) * each
        assert abs(rest - p * others) < 5 * np.sqrt(others * p * (1 - p))


def test_admixture_draws_anew_for_every_site() -> None:
    made = singles(np.repeat(np.arange(10), 200))
    first, same = (set(assign(Admixture(sites=6), made, Stream(0))[site].tolist()) for site in (0, 5))
    others = 1600
    both = len(first & same) - 400
    assert abs(both - 0.49 * others) < 5 * np.sqrt(others * 0.49 * 0.51)


@pytest.mark.parametrize(("p", "expected"), [(0.0, 400), (1.0, 2000)])
def test_admixture_at_its_ends(p: float, expected: int) -> None:
    made = singles(np.repeat(np.arange(10), 200))
    assert {len(rows) for rows in assign(Admixture(sites=5, admixture=p), made, Stream(0))} == {expected}


@pytest.mark.skipif("POLYCLINIC_DATA" not in os.environ, reason="set POLYCLINIC_DATA to the folder that holds mnist/")
def test_admixture_on_mnist_has_the_published_sizes() -> None:
    """Fifty clients of about 45,600 images, each image at about 38 of them."""
    folder = Path(os.environ["POLYCLINIC_DATA"])
    if not (folder / "mnist").is_dir():
        pytest.skip("POLYCLINIC_DATA has no mnist folder")
    mnist = DATASETS["mnist"]
    labels = mnist.load(mnist.options(), Stream(0), folder).labels.numpy()
    parts = assign(Admixture(sites=50), singles(labels), Stream(0))
    sizes = [len(rows) for rows in parts]
    assert np.mean(sizes) == pytest.approx(45_600, rel=0.005)
    assert np.bincount(np.concatenate(parts)).mean() == pytest.approx(38, rel=0.005)
    counts = np.bincount(labels)
    for site, size in enumerate(sizes):
        primary = counts[(2 * site) % 10] + counts[(2 * site + 1) % 10]
        rest = len(labels) - primary
        assert abs(size - primary - 0.7 * rest) < 5 * np.sqrt(rest * 0.21)


def test_natural_sites_follow_the_column() -> None:
    made = sample(0, 30, 2)
    parts, names = assign(Natural(), made, Stream(0)), Natural().site_names(made.column)
    for name, rows in zip(names, parts, strict=True):
        assert {made.column[row] for row in rows} == {name}


def test_the_majority_label_is_a_patients_class() -> None:
    people = Patients.from_names(np.array([2, 2, 0, 1, 3, 3, 1]), ["b", "b", "b", "a", "c", "a", "c"])
    assert people.labels.tolist() == [2, 1, 1], "ties go to the lowest label; patients are in the order of their images"
    assert people.sizes.tolist() == [3, 2, 2]


def refused(partition: Partition, made: Sample) -> str:
    with pytest.raises(DataError) as caught:
        assign(partition, made, Stream(0))
    return str(caught.value)


def test_a_minimum_that_no_draw_reaches_is_told_with_the_way_out() -> None:
    sentence = refused(Dirichlet(sites=20, alpha=0.05, minimum=15), sample(0, 150, 2))
    for word in ("20 sites", "at least 15 images", "fewer sites", "lower minimum", "larger alpha"):
        assert word in sentence


@pytest.mark.parametrize("partition", [Iid(sites=31), Shards(sites=31), Iid(sites=3, minimum=200)])
def test_more_than_there_is_is_refused_at_once(partition: Partition) -> None:
    assert "30 patients could not be divided among" in refused(partition, sample(0, 30, 2))


def test_shards_that_cannot_hold_all_classes_are_refused() -> None:
    sentence = refused(Shards(sites=2, classes_per_site=2), sample(0, 30, 5))
    assert "2 sites with 2 classes each cannot hold all 5 classes" in sentence


def test_natural_sites_must_be_known() -> None:
    for call in (lambda: Natural().assign_images(np.zeros(2, int), ["a", "b"], Stream(0)), Natural().site_names):
        with pytest.raises(DataError, match="no natural sites; choose another partition"):
            call()


def test_a_patient_at_two_natural_sites_is_refused_without_its_name() -> None:
    made = Sample(np.array([0, 1, 0]), ["Jane Doe", "Jane Doe", "x"], ["north", "south", "south"])
    sentence = refused(Natural(), made)
    assert "1 patients have images at more than one natural site" in sentence
    assert "Jane" not in sentence


def test_only_some_natural_sites_may_take_part() -> None:
    column = ["south", "north", "south", "west"]
    some = Natural(only=("west", "south"))
    assert some.site_names(column) == ["south", "west"]
    found = some.assign_images(np.zeros(4, int), ["a", "b", "c", "d"], Stream(0), column)
    assert [rows.tolist() for rows in found] == [[0, 2], [3]]
    with pytest.raises(DataError, match="only has 'east', but no image comes from there"):
        Natural(only=("east",)).site_names(column)


def test_a_small_natural_site_is_named() -> None:
    made = Sample(np.array([0, 1, 0]), ["a", "b", "c"], ["north", "south", "south"])
    assert "Site 1 of 2, with 1 image, is below the minimum of 2 images (1)" in refused(Natural(minimum=2), made)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dirichlet", {"sites": 3, "alpha": 0}, ["alpha", "greater than 0", "but is 0"]),
        ("dirichlet", {"sites": 3, "alpha": float("nan")}, ["alpha", "finite"]),
        ("quantity", {"sites": 3, "alpha": -1}, ["alpha", "greater than 0"]),
        ("iid", {"sites": 0}, ["sites", "greater than or equal to 1"]),
        ("iid", {}, ["Iid needs the option 'sites'"]),
        ("iid", {"sites": 2, "minimum": -1}, ["minimum", "greater than or equal to 0"]),
        ("shards", {"sites": 2, "classes_per_site": 0}, ["classes_per_site", "greater than or equal to 1"]),
        ("admixture", {"sites": 2, "admixture": 1.5}, ["admixture", "less than or equal to 1"]),
        ("natural", {"sites": 2}, ["Natural has no option 'sites'; it has: minimum"]),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(name: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        PARTITIONS[name].model_validate(options)
    sentence = str(caught.value)
    assert all(word in sentence for word in words), sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    with pytest.raises(RecipeError):
        PARTITIONS[name](**options)


def test_sites_stay_in_ascending_order_of_rows() -> None:
    for rows in assign(Dirichlet(sites=3), sample(0, 60, 2), Stream(0)):
        assert all(a < b for a, b in pairwise(rows))
