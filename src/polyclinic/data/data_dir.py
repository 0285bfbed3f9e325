"""Where real images lie."""

from __future__ import annotations

import os
from pathlib import Path

from polyclinic.core.errors import DataError

VARIABLE = "POLYCLINIC_DATA"


def data_folder(given: Path | None = None) -> Path:
    """The folder given by argument, or else by the environment."""
    named = given or os.environ.get(VARIABLE)
    if not named:
        raise DataError(f"No data folder is set; give --data DIR or set {VARIABLE} to the folder of datasets.")
    folder = Path(named)
    if not folder.is_dir():
        raise DataError(f"The data folder '{folder}' does not exist; correct --data DIR or {VARIABLE}.")
    return folder


def in_data_folder(path: Path, given: Path | None = None) -> Path:
    """The path below the data folder, if that is set and has it; else the path as it is."""
    named = given or os.environ.get(VARIABLE)
    inside = Path(named) / path if named else path
    return inside if inside.exists() else path
