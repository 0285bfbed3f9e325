"""What the package offers is what it says it offers, and everything it says is there."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import pytest

import polyclinic

MODULES = [name for _, name, _ in pkgutil.walk_packages(polyclinic.__path__, "polyclinic.")]


@pytest.mark.parametrize("name", ["polyclinic", *MODULES])
def test_every_module_imports_and_offers_what_it_lists(name: str) -> None:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", [])
    assert len(set(listed)) == len(listed)
    assert [n for n in listed if not hasattr(module, n)] == []


def test_the_top_level_offers_nothing_unlisted() -> None:
    public = {
        name
        for name, value in vars(polyclinic).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert public == set(polyclinic.__all__) - {"__version__"}


def test_core_imports_nothing_but_torch() -> None:
    source = importlib.import_module("polyclinic.core.contract").__file__
    assert source is not None
    with open(source, encoding="utf-8") as file:
        imported = [line.split()[1] for line in file if line.startswith(("import ", "from "))]
    own = {"__future__", "hashlib", "json", "collections.abc", "dataclasses", "typing"}
    assert {name for name in imported if name not in own} == {"torch"}
