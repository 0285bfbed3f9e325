"""Images and who has them: the datasets by name. A dataset's module is imported when the dataset is first used."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from polyclinic.core import Registry

if TYPE_CHECKING:
    from polyclinic.data.datasets.base import Dataset, NamedDataset

GENERATED = {
    "phantom": "drawn mammograms of five hospitals with different machines; not real, not evidence",
    "digits": "1,797 handwritten digits of 8 × 8 pixels (Alpaydin and Kaynak 1998), shipped with scikit-learn",
    "drawn_digits": "digits drawn from strokes in many ways of writing, prepared as MNIST's are; nobody's handwriting",
}
USER_DATA = {
    "folder": "your images in folders: of classes, of sites, as you say",
    "table": "your images as a CSV file lists them: path, label, site, patient, split",
    "npz": "your images as arrays in one npz file",
    "multi": "several named datasets under common classes, each as one site or several",
}
PUBLIC = {file.parent.name: file for file in sorted(Path(__file__).parent.glob("datasets/*/dataset.py"))}
NAMED_DATASETS: Registry[NamedDataset] = Registry(
    __name__, {name: f"datasets.{name}.dataset:DATASET" for name in PUBLIC}, group="polyclinic.datasets"
)
"""The public datasets and those of other packages. An entry point is a function with `register_dataset`."""
_OWN: Registry[Dataset] = Registry(
    __name__,
    {name: f"builtin.{name}:DATASET" for name in GENERATED}
    | {name: f"datasets.user_data:{name.upper()}" for name in USER_DATA},
)


class _Datasets(Mapping[str, "Dataset"]):
    """Everything that a recipe can name as `data.name`."""

    def __getitem__(self, name: str) -> Dataset:
        return _OWN[name] if name in _OWN else NAMED_DATASETS[name].to_dataset()

    def __iter__(self) -> Iterator[str]:
        return iter([*GENERATED, *USER_DATA, *NAMED_DATASETS])

    def __len__(self) -> int:
        return sum(1 for _ in self)


DATASETS: Mapping[str, Dataset] = _Datasets()


def describe_datasets() -> dict[str, str]:
    """Return one line about every dataset, by name. Nothing is imported but the packages that add datasets."""
    texts = {name: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) for name, file in PUBLIC.items()}
    texts |= {name: NAMED_DATASETS[name].read.__doc__ for name in NAMED_DATASETS if name not in PUBLIC}
    return (
        GENERATED
        | USER_DATA
        | {name: (text or "").strip().partition("\n")[0].removesuffix(".") for name, text in texts.items()}
    )
