"""7,909 histology images of breast tumours of 82 patients, at 40, 100, 200 and 400 times: benign, malignant.

BreakHis: breast tumour histology at four magnifications (Spanhol et al., IEEE TBME 63(7), 2016).
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from polyclinic.data.datasets.toolkit import (
    Download,
    ImageOptions,
    Listing,
    NamedDataset,
    Record,
    find_subfolder,
    pseudonymise_patients,
    read_public_set,
)

CLASSES = ("benign", "malignant")
SITE = "BreakHis-P&D"
OBTAIN = (
    "download BreaKHis_v1.tar.gz from https://web.inf.ufpr.br/vri/databases/"
    "breast-cancer-histopathological-database-breakhis/ and unpack it there, so that the folder holds "
    "BreaKHis_v1/histology_slides/breast/{benign,malignant}/SOB/."
)
SLIDE = re.compile(r"SOB_(?P<tumour>[BM])_[A-Z]+-(?P<case>\d+-\d+)[A-Z]*-(?P<magnification>\d+)-\d+")
"""The letters after the number name the tissue blocks of one case: 21998AB and 21998CD are the same patient."""


class BreakHisOptions(ImageOptions):
    magnification: Literal["all", "40X", "100X", "200X", "400X"] = "all"


def read_listing(options: BreakHisOptions, folder: Path) -> Listing:
    sample = folder.with_name("breakhis_sample")
    place = sample if sample.exists() and not folder.exists() else folder
    found = read_public_set("breakhis", place, _read_published, OBTAIN, classes=CLASSES, sites=(SITE,))
    slides = [SLIDE.match(record.path.name) for record in found.records]
    records = [
        replace(
            record,
            patient=slide["case"] if slide else record.patient,
            excluded=record.excluded or _exclusion_reason(slide, options.magnification),
        )
        for record, slide in zip(found.records, slides, strict=True)
    ]
    return pseudonymise_patients(replace(found, records=tuple(records)))


def _exclusion_reason(slide: re.Match[str] | None, wanted: str) -> str:
    if wanted == "all" or (slide and f"{slide['magnification']}X" == wanted):
        return ""
    return f"not at the magnification {wanted}"


def _read_published(folder: Path) -> Listing:
    root = find_subfolder(find_subfolder(folder, "BreaKHis_v1"), "histology_slides/breast")
    images = {
        label: filter(lambda path: SLIDE.match(path.name), sorted((root / label).rglob("*.png"))) for label in CLASSES
    }
    records = [
        Record(path, label, SITE, where=f"{label}, file {number}")
        for label, paths in images.items()
        for number, path in enumerate(paths, start=1)
    ]
    return Listing("breakhis", root, tuple(records), CLASSES, declared=True)


DATASET = NamedDataset(
    name="breakhis",
    licence="CC BY 4.0, cite Spanhol et al. 2016",
    classes=CLASSES,
    read=read_listing,
    obtain=OBTAIN,
    options=BreakHisOptions,
    downloads=(
        Download("http://www.inf.ufpr.br/vri/databases/BreaKHis_v1.tar.gz", "", "BreaKHis_v1.tar.gz", unpack=True),
    ),
)
