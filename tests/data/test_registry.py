"""Datasets are found by name, described without heavy imports, and added by other packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import polyclinic.core.registry as core_registry
from polyclinic.core.errors import RecipeError
from polyclinic.core.rng import Stream
from polyclinic.data import DATASETS, NAMED_DATASETS, describe_datasets
from polyclinic.data.datasets.base import register_dataset
from polyclinic.data.loading.image_options import ImageOptions
from polyclinic.data.records import Listing
from polyclinic.data.sources.folder import read_folder


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(NAMED_DATASETS, "_loaded", {})
    return iter(())


def read_ward(options: ImageOptions, folder: Path) -> Listing:
    """Photographs of one ward.

    They are not public.
    """
    assert isinstance(options, ImageOptions)
    return read_folder(folder, name="ward")


def write_ward(data: Path) -> None:
    for label in ("ill", "well"):
        (data / "ward" / label).mkdir(parents=True)
        for number in range(4):
            noise = np.random.default_rng(len(label) * 10 + number).integers(0, 256, (12, 12), dtype=np.uint8)
            Image.fromarray(noise).save(data / "ward" / label / f"{number}.png")


def test_the_list_needs_neither_torch_nor_numpy() -> None:
    """A new process, since this one has imported both."""
    code = (
        "import sys; from polyclinic.data import DATASETS, describe_datasets; "
        "assert list(DATASETS) == list(describe_datasets()); print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_description_is_a_line_of_its_own() -> None:
    lines = describe_datasets()
    assert lines.keys() == DATASETS.keys()
    assert len(set(lines.values())) == len(lines)
    assert all(20 < len(line) < 118 and "\n" not in line for line in lines.values())


@pytest.mark.usefixtures("registered")
def test_a_registered_reader_is_a_dataset(tmp_path: Path) -> None:
    assert register_dataset("ward", licence="ours", classes=("ill", "well"))(read_ward) is read_ward
    write_ward(tmp_path)
    spec = DATASETS["ward"]
    assert (spec.licence, spec.classes) == ("ours", ("ill", "well"))
    found = spec.load(spec.options(size=16, channels=1), Stream(0), tmp_path)  # type: ignore[call-arg]
    assert found.labels.tolist() == [0] * 4 + [1] * 4
    assert "ward" in list(DATASETS)
    assert describe_datasets()["ward"] == "Photographs of one ward"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["phantom", "table", "mias"])
def test_a_name_of_ours_cannot_be_registered(name: str) -> None:
    with pytest.raises(RecipeError, match=f"already a dataset '{name}'"):
        register_dataset(name)(read_ward)


@pytest.mark.usefixtures("registered")
def test_an_installed_package_adds_a_dataset_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ward_package.py").write_text(
        "from polyclinic.data.datasets.base import register_dataset\n"
        "from tests.data.test_registry import read_ward\n"
        "read = register_dataset('ward')(read_ward)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("ward", "ward_package:read", "polyclinic.datasets")]
    monkeypatch.setattr(core_registry, "entry_points", lambda group: points if group == "polyclinic.datasets" else [])
    NAMED_DATASETS.__dict__.pop("_places", None)  # found again, with the new package
    assert "ward" in list(DATASETS)
    assert "ward_package" not in sys.modules
    assert DATASETS["ward"].read is not None
    assert "ward_package" in sys.modules
    assert "other" not in DATASETS
    del sys.modules["ward_package"], NAMED_DATASETS.__dict__["_places"]
