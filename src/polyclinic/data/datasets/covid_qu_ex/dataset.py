"""33,920 chest X-rays from many public collections: COVID-19, other infections, normal.

COVID-QU-Ex: chest X-rays from public collections (Tahir et al., Computers in Biology and Medicine 139, 2021).
"""

from dataclasses import replace
from pathlib import Path

from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    define_public_dataset,
    find_subfolder,
    read_folder,
)

CLASSES = ("COVID-19", "Non-COVID", "Normal")
SITE = "COVID-QU-Ex"
PARTS = ("Train", "Val", "Test")
COLLECTIONS = ("Lung Segmentation Data", "Infection Segmentation Data")
"""The second is a part of the first, with other masks: it is read only where the first is not there."""


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    top = find_subfolder(folder, "COVID-QU-Ex dataset", "COVID-QU-Ex")
    here = [name for name in COLLECTIONS if (top / name).is_dir()]
    root = find_subfolder(top / here[0], here[0]) if here else top
    if not here or not any((root / part / label / "images").is_dir() for part in PARTS for label in CLASSES):
        return None
    # `images` sorts before the folders of masks, so that leaving these out leaves no gap in the numbers.
    found = read_folder(root, name="covid_qu_ex", levels=("split", "label", "skip"), classes=CLASSES)
    images = [record for record in found.records if record.path.parent.name == "images"]
    return replace(found, records=tuple(replace(record, site=SITE) for record in images))


DATASET = define_public_dataset(
    name="covid_qu_ex",
    licence="as stated on its Kaggle page, and each source's own terms; cite Tahir et al. 2021",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "download https://www.kaggle.com/datasets/anasmohammedtahir/covidqu (a Kaggle account is needed) and unpack it "
        "there, so that the folder holds "
        "Lung Segmentation Data/{Train,Val,Test}/{COVID-19,Non-COVID,Normal}/images/*.png."
    ),
)
