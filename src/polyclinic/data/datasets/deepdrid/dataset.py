"""Fundus photographs of 500 patients of three screening projects and wide-field ones of 128: grades 0 to 4.

DeepDRiD: grades of diabetic retinopathy on fundus photographs (Liu et al., Patterns 3(6), 100512, 2022).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    NamedDataset,
    Record,
    find_subfolder,
    pseudonymise_patients,
    read_public_set,
    read_rows,
)

CLASSES = ("0", "1", "2", "3", "4")
UNGRADABLE = "5"
WIDE, UNSTATED = "DeepDRiD-UWF", "unstated"
SITES = ("DeepDRiD-Nicheng", "DeepDRiD-Shanghai", "DeepDRiD-Nation", WIDE, UNSTATED)
GRADES = ("left_eye_dr_level", "right_eye_dr_level", "dr_level", "dr_levels", "uwf_dr_levels")
"""The columns that may hold a grade: the publisher names it differently in almost every table."""
OBTAIN = (
    "clone https://github.com/deepdrdoc/DeepDRiD there, so that the folder holds regular_fundus_images/ and "
    "ultra-widefield_images/, and save Challenge1_labels.xlsx and Challenge3_labels.xlsx as CSV beside themselves."
)


class PublishedFolder(NamedTuple):
    """One folder of the publisher's, with `Images/` and a table of grades."""

    folder: str
    split: str
    tables: tuple[str, ...]
    """The first one that exists is read."""
    sources: str = ""
    """The table of each image's screening project, if one was published."""


PARTS = (
    PublishedFolder(
        "regular_fundus_images/regular-fundus-training",
        "train",
        ("regular-fundus-training.csv",),
        "regular-fundus-source-training.csv",
    ),
    PublishedFolder(
        "regular_fundus_images/regular-fundus-validation",
        "validation",
        ("regular-fundus-validation.csv",),
        "regular-fundus-source-validation.csv",
    ),
    PublishedFolder(
        "regular_fundus_images/Online-Challenge1&2-Evaluation",
        "test",
        ("Challenge1_labels.csv", "Challenge1_upload.csv"),
    ),
    PublishedFolder("ultra-widefield_images/ultra-widefield-training", "train", ("ultra-widefield-training.csv",)),
    PublishedFolder(
        "ultra-widefield_images/ultra-widefield-validation", "validation", ("ultra-widefield-validation.csv",)
    ),
    PublishedFolder(
        "ultra-widefield_images/Online-Challenge3-Evaluation",
        "test",
        ("Challenge3_labels.csv", "Challenge3_upload.csv"),
    ),
)


def read_listing(_: ImageOptions, folder: Path) -> Listing:
    sites = (*SITES, "DeepDRiD-regular-unknown")
    found = read_public_set("deepdrid", folder, _read_published, OBTAIN, classes=CLASSES, sites=sites)
    return pseudonymise_patients(replace(found, records=tuple(map(_normalise_record, found.records))))


def _normalise_record(record: Record) -> Record:
    if record.site == "DeepDRiD-regular-unknown":
        record = replace(record, site=UNSTATED)
    # The two kinds of photograph number their patients independently: both have a patient 1, not the same person.
    record = replace(record, patient=record.patient and f"{record.site == WIDE} {record.patient}")
    if record.label == UNGRADABLE:
        return replace(record, excluded="grade 5: the graders could not judge it")
    return record


def _read_published(folder: Path) -> Listing:
    root = find_subfolder(folder, "DeepDRiD", "DeepDRiD-master")
    records = [record for part in PARTS for record in _list_records(root, part)]
    return Listing("deepdrid", root, tuple(records), CLASSES, declared=True)


def _list_records(root: Path, part: PublishedFolder) -> Iterator[Record]:
    folder = root / part.folder
    table = next((folder / name for name in part.tables if (folder / name).is_file()), None)
    stated = read_rows(folder / part.sources) if (folder / part.sources).is_file() else ()
    sources = {row.get("image_id", ""): f"DeepDRiD-{row['source']}" for _, row in stated if row.get("source")}
    for where, row in read_rows(table) if table else ():
        image = Path(row.get("image_id", "")).name  # never a way out of the folder
        patient = image.partition("_")[0]
        site = WIDE if part.folder.startswith("ultra") else sources.get(image, UNSTATED)
        grade = next((row[column] for column in GRADES if row.get(column)), "")
        excluded = "" if grade else "its grade is in an .xlsx file; save that as CSV under the same name"
        yield Record(_image_path(folder, patient, image), grade, site, patient, part.split, where, excluded=excluded)


def _image_path(folder: Path, patient: str, image: str) -> Path:
    """Two wide-field images were published without their patient's number in the name."""
    usual = folder / "Images" / patient / f"{image}.jpg"
    bare = usual.with_name(f"{image.partition('_')[2]}.jpg")
    return bare if not usual.exists() and bare.exists() else usual


DATASET = NamedDataset(
    name="deepdrid",
    licence="CC BY-SA 4.0, cite Liu et al. 2022",
    classes=CLASSES,
    read=read_listing,
    obtain=OBTAIN,
)
