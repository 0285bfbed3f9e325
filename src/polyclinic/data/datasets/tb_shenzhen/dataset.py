"""662 chest X-rays of Shenzhen No. 3 Hospital, China: normal, tuberculosis.

Shenzhen: chest X-rays of Shenzhen No. 3 Hospital (Jaeger et al., Quant. Imaging Med. Surg. 4(6), 2014).
"""

from functools import partial

from polyclinic.data.datasets.tb_montgomery.dataset import CLASSES, list_radiographs
from polyclinic.data.datasets.toolkit import define_public_dataset

SITE = "TB-Shenzhen"
DATASET = define_public_dataset(
    name="tb_shenzhen",
    licence="free for research and education, cite Jaeger et al. 2014 and Candemir et al. 2014",
    classes=CLASSES,
    sites=(SITE,),
    read_published=partial(
        list_radiographs, name="tb_shenzhen", subfolder="ChinaSet_AllFiles", prefix="CHNCXR", site=SITE
    ),
    obtain=(
        "get ChinaSet_AllFiles.zip from the National Library of Medicine "
        "(https://lhncbc.nlm.nih.gov/LHC-downloads/downloads.html#tuberculosis-image-data-sets) and unpack it there, "
        "so that the folder holds ChinaSet_AllFiles/CXR_png/CHNCXR_*.png."
    ),
)
