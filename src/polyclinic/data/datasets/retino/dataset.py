"""1,392 fundus photographs of one Chinese collection, MedFMC's Retino: grades 0 to 4.

MedFMC's Retino: grades of diabetic retinopathy on fundus photographs (Wang et al., Scientific Data 10, 2023).
"""

import re
from collections.abc import Iterator
from pathlib import Path

from polyclinic.data.datasets.neojaundice.dataset import ImageEntry, build_medfmc_listing, read_lists
from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    define_public_dataset,
    find_subfolder,
    read_rows,
)

CLASSES = ("0", "1", "2", "3", "4")
SITE = "MedFMC-Retino"
TABLE = "Retino_published_G5.csv"
LISTS = {
    "fewshot-pool.txt": "train",
    "test.txt": "test",
    "retino_train.txt": "train",
    "retino_val.txt": "validation",
    "retino_test.txt": "test",
}
EXAMINATION = re.compile(r"(\d{17})(\d{3})?")
"""20230116125802923001: a time to the millisecond, then the number of the photograph within that examination."""


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    root = find_subfolder(folder, "Retino", "retino")
    entries = [*read_lists(root, LISTS)] or [*_read_grades(root / TABLE)]
    examinations = [EXAMINATION.match(entry.image) for entry in entries]
    if not any(examinations):
        return None
    patients = [found[1] if found else "" for found in examinations]
    return build_medfmc_listing("retino", root, entries, patients, CLASSES, SITE)


def _read_grades(table: Path) -> Iterator[ImageEntry]:
    """Read the image from the first column and its grade from the last: the columns' names were not published."""
    for where, row in read_rows(table) if table.is_file() else ():
        cells = [*row.values()]
        yield ImageEntry(where, cells[0], cells[-1])


DATASET = define_public_dataset(
    name="retino",
    licence="CC BY 4.0, cite Wang et al. 2023",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "download Retino from https://doi.org/10.6084/m9.figshare.c.6476047 and unpack it there, so that the folder "
        f"holds images/ and {TABLE}; for the benchmark's own split put its fewshot-pool.txt and test.txt "
        "(data/Retino of https://github.com/wllfore/MedFMC_fewshot_baseline) beside them."
    ),
)
