"""Tests keep prepared images in a folder of their own, never in the user's cache, and may be slow on a busy machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from polyclinic.data.loading.cache import VARIABLE
from polyclinic.deploy.flower import ENVIRONMENT
from tests.deploy.child_process import die_with_parent
from tests.driving import ALONE, Ask, driving, sync_nothing

# Workers rewrite the assertions of all tests, and tests start hundreds of processes: each file is compiled only once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
sync_nothing()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("cache")
    pytest.MonkeyPatch().setenv(VARIABLE, str(folder))


@pytest.fixture(scope="session")
def ask(_own_cache: None) -> Iterator[Ask]:
    """The driver of all tests that fork; its children end with it."""
    if not hasattr(os, "fork"):
        pytest.skip("these tests fork and kill processes, which this system cannot")
    with driving("tests.driver", environment={**ENVIRONMENT, **ALONE}, before=die_with_parent) as found:
        found(do="ready")
        yield found


LONGEST = (
    "test_operations",
    "test_notebooks",
    "test_ray",
    "test_processes",
    "test_churn",
    "test_namespaces",
    "test_audit",
    "test_worst_case",
    "test_outsiders",
    "test_export",
    "test_board",
)
"""Files that take longest come first, so that no core waits for the last of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)
