"""About 3,600 slices of breast CT, as FedCycle counts them: normal, cancer.

Breast Cancer CT, Fully Preprocessed (BCFPP, Kaggle dataset 2026269): the CT client of FedCycle's scenario 3.
"""

from dataclasses import replace
from pathlib import Path

from polyclinic.data.datasets.toolkit import (
    SPLITS,
    ImageOptions,
    Level,
    Listing,
    define_public_dataset,
    list_images,
    list_subfolders,
    read_folder,
)

CLASSES = ("normal", "cancer")
SITE = "BCFPP"
FOLDERS = {"normal": "normal", "0": "normal", "cancer": "cancer", "1": "cancer"}


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    parts = [path for path in list_subfolders(folder) if path.name.lower() in SPLITS]
    if not all(_has_class_folders(place) for place in parts or [folder]):
        return None
    levels: tuple[Level, ...] = ("split", "label") if parts else ("label",)
    found = read_folder(folder, name="breast_ct", levels=levels)
    records = tuple(replace(record, label=FOLDERS[record.label.lower()], site=SITE) for record in found.records)
    return replace(found, records=records, classes=CLASSES, declared=True)


def _has_class_folders(place: Path) -> bool:
    """Two class folders and no other; another publisher's export (`….rf.….jpg`) is not this set."""
    classes = list_subfolders(place)
    labels = sorted(FOLDERS.get(path.name.lower(), "") for path in classes)
    return labels == sorted(CLASSES) and not any(
        ".rf." in image.name for path in classes for image in list_images(path)
    )


DATASET = define_public_dataset(
    name="breast_ct",
    licence="as stated on its Kaggle page: read it before use",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "download https://www.kaggle.com/ds/2026269 (a Kaggle account is needed) and lay its images out there as "
        "{normal,cancer}/*.png, within {train,valid,test}/ where it has such parts."
    ),
)
