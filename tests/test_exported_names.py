"""The package offers exactly the names that it lists, and every listed name is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import polyclinic
from polyclinic.core.registry import Registry

MODULES = [name for _, name, _ in pkgutil.walk_packages(polyclinic.__path__, "polyclinic.")]
ROOT = Path(__file__).parents[1]
PUBLIC = {
    *("Algorithm", "FedAvg", "Federation", "Fit", "Score", "Site", "Update"),
    *("DataError", "PolyclinicError", "RecipeError"),
    *("Recipe", "RunResult", "check_data", "compare", "open_run", "plan", "predict", "report", "run"),
    *("register_algorithm", "register_dataset", "register_model", "register_transform"),
}


@pytest.mark.parametrize("name", ["polyclinic", *MODULES])
def test_every_module_imports_and_offers_what_it_lists(name: str) -> None:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", [])
    assert len(set(listed)) == len(listed)
    assert [n for n in listed if not hasattr(module, n)] == []


def test_the_top_level_offers_the_public_names_and_no_others() -> None:
    assert set(polyclinic.__all__) == PUBLIC | {"__version__"}
    assert dir(polyclinic) == sorted(polyclinic.__all__) == polyclinic.__all__
    with pytest.raises(AttributeError, match="has no attribute 'runn'"):
        polyclinic.runn  # noqa: B018


def test_the_names_that_type_checkers_see_are_those_that_are_imported() -> None:
    tree = ast.parse(Path(polyclinic.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {name.name: node.module for node in imports for name in node.names}
    assert seen.keys() == PUBLIC
    for name, module in seen.items():
        assert module is not None
        assert getattr(polyclinic, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", sorted(PUBLIC - {"FedAvg"}))  # whose module is the documentation
def test_every_public_name_has_a_docstring(name: str) -> None:
    found = getattr(polyclinic, name)
    doc = inspect.getdoc(found.__func__ if inspect.ismethod(found) else found)
    assert doc
    assert not doc.startswith(f"{name}("), "a generated one"


@pytest.mark.parametrize("code", ["import polyclinic", "import polyclinic; dir(polyclinic); polyclinic.__version__"])
def test_importing_the_package_loads_nothing_heavy(code: str) -> None:
    heavy = ["torch", "numpy", "pydantic", "scipy", "yaml", "polyclinic.config.recipe"]
    script = f"import sys; {code}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == polyclinic.__version__


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(polyclinic.__file__).parent / "py.typed").is_file()


def test_the_registries_are_imported_name_by_name() -> None:
    """What another package registers is found, and a name that is taken is refused."""
    registry: Registry[type] = Registry("polyclinic.algorithms", {"fedavg": "optimisation.fedavg:FedAvg"})
    registry.register("mine")(int)
    assert registry["mine"] is int
    with pytest.raises(polyclinic.RecipeError, match="register yours under another name"):
        registry.register("fedavg")


def test_core_imports_no_other_package_of_ours_and_few_of_others() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "numpy", "pydantic", "yaml", "polyclinic"}
    for path in (ROOT / "src" / "polyclinic" / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert {name.split(".")[0] for name in found} <= allowed, path.name
            assert all(name.startswith("polyclinic.core") for name in found if name.startswith("polyclinic")), path.name
