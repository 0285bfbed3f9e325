"""A name where it should not be is not said: not by a listing, a check, an error, or a diagnosis."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyclinic.core.rng import Stream
from polyclinic.data.check import CheckResult, check_listing
from polyclinic.data.examples import Collection, Images
from polyclinic.data.heterogeneity import feature_shift
from polyclinic.data.heterogeneity.diagnosis import Diagnosis, diagnose_sites, format_diagnosis
from polyclinic.data.listings import open_source
from polyclinic.data.partitioning.partitions import Natural
from polyclinic.data.partitioning.site_data import build_site_data
from polyclinic.data.records import Listing
from polyclinic.data.sources.folder import read_folder
from polyclinic.data.sources.table import read_table
from polyclinic.data.splits import Fractions
from tests.data.written import NAME, refused, table, touch


def with_name_in_table(folder: Path) -> Listing:
    touch(folder, f"images/{NAME}.png", f"images/{NAME} 2.png")
    text = f"path,label,patient,{NAME}'s note\nimages/{NAME}.png,a,{NAME},{NAME}\n"
    return read_table(table(folder, text), name="t")


def with_name_in_folder(folder: Path) -> Listing:
    touch(folder, f"a/{NAME}/{NAME}.png", f"a/{NAME}.png", f"a/{NAME}/{NAME}/{NAME}.png")
    return read_folder(folder, name="f", levels=("label", "patient"))


@pytest.mark.parametrize("read", [with_name_in_table, with_name_in_folder])
def test_a_planted_name_is_not_in_a_listing(tmp_path: Path, read: Callable[[Path], Listing]) -> None:
    listing = read(tmp_path)
    assert len(listing.records) == 1
    assert listing.records[0].patient == "patient-1"
    assert NAME not in repr(listing)
    assert not any(NAME in f"{r.where}{r.label}{r.site}{r.split}{r.array}" for r in listing.records)


NAMED_TABLES = {
    "headerless": f"{NAME}.png,benign,{NAME}\n",
    "headerless, a bare name": f"{NAME},benign\n",
    "headerless, twice": f"{NAME},{NAME}\n",
    "long row": f"path,label,patient\n{NAME}.png,a,{NAME},{NAME}\n",
    "out": f"path,label,patient\n../{NAME}.png,a,{NAME}\n",
    "no path": f"path,label,patient\n,a,{NAME}\n",
    "open quote": f'path,label,patient\n1.png,a,"{NAME}\n',
    "quote within": f'path,label,patient\n1.png,a,"{NAME}" x\n',
    "NUL": f"path,label,patient\n1.png,a,{NAME}\0\n",
    "escape codes": f"path,label,site\n1.png,a,\x1b{NAME}\n",
    "no label": f"path,patient,note\n1.png,{NAME},{NAME}\n",
    "headerless, a usual word": f"{NAME}.png,file,{NAME}\n1.png,file,{NAME}\n",
    "headerless, path alone": f"{NAME}.png,path,{NAME}\n1.png,path,{NAME}\n",
    "headerless, label alone": f"{NAME}.png,label,{NAME}\n1.png,label,{NAME}\n",
}


@pytest.mark.parametrize("fault", NAMED_TABLES)
def test_a_planted_name_is_not_in_a_tables_error(tmp_path: Path, fault: str) -> None:
    file = table(tmp_path, NAMED_TABLES[fault])
    assert "Quast" not in refused(lambda: read_table(file, name="t"))


def test_a_planted_name_is_not_in_other_errors(tmp_path: Path) -> None:
    touch(tmp_path, f"{NAME}.png")
    assert NAME not in refused(lambda: open_source(tmp_path))
    touch(tmp_path, f"a/b/{NAME}/x.png")
    assert NAME not in refused(lambda: read_folder(tmp_path, name="f", levels=("label", "patient")))


# Folders of patients, taken for classes or sites


def photographed(folder: Path, *counts: tuple[str, int]) -> Path:
    """Noise in folders, so many images in each."""
    rng = np.random.default_rng(0)
    for place, count in counts:
        (folder / place).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 256, (16, 16), dtype=np.uint8)).save(folder / place / f"{number}.png")
    return folder


def said(checked: CheckResult) -> str:
    return json.dumps(checked.as_json(), ensure_ascii=False)


def spoilt(folder: Path) -> CheckResult:
    """Of a folder whose images are all broken: all of them are told."""
    for file in folder.rglob("*.png"):
        file.write_text("no image")
    return check_listing(open_source(folder))


def test_patients_taken_for_sites_are_numbered(tmp_path: Path) -> None:
    photographed(tmp_path, ("A Clinic/benign", 12), (f"B {NAME}/benign", 4), (f"C {NAME}/malignant", 5))
    checked = check_listing(open_source(tmp_path))
    assert checked.sites == {"A Clinic": 12, "(rare ones)": 9}
    assert checked.classes == {"benign": 16, "(rare ones)": 5}
    broken = spoilt(tmp_path)
    assert [record.where for record in open_source(tmp_path).records][11:17] == [
        "A Clinic/benign, file 12",
        *(f"folder 2/benign, file {number}" for number in range(1, 5)),
        "folder 3/folder 1, file 1",
    ]
    assert NAME not in said(checked) + said(broken)


def test_patients_taken_for_classes_are_numbered(tmp_path: Path) -> None:
    photographed(tmp_path, (NAME, 3), (f"{NAME} 2", 9), ("normal", 10))
    assert check_listing(open_source(tmp_path)).classes == {"normal": 10, "(rare ones)": 12}
    broken = spoilt(tmp_path)
    (found,) = [finding for finding in broken.findings if finding.kind == "unreadable file"]
    assert found.where == (*(f"folder 1, file {n}" for n in (1, 2, 3)), *(f"folder 2, file {n}" for n in (1, 2)))
    assert NAME not in said(broken)


def test_levels_that_were_declared_may_be_said(tmp_path: Path) -> None:
    touch(tmp_path, "Lyon/benign/1.png", f"Turin/benign/{NAME}.png")
    listing = read_folder(tmp_path, name="f", levels=("site", "label"))
    assert [record.where for record in listing.records] == ["Lyon/benign, file 1", "Turin/benign, file 1"]


@pytest.mark.parametrize("deeper", ["", "a/"])
def test_empty_folders_are_counted_and_numbered(tmp_path: Path, deeper: str) -> None:
    touch(tmp_path, f"a/{deeper}1.png", f"{NAME}/notes.txt", f"z {NAME}/notes.txt")
    sentence = refused(lambda: open_source(tmp_path))
    assert "2 " in sentence
    assert "folder 1, 3)" in sentence
    assert NAME not in sentence


# A patient's name in the column of sites


def at_sites(*sizes: int, patients: int = 3, sites: tuple[str, ...] = ("", "north", "south")) -> Collection:
    """Images of so many patients at each site, of which the first is named after one of them."""
    names = [name or f"{NAME}, born 1950" for name in sites[: len(sizes)]]
    column = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    people = [f"{site} {row % patients}" for row, site in enumerate(column)]
    images = torch.rand(len(column), 1, 4, 4, generator=Stream(0).generator())
    labels = torch.arange(len(column)) % 2
    return Collection(images, labels, ("benign", "malignant"), tuple(people), tuple(column))


WRONG = at_sites(4, 20)
BROKEN = at_sites(4, 20)
BROKEN.images[1] = torch.nan
PARTS = Fractions(train=0.8, validation=0.1, test=0.1)
NUMBERED: dict[str, tuple[Callable[[], object], str]] = {
    "minimum": (
        lambda: build_site_data(at_sites(4, 20), Natural(minimum=5), PARTS, Stream(0)),
        "Site 1 of 2, with 4 images, is below the minimum of 5 images",
    ),
    "no part": (
        lambda: build_site_data(at_sites(20, 20, patients=2), Natural(), PARTS, Stream(0)),
        "Site 1 of 2, with 20 images, has no images left for its test part",
    ),
    "one class": (
        lambda: build_site_data(replace(WRONG, labels=torch.zeros(24).long()), Natural(), PARTS, Stream(0)),
        "Site 1 of 2, with 4 images, would train on class 'benign' only",
    ),
    "labels": (
        lambda: build_site_data(replace(WRONG, labels=torch.full((24,), 7)), Natural(), PARTS, Stream(0)),
        "Site 1 of 2, with 4 images, has 4 images labelled outside",
    ),
    "values": (
        lambda: build_site_data(BROKEN, Natural(), PARTS, Stream(0)),
        "Site 1 of 2, with 4 images, has 1 images with values that are not finite",
    ),
}


@pytest.mark.parametrize("fault", NUMBERED)
def test_a_small_sites_error_tells_its_number(fault: str) -> None:
    deed, words = NUMBERED[fault]
    sentence = refused(deed)
    assert words in sentence
    assert NAME not in sentence


@pytest.mark.parametrize(("size", "patients", "told"), [(10, 3, "'south'"), (9, 3, "1 of 1"), (10, 2, "1 of 1")])
def test_ten_images_of_three_patients_make_a_site_that_is_named(size: int, patients: int, told: str) -> None:
    data = at_sites(size, patients=patients, sites=("south",))
    assert f"Site {told}" in refused(lambda: build_site_data(data, Natural(minimum=99), PARTS, Stream(0)))


def diagnosed(data: Collection, monkeypatch: pytest.MonkeyPatch) -> Diagnosis:
    monkeypatch.setattr(feature_shift, "REFITS", 5)
    whole = Fractions(train=1, validation=0, test=0)
    sites = build_site_data(data, Natural(), whole, Stream(0), allow_single_class=True)
    return diagnose_sites({name: site.train for name, site in sites.items()}, data.classes, Stream(0))


def test_a_diagnosis_numbers_small_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnosed(at_sites(4, 40, 36, patients=12), monkeypatch)
    assert [site.name for site in found.sites] == ["site 1 (4 images)", "north", "south"]
    assert {found.pairs[0].a, found.pairs[0].b} == {"site 1 (4 images)", "north"}
    told = json.dumps(found.as_json(), ensure_ascii=False) + " ".join(format_diagnosis(found))
    assert "leaves out site 1 (4 images), with fewer" in told
    assert NAME not in told


def test_a_diagnosis_refuses_without_the_name() -> None:
    here, nothing = Images(torch.zeros(2, 1, 4, 4), torch.tensor([0, 5])), torch.zeros(0)
    sentence = refused(lambda: diagnose_sites({NAME: here, "north": here}, ("benign", "malignant"), Stream(0)))
    assert "Site 1 of 2, with 2 images, has 1 images labelled outside" in sentence
    empty = {NAME: Images(nothing.reshape(0, 1, 4, 4), nothing.long()), "north": here}
    assert "Site 1 of 2 has no images;" in refused(lambda: diagnose_sites(empty, ("benign", "malignant"), Stream(0)))


def test_sites_that_we_drew_are_always_named() -> None:
    sites = {f"site-{number}": Images(torch.rand(2, 1, 4, 4), torch.tensor([0, 9])) for number in (1, 2)}
    assert "Site 'site-1' has 1 images labelled" in refused(
        lambda: diagnose_sites(sites, ("benign", "malignant"), Stream(0))
    )
