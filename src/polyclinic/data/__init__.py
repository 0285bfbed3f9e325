"""Images and who has them: the datasets by name. A dataset's module is imported when the dataset is first used."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from polyclinic.core import RecipeError

if TYPE_CHECKING:
    from polyclinic.data.datasets.base import Dataset, NamedDataset

__all__ = ["DATASETS", "NAMED_DATASETS", "describe_datasets"]

ENTRY_POINTS = "polyclinic.datasets"
"""Entry points of installed packages by which they add datasets: each loads a function with `register_dataset`."""
GENERATED = {
    "phantom": "drawn mammograms of five hospitals with different machines; not real, not evidence",
    "digits": "1,797 handwritten digits of 8 × 8 pixels (Alpaydin and Kaynak 1998), shipped with scikit-learn",
}
USER_DATA = {
    "folder": "your images in folders: of classes, of sites, as you say",
    "table": "your images as a CSV file lists them: path, label, site, patient, split",
    "npz": "your images as arrays in one npz file",
    "multi": "several named datasets under common classes, each as one site or several",
}
PUBLIC = {file.parent.name: file for file in sorted(Path(__file__).parent.glob("datasets/*/dataset.py"))}


class _NamedDatasets(Mapping[str, "NamedDataset"]):
    """The public datasets, those of installed packages, and those registered while the program runs."""

    def __init__(self) -> None:
        self._registered: dict[str, NamedDataset] = {}

    def __getitem__(self, name: str) -> NamedDataset:
        if name in PUBLIC:
            found: NamedDataset = import_module(f"{__name__}.datasets.{name}.dataset").DATASET
            return found
        if name not in self._registered:
            for point in entry_points(group=ENTRY_POINTS, name=name):
                point.load()
        return self._registered[name]

    def __iter__(self) -> Iterator[str]:
        installed = (point.name for point in entry_points(group=ENTRY_POINTS))
        return iter(dict.fromkeys([*PUBLIC, *installed, *self._registered]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def register(self, dataset: NamedDataset) -> None:
        if dataset.name in {*GENERATED, *USER_DATA, *PUBLIC}:
            raise RecipeError(f"There is already a dataset '{dataset.name}'; register yours under another name.")
        self._registered[dataset.name] = dataset


class _Datasets(Mapping[str, "Dataset"]):
    """Everything that a recipe can name as `data.name`."""

    def __getitem__(self, name: str) -> Dataset:
        if name in GENERATED:
            generated: Dataset = import_module(f"{__name__}.builtin.{name}").DATASET
            return generated
        if name in USER_DATA:
            of_user: Dataset = import_module(f"{__name__}.datasets.user_data").DATASETS[name]
            return of_user
        return NAMED_DATASETS[name].to_dataset()

    def __iter__(self) -> Iterator[str]:
        return iter([*GENERATED, *USER_DATA, *NAMED_DATASETS])

    def __len__(self) -> int:
        return sum(1 for _ in self)


NAMED_DATASETS = _NamedDatasets()
DATASETS: Mapping[str, Dataset] = _Datasets()


def describe_datasets() -> dict[str, str]:
    """Return one line about every dataset, by name. Nothing is imported but the packages that add datasets."""
    public = {name: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) for name, file in PUBLIC.items()}
    added = {name: NAMED_DATASETS[name].read.__doc__ for name in NAMED_DATASETS if name not in PUBLIC}
    first_lines = {name: (text or "").strip().partition("\n")[0] for name, text in (public | added).items()}
    return GENERATED | USER_DATA | {name: line.removesuffix(".") for name, line in first_lines.items()}
