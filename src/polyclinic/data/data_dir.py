"""The data folder, which holds the images of all datasets."""

import os
from pathlib import Path

from polyclinic.core import DataError

VARIABLE = "POLYCLINIC_DATA"


def data_folder(given: Path | None = None) -> Path:
    """Return the folder that is `given`, or else the one that the environment variable names."""
    if not (named := given or os.environ.get(VARIABLE)):
        raise DataError(f"No data folder is set; give --data DIR or set {VARIABLE} to the folder of the datasets.")
    folder = Path(named)
    if not folder.is_dir():
        raise DataError(f"The data folder '{folder}' does not exist; correct --data DIR or {VARIABLE}.")
    return folder


def in_data_folder(path: Path, given: Path | None = None) -> Path:
    """Return the path inside the data folder if it exists there, else the path unchanged."""
    named = given or os.environ.get(VARIABLE)
    inside = Path(named) / path if named else path
    return inside if inside.exists() else path
