"""Folders of runs: of which recipe they are, and what a finished one says."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyclinic.algorithms.distillation.refine import RefinementOptions
from polyclinic.config.recipe import EngineSection, Recipe
from polyclinic.core.contract import Bundle, Part
from polyclinic.core.errors import StoreError

ENROLMENT = "enrolled.json"
"""In the folder of a run between real sites: what they said of themselves as it began."""


@dataclass(frozen=True)
class RunResult:
    """A finished run. `summary` is what result.json holds; `state` the server's last (empty when read back)."""

    summary: dict[str, Any]
    state: Bundle
    folder: Path | None

    @property
    def headline(self) -> dict[str, Any]:
        found: dict[str, Any] = self.summary["headline"]
        return found


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """With the place of a shared ledger as it is from here: from elsewhere the run would go on with another account."""
    wish = recipe.privacy
    if wish is None or wish.ledger is None:
        return recipe
    return recipe.model_copy(update={"privacy": replace(wish, ledger=str(Path(wish.ledger).resolve()))})


def read_result(folder: Path, recipe: Recipe | None = None) -> RunResult:
    """A run that has already ended, read back."""
    if recipe is not None:
        check_same_recipe(folder, recipe)
    path = folder / "result.json"
    try:
        summary = json.loads(path.read_text())
        if "part" not in summary["headline"] or not {"sites", "cost", "drift", "rounds", "name"} <= summary.keys():
            raise ValueError("it is not whole")
        return RunResult(summary, {}, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged ({error}); remove it and run again: only the end is repeated") from error


def identity(recipe: Recipe) -> str:
    """The recipe without what cannot change a round that counts: where it runs and is followed, words about it, how
    many sites are enough, how it finishes."""
    ending = recipe.finish and RefinementOptions()
    aside: dict[str, Any] = {"engine": EngineSection(), "about": "", "paper": {}, "finish": ending, "track": ()}
    return recipe.model_copy(update={**aside, "quorum": 1}).to_yaml()


def predicted_parts(recipe: Recipe) -> list[Part]:
    """Of which images a run's last models tell what they see in each, with its label."""
    asked: list[Part] = ["train", "validation", "test"]
    open_ones = recipe.evaluate.train and recipe.privacy is None  # a plan keeps training images from everybody's sight
    return asked if open_ones else asked[1:]


def method_identity(recipe: Recipe) -> str:
    """What two runs have in common that differ in the seed, or in where they ran and were followed."""
    aside = {"seed": 0, "engine": EngineSection(), "track": (), "quorum": recipe.quorum or 1}
    return recipe.model_copy(update=aside).to_yaml()


def check_same_recipe(folder: Path, recipe: Recipe, served: bool = False) -> None:
    """A folder that already holds a run must hold one of this very recipe; one that has not ended may end otherwise.

    served: it is played between real sites, and not with their images here."""
    path = folder / "recipe.yaml"
    begun = Recipe.load(path) if path.exists() else recipe
    if begun is not recipe and identity(begun) != identity(recipe):
        raise StoreError(f"{folder} holds a run of another recipe; choose another folder with --out, or remove it")
    between = (folder / ENROLMENT).exists()
    if served and not between and (folder / "ledger.jsonl").exists():
        raise StoreError(f"{folder} holds a simulation, in which no site was asked; choose another folder with --out")
    if between and not served and not (folder / "result.json").exists():
        raise StoreError(
            f"{folder} holds a run between real sites, who alone have its images; go on with: polyclinic serve "
            f"SERVER.yaml {path} --out {folder}"
        )
    if begun.finish != recipe.finish and (folder / "result.json").exists():
        raise StoreError(f"{folder} holds a run with another finish; remove its result.json to repeat the end alone")
