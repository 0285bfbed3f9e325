"""Registries: names are there before anything is imported, and authors elsewhere may add their own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from polyclinic.algorithms import ALGORITHMS
from polyclinic.algorithms.optimisation.fedavg import FedAvg
from polyclinic.core import registry
from polyclinic.core.errors import RecipeError
from polyclinic.core.registry import Registry


def small() -> Registry[type]:
    return Registry("polyclinic.algorithms", {"prox": "optimisation.fedprox:FedProx"})


def test_an_entry_is_imported_on_access() -> None:
    from polyclinic.algorithms.optimisation.fedprox import FedProx

    found = small()
    assert list(found) == ["prox"]
    assert "prox" in found
    assert "fedavg" not in found
    assert found["prox"] is FedProx
    with pytest.raises(KeyError):
        found["fedavg"]


def test_descriptions_are_read_without_an_import() -> None:
    found = Registry[type]("tests.core", {"absent": "nowhere:Absent", "here": "test_registry:Averaged"})
    sys.modules.pop("tests.core.nowhere", None)
    described = found.describe()
    assert described["here"].options == ["beta"]
    assert described["here"].about.startswith("Registries: names are there")
    assert described["absent"] == ("", [])


def test_every_algorithm_has_a_description_and_its_own_options() -> None:
    described = ALGORITHMS.describe()
    assert described.keys() == ALGORITHMS.keys()
    assert all(about for about, _ in described.values())
    assert described["fedprox"].options == ["mu"]
    assert "unused_options" not in described["fedmp"].options


@dataclass(frozen=True)
class Averaged(FedAvg):
    """Averages, with a pinch of beta."""

    beta: float = 0.5


def test_a_class_is_registered_by_a_decorator() -> None:
    found = small()
    assert found.register("averaged")(Averaged) is Averaged
    assert found["averaged"] is Averaged
    assert list(found) == ["prox", "averaged"]
    assert found.describe()["averaged"] == ("Averages, with a pinch of beta.", ["beta"])
    with pytest.raises(RecipeError, match=r"'prox' is already one of polyclinic\.algorithms"):
        found.register("prox")


def test_other_distributions_add_entries_but_replace_none(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        EntryPoint(name, "tests.core.test_registry:Averaged", "polyclinic.algorithms") for name in ("theirs", "prox")
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in entries if e.group == group])
    found = small()
    assert list(found) == ["prox", "theirs"]
    assert found["theirs"].__name__ == "Averaged"
    assert found["prox"].__name__ == "FedProx"


def test_the_registry_of_algorithms_loads_no_torch() -> None:
    lines = "import sys; from polyclinic.algorithms import describe_algorithms as d; d(); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
