"""138 chest X-rays of the tuberculosis programme of Montgomery County, USA: normal, tuberculosis.

Montgomery County: chest X-rays of a tuberculosis programme (Jaeger et al., Quant. Imaging Med. Surg. 4(6), 2014).
"""

import re
from functools import partial
from pathlib import Path

from polyclinic.data.datasets.toolkit import Listing, NamedDataset, Record, find_subfolder, list_images, read_public_set

CLASSES = ("normal", "tuberculosis")
SITE = "TB-Montgomery"
OBTAIN = (
    "get NLM-MontgomeryCXRSet.zip from the National Library of Medicine "
    "(https://lhncbc.nlm.nih.gov/LHC-downloads/downloads.html#tuberculosis-image-data-sets) and unpack it there, "
    "so that the folder holds MontgomerySet/CXR_png/MCUCXR_*.png."
)


def list_radiographs(folder: Path, name: str, subfolder: str, prefix: str, site: str) -> Listing | None:
    """List the National Library's layout: CXR_png/PREFIX_0001_0.png, whose last digit is 1 for tuberculosis."""
    root = find_subfolder(folder, subfolder)
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


_read_published = partial(list_radiographs, name="tb_montgomery", subfolder="MontgomerySet", prefix="MCUCXR", site=SITE)
DATASET = NamedDataset(
    name="tb_montgomery",
    licence="free for research and education, cite Jaeger et al. 2014 and Candemir et al. 2014",
    classes=CLASSES,
    read=lambda _, folder: read_public_set(
        "tb_montgomery", folder, _read_published, OBTAIN, classes=CLASSES, sites=(SITE,)
    ),
    obtain=OBTAIN,
)
