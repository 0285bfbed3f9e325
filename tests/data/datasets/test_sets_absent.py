"""Datasets that are not available here: small folders in their publishers' layouts, with a planted name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from polyclinic.core.errors import DataError
from polyclinic.data.datasets.base import NamedDataset
from polyclinic.data.records import Listing
from tests.data import layouts
from tests.data.layouts import CASES, MASS_TEST, MASS_TRAIN, NAME, case, table, touch, write

HEADINGS = ["What it is", "Licence and terms", "How to get it", "Layout", "Split", "Heterogeneity"]


@dataclass(frozen=True)
class Expected:
    lay_out: Callable[[Path], None]
    labels: Mapping[str, int]
    sites: Mapping[str, int]
    splits: Mapping[str, int]
    patients: int
    """How many the layout tells apart; 0 where it tells none."""
    official: bool = True
    unlisted: int = 0
    missing: int = 0


PARTS = {"train": 6, "validation": 6, "test": 6}
SETS = {
    "cbis_ddsm": Expected(
        layouts.cbis_ddsm, {"malignant": 1, "benign": 2}, {"CBIS-DDSM": 3}, {"train": 2, "test": 1}, patients=2
    ),
    "inbreast": Expected(
        layouts.inbreast,
        {"malignant": 2, "normal": 1, "benign": 2},
        {"INbreast-Porto": 5},
        {"": 5},
        patients=3,
        unlisted=1,
    ),
    "covid_qu_ex": Expected(
        layouts.covid_qu_ex, {"COVID-19": 6, "Non-COVID": 6, "Normal": 6}, {"COVID-QU-Ex": 18}, PARTS, patients=0
    ),
    "neojaundice": Expected(
        layouts.neojaundice,
        {"no jaundice": 6, "jaundice": 3},
        {"MedFMC-NeoJaundice": 9},
        {"train": 6, "test": 3},
        patients=3,
        unlisted=1,
    ),
    "aptos2019": Expected(
        layouts.aptos2019, {"2": 1, "4": 1, "0": 1}, {"APTOS-Aravind": 3}, {"": 3}, patients=0, unlisted=1, missing=1
    ),
    "retino": Expected(layouts.retino, {"0": 1, "1": 1, "2": 1, "4": 1}, {"MedFMC-Retino": 4}, {"": 4}, patients=3),
    "idrid": Expected(
        layouts.idrid, {"3": 1, "0": 1, "4": 1}, {"IDRiD-Nanded": 3}, {"train": 2, "test": 1}, patients=0, unlisted=1
    ),
    "tb_montgomery": Expected(
        layouts.tb_montgomery, {"normal": 2, "tuberculosis": 1}, {"TB-Montgomery": 3}, {"": 3}, patients=0, unlisted=1
    ),
    "tb_shenzhen": Expected(
        layouts.tb_shenzhen, {"normal": 1, "tuberculosis": 2}, {"TB-Shenzhen": 3}, {"": 3}, patients=0
    ),
    "tb_india": Expected(
        layouts.tb_india, {"normal": 3, "tuberculosis": 3}, {"TB-India": 6}, {"train": 4, "test": 2}, patients=0
    ),
    "rsna_mammography": Expected(
        layouts.rsna_mammography, {"no cancer": 3, "cancer": 1}, {"RSNA-2": 2, "RSNA-1": 2}, {"": 4}, patients=3
    ),
    "roboflow_breast": Expected(
        layouts.roboflow_breast,
        {"normal": 5, "cancer": 2},
        {"Roboflow": 7},
        {"train": 5, "validation": 1, "test": 1},
        patients=4,
        official=False,
    ),
    "breast_ct": Expected(layouts.breast_ct, {"normal": 3, "cancer": 2}, {"BCFPP": 5}, {"": 5}, patients=0),
}
ALL = pytest.mark.parametrize("name", SETS)


def set_of(name: str) -> NamedDataset:
    found: NamedDataset = import_module(f"polyclinic.data.datasets.{name}.dataset").DATASET
    return found


def read(name: str, folder: Path, **options: object) -> Listing:
    set_ = set_of(name)
    return set_.read(set_.options.model_validate(options), folder)


def laid_out(name: str, folder: Path) -> Path:
    SETS[name].lay_out(folder)
    return folder


# --- All sets ---


@ALL
def test_a_set_is_listed_as_it_is_laid_out(name: str, tmp_path: Path) -> None:
    expected, found = SETS[name], read(name, laid_out(name, tmp_path / name))
    assert Counter(record.label for record in found.records) == expected.labels
    assert Counter(record.site for record in found.records) == expected.sites
    assert Counter(record.split for record in found.records) == expected.splits
    assert len({record.patient for record in found.records} - {""}) == expected.patients
    assert (found.official, len(found.unlisted)) == (expected.official, expected.unlisted)
    assert sum(not record.path.is_file() for record in found.records) == expected.missing
    assert len({record.path for record in found.records}) == len(found.records)
    assert (found.name, found.classes, found.declared) == (name, set_of(name).classes, True)


@ALL
def test_every_place_is_told_once_and_without_names(name: str, tmp_path: Path) -> None:
    found = read(name, laid_out(name, tmp_path / name))
    places = [record.where for record in found.records]
    assert all(re.search(r"(row|line|file) \d+$", place) for place in places)
    assert len(set(places)) == len(places)
    assert NAME not in repr(found)
    assert all(re.fullmatch(r"(patient-\d+)?", record.patient) for record in found.records)


@ALL
def test_the_plain_table_comes_first(name: str, tmp_path: Path) -> None:
    folder, label = laid_out(name, tmp_path / name), set_of(name).classes[0]
    write(folder, {"labels.csv": table("path,label,patient", f"{NAME}.png,{label},{NAME}"), f"{NAME}.png": "pixels"})
    found = read(name, folder)
    assert [(record.label, record.where) for record in found.records] == [(label, "labels.csv row 2")]
    assert NAME not in repr(found)


def refusal(name: str, folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(name, folder)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


@ALL
def test_an_empty_or_absent_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "absent"):
        told = refusal(name, folder)
        assert str(folder) in told
        assert set_of(name).obtain in told


@ALL
def test_another_set_in_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    for other in SETS:
        if other != name:
            told = refusal(name, laid_out(other, tmp_path / other))
            assert str(tmp_path / other) in told
            assert set_of(name).obtain in told
            assert NAME not in told


@ALL
def test_another_sets_table_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path, {"labels.csv": table("path,label,patient", f"{NAME}.png,histology,{NAME}")})
    told = refusal(name, tmp_path)
    assert set_of(name).obtain in told
    assert NAME not in told


@ALL
def test_what_a_set_says_of_itself(name: str) -> None:
    set_ = set_of(name)
    assert set_.name == name
    assert set_.downloads == ()
    assert all((set_.licence, set_.obtain.endswith(".")))
    folder = Path(str(import_module(f"polyclinic.data.datasets.{name}.dataset").__file__)).parent
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"__init__.py", "dataset.py", "README.md"}
    assert (folder / "__init__.py").read_text() == ""
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == HEADINGS
    assert re.findall(r"^# (.+)$", text, flags=re.MULTILINE) == [name]


TABLES = {
    "cbis_ddsm": "mass_case_description_train_set.csv",
    "inbreast": "INbreast.csv",
    "neojaundice": "fewshot-pool.txt",
    "aptos2019": "train.csv",
    "retino": "Retino_published_G5.csv",
    "idrid": "B. Disease Grading/2. Groundtruths/a. IDRiD_Disease Grading_Training Labels.csv",
    "rsna_mammography": "train.csv",
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("damage", [NAME.encode() + b"\xff\xfe\n", f'"{NAME},1,2\n'.encode()])
def test_a_damaged_table_is_refused_and_names_nobody(name: str, damage: bytes, tmp_path: Path) -> None:
    file = laid_out(name, tmp_path / name) / TABLES[name]
    file.write_bytes(file.read_bytes() + damage)
    told = refusal(name, tmp_path / name)
    assert str(file) in told
    assert NAME not in told


NAMED = {
    "aptos2019": "001639a390f0",
    "rsna_mammography": "220375232",
    "idrid": "IDRiD_002",
    "inbreast": "22678646",
    "retino": "20230112085804506",
    "cbis_ddsm": f"Mass-Training_P_{NAME}_LEFT_MLO/1.3.study/1.3.24516/000000.dcm",
}
"""An image, as the set's table names it."""


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("way_out", ["../../../../secret", "../../../secret", "/secret"])
def test_a_table_cannot_point_out_of_the_set(name: str, way_out: str, tmp_path: Path) -> None:
    folder = laid_out(name, tmp_path / name)
    text = (folder / TABLES[name]).read_text(encoding="utf-8").replace(NAMED[name], way_out)
    assert way_out in text
    (folder / TABLES[name]).write_text(text, encoding="utf-8")
    for record in read(name, folder).records:
        assert record.path.resolve().is_relative_to(folder.resolve())


# --- Single sets ---


def test_cbis_jpegs_are_found_by_their_series(tmp_path: Path) -> None:
    write(tmp_path / "csv", {"mass_case_description_train_set.csv": MASS_TRAIN, "dicom_info.csv": "file_path\n"})
    touch(tmp_path / "jpeg", "1.3.24515/1-249.jpg", "1.3.24516/1-001.jpg", "1.3.99/1-002.jpg")
    found = read("cbis_ddsm", tmp_path)
    assert [record.path.name for record in found.records] == ["1-249.jpg", "1-001.jpg"]
    assert [record.label for record in found.records] == ["malignant", "benign"]


def test_cbis_paths_as_the_table_has_them(tmp_path: Path) -> None:
    write(tmp_path, {"mass_case_description_test_set.csv": MASS_TEST})
    touch(tmp_path, "CBIS-DDSM/Mass-Test_P_00016_LEFT_CC/1.3.study/1.3.14172/000000.dcm")
    (record,) = read("cbis_ddsm", tmp_path).records
    assert record.path.is_file()
    assert record.split == "test"


def test_cbis_patients_in_both_parts_cancel_the_split(tmp_path: Path) -> None:
    """The same film as a mass for training and as a calcification for test is one record, and malignant."""
    calc = table(CASES, case("Calc", "Test", f"P_{NAME}", "MLO", 1, "MALIGNANT", "1.3.7"))
    write(laid_out("cbis_ddsm", tmp_path), {"calc_case_description_test_set.csv": calc})
    found = read("cbis_ddsm", tmp_path)
    assert not found.official
    assert [(record.label, record.split) for record in found.records] == [
        ("malignant", "train"),
        ("malignant", ""),
        ("benign", "test"),
    ]
    masses = read("cbis_ddsm", tmp_path, abnormality="mass")
    assert masses.official
    assert len(masses.records) == 3
    assert [record.label for record in read("cbis_ddsm", tmp_path, abnormality="calcification").records] == [
        "malignant"
    ]


@pytest.mark.parametrize("separator", [";", ","])
def test_inbreast_reads_birads_as_documented(separator: str, tmp_path: Path) -> None:
    grades = {"1": "normal", "2": "benign", "3": "benign"}
    grades |= dict.fromkeys(("4a", "4b", "4c", "4", "5", "6", "4A"), "malignant")
    rows = ["File Name;Bi-Rads", *(f"{10 + number};{grade}" for number, grade in enumerate([*grades, "0"]))]
    write(tmp_path, {"INbreast Release 1.0/INbreast.csv": table(*rows).replace(";", separator)})
    touch(tmp_path / "INbreast Release 1.0/AllDICOMs", "10_aa_MG_L_CC_ANON.dcm")
    labels = [record.label for record in read("inbreast", tmp_path).records]
    assert labels == [*grades.values(), "0"]


def test_covid_qu_ex_falls_back_to_the_infection_part(tmp_path: Path) -> None:
    root = tmp_path / "COVID-QU-Ex dataset/Infection Segmentation Data"
    for label in ("COVID-19", "Non-COVID", "Normal"):
        touch(root / "Test" / label, "images/1.png", "infection masks/1.png", "lung masks/1.png")
    found = read("covid_qu_ex", tmp_path)
    assert [record.where for record in found.records] == [
        f"Test/{label}, file 1" for label in ("COVID-19", "Non-COVID", "Normal")
    ]


def test_neojaundice_values_are_cut_at_the_threshold(tmp_path: Path) -> None:
    header = "patient_id,image_idx,gender,gestational_age,age(day),weight,blood(mg/dL),Treatment"
    values = {"0001": "12.9", "0002": "13.0", "0003": "20", "0004": "?"}
    rows = [f"{infant},{infant}-1.jpg,0,38,5,3000,{value},N" for infant, value in values.items()]
    write(tmp_path, {"NeoJaundice/chd_jaundice_published_2.csv": table(header, *rows)})
    touch(tmp_path / "NeoJaundice/images", *(f"{infant}-1.jpg" for infant in values))
    labels = [record.label for record in read("neojaundice", tmp_path).records]
    assert labels == ["no jaundice", "jaundice", "jaundice", ""]
    labels = [record.label for record in read("neojaundice", tmp_path, threshold=15).records]
    assert labels == ["no jaundice", "no jaundice", "jaundice", ""]


def test_the_three_photographs_of_an_infant_belong_together(tmp_path: Path) -> None:
    found = read("neojaundice", laid_out("neojaundice", tmp_path))
    assert Counter(record.patient for record in found.records) == {f"patient-{n}": 3 for n in (1, 2, 3)}


def test_retino_lists_that_divide_an_examination_are_not_kept(tmp_path: Path) -> None:
    laid_out("retino", tmp_path)
    pool, test = table("20230116125802923001 0", "20230112085804506 2"), table("20230116165508632001 4")
    write(tmp_path, {"fewshot-pool.txt": pool, "test.txt": test})
    assert read("retino", tmp_path).official
    write(tmp_path, {"test.txt": table("20230116125802923002 1")})
    found = read("retino", tmp_path)
    assert not found.official
    assert found.records[0].patient == found.records[2].patient
    assert all(record.path.is_file() for record in found.records)


def test_sets_of_one_publisher_or_layout_are_told_apart(tmp_path: Path) -> None:
    """Retino's lists name grades 0 and 1 as NeoJaundice's name labels; exports and class folders look alike."""
    write(laid_out("retino", tmp_path / "retino"), {"test.txt": table("20230116125802923001 0")})
    assert set_of("neojaundice").obtain in refusal("neojaundice", tmp_path / "retino")
    assert set_of("retino").obtain in refusal("retino", laid_out("neojaundice", tmp_path / "neojaundice"))
    touch(tmp_path / "ct/train", "0/1.png", "1/1.png")
    touch(tmp_path / "roboflow/train", "0/1_2_png.rf.a.jpg", "1/3_4_png.rf.b.jpg")
    assert set_of("roboflow_breast").obtain in refusal("roboflow_breast", tmp_path / "ct")
    assert set_of("breast_ct").obtain in refusal("breast_ct", tmp_path / "roboflow")


def test_tb_india_by_machine(tmp_path: Path) -> None:
    found = read("tb_india", laid_out("tb_india", tmp_path), sites="machine")
    assert Counter(record.site for record in found.records) == {"TB-India-A": 4, "TB-India-B": 2}
    assert {(record.site, record.label, record.split) for record in found.records if record.path.suffix == ".dcm"} == {
        ("TB-India-B", "tuberculosis", "train"),
        ("TB-India-B", "normal", "test"),
    }


def test_tb_india_with_one_machine_only(tmp_path: Path) -> None:
    touch(tmp_path / "DB/Training", "px1.dcm", "nx1.dcm", f"{NAME}.dcm")
    found = read("tb_india", tmp_path)
    assert Counter(record.label for record in found.records) == {"tuberculosis": 1, "normal": 1, "": 1}


def test_rsna_png_copies_are_found(tmp_path: Path) -> None:
    laid_out("rsna_mammography", tmp_path)
    copies = {file.rename(file.with_suffix(".png")) for file in list(tmp_path.rglob("*.dcm"))}
    assert {record.path for record in read("rsna_mammography", tmp_path).records} == copies


def test_roboflow_copies_and_patients_belong_together(tmp_path: Path) -> None:
    found = read("roboflow_breast", laid_out("roboflow_breast", tmp_path))
    of = {record.path.name.partition(".rf.")[0]: record.patient for record in found.records}
    assert of["105_1232990271_png"] == of["105_1934323665_png"] == of["105_397491913_png"]
    assert len({of["105_1232990271_png"], of["10011_220375232_png"], of["106_1160585918_png"], of[f"{NAME}_jpg"]}) == 4


def test_a_roboflow_export_with_a_table(tmp_path: Path) -> None:
    for part, rows in {"train": ["a_png.rf.1.jpg,1,0", "b_png.rf.1.jpg,0,1"], "test": ["c_png.rf.1.jpg,1,1"]}.items():
        write(tmp_path / part, {"_classes.csv": table("filename, 0, 1", *rows)})
        touch(tmp_path / part, *(row.partition(",")[0] for row in rows))
    found = read("roboflow_breast", tmp_path)
    assert [(record.label, record.split) for record in found.records] == [
        ("normal", "train"),
        ("cancer", "train"),
        ("", "test"),
    ]
    assert found.official
    assert all(record.path.is_file() for record in found.records)


def test_breast_ct_in_parts(tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        touch(tmp_path / part, "0/1.png", "1/1.png")
    found = read("breast_ct", tmp_path)
    assert Counter((record.split, record.label) for record in found.records) == {
        (part, label): 1 for part in ("train", "validation", "test") for label in ("normal", "cancer")
    }
