"""54,706 screening mammograms of 11,913 patients at two real sites: no cancer, cancer.

RSNA screening mammography: two screening programmes, USA and Australia (Carr et al., Kaggle competition, 2022).
"""

from pathlib import Path

from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    Record,
    define_public_dataset,
    find_subfolder,
    read_rows,
)

CLASSES = ("no cancer", "cancer")
LABELS = {"0": "no cancer", "1": "cancer"}
COLUMNS = {"site_id", "patient_id", "image_id", "cancer"}
SUFFIXES = (".dcm", ".png")


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    root = find_subfolder(folder, "rsna-breast-cancer-detection")
    table, store = root / "train.csv", root / "train_images"
    if not (table.is_file() and store.is_dir()):
        return None
    rows = [(where, row) for where, row in read_rows(table) if row.keys() >= COLUMNS]
    if not rows:
        return None
    paths = [store / _parse_number(row["patient_id"]) / _parse_number(row["image_id"]) for _, row in rows]
    # Converted copies are common; the first file decides for all 54,706.
    suffix = next((suffix for suffix in SUFFIXES if paths[0].with_suffix(suffix).exists()), SUFFIXES[0])
    records = [
        Record(
            path.with_suffix(suffix),
            LABELS.get(row["cancer"], row["cancer"]),
            f"RSNA-{row['site_id']}" if row["site_id"] else "",
            row["patient_id"],
            where=where,
        )
        for (where, row), path in zip(rows, paths, strict=True)
    ]
    return Listing("rsna_mammography", root, tuple(records), CLASSES, declared=True)


def _parse_number(text: str) -> str:
    """Return the number of a patient or image; any other text could point outside the folder."""
    return text if text.isalnum() else "unnumbered"


DATASET = define_public_dataset(
    name="rsna_mammography",
    licence="the competition's rules: non-commercial research and education, no redistribution",
    classes=CLASSES,
    sites=("RSNA-1", "RSNA-2"),
    read_published=_read_published,
    obtain=(
        "accept the rules of https://www.kaggle.com/competitions/rsna-breast-cancer-detection, download its data and "
        "unpack it there, so that the folder holds train.csv and train_images/<patient>/<image>.dcm."
    ),
)
