"""3,662 fundus photographs of rural India, Aravind Eye Hospital: grades 0 to 4.

APTOS 2019: grades of diabetic retinopathy on fundus photographs of Aravind Eye Hospital (Kaggle, 2019).
"""

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
SITE = "APTOS-Aravind"


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    root = find_subfolder(folder, "aptos2019-blindness-detection")
    table, store = root / "train.csv", root / "train_images"
    if not (table.is_file() and store.is_dir()):
        return None
    records = [
        Record(store / f"{PurePosixPath(row['id_code']).name}.png", row["diagnosis"], SITE, where=where)
        for where, row in read_rows(table)
        if row.keys() >= {"id_code", "diagnosis"}
    ]
    unlisted = sorted(set(list_images(store)) - {record.path for record in records})
    return Listing("aptos2019", root, tuple(records), CLASSES, declared=True, unlisted=tuple(unlisted))


DATASET = define_public_dataset(
    name="aptos2019",
    licence="the competition's rules: research and education, no redistribution",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "accept the rules of https://www.kaggle.com/competitions/aptos2019-blindness-detection, download its data and "
        "unpack it there, so that the folder holds train.csv and train_images/*.png."
    ),
)
