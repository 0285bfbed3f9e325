"""138 chest X-rays of the tuberculosis programme of Montgomery County, USA: normal, tuberculosis.

Montgomery County: chest X-rays of a tuberculosis programme (Jaeger et al., Quant. Imaging Med. Surg. 4(6), 2014).
"""

from __future__ import annotations

import re
from pathlib import Path

from polyclinic.data.datasets.base import NamedDataset
from polyclinic.data.datasets.readers import find_subfolder, read_public_set
from polyclinic.data.records import Listing, Record
from polyclinic.data.sources.folder import list_images

CLASSES = ("normal", "tuberculosis")
SITE = "TB-Montgomery"
OBTAIN = (
    "get NLM-MontgomeryCXRSet.zip from the National Library of Medicine "
    "(https://lhncbc.nlm.nih.gov/LHC-downloads/downloads.html#tuberculosis-image-data-sets) and unpack it there, "
    "so that the folder holds MontgomerySet/CXR_png/MCUCXR_*.png."
)


def _read_published(folder: Path) -> Listing | None:
    return list_radiographs("tb_montgomery", find_subfolder(folder, "MontgomerySet"), "MCUCXR", SITE)


def list_radiographs(name: str, root: Path, prefix: str, site: str) -> Listing | None:
    """The National Library's layout: CXR_png/PREFIX_0001_0.png, whose last digit is 1 for tuberculosis."""
    store = root / "CXR_png"
    found = list(list_images(store)) if store.is_dir() else []
    marks = [re.fullmatch(rf"{prefix}_\d+_([01])", path.stem) for path in found]
    records = [
        Record(path, CLASSES[int(mark[1])], site, where=f"CXR_png, file {number}")
        for number, (path, mark) in enumerate(zip(found, marks, strict=True), start=1)
        if mark
    ]
    unlisted = tuple(path for path, mark in zip(found, marks, strict=True) if not mark)
    return Listing(name, root, tuple(records), CLASSES, declared=True, unlisted=unlisted) if records else None


DATASET = NamedDataset(
    name="tb_montgomery",
    licence="free for research and education, cite Jaeger et al. 2014 and Candemir et al. 2014",
    classes=CLASSES,
    read=lambda _, folder: read_public_set(
        "tb_montgomery", folder, _read_published, OBTAIN, classes=CLASSES, sites=(SITE,)
    ),
    obtain=OBTAIN,
)
