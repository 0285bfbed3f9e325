"""What several tests of data start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyclinic.data.loading.cache import VARIABLE
from polyclinic.data.records import Record
from tests.data.caching import drawn


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    return drawn(tmp_path / "images", 3)
