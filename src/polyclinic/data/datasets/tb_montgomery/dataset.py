"""138 chest X-rays of the tuberculosis programme of Montgomery County, USA: normal, tuberculosis.

Montgomery County: chest X-rays of a tuberculosis programme (Jaeger et al., Quant. Imaging Med. Surg. 4(6), 2014).
"""

import re
from functools import partial
from pathlib import Path

from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    Record,
    define_public_dataset,
    find_subfolder,
    list_images,
)

CLASSES = ("normal", "tuberculosis")
SITE = "TB-Montgomery"


def list_radiographs(_: ImageOptions, folder: Path, *, name: str, subfolder: str, prefix: str, site: str) -> Listing:
    """List the National Library's layout: CXR_png/PREFIX_0001_0.png, whose last digit is 1 for tuberculosis."""
    root = find_subfolder(folder, subfolder)
    store = root / "CXR_png"
    found = list(list_images(store)) if store.is_dir() else []
    records = [
        Record(path, CLASSES[int(mark[1])], site, where=f"CXR_png, file {number}")
        for number, path in enumerate(found, start=1)
        if (mark := re.fullmatch(rf"{prefix}_\d+_([01])", path.stem))
    ]
    unlisted = set(found) - {record.path for record in records}
    return Listing(name, root, tuple(records), CLASSES, declared=True, unlisted=tuple(sorted(unlisted)))


DATASET = define_public_dataset(
    name="tb_montgomery",
    licence="free for research and education, cite Jaeger et al. 2014 and Candemir et al. 2014",
    classes=CLASSES,
    sites=(SITE,),
    read_published=partial(
        list_radiographs, name="tb_montgomery", subfolder="MontgomerySet", prefix="MCUCXR", site=SITE
    ),
    obtain=(
        "get NLM-MontgomeryCXRSet.zip from the National Library of Medicine "
        "(https://lhncbc.nlm.nih.gov/LHC-downloads/downloads.html#tuberculosis-image-data-sets) and unpack it there, "
        "so that the folder holds MontgomerySet/CXR_png/MCUCXR_*.png."
    ),
)
