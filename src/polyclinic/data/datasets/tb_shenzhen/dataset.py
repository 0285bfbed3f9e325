"""662 chest X-rays of Shenzhen No. 3 Hospital, China: normal, tuberculosis.

Shenzhen: chest X-rays of Shenzhen No. 3 Hospital (Jaeger et al., Quant. Imaging Med. Surg. 4(6), 2014).
"""

from __future__ import annotations

from pathlib import Path

from polyclinic.data.datasets.base import NamedDataset
from polyclinic.data.datasets.readers import find_subfolder, read_public_set
from polyclinic.data.datasets.tb_montgomery.dataset import CLASSES, list_radiographs
from polyclinic.data.records import Listing

SITE = "TB-Shenzhen"
OBTAIN = (
    "get ChinaSet_AllFiles.zip from the National Library of Medicine "
    "(https://lhncbc.nlm.nih.gov/LHC-downloads/downloads.html#tuberculosis-image-data-sets) and unpack it there, "
    "so that the folder holds ChinaSet_AllFiles/CXR_png/CHNCXR_*.png."
)


def _read_published(folder: Path) -> Listing | None:
    return list_radiographs("tb_shenzhen", find_subfolder(folder, "ChinaSet_AllFiles"), "CHNCXR", SITE)


DATASET = NamedDataset(
    name="tb_shenzhen",
    licence="free for research and education, cite Jaeger et al. 2014 and Candemir et al. 2014",
    classes=CLASSES,
    read=lambda _, folder: read_public_set(
        "tb_shenzhen", folder, _read_published, OBTAIN, classes=CLASSES, sites=(SITE,)
    ),
    obtain=OBTAIN,
)
