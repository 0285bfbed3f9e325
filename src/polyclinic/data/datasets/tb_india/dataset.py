"""Chest X-rays of one institute in New Delhi, two machines (DA 156, DB 150): normal, tuberculosis.

DA and DB: chest X-rays of one institute in New Delhi (Chauhan, Chauhan and Rout, PLoS ONE 9(11), e112980, 2014).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from polyclinic.data.datasets.tb_montgomery.dataset import CLASSES
from polyclinic.data.datasets.toolkit import (
    SPLITS,
    ImageOptions,
    Listing,
    Record,
    define_public_dataset,
    find_subfolder,
    is_image,
)

SITE = "TB-India"
COLLECTIONS = {"A": ("DatasetA", "Dataset A", "DA"), "B": ("DatasetB", "Dataset B", "DB")}
MARKS = {"n": "normal", "p": "tuberculosis"}


class TbIndiaOptions(ImageOptions):
    sites: Literal["institute", "machine"] = "institute"
    """One site, or one for each of the two X-ray machines: DA and DB."""


def _read_published(options: TbIndiaOptions, folder: Path) -> Listing:
    root = find_subfolder(folder, "tbxpredict")
    records = [record for letter in COLLECTIONS for record in _list_records(root, letter, options.sites == "machine")]
    return Listing("tb_india", root, tuple(records), CLASSES, declared=True)


def _list_records(root: Path, letter: str, machines: bool) -> Iterator[Record]:
    collection = next((root / name for name in COLLECTIONS[letter] if (root / name).is_dir()), None)
    found = [path for path in sorted(collection.rglob("*")) if is_image(path)] if collection else []
    site = f"{SITE}-{letter}" if machines else SITE
    for number, path in enumerate(found, start=1):
        split = next((SPLITS[step.lower()] for step in path.parts[len(root.parts) :] if step.lower() in SPLITS), "")
        mark = re.match(r"([np])x?[ _-]?\d", path.name.lower())
        yield Record(path, MARKS[mark[1]] if mark else "", site, split=split, where=f"Dataset {letter}, file {number}")


DATASET = define_public_dataset(
    name="tb_india",
    licence="free for research, cite Chauhan et al. 2014",
    classes=CLASSES,
    sites=(SITE, *(f"{SITE}-{letter}" for letter in COLLECTIONS)),
    read_published=_read_published,
    obtain=(
        "download Dataset A and Dataset B from https://sourceforge.net/projects/tbxpredict/ and unpack them there, so "
        "that the folder holds DatasetA/{Training,Testing}/ and DatasetB/{Training,Testing}/ with files such as "
        "px1.jpg (positive) and nx1.jpg (negative)."
    ),
    options=TbIndiaOptions,
)
