"""Detection of the format of a path, as in `polyclinic data check PATH`."""

from __future__ import annotations

from pathlib import Path

from polyclinic.core import DataError
from polyclinic.data.records import Listing
from polyclinic.data.sources.folder import SPLITS, Level, list_images, list_subfolders, plain_read_errors, read_folder
from polyclinic.data.sources.npz import read_npz
from polyclinic.data.sources.table import read_table

TABLE = "labels.csv"


def open_source(path: Path) -> Listing:
    """Open a table, an npz file, a folder with labels.csv, or a folder of folders, whose levels are guessed."""
    with plain_read_errors(path):
        if path.is_dir():
            return _open_folder(path)
        exists = path.exists()
    suffix = path.suffix.lower()
    if exists and suffix in (".csv", ".tsv"):
        return read_table(path, name=str(path))
    if exists and suffix == ".npz":
        return read_npz(path, name=str(path))
    fault = "is neither a folder nor a CSV or npz file" if exists else "does not exist"
    raise DataError(f"'{path}' {fault}; give a folder of images, a CSV file or an npz file.")


def _open_folder(path: Path) -> Listing:
    if (path / TABLE).is_file():
        return read_table(path / TABLE, name=str(path))
    levels = _guess_levels(path)
    return read_folder(path, name=f"folder {path} read as {'/'.join(levels)}", levels=levels, guessed=True)


def _guess_levels(path: Path) -> tuple[Level, ...]:
    folders = list_subfolders(path)
    if any(True for folder in folders for _ in list_images(folder)):
        return ("label",)
    if any(True for folder in folders for deeper in list_subfolders(folder) for _ in list_images(deeper)):
        split = all(folder.name.lower() in SPLITS for folder in folders)
        return ("split" if split else "site", "label")
    raise DataError(
        f"'{path}' {_describe_fault(path, folders)}; make one folder per class, add a {TABLE}, or give a file."
    )


def _describe_fault(path: Path, folders: list[Path]) -> str:
    if folders:
        return "has folders, but no images one or two levels down"
    return "holds files but no class folders" if any(path.iterdir()) else "is an empty folder"
