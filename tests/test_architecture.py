"""The rules of the package's structure that import contracts do not check (those run in scripts/check)."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "polyclinic"
MOST_MODULES = 12
LONGEST_FUNCTION, LONGEST_MODULE = 80, 500


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> Iterator[Path]:
    return (path for path in sorted(PACKAGE.rglob("*.py")))


def layers() -> list[set[str]]:
    """The packages from the highest layer to the lowest."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = next(contract["layers"] for contract in contracts if "containers" not in contract)
    return [{name.strip().removeprefix("polyclinic.") for name in layer.split("|")} for layer in names]


def imported_packages(node: ast.AST) -> Iterator[str]:
    """The packages of polyclinic that an import statement names."""
    if isinstance(node, ast.ImportFrom):
        names = [f"polyclinic.{a.name}" for a in node.names] if node.module == "polyclinic" else [node.module or ""]
        assert node.level == 0, "imports are absolute"
    elif isinstance(node, ast.Import):
        names = [a.name for a in node.names]
    else:
        names = []
    return (name.split(".")[1] for name in names if name.startswith("polyclinic."))


def type_checking_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from imported_packages(child)


def function_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in ast.walk(node):
                yield from imported_packages(child)


def test_the_layers_name_every_package() -> None:
    named = [name for layer in layers() for name in layer]
    assert sorted(named) == sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())


def test_the_root_holds_packages_only() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == {"__init__.py", "__main__.py", "py.typed"}


def test_no_import_for_type_checking_points_upwards() -> None:
    height = {name: -number for number, layer in enumerate(layers()) for name in layer}
    upwards = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules()
        if path.parent != PACKAGE
        for name in type_checking_imports(parse(path))
        if height[name] > height[path.relative_to(PACKAGE).parts[0]]
    ]
    assert upwards == []


def test_functions_import_no_module_of_ours() -> None:
    """Otherwise a cycle hides there. The command line is exempt: it loads what a command needs."""
    hidden = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules()
        if path.parent.name != "cli" and path.parent != PACKAGE
        for name in function_imports(parse(path))
    ]
    assert hidden == []


def test_no_folder_has_more_modules_than_one_can_survey() -> None:
    counts = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in modules() if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_a_class_name_means_one_thing() -> None:
    names = Counter(node.name for path in modules() for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_functions_and_modules_are_short() -> None:
    for path in modules():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_MODULE, path
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < LONGEST_FUNCTION, f"{path}: {node.name}"


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in modules() if path.read_text().strip() and not ast.get_docstring(parse(path))]
    assert silent == []


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("if TYPE_CHECKING:\n    from polyclinic.cli import main", ["cli"]),
        ("if typing.TYPE_CHECKING:\n    import polyclinic.runs.sites", ["runs"]),
        ("from polyclinic.cli import main", []),
    ],
)
def test_the_check_of_type_checking_imports_finds_them(source: str, packages: list[str]) -> None:
    assert list(type_checking_imports(ast.parse(source))) == packages


@pytest.mark.parametrize(
    ("source", "packages"),
    [
        ("def f():\n    from polyclinic.runs import sites", ["runs"]),
        ("class A:\n    def f(self):\n        from polyclinic import runs", ["runs"]),
        ("from polyclinic.runs import sites\ndef f():\n    import torch", []),
    ],
)
def test_the_check_of_imports_in_functions_finds_them(source: str, packages: list[str]) -> None:
    assert list(function_imports(ast.parse(source))) == packages
