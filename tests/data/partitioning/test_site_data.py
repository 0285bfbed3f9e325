from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyclinic.core.errors import DataError
from polyclinic.core.rng import Stream
from polyclinic.core.types import Examples
from polyclinic.data.examples import Collection, Selection, SiteData
from polyclinic.data.partitioning.partitions import Admixture, Dirichlet, Iid, Natural, Partition, Shards
from polyclinic.data.partitioning.site_data import build_site_data, summarise_sites
from polyclinic.data.splits import Fractions
from tests.data.samples import collection

NATURAL = Natural()


def federated(data: Collection, partition: Partition = NATURAL, seed: int = 0) -> dict[str, SiteData]:
    return build_site_data(data, partition, Fractions(), Stream(seed))


def parts(site: SiteData) -> tuple[Examples, Examples, Examples]:
    return site.train, site.validation, site.test


def patients(examples: Sequence[Examples]) -> list[set[str]]:
    return [set(part.patients or ()) for part in examples]


def test_sites_hold_the_collection_once_and_no_patient_twice() -> None:
    data = collection()
    held = [part for site in federated(data, Dirichlet(sites=3, alpha=2, minimum=20)).values() for part in parts(site)]
    assert sum(map(len, held)) == len(data)
    assert sum(map(len, patients(held))) == len(set(data.patients))


def test_images_stay_with_their_labels_and_patients() -> None:
    data = collection()
    known = {image.numpy().tobytes(): row for row, image in enumerate(data.images)}
    for site in federated(data).values():
        for part in parts(site):
            images, labels = part.batch(torch.arange(len(part)))
            rows = [known[image.numpy().tobytes()] for image in images]
            assert labels.tolist() == data.labels[rows].tolist()
            assert part.patients == tuple(data.patients[row] for row in rows)
            assert {(data.sites or ())[row] for row in rows} == {site.name}


def test_the_stream_decides() -> None:
    data = collection()
    one, again, other = (federated(data, Iid(sites=3), seed) for seed in (1, 1, 2))
    assert all(one[name].train.patients == again[name].train.patients for name in one)
    assert any(one[name].train.patients != other[name].train.patients for name in one)


def test_a_site_is_split_alike_whoever_else_takes_part() -> None:
    data = collection()
    rows = [row for row, site in enumerate(data.sites or ()) if site == "clinic-1"]
    alone = Collection(
        data.images[rows],
        data.labels[rows],
        data.classes,
        tuple(data.patients[row] for row in rows),
        ("clinic-1",) * len(rows),
    )
    assert federated(alone)["clinic-1"].test.patients == federated(data)["clinic-1"].test.patients


def test_overlapping_sites_share_one_split_and_one_copy() -> None:
    data = collection(patients=100, classes=4)
    sites = list(federated(data, Admixture(sites=5)).values())
    trained = set().union(*patients([site.train for site in sites]))
    tested = set().union(*patients([site.test for site in sites]))
    validated = set().union(*patients([site.validation for site in sites]))
    assert not trained & tested
    assert not trained & validated
    assert not tested & validated
    for site in sites:
        assert isinstance(site.train, Selection)
        assert site.train.shared.images.data_ptr() == data.images.data_ptr()


def test_every_image_of_an_overlapping_site_lies_in_one_part_in_order() -> None:
    data = collection(patients=100, classes=4)
    partition = Admixture(sites=5)
    labels = data.labels.numpy()
    assigned = partition.assign_images(labels, data.patients, Stream(0).child("partition"), data.sites)
    for site, wanted in zip(federated(data, partition).values(), assigned, strict=True):
        rows = [part.rows.tolist() for part in (site.train, site.validation, site.test) if isinstance(part, Selection)]
        assert sorted(row for part in rows for row in part) == sorted(wanted.tolist())
        assert all(part == sorted(part) for part in rows)


def test_the_normalisation_reaches_every_part() -> None:
    data = collection()
    plain, normalised = federated(data), federated(data.with_normalisation(0.5, 0.5))
    for name in plain:
        for a, b in zip(parts(plain[name]), parts(normalised[name]), strict=True):
            index = torch.arange(len(a))
            assert torch.allclose((a.batch(index)[0] - 0.5) / 0.5, b.batch(index)[0])


def test_an_official_split_reaches_the_sites() -> None:
    data = collection()
    split = tuple("test" if int(patient[1:]) % 3 == 0 else "train" for patient in data.patients)
    sites = federated(replace(data, split=split)).values()
    tested = {patient for patient in data.patients if int(patient[1:]) % 3 == 0}
    assert set.union(*patients([site.test for site in sites])) == tested
    assert set.union(*patients([part for site in sites for part in (site.train, site.validation)])) == (
        set(data.patients) - tested
    )


def test_the_description_adds_up() -> None:
    data = collection(classes=3)
    rows = summarise_sites(federated(data), data.classes)
    assert [row["site"] for row in rows] == Natural().site_names(data.sites)
    assert sum(row["train"] + row["validation"] + row["test"] for row in rows) == len(data)
    for number, name in enumerate(data.classes):
        assert sum(row["classes"][name] for row in rows) == int((data.labels == number).sum())


def refused(data: Collection, partition: Partition = NATURAL) -> str:
    with pytest.raises(DataError) as caught:
        federated(data, partition)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def first_of(data: Collection, site: str) -> int:
    return (data.sites or ()).index(site)


@pytest.mark.parametrize("label", [-1, 2, 99])
def test_labels_outside_the_task_are_counted_and_located(label: int) -> None:
    data = collection()
    row = first_of(data, "clinic-1")
    rows = [row, max(r for r, site in enumerate(data.sites or ()) if site == "clinic-1")]
    labels = data.labels.clone()
    labels[rows] = label
    sentence = refused(replace(data, labels=labels))
    assert "Site 'clinic-1' has 2 images labelled outside the 2 classes" in sentence
    assert f"index {row})" in sentence
    assert "use labels 0 to 1" in sentence


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_located(value: float) -> None:
    data = collection()
    row = first_of(data, "clinic-2")
    images = data.images.clone()
    images[row, 0, 1, 2] = value
    sentence = refused(replace(data, images=images))
    assert "Site 'clinic-2' has 1 images with values that are not finite" in sentence
    assert f"index {row})" in sentence


@pytest.mark.parametrize(
    ("column", "words"),
    [("labels", "labels"), ("patients", "patients"), ("sites", "sites"), ("split", "official parts")],
)
def test_a_column_of_another_length_is_refused(column: str, words: str) -> None:
    data = replace(collection(), split=("train",) * len(collection()))
    n = len(data)
    short = replace(data, **{column: getattr(data, column)[:-1]})
    assert f"{n} images but {n - 1} {words}" in refused(short)


def test_no_images_at_all_is_refused() -> None:
    nothing = Collection(torch.zeros(0, 1, 4, 4), torch.zeros(0, dtype=torch.long), ("a", "b"), ())
    assert "The collection has no images" in refused(nothing, Iid(sites=2))


def tiny(labels: list[int]) -> Collection:
    """One clinic, one image a patient."""
    n = len(labels)
    names = tuple(f"p{row}" for row in range(n))
    return Collection(torch.rand(n, 1, 2, 2), torch.tensor(labels), ("benign", "malignant"), names, ("north",) * n)


def test_a_site_without_images_is_named() -> None:
    sentence = refused(tiny([0, 1, 0, 1]), Iid(sites=9, minimum=0))
    assert sentence.startswith("Site 'site-")
    assert "has no images; ask for fewer sites" in sentence


def test_an_empty_part_is_named() -> None:
    official = replace(tiny([0, 1] * 5), split=("test",) * 10)
    assert "Site 'north' has no images left for its train part; give it at least three" in refused(official)
    assert "Site 1 of 1, with 2 images, has no images left for its test part" in refused(tiny([0, 1]))
    fractions = Fractions(train=0.5, validation=0.5, test=0)
    assert len(build_site_data(tiny([0, 0]), NATURAL, fractions, Stream(0), allow_single_class=True)["north"].test) == 0


def test_a_single_class_is_named_unless_allowed() -> None:
    assert "Site 'north' would train on class 'malignant' only" in refused(tiny([1] * 10))
    assert (
        len(build_site_data(tiny([1] * 10), NATURAL, Fractions(), Stream(0), allow_single_class=True)["north"].train)
        == 8
    )


def test_pathological_sites_are_possible_on_request() -> None:
    data = collection(patients=120, classes=4)
    partition = Shards(sites=8, classes_per_site=1)
    sites = build_site_data(data, partition, Fractions(), Stream(0), allow_single_class=True)
    assert len(sites) == 8
    for site in sites.values():
        counts = np.bincount(site.train.labels.numpy(), minlength=4)
        assert counts.max() > 0.6 * counts.sum(), "one class by majority; single images of a patient may differ"


def test_a_rare_class_is_trained_on() -> None:
    for seed in range(20):
        site = build_site_data(tiny([1] * 3 + [0] * 40), NATURAL, Fractions(), Stream(seed))["north"]
        assert 1 in site.train.labels


def test_bytes_are_never_called_infinite() -> None:
    data = collection()
    images = (data.images * 255).to(torch.uint8)
    site = federated(replace(data, images=images))["clinic-0"]
    assert isinstance(site.train, Selection)
    assert site.train.shared.images.dtype == torch.uint8
