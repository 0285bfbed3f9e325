"""Shenzhen: chest X-rays of Shenzhen No. 3 Hospital (Jaeger et al., Quant. Imaging Med. Surg. 4(6), 2014)."""

from __future__ import annotations

from pathlib import Path

from polyclinic.data.datasets.base import NamedSet
from polyclinic.data.datasets.reading import inside, listed
from polyclinic.data.datasets.tb_montgomery.dataset import CLASSES, radiographs
from polyclinic.data.loading.options import ImageOptions
from polyclinic.data.records import Listing

SITE = "TB-Shenzhen"
OBTAIN = (
    "get ChinaSet_AllFiles.zip from the National Library of Medicine "
    "(https://lhncbc.nlm.nih.gov/LHC-downloads/downloads.html#tuberculosis-image-data-sets) and unpack it there, "
    "so that the folder holds ChinaSet_AllFiles/CXR_png/CHNCXR_*.png."
)


def read(_: ImageOptions, folder: Path) -> Listing:
    def publisher(place: Path) -> Listing | None:
        return radiographs("tb_shenzhen", inside(place, "ChinaSet_AllFiles"), "CHNCXR", SITE)

    return listed("tb_shenzhen", folder, publisher, OBTAIN, classes=CLASSES, sites=(SITE,))


SET = NamedSet(
    name="tb_shenzhen",
    about="662 chest X-rays of Shenzhen No. 3 Hospital, China: normal, tuberculosis",
    licence="free for research and education, cite Jaeger et al. 2014 and Candemir et al. 2014",
    classes=CLASSES,
    read=read,
    obtain=OBTAIN,
)
