"""780 breast ultrasound images of about 600 women, one hospital in Cairo: normal, benign, malignant.

BUSI: breast ultrasound images of Baheya Hospital, Cairo (Al-Dhabyani et al., Data in Brief 28, 104863, 2020).
"""

from dataclasses import replace
from pathlib import Path

from polyclinic.data.datasets.toolkit import (
    TABLE,
    Download,
    ImageOptions,
    Listing,
    NamedDataset,
    exclude_duplicates,
    find_subfolder,
    read_duplicates,
    read_folder,
    read_public_set,
)

CLASSES = ("normal", "benign", "malignant")
SITE = "BUSI-Cairo"
OBTAIN = (
    "download Dataset_BUSI.zip from https://scholar.cu.edu.eg/?q=afahmy/pages/dataset "
    "and unpack it there, so that the folder holds Dataset_BUSI_with_GT/{benign,malignant,normal}/*.png."
)
NOT_A_MASK = "* (*).png"
ONE_IMAGE_TWICE = ("benign/benign (433).png", "malignant/malignant (145).png")


def read_listing(_: ImageOptions, folder: Path) -> Listing:
    found = read_public_set("busi", folder, _read_published, OBTAIN, classes=CLASSES, sites=(SITE,))
    if (folder / TABLE).is_file():
        return exclude_duplicates(found, read_duplicates(folder))
    return exclude_duplicates(found, [[found.root / name for name in ONE_IMAGE_TWICE]])


def _read_published(folder: Path) -> Listing | None:
    root = find_subfolder(folder, "Dataset_BUSI_with_GT")
    if not all(any(root.glob(f"{label}/{label} (*).png")) for label in CLASSES):
        return None
    found = read_folder(root, name="busi", levels=("label",), classes=CLASSES, pattern=NOT_A_MASK)
    return replace(found, records=tuple(replace(record, site=SITE) for record in found.records))


DATASET = NamedDataset(
    name="busi",
    licence="free for research, cite Al-Dhabyani et al. 2020",
    classes=CLASSES,
    read=read_listing,
    obtain=OBTAIN,
    downloads=(Download("https://scholar.cu.edu.eg/Dataset_BUSI.zip", "", "Dataset_BUSI.zip", unpack=True),),
)
