"""Listings of images by the name of a dataset or by a path."""

from __future__ import annotations

from pathlib import Path

from polyclinic.core import DataError
from polyclinic.data import DATASETS, NAMED_DATASETS
from polyclinic.data.records import Listing
from polyclinic.data.sources.format_detection import TABLE, open_source
from polyclinic.data.sources.table import Columns, read_table


def open_listing(source: str, data: Path | None = None, columns: str = "") -> Listing:
    """List the images of a dataset or a path. No image is opened.

    Args:
        source: The name of a public dataset, or a path to a folder, a table, an npz file or an IDX file.
        data: The data folder of public datasets (None: the one that POLYCLINIC_DATA names).
        columns: The columns of a table, such as "path=file,label=diagnosis,site=clinic".
    """
    if columns:
        return _open_table(Path(source), columns)
    dataset = DATASETS.get(source)
    if dataset is not None and dataset.read is not None and source in NAMED_DATASETS:
        return dataset.read(dataset.options(), data)
    if not Path(source).exists():
        problem = f"There is no dataset and no path '{source}'" if dataset is None else f"'{source}' is not in files"
        raise DataError(f"{problem}; give a path, or a dataset of `polyclinic data list`.")
    return open_source(Path(source))


def _open_table(path: Path, columns: str) -> Listing:
    pairs = [pair.partition("=")[::2] for pair in columns.split(",")]
    if not all(name.strip() and column.strip() for name, column in pairs):
        raise DataError("--columns needs names of columns, such as path=file,label=diagnosis,site=clinic.")
    table = path / TABLE if path.is_dir() else path
    if table.suffix.lower() not in (".csv", ".tsv") or not table.is_file():
        raise DataError(f"--columns is for a table, but '{path}' is neither a CSV file nor a folder with {TABLE}.")
    chosen = Columns.model_validate({name.strip(): column.strip() for name, column in pairs})
    return read_table(table, name=str(path), columns=chosen)
