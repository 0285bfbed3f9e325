"""3,383 mammograms exported from Roboflow, by their names a selection of RSNA's: normal, cancer.

Breast Cancer Detection (hayder17, Roboflow Universe): mammograms as the third client of FedCycle's scenario 2.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    Record,
    define_public_dataset,
    has_one_part_per_patient,
    list_images,
    list_subfolders,
    parse_part,
    read_rows,
)

CLASSES = ("normal", "cancer")
SITE = "Roboflow"
LABELS = {"0": "normal", "1": "cancer"}
PARTS = ("train", "valid", "test")
EXPORTED = re.compile(r"(?P<source>.+)\.rf\.[^.]+\.\w+")
"""Roboflow adds a code to each image's name; copies made by augmentation share what stands before it."""
RSNA = re.compile(r"(?P<patient>\d+)_\d+_(png|jpg|jpeg|dcm)")


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    found = [(part, *entry) for part in PARTS if (folder / part).is_dir() for entry in _list_entries(folder / part)]
    sources = [EXPORTED.fullmatch(path.name) for _, path, _, _ in found]
    if not any(sources):
        return None
    records = [
        Record(path, LABELS.get(label, label), SITE, _patient_name(source) if source else "", parse_part(part), where)
        for (part, path, label, where), source in zip(found, sources, strict=True)
    ]
    official = has_one_part_per_patient((record.patient, record.split) for record in records if record.patient)
    return Listing("roboflow_breast", folder, tuple(records), CLASSES, official=official, declared=True)


def _list_entries(part: Path) -> Iterator[tuple[Path, str, str]]:
    """Image, label and where it is listed: from class folders, or from the table of a multi-label export."""
    table = part / "_classes.csv"
    for where, row in read_rows(table) if table.is_file() else ():
        name, *marks = row.items()
        chosen = [label for label, mark in marks if mark == "1"]
        yield part / Path(name[1]).name, chosen[0] if len(chosen) == 1 else "", f"{part.name}/{where}"
    for label in list_subfolders(part):
        for number, path in enumerate(list_images(label), start=1):
            yield path, label.name, f"{part.name}/{label.name}, file {number}"


def _patient_name(exported: re.Match[str]) -> str:
    """The names are RSNA's numbers of patient and image; where they are not, copies of one image belong together."""
    numbers = RSNA.fullmatch(exported["source"])
    return numbers["patient"] if numbers else exported["source"]


DATASET = define_public_dataset(
    name="roboflow_breast",
    licence="DbCL 1.0 as Kaggle states it; by their names the images are RSNA's, and under RSNA's rules",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "export https://universe.roboflow.com/hayder17/breast-cancer-detection as 'Folder Structure' (an account is "
        "needed), or download its copy https://www.kaggle.com/datasets/hayder17/breast-cancer-detection, and unpack it "
        "there, so that the folder holds {train,valid,test}/{0,1}/*.rf.*.jpg."
    ),
)
