"""Listings of images by the name of a dataset or by a path, whose format is detected."""

from pathlib import Path

from polyclinic.core import DataError
from polyclinic.data import DATASETS, NAMED_DATASETS
from polyclinic.data.records import Listing
from polyclinic.data.sources.folder import SPLITS, Level, list_images, list_subfolders, plain_read_errors, read_folder
from polyclinic.data.sources.npz import read_npz
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
    return read_table(
        table,
        name=str(path),
        columns=Columns.model_validate({name.strip(): column.strip() for name, column in pairs}),
    )


TABLE = "labels.csv"


def open_source(path: Path) -> Listing:
    """Open a table, an npz file, a folder with labels.csv, or a folder of folders, whose levels are guessed."""
    with plain_read_errors(path):
        if path.is_dir() and (path / TABLE).is_file():
            return read_table(path / TABLE, name=str(path))
        if path.is_dir():
            levels = _guess_levels(path)
            return read_folder(path, name=f"folder {path} read as {'/'.join(levels)}", levels=levels, guessed=True)
        exists = path.exists()
    suffix = path.suffix.lower()
    if exists and suffix in (".csv", ".tsv"):
        return read_table(path, name=str(path))
    if exists and suffix == ".npz":
        return read_npz(path, name=str(path))
    fault = "is neither a folder nor a CSV or npz file" if exists else "does not exist"
    raise DataError(f"'{path}' {fault}; give a folder of images, a CSV file or an npz file.")


def _guess_levels(path: Path) -> tuple[Level, ...]:
    folders = list_subfolders(path)
    if any(any(list_images(folder)) for folder in folders):
        return ("label",)
    if any(any(list_images(deeper)) for folder in folders for deeper in list_subfolders(folder)):
        return ("split" if all(folder.name.lower() in SPLITS for folder in folders) else "site", "label")
    fault = "holds files but no class folders" if any(path.iterdir()) else "is an empty folder"
    if folders:
        fault = "has folders, but no images one or two levels down"
    raise DataError(f"'{path}' {fault}; make one folder per class, add a {TABLE}, or give a file.")
