"""3,103 film mammograms of 1,566 patients with masses or calcifications: benign, malignant.

CBIS-DDSM: film mammograms with biopsied or followed-up lesions (Lee et al., Scientific Data 4, 170177, 2017).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    Record,
    define_public_dataset,
    find_subfolder,
    has_one_part_per_patient,
    read_rows,
)

CLASSES = ("benign", "malignant")
SITE = "CBIS-DDSM"
PATHOLOGY = {"BENIGN": "benign", "BENIGN_WITHOUT_CALLBACK": "benign", "MALIGNANT": "malignant"}
ABNORMALITIES = {"all": ("mass", "calc"), "mass": ("mass",), "calcification": ("calc",)}
COLUMNS = ("patient_id", "left or right breast", "image view", "pathology", "image file path")


class CbisDdsmOptions(ImageOptions):
    abnormality: Literal["all", "mass", "calcification"] = "all"
    """Whose tables are read. With one kind only, the official split can be kept."""


class Lesion(NamedTuple):
    """One row: one abnormality on one mammogram."""

    where: str
    split: str
    patient: str
    view: tuple[str, ...]
    pathology: str
    file: str


def _read_published(options: CbisDdsmOptions, folder: Path) -> Listing:
    tables = product(ABNORMALITIES[options.abnormality], ("train", "test"))
    lesions = [lesion for kind, part in tables for lesion in _read_lesions(folder, kind, part)]
    mammograms: defaultdict[tuple[str, tuple[str, ...]], list[Lesion]] = defaultdict(list)
    for lesion in lesions:
        mammograms[lesion.patient, lesion.view].append(lesion)
    # The retriever adds a folder named after the manifest.
    dicoms = next(iter(sorted(folder.glob("manifest-*/CBIS-DDSM"))), find_subfolder(folder, "CBIS-DDSM"))
    records = [_mammogram_record(folder, dicoms, shown) for shown in mammograms.values()]
    # The publisher split masses and calcifications separately, so a patient with both may be in both parts.
    official = has_one_part_per_patient((lesion.patient, lesion.split) for lesion in lesions)
    return Listing("cbis_ddsm", folder, tuple(records), CLASSES, official=official, declared=True)


def _read_lesions(folder: Path, kind: str, part: str) -> Iterator[Lesion]:
    table = find_subfolder(folder, "csv") / f"{kind}_case_description_{part}_set.csv"
    for where, row in read_rows(table) if table.is_file() else ():
        if not row.keys() >= set(COLUMNS):
            return
        patient, *view, pathology, file = (row[column] for column in COLUMNS)
        yield Lesion(where, part, patient, tuple(view), pathology, file)


def _mammogram_record(folder: Path, dicoms: Path, shown: Sequence[Lesion]) -> Record:
    """One mammogram, malignant if any of its lesions is; a mass and a calcification may share it."""
    labels = [PATHOLOGY.get(lesion.pathology.upper(), lesion.pathology) for lesion in shown]
    strange = [label for label in labels if label not in CLASSES]
    splits = {lesion.split for lesion in shown}
    paths = [path for lesion in shown for path in _image_candidates(folder, dicoms, lesion.file)]
    return Record(
        path=next((path for path in paths if path.is_file()), (paths or [dicoms / "not named"])[-1]),
        label=(strange or [max(labels, key=CLASSES.index)])[0],
        site=SITE,
        patient=shown[0].patient,
        split=splits.pop() if len(splits) == 1 else "",
        where=shown[0].where,
    )


def _image_candidates(folder: Path, dicoms: Path, text: str) -> list[Path]:
    """Where the full mammogram may lie that a table calls case/study/series/000000.dcm.

    The retriever renames study and series, so the case decides; it holds one image. The JPEG copy keeps the series.
    """
    steps = text.split("/")
    if len(steps) != 4 or not all(steps) or ".." in steps:
        return []
    case, _, series, _ = steps
    copies, originals = (folder / "jpeg" / series).glob("*.jpg"), (dicoms / case).glob("*/*/*.dcm")
    return [*sorted(copies), *sorted(originals), dicoms.joinpath(*steps)]


DATASET = define_public_dataset(
    name="cbis_ddsm",
    licence="CC BY 3.0, cite Lee et al. 2017 and the Cancer Imaging Archive",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "download the images with the NBIA Data Retriever and the four *_case_description_*_set.csv files from "
        "https://www.cancerimagingarchive.net/collection/cbis-ddsm/ so that the folder holds CBIS-DDSM/ and the CSV "
        "files, or the JPEG copy from https://www.kaggle.com/datasets/awsaf49/cbis-ddsm-breast-cancer-image-dataset "
        "so that it holds csv/ and jpeg/."
    ),
    options=CbisDdsmOptions,
)
