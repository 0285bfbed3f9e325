"""What we use of Flower, listed from our own source: the next version fails here, with one sentence."""

from __future__ import annotations

import ast
import importlib
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

import polyclinic
from polyclinic.deploy.provisioning.software import FLWR

PACKAGE = Path(polyclinic.__file__).parent


def list_names() -> set[tuple[str, str]]:
    """Every name that the package imports from flwr, with its module."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    return {
        (node.module, name.name)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flwr" and node.module
        for name in node.names
    }


def find_missing(names: set[tuple[str, str]]) -> list[str]:
    """The names that the installed Flower lacks."""
    missing = []
    for module, name in sorted(names):
        try:
            if not hasattr(importlib.import_module(module), name):
                missing.append(f"{module}.{name}")
        except ImportError:
            missing.append(f"{module}.{name}")
    return missing


def test_flower_has_every_name_that_we_use() -> None:
    names = list_names()
    assert len(names) > 10
    missing = find_missing({(module, name) for module, name in names if ".vce.backend." not in module})  # needs Ray
    assert not missing, f"flwr lacks {', '.join(missing)}, which polyclinic uses; adapt it before you move `{FLWR}`"
    assert find_missing({("flwr.app", "NoSuchName"), ("flwr.no_such_module", "x")}) == [
        "flwr.app.NoSuchName",
        "flwr.no_such_module.x",
    ]


def test_the_version_of_flower_is_written_in_one_line() -> None:
    project = PACKAGE.parents[1] / "pyproject.toml"
    if not project.exists():
        pytest.skip("an installed package has no pyproject.toml")
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert extras["flower"] == [f"flwr=={FLWR}"]
    lines = [line for line in project.read_text().splitlines() if "flwr==" in line]
    assert len(lines) == 1
    sources = [path for path in PACKAGE.rglob("*.py") if FLWR in path.read_text(encoding="utf-8")]
    assert sources == []
