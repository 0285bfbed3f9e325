"""Several sets side by side: a site each, under common classes, nobody's patients mixed up with another's."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyclinic.core.errors import DataError, RecipeError
from polyclinic.core.rng import Stream
from polyclinic.data import DATASETS
from polyclinic.data.datasets.base import NamedDataset
from polyclinic.data.datasets.user_data import MultiOptions, read_multi, resolve_path
from polyclinic.data.loading.loader import load_collection
from polyclinic.data.partitioning.partitions import Natural
from polyclinic.data.partitioning.site_data import build_site_data
from polyclinic.data.records import Listing, Record
from polyclinic.data.splits import Fractions
from tests.data.clinics import NAME, Rows, clinic, listed, loaded
from tests.data.written import real, refused

ONE: dict[str, list[str]] = {"sick": ["malignant"], "well": ["benign"]}
OTHER: dict[str, list[str]] = {"well": ["normal"], "sick": ["odd", "bad"]}


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, NamedDataset]:
    """Two sets with labels of their own, whose patients bear the same pseudonyms; the second has a label more."""
    (tmp_path / "breasts").mkdir()
    (tmp_path / "eyes").mkdir()
    clinic(tmp_path / "breasts")
    rows = clinic(tmp_path / "eyes", seed=100)
    for number, row in enumerate(rows):
        row["label"] = ("normal", "odd", "bad", "blurred")[number // 2 % 4]
        row["split"] = ("train", "test")[number // 2 % 2]
    listed(tmp_path / "eyes", rows)
    listed(tmp_path / "breasts", clinic(tmp_path / "breasts"))
    return {name: named(name) for name in ("breasts", "eyes")}


def named(name: str) -> NamedDataset:
    def read(options: Any, folder: Path) -> Listing:
        del options
        lines = [line.split(",") for line in (folder / "labels.csv").read_text(encoding="utf-8").splitlines()]
        rows: Rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
        return listed(folder, rows, classes=tuple(sorted({row["label"] for row in rows})))

    return NamedDataset(name, "", (), read, "")


def options(*parts: dict[str, Any], **others: Any) -> MultiOptions:
    return MultiOptions.model_validate({"parts": list(parts), "size": 16, "channels": 1, **others})


BREASTS: dict[str, Any] = {"set": "breasts", "site": "A", "task": ONE}
EYES: dict[str, Any] = {"set": "eyes", "site": "B", "task": OTHER}


def test_each_set_is_a_site_under_common_classes(sets: dict[str, NamedDataset], tmp_path: Path) -> None:
    listing = read_multi(options(BREASTS, EYES), tmp_path, sets)
    assert listing.classes == ("sick", "well")
    found = load_collection(listing, options(BREASTS, EYES), Stream(0))
    assert found.sites == ("A",) * 24 + ("B",) * 18
    assert found.split is None, "parts of one set say nothing about the other's"
    assert {record.split for record in listing.records} == {""}
    said = [found.classes[label] for label in found.labels.tolist()]
    assert said[:24] == ["sick" if number // 2 % 2 else "well" for number in range(24)]
    assert said[24:] == ["well" if number // 2 % 4 == 0 else "sick" for number in range(24) if number // 2 % 4 != 3]
    alone = loaded(sets["eyes"].read(None, tmp_path / "eyes"), task=OTHER)
    assert torch.equal(found.images[24:], alone.images)


def test_patients_of_two_sets_are_different_people(sets: dict[str, NamedDataset], tmp_path: Path) -> None:
    found = load_collection(read_multi(options(BREASTS, EYES), tmp_path, sets), options(BREASTS, EYES), Stream(0))
    people: defaultdict[str, set[str]] = defaultdict(set)
    for site, patient in zip(found.sites or (), found.patients, strict=True):
        people[site].add(patient)
    assert {site: len(names) for site, names in people.items()} == {"A": 12, "B": 9}
    assert people["A"].isdisjoint(people["B"])
    assert not any(NAME in patient for patient in found.patients)
    sites = build_site_data(found, Natural(), Fractions(train=0.5, validation=0.25, test=0.25), Stream(0))
    assert list(sites) == ["A", "B"]


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_a_set_is_cut_into_pieces_by_patient(sets: dict[str, NamedDataset], tmp_path: Path, pieces: int) -> None:
    listing = read_multi(options({**BREASTS, "pieces": pieces}, EYES), tmp_path, sets)
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for record in listing.records[:24]:
        owners[record.site].add(record.patient)
    names = ["A"] if pieces == 1 else [f"A-{number}" for number in range(1, pieces + 1)]
    assert sorted(owners) == names
    assert sum(map(len, owners.values())) == 12, "a patient is at two sites"
    assert max(map(len, owners.values())) - min(map(len, owners.values())) <= 1


def test_images_without_a_patient_are_dealt_one_by_one(tmp_path: Path) -> None:
    records = tuple(Record(tmp_path, ("a", "b")[number % 2], where=f"row {number}") for number in range(7))
    plain = NamedDataset("plain", "", (), lambda *_: Listing("plain", tmp_path, records, ("a", "b")), "")
    part = {"set": "plain", "site": "A", "task": {"a": ["a"], "b": ["b"]}, "pieces": 3}
    listing = read_multi(options(part, {**part, "site": "B", "pieces": 1}), tmp_path, {"plain": plain})
    assert [record.site for record in listing.records] == ["A-1", "A-2", "A-3", "A-1", "A-2", "A-3", "A-1"] + ["B"] * 7
    assert {record.patient for record in listing.records} == {""}


def test_faults_are_told_with_the_set_they_are_in(sets: dict[str, NamedDataset], tmp_path: Path) -> None:
    gone = tmp_path / "eyes" / f"{NAME} 0.png"
    gone.unlink()
    told = refused(
        lambda: load_collection(read_multi(options(BREASTS, EYES), tmp_path, sets), options(BREASTS, EYES), Stream(0))
    )
    assert told.startswith("1 listed file cannot be found (eyes: labels.csv row 2);")


def test_an_unknown_set_and_other_classes_are_refused(sets: dict[str, NamedDataset], tmp_path: Path) -> None:
    told = refused(lambda: read_multi(options(BREASTS, {**EYES, "set": "ears"}), tmp_path, sets))
    assert told == "There is no set 'ears' to take a part from; there are: breasts, eyes."
    wrong = {**EYES, "task": {"well": ["normal"], "ill": ["odd"]}}
    told = refused(lambda: read_multi(options(BREASTS, wrong), tmp_path, sets))
    assert told == "The part 'eyes' has the classes well, ill, the first part sick, well; give all parts the same."
    with pytest.raises(RecipeError, match="'parts' of MultiOptions"):
        options(BREASTS)
    with pytest.raises(RecipeError, match="pieces"):
        options({**BREASTS, "pieces": 0}, EYES)
    with pytest.raises(DataError, match="names the label 'cyst', which clinic does not have; it has bad, blurred"):
        read_multi(options(BREASTS, {**EYES, "task": {"well": ["normal"], "sick": ["cyst"]}}), tmp_path, sets)


def test_labels_outside_the_task_are_known_but_not_used(sets: dict[str, NamedDataset], tmp_path: Path) -> None:
    listing = read_multi(options(BREASTS, EYES), tmp_path, sets)
    left_out = [record for record in listing.records if record.excluded]
    assert {(record.label, record.excluded) for record in left_out} == {("blurred", "not part of the task")}
    assert len(left_out) == 6
    everything = replace(listing, records=tuple(replace(record, excluded="") for record in listing.records))
    assert "6 images have a label that is none of the task's" in refused(lambda: loaded(everything))


def test_a_path_is_in_the_data_folder_or_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYCLINIC_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/set").mkdir(parents=True)
    (tmp_path / "set").mkdir()
    assert resolve_path("set", tmp_path / "data") == tmp_path / "data/set"
    assert resolve_path("set", None) == Path("set")
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path / "data"))
    assert resolve_path("set", None) == tmp_path / "data/set"
    (tmp_path / "data/set").rmdir()
    assert resolve_path("set", None) == Path("set")
    told = refused(lambda: resolve_path("nowhere", tmp_path / "data"))
    assert told.startswith(f"There is nothing at {tmp_path}/data/nowhere or nowhere; correct data.path, or --data DIR;")
    assert "at a site by `polyclinic join --dry-run`" in told, "a coordinator has no images"
    told = refused(lambda: resolve_path(f"{tmp_path}/nowhere", tmp_path / "data"))
    assert told.startswith(f"There is nothing at {tmp_path}/nowhere; correct data.path, or --data DIR;")


def test_two_real_sets_side_by_side() -> None:
    folder = real("busi").parent
    real("mias")
    normal = {"normal": ["normal"], "abnormal": ["benign", "malignant"]}
    parts = [
        {"set": "busi", "site": "Cairo", "task": normal, "pieces": 2},
        {"set": "mias", "site": "UK", "task": normal},
    ]
    spec = DATASETS["multi"]
    chosen = spec.options.model_validate({"parts": parts, "size": 32, "channels": 1})
    found = spec.load(chosen, Stream(0), folder)
    assert torch.bincount(found.labels).tolist() == [133 + 207, 436 + 209 + 63 + 52]
    sites = build_site_data(found, Natural(), Fractions(), Stream(0))
    assert {name: len(s.train) + len(s.validation) + len(s.test) for name, s in sites.items()} == {
        "Cairo-1": 389,
        "Cairo-2": 389,
        "UK": 322,
    }
