"""APTOS 2019: grades of diabetic retinopathy on fundus photographs of Aravind Eye Hospital (Kaggle, 2019)."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from polyclinic.data.datasets.base import NamedSet
from polyclinic.data.datasets.reading import inside, listed, rows
from polyclinic.data.loading.options import ImageOptions
from polyclinic.data.records import Listing, Record
from polyclinic.data.sources.folder import images

CLASSES = ("0", "1", "2", "3", "4")
SITE = "APTOS-Aravind"
OBTAIN = (
    "accept the rules of https://www.kaggle.com/competitions/aptos2019-blindness-detection, download its data and "
    "unpack it there, so that the folder holds train.csv and train_images/*.png."
)


def read(_: ImageOptions, folder: Path) -> Listing:
    return listed("aptos2019", folder, _publisher, OBTAIN, classes=CLASSES, sites=(SITE,))


def _publisher(folder: Path) -> Listing | None:
    root = inside(folder, "aptos2019-blindness-detection")
    table, store = root / "train.csv", root / "train_images"
    if not (table.is_file() and store.is_dir()):
        return None
    said = [(where, row) for where, row in rows(table) if row.keys() >= {"id_code", "diagnosis"}]
    records = [
        Record(store / f"{PurePosixPath(row['id_code']).name}.png", row["diagnosis"], SITE, where=where)
        for where, row in said
    ]
    unlisted = tuple(sorted(set(images(store)) - {record.path for record in records}))
    return Listing("aptos2019", root, tuple(records), CLASSES, declared=True, unlisted=unlisted) if records else None


SET = NamedSet(
    name="aptos2019",
    about="3,662 fundus photographs of rural India, Aravind Eye Hospital: grades 0 to 4",
    licence="the competition's rules: research and education, no redistribution",
    classes=CLASSES,
    read=read,
    obtain=OBTAIN,
)
