"""2,225 film mammograms of 602 women from three institutions: projection (CC, MLO) and side, no cancer label.

DDSM views: which breast and which projection a film mammogram shows (Heath et al., IWDM 2000).
"""

import re
from dataclasses import replace
from pathlib import Path

from polyclinic.data.datasets.toolkit import ImageOptions, Listing, Record, define_public_dataset, read_table

CLASSES = ("CC_L", "CC_R", "MLO_L", "MLO_R")
SITES = {"A": "DDSM-A-MGH", "B": "DDSM-B-WFU-Lumisys", "C": "DDSM-C", "D": "DDSM-D-ISMD-Howtek"}
"""By the first letter of a case: the institution and its film digitiser."""
FILM = re.compile(r"([A-D])_(\d{4})(?:_1)?[._](LEFT|RIGHT)_(CC|MLO)\.(?:png|jpe?g)", re.IGNORECASE)
"""Digitiser, case, breast, projection."""


def _read_plain(table: Path, *, name: str, classes: tuple[str, ...]) -> Listing:
    """Read the table. Some copies have a split with films of one woman in both parts, so it is never kept."""
    return replace(read_table(table, name=name, classes=classes), official=False)


def _read_published(_: ImageOptions, folder: Path) -> Listing:
    films = [(path, film) for path in sorted(folder.rglob("*")) if (film := FILM.fullmatch(path.name))]
    records = [
        Record(
            path,
            f"{film[4]}_{film[3][0]}".upper(),
            SITES[film[1].upper()],
            f"{film[1]}_{film[2]}".upper(),
            where=f"film {number}",
        )
        for number, (path, film) in enumerate(films, start=1)
    ]
    return Listing("ddsm_views", folder, tuple(records), CLASSES, official=False, declared=True)


DATASET = define_public_dataset(
    name="ddsm_views",
    licence="MIT-0 for the derived files, cite Heath et al. 2000",
    classes=CLASSES,
    sites=tuple(SITES.values()),
    read_published=_read_published,
    obtain=(
        "the set is derived from DDSM (http://www.eng.usf.edu/cvprg/Mammography/Database.html): convert its images "
        "to PNG or JPEG under their own names, such as A_0002_1.LEFT_CC.png, in any folders below this one."
    ),
    read_plain=_read_plain,
)
