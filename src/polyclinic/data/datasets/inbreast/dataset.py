"""410 full-field digital mammograms of 115 cases, one hospital in Porto: normal, benign, malignant by BI-RADS.

INbreast: full-field digital mammograms of one hospital in Porto (Moreira et al., Academic Radiology 19(2), 2012).
"""

from pathlib import Path, PurePosixPath

from polyclinic.data.datasets.toolkit import (
    ImageOptions,
    Listing,
    Record,
    define_public_dataset,
    find_subfolder,
    list_images,
    read_rows,
)

CLASSES = ("normal", "benign", "malignant")
SITE = "INbreast-Porto"
BIRADS = {"1": "normal", "2": "benign", "3": "benign"} | dict.fromkeys(("4", "4a", "4b", "4c", "5", "6"), "malignant")
"""Ours: the set has a radiologist's assessment for every image, but a biopsy only for some."""


def _read_published(_: ImageOptions, folder: Path) -> Listing | None:
    root = find_subfolder(folder, "INbreast Release 1.0", "INbreast")
    table, store = root / "INbreast.csv", root / "AllDICOMs"
    if not (table.is_file() and store.is_dir()):
        return None
    files = {path.name.partition("_")[0]: path for path in list_images(store)}
    rows = [(where, _split_columns(row)) for where, row in read_rows(table)]
    named = [PurePosixPath(cells.get("file name", "")).name for _, cells in rows]
    paths = [files.get(name, store / f"{name}.dcm") for name in named]
    records = [
        Record(
            path,
            BIRADS.get(cells.get("bi-rads", "").lower(), cells.get("bi-rads", "")),
            SITE,
            # 22678622_61b13c59bcba149e_MG_L_CC_ANON.dcm: the second word is the patient, whom the table does not name.
            f"{path.stem}__".split("_")[1],
            where=where,
        )
        for (where, cells), path in zip(rows, paths, strict=True)
    ]
    unlisted = [path for name, path in files.items() if name not in set(named)]
    return Listing("inbreast", root, tuple(records), CLASSES, declared=True, unlisted=tuple(unlisted))


def _split_columns(row: dict[str, str]) -> dict[str, str]:
    """Split the cells: the published table separates them by semicolons, copies saved by others by commas."""
    cells = zip(";".join(row).split(";"), ";".join(row.values()).split(";"), strict=False)
    return {column.strip(): cell.strip() for column, cell in cells}


DATASET = define_public_dataset(
    name="inbreast",
    licence="for research, by agreement with the authors; cite Moreira et al. 2012",
    classes=CLASSES,
    sites=(SITE,),
    read_published=_read_published,
    obtain=(
        "ask the authors for INbreast (https://doi.org/10.1016/j.acra.2011.09.014), or take the copy on Kaggle if its "
        "terms suit you, and unpack it there, so that the folder holds INbreast.csv and AllDICOMs/*.dcm."
    ),
)
