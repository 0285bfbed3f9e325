"""One file, one paper: the rules that keep the algorithms short, cited and found by name."""

from __future__ import annotations

import ast
import inspect
import re
import weakref
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch

from polyclinic.algorithms import ALGORITHMS
from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import RecipeError
from polyclinic.core.jobs import Update
from polyclinic.core.options import Training
from polyclinic.core.types import Bundle
from tests.small import NEEDED

FILES = sorted({Path(inspect.getfile(kind)) for kind in ALGORITHMS.values()})
FAMILIES = sorted({path.parent for path in FILES})
HELPERS = {"fedmp_losses", "fraug_losses", "fed_align_losses", "fed_align_pooled", "feature_bank", "__init__"}
LABEL = re.compile(r"\((\d+)\)|(line \d+)|(Eq\. \d+)")


def labels(text: str) -> set[str]:
    return {next(filter(None, found)) for found in LABEL.findall(text)}


def recipe(**values: object) -> Recipe:
    base = {"name": "any", "rounds": 1, "data": {"name": "digits"}, "model": {"name": "linear"}}
    return Recipe.from_values({**base, "data": {"name": "digits", "partition": {"by": "iid", "sites": 2}}, **values})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_short_cites_its_source_and_owns_up_to_departures(path: Path) -> None:
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) <= 200
    assert "Departures" in docstring
    equations = labels("\n".join(line for line in docstring.splitlines() if re.match(r" +\(", line)))
    code = re.split(r'"""\n\n(?=from|import)', text, maxsplit=1)[1]
    cited = set().union(*(labels(line.partition("#")[2]) for line in code.splitlines()))
    assert equations, "the docstring states numbered equations"
    assert cited, "some line says which equation it implements"
    assert cited <= equations


def test_every_file_is_in_the_registry_and_every_entry_has_its_own_file() -> None:
    modules = [Path(inspect.getfile(kind)) for kind in ALGORITHMS.values()]
    there = {path for family in FAMILIES for path in family.glob("*.py") if path.stem not in HELPERS}
    assert sorted(modules) == sorted(there)
    assert all(is_dataclass(kind) for kind in ALGORITHMS.values())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recipe_accepts_every_name_of_the_registry(name: str) -> None:
    assert type(recipe(**{"algorithm": name, **NEEDED.get(name, {})}).build_algorithm()) is ALGORITHMS[name]


def test_a_recipe_accepts_no_other_name_and_lists_those_there_are() -> None:
    with pytest.raises(RecipeError, match="there is no algorithm 'fedavgg'") as refusal:
        recipe(algorithm="fedavgg")
    assert str(refusal.value).partition("there are: ")[2].split(", ") == list(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="mju"):
        recipe(algorithm={"name": name, "mju": 0.1})


IMPOSSIBLE = [
    ("fednova", {}, {"name": "adam", "lr": 0.001}, "fednova cannot use adam"),
    ("fedsgd", {}, {"name": "adam", "lr": 0.001}, "fedsgd takes plain gradient steps"),
    ("fedsgd", {"steps_per_round": 0}, {}, "steps_per_round"),
    ("fedprox", {"mu": -0.1}, {}, "algorithm.mu"),
    ("moon", {"mu": -0.1}, {}, "algorithm.mu"),
    ("moon", {"tau": 0.0}, {}, "algorithm.tau"),
    ("scaffold", {}, {"name": "adam", "lr": 0.001}, "scaffold needs plain SGD"),
    ("scaffold", {}, {"momentum": 0.9}, "scaffold needs plain SGD"),
    ("scaffold", {}, {"weight_decay": 0.1}, "scaffold needs plain SGD"),
]


@pytest.mark.parametrize(("name", "options", "optimiser", "sentence"), IMPOSSIBLE)
def test_what_cannot_work_is_refused_before_anything_runs(
    name: str, options: dict[str, float], optimiser: dict[str, object], sentence: str
) -> None:
    with pytest.raises(RecipeError, match=sentence):
        recipe(algorithm={"name": name, **options}, training={"optimiser": optimiser})


class Counted:
    """Hands out updates one at a time and notes how many are alive at once."""

    def __init__(self, count: int, kinds: tuple[str, ...]) -> None:
        self.count, self.kinds, self.most = count, kinds, 0
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Update]:
        for number in range(self.count):
            tensors: Bundle = {kind: {"w": torch.full((4,), float(number))} for kind in self.kinds}
            self.alive.update(tensors["model"].values())
            self.most = max(self.most, len(self.alive))
            update = Update(tensors, 1, f"site-{number}", {"steps": 1.0})
            del tensors
            yield update
            del update


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "cross-site"])
def test_aggregation_never_holds_all_updates(name: str) -> None:
    """Cross-site must keep every model, to test it everywhere; the others need one at a time."""
    state: Bundle = {kind: {"w": torch.zeros(4)} for kind in ("model", "buffers", "control", "sensitivity")}
    updates = Counted(12, tuple(state))
    ALGORITHMS[name](Training()).aggregate({**state, "all": {"sites": torch.tensor(12)}}, iter(updates))
    assert updates.most <= 3
