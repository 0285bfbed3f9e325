"""516 fundus photographs of one eye clinic in Nanded, India: grades 0 to 4.

IDRiD: grades of diabetic retinopathy on fundus photographs of one Indian clinic (Porwal et al., Data 3(3), 2018).
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    Record,
    define_public_dataset,
    find_subfolder,
    list_images,
    read_rows,
)

CLASSES = ("0", "1", "2", "3", "4")
SITE = "IDRiD-Nanded"
GRADING = "B. Disease Grading"
PARTS = (
    ("a. Training Set", "a. IDRiD_Disease Grading_Training Labels.csv", "train"),
    ("b. Testing Set", "b. IDRiD_Disease Grading_Testing Labels.csv", "test"),
)


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    root = find_subfolder(folder, f"{GRADING}/{GRADING}", f"B.%20Disease%20Grading/{GRADING}", GRADING)
    records = [record for part in PARTS for record in _list_records(root, *part)]
    stores = [store for name, _, _ in PARTS if (store := root / "1. Original Images" / name).is_dir()]
    if not stores:
        return None
    unlisted = {path for store in stores for path in list_images(store)} - {record.path for record in records}
    return Listing("idrid", root, tuple(records), CLASSES, declared=True, unlisted=tuple(sorted(unlisted)))


def _list_records(root: Path, store: str, name: str, split: str) -> Iterator[Record]:
    table = root / "2. Groundtruths" / name
    for where, row in read_rows(table) if table.is_file() else ():
        image, grade = row.get("image name", ""), row.get("retinopathy grade", "")
        if image or grade:  # the tables end in rows of commas
            path = root / "1. Original Images" / store / f"{PurePosixPath(image).name}.jpg"
            yield Record(path, grade, SITE, split=split, where=where)


DATASET = define_public_dataset(
    name="idrid",
    licence="CC BY 4.0, cite Porwal et al. 2018",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "download B. Disease Grading.zip from https://dx.doi.org/10.21227/H25W98 (an IEEE DataPort account is needed) "
        "and unpack it there, so that the folder holds B. Disease Grading/1. Original Images/ and 2. Groundtruths/."
    ),
)
