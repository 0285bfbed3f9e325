"""780 breast ultrasound images of about 600 women, one hospital in Cairo: normal, benign, malignant.

BUSI: breast ultrasound images of Baheya Hospital, Cairo (Al-Dhabyani et al., Data in Brief 28, 104863, 2020).
"""

from dataclasses import replace
from pathlib import Path

from polyclinic.data.datasets.toolkit import (
    Download,
    ImageOptions,
    Listing,
    define_public_dataset,
    exclude_duplicates,
    find_subfolder,
    read_folder,
    read_table_without_copies,
)

CLASSES = ("normal", "benign", "malignant")
SITE = "BUSI-Cairo"
NOT_A_MASK = "* (*).png"
ONE_IMAGE_TWICE = ("benign/benign (433).png", "malignant/malignant (145).png")


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    root = find_subfolder(folder, "Dataset_BUSI_with_GT")
    if not all(any(root.glob(f"{label}/{label} (*).png")) for label in CLASSES):
        return None
    found = read_folder(root, name="busi", levels=("label",), classes=CLASSES, pattern=NOT_A_MASK)
    listing = replace(found, records=tuple(replace(record, site=SITE) for record in found.records))
    return exclude_duplicates(listing, [[root / name for name in ONE_IMAGE_TWICE]])


DATASET = define_public_dataset(
    name="busi",
    licence="free for research, cite Al-Dhabyani et al. 2020",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "download Dataset_BUSI.zip from https://scholar.cu.edu.eg/?q=afahmy/pages/dataset "
        "and unpack it there, so that the folder holds Dataset_BUSI_with_GT/{benign,malignant,normal}/*.png."
    ),
    downloads=(Download("https://scholar.cu.edu.eg/Dataset_BUSI.zip", "", "Dataset_BUSI.zip", unpack=True),),
    read_plain=read_table_without_copies,
)
