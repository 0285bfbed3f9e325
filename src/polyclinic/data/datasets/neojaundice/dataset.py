"""2,235 skin photographs of 745 newborns, three of each: jaundice or not, by serum bilirubin.

NeoJaundice of MedFMC: skin photographs of newborns (Wang et al., Scientific Data 10, 574, 2023).
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pydantic import Field

from polyclinic.core import DataError
from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    Record,
    define_public_dataset,
    find_subfolder,
    has_one_part_per_patient,
    list_images,
    read_rows,
)

CLASSES = ("no jaundice", "jaundice")
SITE = "MedFMC-NeoJaundice"
LABELS = {"0": "no jaundice", "1": "jaundice"}
TABLE = "chd_jaundice_published_2.csv"
LISTS = {
    "fewshot-pool.txt": "train",
    "test.txt": "test",
    "neojaundice_train.txt": "train",
    "neojaundice_val.txt": "validation",
    "neojaundice_test.txt": "test",
}
"""Lists of "image label": the first two are the authors', with their benchmark."""


class NeoJaundiceOptions(ImageOptions):
    threshold: float = Field(12.9, gt=0)
    """Serum bilirubin in mg/dL above which an infant counts as jaundiced, where only the table of values is there."""


class ImageEntry(NamedTuple):
    """The entry of one image in a list or table."""

    where: str
    image: str
    label: str
    split: str = ""


def _read_published(options: NeoJaundiceOptions, folder: Path) -> Listing | None:
    root = find_subfolder(folder, "NeoJaundice", "neojaundice")
    entries = [*read_lists(root, LISTS)] or [*_read_table_entries(root / TABLE, options.threshold)]
    named = [entry._replace(label=LABELS.get(entry.label, entry.label)) for entry in entries]
    # 0012-1, 0012-2 and 0012-3 are the head, face and chest of one infant.
    patients = [PurePosixPath(entry.image).stem.partition("-")[0] for entry in entries]
    fits = all(re.match(r"\d+-\d", entry.image) for entry in entries[:1])
    return build_medfmc_listing("neojaundice", root, named, patients, CLASSES, SITE) if fits else None


def _read_table_entries(table: Path, threshold: float) -> Iterator[ImageEntry]:
    for where, row in read_rows(table) if table.is_file() else ():
        value = row.get("blood(mg/dl)", "")
        number = float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else None
        yield ImageEntry(where, row.get("image_idx", ""), "" if number is None else str(int(number > threshold)))


def read_lists(root: Path, lists: dict[str, str]) -> Iterator[ImageEntry]:
    """Yield the entries of the lists that exist."""
    for name in filter(lambda name: (root / name).is_file(), lists):
        yield from _read_list(root / name, lists[name])


def _read_list(file: Path, split: str) -> Iterator[ImageEntry]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        raise DataError(f"{file} cannot be read as a list of images; save it as UTF-8 text.") from None
    for number, line in enumerate(lines, start=1):
        words = re.split(r"[\s,]+", line.strip())
        if words == [""]:
            continue
        if len(words) != 2:
            raise DataError(f"{file} does not give an image and a label in line {number}; correct that line.")
        yield ImageEntry(f"{file.name} line {number}", words[0], words[1], split)


def build_medfmc_listing(
    name: str, root: Path, entries: Sequence[ImageEntry], patients: Sequence[str], classes: tuple[str, ...], site: str
) -> Listing | None:
    """The listing of one of MedFMC's sets: `images/`, and entries that name images with or without their suffix."""
    store = root / "images"
    if not entries or not store.is_dir():
        return None
    files = {key: path for path in list_images(store) for key in (path.name, path.stem)}
    paths = [files.get(plain, store / plain) for plain in (PurePosixPath(entry.image).name for entry in entries)]
    records = [
        Record(path, entry.label, site, patient, entry.split, entry.where)
        for entry, path, patient in zip(entries, paths, patients, strict=True)
    ]
    return Listing(
        name,
        root,
        tuple(records),
        classes,
        official=has_one_part_per_patient((record.patient, record.split) for record in records),
        declared=True,
        unlisted=tuple(sorted(set(files.values()) - set(paths))),
    )


DATASET = define_public_dataset(
    name="neojaundice",
    licence="CC BY 4.0, cite Wang et al. 2023",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "download NeoJaundice from https://doi.org/10.6084/m9.figshare.c.6476047 and unpack it there, so that the "
        f"folder holds images/*.jpg and {TABLE}; for the benchmark's own labels and split put its fewshot-pool.txt and "
        "test.txt (data/NeoJaundice of https://github.com/wllfore/MedFMC_fewshot_baseline) beside them."
    ),
    options=NeoJaundiceOptions,
)
