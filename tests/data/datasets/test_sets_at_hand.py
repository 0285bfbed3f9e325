"""Named datasets: the real folders where they are available, and small copies of the publishers' layouts."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyclinic.core.errors import DataError, RecipeError
from polyclinic.data.datasets import ddsm_views
from polyclinic.data.datasets.base import NamedDataset
from polyclinic.data.datasets.breakhis.dataset import DATASET as BREAKHIS
from polyclinic.data.datasets.busi.dataset import DATASET as BUSI
from polyclinic.data.datasets.covid_cxr.dataset import DATASET as COVID
from polyclinic.data.datasets.ddsm_views.dataset import DATASET as DDSM
from polyclinic.data.datasets.deepdrid.dataset import DATASET as DEEPDRID
from polyclinic.data.datasets.medmnist.dataset import DATASET as MEDMNIST
from polyclinic.data.datasets.mias.dataset import DATASET as MIAS
from polyclinic.data.datasets.office_caltech10.dataset import DATASET as OFFICE, ONE_IMAGE_TWICE
from polyclinic.data.datasets.toolkit import exclude_duplicates, read_duplicates, read_rows
from polyclinic.data.records import Listing, Record

SETS = {each.name: each for each in (BUSI, MIAS, DDSM, DEEPDRID, COVID, OFFICE, MEDMNIST, BREAKHIS)}
NAME = "Grete_Musterfrau"


def read(each: NamedDataset, folder: Path, **options: Any) -> Listing:
    return each.read(each.options.model_validate(options), folder)


def real(name: str) -> Listing:
    folder = os.environ.get("POLYCLINIC_DATA")
    if not folder:
        pytest.skip("set POLYCLINIC_DATA to the folder that holds the real image sets")
    return read(SETS[name], Path(folder) / (SETS[name].folder or name))


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), len(path.name)).save(path)
    return path


def table(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def by_where(listing: Listing) -> dict[str, Record]:
    return {record.where: record for record in listing.records}


# What the data's own README counts.
LABELS = {
    "busi": {"benign": 437, "malignant": 210, "normal": 133},
    "mias": {"normal": 207, "benign": 63, "malignant": 52},
    "deepdrid": {"0": 980, "1": 294, "2": 465, "3": 382, "4": 116, "5": 6},
    "covid_cxr": {"pneumonia": 661, "normal": 511, "covid": 243, "tuberculosis": 11},
    "breakhis": {"benign": 8, "malignant": 4},
}
SITES = {
    "busi": {"BUSI-Cairo": 780},
    "mias": {"MIAS-UK": 322},
    "ddsm_views": {"DDSM-A-MGH": 1822, "DDSM-B-WFU-Lumisys": 312, "DDSM-D-ISMD-Howtek": 91},
    "deepdrid": {
        "DeepDRiD-Nicheng": 1497,
        "DeepDRiD-UWF": 254,
        "DeepDRiD-Nation": 56,
        "DeepDRiD-Shanghai": 36,
        "unstated": 400,
    },
    "covid_cxr": {"NIH-ChestXray8": 1000, "radiopaedia.org": 200, "eurorad.org": 117, "Hannover-ml-workgroup": 81},
    "office_caltech10": {"amazon": 958, "caltech": 1123, "dslr": 157, "webcam": 295},
    "medmnist": {"Guangzhou": 5856},
    "breakhis": {"BreakHis-P&D": 12},
}


@pytest.mark.parametrize("name", LABELS)
def test_real_images_per_class(name: str) -> None:
    assert Counter(record.label for record in real(name).records) == LABELS[name]


@pytest.mark.parametrize("name", SITES)
def test_real_images_per_site(name: str) -> None:
    sites = Counter(record.site for record in real(name).records)
    assert SITES[name].items() <= sites.items()
    assert sites.total() == sum(SITES[name].values()) + (28 if name == "covid_cxr" else 0), "28 from small sites"


def test_real_pneumoniamnist_parts() -> None:
    assert Counter(record.split for record in real("medmnist").used_records) == {
        "train": 4708,
        "validation": 524,
        "test": 624,
    }


@pytest.mark.parametrize("name", SETS)
def test_real_records_are_sound(name: str) -> None:
    listing = real(name)
    assert {record.label for record in listing.used_records} == set(listing.classes) == set(SETS[name].classes)
    assert all(record.path.is_file() for record in listing.records)
    assert len({record.where for record in listing.records}) == len(listing.records)


@pytest.mark.parametrize("name", SETS)
def test_no_patient_is_in_two_official_parts(name: str) -> None:
    listing = real(name)
    assert listing.official is (name != "ddsm_views")
    assert bool(patients_in_two_parts(listing)) is (name == "ddsm_views")


def patients_in_two_parts(listing: Listing) -> list[str]:
    parts = defaultdict(set)
    for record in listing.used_records:
        parts[record.patient].add(record.split)
    return [patient for patient, found in parts.items() if patient and len(found) > 1]


@pytest.mark.parametrize(("name", "excluded"), [("busi", 2), ("office_caltech10", 26)])
def test_no_two_used_images_are_the_same(name: str, excluded: int) -> None:
    listing = real(name)
    prints = [hashlib.sha256(record.path.read_bytes()).digest() for record in listing.used_records]
    assert len(set(prints)) == len(prints) == len(listing.records) - excluded


def test_real_ungradable_eyes_are_left_out() -> None:
    left_out = [record for record in real("deepdrid").records if record.excluded]
    assert {record.label for record in left_out} == {"5"}
    assert len(left_out) == 6


def test_real_mias_table_agrees_with_the_publishers_own_list(tmp_path: Path) -> None:
    plain = real("mias")
    info = (plain.root / "MIAS_Info.txt").read_bytes()
    (tmp_path / "all-mias").mkdir()
    (tmp_path / "Info.txt").write_bytes(info)
    for record in plain.records:
        (tmp_path / "all-mias" / f"{record.path.stem}.pgm").touch()
    published = read(MIAS, tmp_path)
    assert published.unlisted == ()
    told = [
        {record.path.stem: (record.label, record.patient) for record in each.records} for each in (plain, published)
    ]
    assert told[0] == told[1]


# The publishers' layouts, each with a patient's name wherever a file or a cell has room for one.


def busi(root: Path) -> None:
    for name in ("benign (1)", "benign (1)_mask", "benign (1)_mask_1", "benign (433)", f"benign ({NAME})"):
        put(root / f"Dataset_BUSI_with_GT/benign/{name}.png")
    put(root / "Dataset_BUSI_with_GT/malignant/malignant (145).png")
    put(root / "Dataset_BUSI_with_GT/malignant/malignant (2).png")
    put(root / "Dataset_BUSI_with_GT/normal/normal (1).png")


def mias(root: Path) -> None:
    for number in (1, 2, 3, 5, 6, 322):
        Image.new("L", (4, 4)).save(root / f"mdb{number:03}.pgm")
    lines = (
        "mdb001 G CIRC B 535 425 197|mdb002 D NORM|mdb003 F CALC B 1 2 3|mdb003 F CALC M *NOTE 3*|mdb005 F CIRC M 1 2 3"
    )
    table(root / "Info.txt", f"Thanks to {NAME}", *lines.split("|"), "mdb005 F CIRC B 1 2 3", "mdb006 D ASYM")


def ddsm(root: Path) -> None:
    for name in ("A_0002_1.LEFT_CC.png", "A_0002_1.RIGHT_MLO.png", "B_0002_1.LEFT_MLO.png"):
        put(root / f"cancers/{NAME}" / name)
    put(root / "normals/D_0009_RIGHT_CC.jpg")
    put(root / f"normals/{NAME}.jpg")


def deepdrid(root: Path) -> None:
    header = "patient_id,image_id,image_path,Overall quality,left_eye_DR_Level,right_eye_DR_Level,patient_DR_Level"
    train = root / "regular_fundus_images/regular-fundus-training"
    table(
        train / "regular-fundus-training.csv",
        header,
        "1,1_l1,\\x,0,2,,3",
        "1,1_r1,\\x,0,,3,3",
        f"9,{NAME}_l1,\\x,0,0,,0",
    )
    table(train / "regular-fundus-source-training.csv", "patient_id,image_id,image_path,Source", "1,1_l1,x,Shanghai")
    put(train / "Images/1/1_l1.jpg")
    test = root / "regular_fundus_images/Online-Challenge1&2-Evaluation"
    table(test / "Challenge1_upload.csv", "image_id,DR_Level", "347_l1,")
    wide = root / "ultra-widefield_images/ultra-widefield-training"
    table(
        wide / "ultra-widefield-training.csv",
        "patient_id,image_id,image_path,DR_level,position",
        "1,1_r1,x,5,right_eye",
        "121,121_l3,x,2,left_eye",
    )
    put(wide / "Images/121/l3.jpg")


def covid(root: Path) -> None:
    table(
        root / "metadata.csv",
        "patientid,finding,view,modality,folder,filename,url,license",
        "4,Pneumonia/Viral/COVID-19,PA,X-ray,images,a.jpg,https://www.eurorad.org/case/1,CC BY",
        "4,No Finding,AP Supine,X-ray,images,b.jpg,https://github.com/ml-workgroup/covid-19-image-repository,CC BY 3.0",
        f"{NAME},Pneumonia/Bacterial/Klebsiella,AP,X-ray,images,{NAME}.jpg,https://radiopaedia.org/cases/1,CC BY",
        "5,Tuberculosis,L,X-ray,images,c.jpg,https://radiopaedia.org/cases/2,CC BY",
        "5,Tuberculosis,Axial,CT,volumes,c.nii.gz,https://radiopaedia.org/cases/2,CC BY",
        "6,todo,PA,X-ray,images,d.jpg,https://radiopaedia.org/cases/2,CC BY",
        "6,Tuberculosis,PA,X-ray,images,../../e.jpg,https://radiopaedia.org/cases/2,",
    )


def office(root: Path) -> None:
    for site in ("amazon", "caltech", "dslr", "webcam"):
        put(root / f"office_caltech_10/{site}/back_pack/frame_0001.jpg")
    for number in (3, 4, 5, 18):
        put(root / f"office_caltech_10/amazon/monitor/frame_{number:04}.jpg")
    put(root / f"office_caltech_10/amazon/monitor/{NAME}.jpg")


def medmnist(root: Path) -> None:
    parts: dict[str, Any] = {}
    for part, labels in {"train": [0, 1, 1], "val": [1], "test": [0]}.items():
        parts[f"{part}_images"] = np.zeros((len(labels), 28, 28), np.uint8)
        parts[f"{part}_labels"] = np.array(labels, np.uint8)[:, None]
    np.savez(root / "pneumoniamnist.npz", **parts)


def breakhis(root: Path) -> None:
    breast = root / "BreaKHis_v1/histology_slides/breast"
    put(breast / "benign/SOB/phyllodes_tumor/SOB_B_PT_14-21998AB/40X/SOB_B_PT-14-21998AB-40-001.png")
    put(breast / "benign/SOB/fibroadenoma/SOB_B_F_14-21998CD/400X/SOB_B_F-14-21998CD-400-002.png")
    put(breast / "malignant/SOB/ductal_carcinoma/SOB_M_DC_14-2523/40X/SOB_M_DC-14-2523-40-010.png")
    put(breast / f"malignant/SOB/{NAME}.png")


LAYOUTS: dict[str, Callable[[Path], None]] = dict(
    zip(SETS, (busi, mias, ddsm, deepdrid, covid, office, medmnist, breakhis), strict=True)
)


def laid_out(name: str, folder: Path) -> Listing:
    LAYOUTS[name](folder)
    return read(SETS[name], folder)


def test_busi_ignores_masks_and_drops_the_image_with_two_labels(tmp_path: Path) -> None:
    listing = laid_out("busi", tmp_path)
    assert Counter(record.label for record in listing.used_records) == {"benign": 2, "malignant": 1, "normal": 1}
    assert not any("_mask" in record.path.name for record in listing.records)
    assert {record.path.stem for record in listing.records if record.excluded} == {"benign (433)", "malignant (145)"}


def test_mias_takes_the_worst_lesion_and_pairs_the_films(tmp_path: Path) -> None:
    listing = laid_out("mias", tmp_path)
    films = {record.path.stem: record for record in listing.records}
    labels = ["benign", "normal", "malignant", "malignant", ""]
    assert [films[f"mdb{number:03}"].label for number in (1, 2, 3, 5, 6)] == labels
    assert films["mdb001"].patient == films["mdb002"].patient != films["mdb003"].patient
    assert [path.name for path in listing.unlisted] == ["mdb322.pgm"]


def test_ddsm_reads_names(tmp_path: Path) -> None:
    listing = laid_out("ddsm_views", tmp_path)
    assert [record.label for record in listing.records] == ["CC_L", "MLO_R", "MLO_L", "CC_R"]
    assert [record.site[:6] for record in listing.records] == ["DDSM-A", "DDSM-A", "DDSM-B", "DDSM-D"]
    assert [record.patient for record in listing.records] == ["patient-1", "patient-1", "patient-2", "patient-3"]
    assert not listing.official


def test_deepdrid_reads_every_table(tmp_path: Path) -> None:
    records = by_where(laid_out("deepdrid", tmp_path))
    left, right = records["regular-fundus-training.csv row 2"], records["regular-fundus-training.csv row 3"]
    assert (left.label, left.site, left.split) == ("2", "DeepDRiD-Shanghai", "train")
    assert (right.label, right.site, right.patient) == ("3", "unstated", left.patient)
    wide, odd = records["ultra-widefield-training.csv row 2"], records["ultra-widefield-training.csv row 3"]
    assert wide.patient != left.patient, "wide-field patient 1 is not regular patient 1"
    assert wide.excluded.startswith("grade 5")
    assert odd.path.is_file()
    assert "save that as CSV" in records["Challenge1_upload.csv row 2"].excluded


def test_deepdrid_test_grades_are_used_once_they_are_csv(tmp_path: Path) -> None:
    deepdrid(tmp_path)
    test = tmp_path / "regular_fundus_images/Online-Challenge1&2-Evaluation"
    table(test / "Challenge1_labels.csv", "image_id,DR_Levels", "347_l1,4")
    record = by_where(read(DEEPDRID, tmp_path))["Challenge1_labels.csv row 2"]
    assert (record.label, record.split, record.excluded) == ("4", "test", "")


def test_covid_reads_findings_hosts_and_views(tmp_path: Path) -> None:
    listing = laid_out("covid_cxr", tmp_path)
    told = [("covid", "eurorad.org"), ("normal", "Hannover-ml-workgroup"), ("pneumonia", "radiopaedia.org")]
    assert [(record.label, record.site) for record in listing.used_records] == told
    first, second, third = listing.used_records
    assert first.patient == second.patient != third.patient
    reasons = ["not a frontal X-ray"] * 2 + ["its finding is none of the classes", "no licence is stated for it"]
    assert [record.excluded for record in listing.records[3:]] == reasons
    assert all(tmp_path in record.path.parents and ".." not in record.path.parts for record in listing.records)


def test_office_keeps_the_first_of_identical_pictures(tmp_path: Path) -> None:
    listing = laid_out("office_caltech10", tmp_path)
    assert {record.site for record in listing.used_records if record.label == "backpack"} == set(
        SITES["office_caltech10"]
    )
    left_out = [record for record in listing.records if record.excluded]
    assert [record.path.stem for record in left_out] == ["frame_0004", "frame_0018"]
    kept = next(record for record in listing.used_records if record.path.stem == "frame_0003")
    assert {record.excluded for record in left_out} == {f"the same image as {kept.where}"}


def test_known_duplicates_of_office_are_those_of_the_data() -> None:
    folder = real("office_caltech10").root
    known = [line.split() for line in ONE_IMAGE_TWICE.strip().splitlines()]
    told = [[folder / f"images/{place}/{stem}.jpg" for stem in stems] for place, *stems in known]
    assert sorted(map(sorted, read_duplicates(folder))) == sorted(map(sorted, told))


def test_medmnist_names_labels_and_parts(tmp_path: Path) -> None:
    listing = laid_out("medmnist", tmp_path)
    assert [record.label for record in listing.records] == ["normal", "pneumonia", "pneumonia", "pneumonia", "normal"]
    assert [record.split for record in listing.records] == ["train"] * 3 + ["validation", "test"]
    with pytest.raises(DataError, match=r"breastmnist_64\.npz"):
        read(MEDMNIST, tmp_path, file="breastmnist", resolution=64)
    with pytest.raises(RecipeError, match="'pneumoniamnist'"):
        read(MEDMNIST, tmp_path, file="../pneumoniamnist")


def test_breakhis_patients_and_magnifications(tmp_path: Path) -> None:
    listing = laid_out("breakhis", tmp_path)
    assert Counter(record.label for record in listing.used_records) == {"benign": 2, "malignant": 1}
    assert [record.patient for record in listing.records] == ["patient-1", "patient-1", "patient-2"]
    low = read(BREAKHIS, tmp_path, magnification="40X")
    assert Counter(record.label for record in low.used_records) == {"benign": 1, "malignant": 1}
    assert [record.excluded for record in low.records if record.excluded] == ["not at the magnification 40X"]


# What every set owes its user.


@pytest.mark.parametrize("other", [*LAYOUTS, "nothing", "no folder"])
@pytest.mark.parametrize("name", SETS)
def test_a_wrong_folder_is_refused(name: str, other: str, tmp_path: Path) -> None:
    folder = tmp_path if other != "no folder" else tmp_path / "absent"
    if other == name:
        assert laid_out(name, folder).used_records
        return
    if other in LAYOUTS:
        LAYOUTS[other](folder)
    with pytest.raises(DataError, match=f"The set {name} was not found in ") as refusal:
        read(SETS[name], folder)
    assert str(folder) in str(refusal.value)
    assert NAME not in str(refusal.value)


def test_another_sets_table_is_refused_although_it_has_the_same_classes(tmp_path: Path) -> None:
    table(tmp_path / "labels.csv", "path,label,site", f"{NAME}.png,benign,MIAS-UK")
    told = r"the labels.csv there lists another set \(its sites are none of: BUSI-Cairo; it looks like .*mias.*\)"
    with pytest.raises(DataError, match=f"is not that of the set busi: {told}") as refusal:
        read(BUSI, tmp_path)
    assert NAME not in str(refusal.value)


@pytest.mark.parametrize("name", SETS)
def test_no_listing_tells_a_patients_name(name: str, tmp_path: Path) -> None:
    assert NAME not in repr(laid_out(name, tmp_path))


@pytest.mark.parametrize("fault", [b'a,b\n"never closed', b"a,b\n\xff\xfe,1", b"a,b\n1,2,Grete_Musterfrau"])
def test_a_broken_table_is_refused_without_its_contents(fault: bytes, tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_bytes(fault)
    with pytest.raises(DataError, match=r"metadata\.csv") as refusal:
        list(read_rows(tmp_path / "metadata.csv"))
    assert NAME not in str(refusal.value)
    assert refusal.value.__cause__ is None


@pytest.mark.parametrize(("labels", "used"), [("aaa", 1), ("aab", 0)])
def test_identical_images_keep_the_first_unless_their_labels_conflict(labels: str, used: int) -> None:
    paths = [Path(str(number)) for number in range(3)]
    records = tuple(Record(path, label, where=f"row {path}") for path, label in zip(paths, labels, strict=True))
    listing = Listing("x", Path(), (*records, Record(Path("3"), "a")), ("a", "b"))
    kept = exclude_duplicates(listing, [paths, [Path("3"), Path("not there")]])
    assert [record.path for record in kept.used_records] == [*paths[:used], Path("3")]


def test_mias_table_splits_by_pair(tmp_path: Path) -> None:
    lines = ["path;label;site;patient_pair", "1.png;benign;MIAS-UK;p1", "2.png;normal;MIAS-UK;p1"]
    table(tmp_path / "labels.csv", *lines)
    assert {record.patient for record in read(MIAS, tmp_path).records} == {"patient-1"}


def test_the_readme_of_ddsm_counts_what_is_there() -> None:
    counts = Counter((record.site, record.label) for record in real("ddsm_views").records)
    text = Path(ddsm_views.__file__ or "").with_name("README.md").read_text(encoding="utf-8")
    for site in SITES["ddsm_views"]:
        assert f"| {site} | {' | '.join(str(counts[site, label]) for label in DDSM.classes)} |" in text
