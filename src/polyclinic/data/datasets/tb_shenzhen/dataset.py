"""Shenzhen: chest X-rays of Shenzhen No. 3 Hospital (Jaeger et al., Quant. Imaging Med. Surg. 4(6), 2014)."""

from __future__ import annotations

from pathlib import Path

from polyclinic.data.datasets.base import PublicDataset
from polyclinic.data.datasets.reading import find_subfolder, read_public_set
from polyclinic.data.datasets.tb_montgomery.dataset import CLASSES, list_radiographs
from polyclinic.data.loading.options import ImageOptions
from polyclinic.data.records import Listing

SITE = "TB-Shenzhen"
OBTAIN = (
    "get ChinaSet_AllFiles.zip from the National Library of Medicine "
    "(https://lhncbc.nlm.nih.gov/LHC-downloads/downloads.html#tuberculosis-image-data-sets) and unpack it there, "
    "so that the folder holds ChinaSet_AllFiles/CXR_png/CHNCXR_*.png."
)


def read_listing(_: ImageOptions, folder: Path) -> Listing:
    def publisher(place: Path) -> Listing | None:
        return list_radiographs("tb_shenzhen", find_subfolder(place, "ChinaSet_AllFiles"), "CHNCXR", SITE)

    return read_public_set("tb_shenzhen", folder, publisher, OBTAIN, classes=CLASSES, sites=(SITE,))


SET = PublicDataset(
    name="tb_shenzhen",
    about="662 chest X-rays of Shenzhen No. 3 Hospital, China: normal, tuberculosis",
    licence="free for research and education, cite Jaeger et al. 2014 and Candemir et al. 2014",
    classes=CLASSES,
    read=read_listing,
    obtain=OBTAIN,
)
