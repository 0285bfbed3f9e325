"""Folders of runs: of which recipe they are, and what a finished one says."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyclinic.core import Bundle
from polyclinic.errors import StoreError
from polyclinic.finish.refine import Refine
from polyclinic.recipe import EngineSection, Recipe


@dataclass(frozen=True)
class Result:
    """A finished run. `summary` is what result.json holds; `state` the server's last (empty when read back)."""

    summary: dict[str, Any]
    state: Bundle
    folder: Path | None

    @property
    def headline(self) -> dict[str, Any]:
        found: dict[str, Any] = self.summary["headline"]
        return found


def located(recipe: Recipe) -> Recipe:
    """With the place of a shared ledger as it is from here: from elsewhere the run would go on with another account."""
    wish = recipe.privacy
    if wish is None or wish.ledger is None:
        return recipe
    return recipe.model_copy(update={"privacy": replace(wish, ledger=str(Path(wish.ledger).resolve()))})


def finished(folder: Path, recipe: Recipe | None = None) -> Result:
    """A run that has already ended, read back."""
    if recipe is not None:
        refuse_other(folder, recipe)
    path = folder / "result.json"
    try:
        summary = json.loads(path.read_text())
        if "part" not in summary["headline"] or not {"sites", "cost", "drift", "rounds", "name"} <= summary.keys():
            raise ValueError("it is not whole")
        return Result(summary, {}, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged ({error}); remove it and run again: only the end is repeated") from error


def decisive(recipe: Recipe) -> str:
    """The recipe without what cannot change a round: where it runs, words about it, and how it finishes."""
    ending = recipe.finish and Refine()
    return recipe.model_copy(update={"engine": EngineSection(), "about": "", "paper": {}, "finish": ending}).to_yaml()


def refuse_other(folder: Path, recipe: Recipe) -> None:
    """A folder that already holds a run must hold one of this very recipe; one that has not ended may end otherwise."""
    path = folder / "recipe.yaml"
    begun = Recipe.load(path) if path.exists() else recipe
    if decisive(begun) != decisive(recipe):
        raise StoreError(f"{folder} holds a run of another recipe; choose another folder with --out, or remove it")
    if begun.finish != recipe.finish and (folder / "result.json").exists():
        raise StoreError(f"{folder} holds a run with another finish; remove its result.json to repeat the end alone")
