"""Hospitals with images, and kits of two federations: made once for all tests of a module."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from polyclinic.deploy.provisioning.provision import provision_federation
from tests.deploy.example_sites import write_hospitals
from tests.deploy.kits import NORTH


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hospitals")
    write_hospitals(folder)
    return folder


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two federations of the same sites."""
    folder: Path = tmp_path_factory.mktemp("made")
    for name in ("kits", "others"):
        provision_federation(NORTH, folder / name)
    return folder


@pytest.fixture
def kits(made_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_once, tmp_path / "made")) / "kits"
