"""Every fault is planted, alone, in a set of real photographs: it must be found, counted and told where it is, nothing
else may be said, and the set without it must be clean."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyclinic.data.check import CheckResult, check_listing
from polyclinic.data.findings import Finding
from polyclinic.data.quality.cohort import cohort_findings, measure_association
from polyclinic.data.quality.labels import label_findings
from polyclinic.data.quality.near_duplicates import group_near_duplicates
from polyclinic.data.records import Listing, Record
from polyclinic.data.sources.npz import read_npz
from polyclinic.data.sources.table import Columns, read_table
from tests.data import planted
from tests.data.planted import PLANTS, Bench, Bytes

NAMING = (
    planted.copied,
    planted.saved_anew,
    planted.unreadable,
    planted.names_alike,
    planted.leaking,
    planted.two_sites,
)
NOTES = {"patients with several images"}
TOLD_BY_NAME = {"class with one image", "class with few patients", "few images at a site", "site with a single class"}
ABOUT_USED = {
    "class with one image",
    "class with few patients",
    "unknown part",
    "patient in two parts",
    "duplicate in the test part",
}
"""Kinds that look only at images in use: leave those out, and the fault is gone."""


@pytest.fixture(scope="session")
def crops() -> dict[str, list[Bytes]]:
    return planted.cut_crops()


@pytest.fixture(scope="session")
def records(crops: dict[str, list[Bytes]], tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return planted.save_records(crops, tmp_path_factory.mktemp("set"))


@pytest.fixture
def bench(records: list[Record], crops: dict[str, list[Bytes]], tmp_path: Path) -> Bench:
    return Bench(list(records), crops, tmp_path)


@pytest.fixture(scope="session")
def clean(records: list[Record], crops: dict[str, list[Bytes]]) -> CheckResult:
    return Bench(list(records), crops, Path()).check()


def kinds(checked: CheckResult) -> set[str]:
    return {finding.kind for finding in checked.findings}


def the(checked: CheckResult, kind: str) -> Finding:
    (found,) = [finding for finding in checked.findings if finding.kind == kind]
    return found


def test_clean_set_is_clean(clean: CheckResult) -> None:
    assert kinds(clean) == NOTES
    assert clean.may_train
    assert clean.images == 120
    assert clean.classes == {"city": 60, "flower": 60}
    assert clean.sites == {"clinic 0": 60, "clinic 1": 60}


@pytest.mark.parametrize("name", PLANTS)
def test_planted_fault_is_found_alone(name: str, bench: Bench, clean: CheckResult) -> None:
    plant, kind, level, count, also = PLANTS[name]
    expected = plant(bench)
    checked = bench.check()
    found = the(checked, kind)
    assert (found.level, found.count, found.handled) == (level, count, "")
    assert checked.may_train == (level != "stop")
    gone = {"patients with several images"} if kind == "no patients" else set()
    assert kinds(checked) == (NOTES - gone) | {kind} | also
    assert kind not in kinds(clean)
    if expected is not None:
        assert sorted(found.positions) == sorted(expected)
        told = {where for place in found.where for where in place.split(" = ")}
        assert kind in TOLD_BY_NAME or told <= {bench.records[position].where for position in expected}
        assert len(found.where) == min(5, count)


@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if plant[2] == "stop"])
def test_what_the_loader_leaves_out_stops_nobody(name: str, bench: Bench) -> None:
    plant, kind, *_ = PLANTS[name]
    expected = plant(bench)
    assert expected is not None
    for position in expected:
        bench.change(position, excluded="a known fault")
    checked = bench.check()
    assert checked.may_train
    if kind not in ABOUT_USED:
        assert the(checked, kind).handled == "left out (a known fault)"


def test_known_and_new_faults_are_told_apart(bench: Bench) -> None:
    planted.missing(bench)
    bench.change(3, excluded="lost in a fire")
    known, new = sorted((f for f in bench.check().findings if f.kind == "missing file"), key=lambda f: f.count)
    assert (known.count, known.positions, known.handled) == (1, (3,), "left out (lost in a fire)")
    assert (new.count, new.stops) == (6, True)


def test_a_copy_is_dealt_with_when_all_but_one_are_left_out(bench: Bench) -> None:
    bench.put(1, bench.opened(0))
    bench.change(1, excluded="the same image as labels.csv row 2")
    assert the(bench.check(), "duplicate image").handled


def test_split_that_is_not_kept_stops_nobody(bench: Bench) -> None:
    planted.leaking(bench)
    planted.copied_into_test(bench)
    bench.options["official"] = False
    checked = bench.check()
    assert "by patient" in the(checked, "patient in two parts").handled
    assert the(checked, "duplicate image").level == "warn"
    assert checked.may_train


def test_reasons_are_counted(bench: Bench) -> None:
    planted.unreadable(bench)
    sentence = the(bench.check(), "unreadable file").sentence
    assert "the JPEG is truncated (2)" in sentence
    assert sentence.count("(1)") == 1


def test_codes_are_no_misspellings(bench: Bench) -> None:
    """Rare, and like another label; but nobody who writes them means the other."""
    for common, rare in (("MLO_L", "MLO_R"), ("grade 1", "grade 2"), ("normal", "abnormal"), ("HER2+", "HER2-")):
        for position in range(120):
            bench.change(position, label=rare if position in (3, 18, 40, 55) else common)
        found = {finding.kind for finding in label_findings(bench.listing())}
        assert "misspelt label" not in found, rare


def test_misspelling_is_quoted_only_if_the_class_is_common(bench: Bench) -> None:
    planted.misspelt(bench)
    assert "'flwoer' (did you mean 'flower'?)" in the(bench.check(), "misspelt label").sentence
    for position in range(20, 28):
        bench.change(position, label="Wilhelmine" if position == 25 else "wilhelmine")
    found = the(bench.check(), "misspelt label")
    assert 25 in found.positions
    assert "ilhelmine" not in found.sentence


def test_no_name_is_told(bench: Bench, tmp_path: Path) -> None:
    """Planted wherever a source may carry it: file names, labels, patients, parts, sites."""
    for number, plant in enumerate(NAMING):
        plant(bench)
        bench.change(110 - number, label="Wilhelmine Röntgen")
    for position, record in enumerate(bench.records):
        path = tmp_path / f"Wilhelmine Röntgen {record.path.name}"
        if record.path.exists():
            path.write_bytes(record.path.read_bytes())
        bench.change(position, path=path, patient=f"Wilhelmine Röntgen {record.patient}")
    bench.change(49, path=tmp_path / "Wilhelmine Röntgen, lost.png")
    bench.change(50, label="Röntgen, Wilhelmine")
    bench.change(51, split="Wilhelmine Röntgen")
    bench.change(52, site="Wilhelmine Röntgen")
    bench.options["unlisted"] = (tmp_path / "Wilhelmine Röntgen.png",)
    checked = bench.check()
    assert len(kinds(checked)) > 12
    for text in (json.dumps(checked.as_json(), ensure_ascii=False), repr(checked)):
        assert "wilhelmine" not in text.replace(str(tmp_path), "").lower()
        assert "röntgen" not in text.lower()


def test_json_says_it_all(bench: Bench) -> None:
    planted.leaking(bench)
    planted.missing(bench)
    checked = bench.check()
    read = json.loads(json.dumps(checked.as_json()))
    assert read == checked.as_json()
    assert read["may_train"] is False
    again = tuple(
        Finding(**{**finding, "where": tuple(finding["where"]), "positions": tuple(finding["positions"])})
        for finding in read["findings"]
    )
    assert CheckResult(read["name"], read["images"], read["classes"], read["sites"], again) == checked
    assert [finding.stops for finding in again] == sorted((f.stops for f in again), reverse=True)


def test_workers_change_nothing_and_progress_is_told(bench: Bench) -> None:
    planted.copied(bench)
    planted.unreadable(bench)
    told: list[tuple[int, int]] = []
    one = check_listing(bench.listing(), workers=1, progress=lambda done, total: told.append((done, total)))
    assert one == check_listing(bench.listing(), workers=5) == check_listing(bench.listing())
    assert told[-1] == (120, 120)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_array_of_images(crops: dict[str, list[Bytes]], tmp_path: Path) -> None:
    images = np.stack(crops["city"][:100])
    images[7], images[60] = images[3], 9
    np.savez(tmp_path / "set.npz", train_images=images, train_labels=np.arange(100) % 2)
    checked = check_listing(read_npz(tmp_path / "set.npz", name="array"))
    assert kinds(checked) == {"duplicate image", "blank image", "no patients"}
    assert the(checked, "duplicate image").positions == (3, 7)
    assert the(checked, "blank image").where == ("train_images row 60",)


def test_empty_listing_is_no_training_set(tmp_path: Path) -> None:
    checked = check_listing(Listing("nothing", tmp_path, (), ()))
    assert kinds(checked) == {"too few images"}
    assert not checked.may_train


@pytest.mark.parametrize("contrast", [0.5, 1.0])
def test_copies_stand_out_from_a_crowd_that_looks_alike(contrast: float) -> None:
    """A family of smooth pictures, each like many others to r > 0.99: only the copy is a copy."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:32, 0:32] / 32
    waves = np.stack([np.cos(np.pi * (a * x + b * y)) for a in range(4) for b in range(4)][1:])
    strength = np.concatenate([np.full(5, 8.0), np.full(10, 1.5)])
    crowd = 60 * waves[0] + np.tensordot(rng.normal(size=(800, 15)) * strength, waves, 1) + 128
    crowd[400] = crowd[17] + rng.normal(scale=0.3, size=(32, 32))
    shown = (128 + contrast * (crowd - 128)).clip(0, 255).round().astype(np.uint8)
    flat = shown.reshape(800, -1).astype(np.float64)
    r = np.corrcoef(flat) - np.eye(800)
    assert np.median(r.max(axis=1)) > 0.99
    assert group_near_duplicates(dict(enumerate(shown))) == [[17, 400]]
    backwards = dict(reversed(list(enumerate(shown))))
    assert [sorted(group) for group in group_near_duplicates(backwards)] == [[17, 400]]


def test_association_in_closed_form() -> None:
    rng = np.random.default_rng(0)
    assert measure_association(np.array([[300, 0], [0, 700]])).v == pytest.approx(1, abs=0.002)
    halves = measure_association(np.array([[400, 100], [100, 400]]))
    assert halves.v == pytest.approx(0.6, abs=0.002)
    assert (halves.guessed, halves.commonest) == (0.8, 0.5)
    same = measure_association(np.array([[30, 60, 90], [10, 20, 30]]))
    assert same.v == 0
    assert same.p == pytest.approx(1)
    independent = [measure_association(rng.multinomial(200, np.full(12, 1 / 12)).reshape(3, 4)) for _ in range(200)]
    assert np.mean([found.v for found in independent]) < 0.06, "without the correction it would be 0.12"
    assert np.mean([found.p < 0.05 for found in independent]) == pytest.approx(0.05, abs=0.05)


real = pytest.mark.skipif("POLYCLINIC_DATA" not in os.environ, reason="POLYCLINIC_DATA does not name a folder of sets")


def table(name: str, **columns: str) -> Listing:
    """As its table says, without what our loader knows of the set."""
    file = Path(os.environ["POLYCLINIC_DATA"]) / name / "labels.csv"
    if not file.is_file():
        pytest.skip(f"POLYCLINIC_DATA has no {name}/labels.csv")
    return read_table(file, name=name, columns=Columns(**columns))


def named(listing: Listing, finding: Finding) -> set[str]:
    return {listing.records[position].path.stem for position in finding.positions}


@real
def test_busi_has_one_image_under_two_labels() -> None:
    listing = table("busi")
    checked = check_listing(listing)
    assert named(listing, the(checked, "duplicate with another label")) == {"benign_433", "malignant_145"}
    assert not checked.may_train
    assert {"benign_399", "malignant_093"} <= named(listing, the(checked, "near duplicate with another label"))


@real
def test_mias_is_clean_and_has_pairs() -> None:
    checked = check_listing(table("mias", patient="patient_pair"))
    assert kinds(checked) == {"patients with several images"}
    assert the(checked, "patients with several images").count == 161


@real
def test_office_caltech_has_18_groups_of_duplicates() -> None:
    listing = table("office_caltech10")
    part = replace(listing, records=tuple(r for r in listing.records if r.site == "amazon" or r.label == "bike"))
    found = the(check_listing(part), "duplicate image")
    assert (found.count, len(found.positions)) == (18, 44)


@real
def test_covid_labels_follow_sites_and_those_of_other_sets_do_not() -> None:
    checked = check_listing(table("covid_cxr"))
    assert "Cramér's V 0.48" in the(checked, "label follows site").sentence
    assert checked.may_train
    assert the(checked, "near duplicate").count == 13
    for name in ("ddsm_views", "deepdrid", "office_caltech10"):
        assert "label follows site" not in {finding.kind for finding in cohort_findings(table(name))}, name


@real
def test_ddsm_split_leaks_patients_and_deepdrid_has_ungradable_ones() -> None:
    leak = {finding.kind: finding for finding in cohort_findings(table("ddsm_views"))}["patient in two parts"]
    assert leak.stops
    assert leak.count > 400
    listing = replace(table("deepdrid"), classes=tuple("01234"), declared=True)
    outside = {finding.kind: finding for finding in label_findings(listing)}["label outside the task"]
    assert (outside.count, outside.stops) == (6, True)


@real
def test_breakhis_sample_is_too_small() -> None:
    assert the(check_listing(table("breakhis_sample")), "too few images").count == 12


@real
def test_pneumoniamnist_has_true_duplicates_and_nothing_else() -> None:
    file = Path(os.environ["POLYCLINIC_DATA"]) / "pneumoniamnist" / "pneumoniamnist_rebuilt.npz"
    if not file.is_file():
        pytest.skip("POLYCLINIC_DATA has no pneumoniamnist")
    listing = read_npz(file, name="pneumoniamnist", label_names=("normal", "pneumonia"))
    checked = check_listing(listing)
    assert kinds(checked) == {"duplicate image", "no patients"}
    arrays = np.load(file)
    rows = [listing.records[position] for position in the(checked, "duplicate image").positions]
    pictures = {arrays[record.array][record.row].tobytes() for record in rows}
    assert len(pictures) == the(checked, "duplicate image").count
    whole = np.concatenate([arrays[f"{part}_images"] for part in ("train", "val", "test")])
    assert len(whole) - len({image.tobytes() for image in whole}) == len(rows) - len(pictures)
