"""2,533 images of ten kinds of object from four sources: shops, Caltech-256, a camera, a webcam.

Office-Caltech10: ten kinds of object from four sources of images (Gong et al., CVPR 2012). Not medical.
"""

from dataclasses import replace
from pathlib import Path

from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    define_public_dataset,
    exclude_duplicates,
    find_subfolder,
    read_folder,
    read_table_without_copies,
)

CLASSES = (
    "backpack",
    "bike",
    "calculator",
    "headphones",
    "keyboard",
    "laptop_computer",
    "monitor",
    "mouse",
    "mug",
    "projector",
)
SITES = ("amazon", "caltech", "dslr", "webcam")
ONE_IMAGE_TWICE = """
caltech/bike 224_0004 224_0095
amazon/headphones frame_0024 frame_0079
amazon/keyboard frame_0048 frame_0057 frame_0085
amazon/laptop_computer frame_0010 frame_0049 frame_0055
amazon/laptop_computer frame_0012 frame_0021 frame_0033 frame_0036
amazon/laptop_computer frame_0023 frame_0030 frame_0073
amazon/laptop_computer frame_0034 frame_0083
amazon/laptop_computer frame_0060 frame_0091
amazon/laptop_computer frame_0063 frame_0095
amazon/laptop_computer frame_0082 frame_0087
amazon/monitor frame_0003 frame_0004 frame_0006 frame_0018
amazon/monitor frame_0013 frame_0086
amazon/mouse frame_0011 frame_0027
amazon/mouse frame_0020 frame_0071
amazon/mouse frame_0048 frame_0077
amazon/mug frame_0071 frame_0073
amazon/projector frame_0013 frame_0021 frame_0046
amazon/projector frame_0051 frame_0064
"""
"""A folder, and the files in it that are the same picture."""


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    root = find_subfolder(folder, "office_caltech_10", "Office_Caltech_DA_Dataset", "images")
    if not all((root / site).is_dir() for site in SITES):
        return None
    found = read_folder(root, name="office_caltech10", levels=("site", "label"))
    records = tuple(replace(record, label=record.label.replace("back_pack", "backpack")) for record in found.records)
    listing = replace(found, records=records, classes=CLASSES, declared=True)
    groups = map(str.split, ONE_IMAGE_TWICE.strip().splitlines())
    return exclude_duplicates(listing, [[root / place / f"{stem}.jpg" for stem in stems] for place, *stems in groups])


DATASET = define_public_dataset(
    name="office_caltech10",
    licence="research, cite Gong et al. 2012",
    classes=CLASSES,
    sites=SITES,
    read_published=_read_published,
    obtain=(
        "get a copy of Gong et al.'s images (Office_Caltech_DA_Dataset on GitHub is one), "
        "so that the folder holds office_caltech_10/{amazon,caltech,dslr,webcam}/<class>/*.jpg."
    ),
    read_plain=read_table_without_copies,
)
