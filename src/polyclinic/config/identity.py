"""The identity of a run: which keys of a recipe determine its result, and whether a folder holds that run."""

from dataclasses import replace
from pathlib import Path

from polyclinic.algorithms.distillation.refine import RefinementOptions
from polyclinic.config.recipe import EngineSection, Recipe
from polyclinic.core import Part, StoreError
from polyclinic.storage.run_folder import RunFolder


def identity(recipe: Recipe) -> str:
    """Return the recipe reduced to the keys that determine the rounds. Two recipes with equal identity may resume
    each other's folder. Left out: engine, track, about, paper, quorum, keep_snapshots and the options of finish."""
    finish = recipe.finish and RefinementOptions()
    reset = {"engine": EngineSection(), "about": "", "paper": {}, "finish": finish, "track": (), "quorum": 1}
    reset |= {"keep_snapshots": 5}
    return recipe.model_copy(update=reset).to_yaml()


def method_identity(recipe: Recipe) -> str:
    """Return the recipe without its seed and its place: it is equal for the runs of one method in a comparison."""
    reset = {"seed": 0, "engine": EngineSection(), "track": (), "quorum": recipe.quorum or 1}
    return recipe.model_copy(update=reset).to_yaml()


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with an absolute path of its privacy ledger, so that it can be resumed from elsewhere."""
    privacy = recipe.privacy
    if privacy is None or privacy.ledger is None:
        return recipe
    return recipe.model_copy(update={"privacy": replace(privacy, ledger=str(Path(privacy.ledger).resolve()))})


def predicted_parts(recipe: Recipe) -> list[Part]:
    """Return the parts for which the final models predict every image; under a privacy plan never the training part."""
    parts: list[Part] = ["train", "validation", "test"]
    return parts if recipe.evaluate.train and recipe.privacy is None else parts[1:]


def check_same_recipe(path: Path, recipe: Recipe, served: bool = False) -> None:
    """Raise a StoreError if a folder holds another run than this recipe's; `served`: a run between real sites."""
    folder = RunFolder(path)
    begun = Recipe.load(folder.recipe) if folder.recipe.exists() else recipe
    if begun is not recipe and identity(begun) != identity(recipe):
        raise StoreError(f"{path} holds a run of another recipe; choose another folder with --out, or remove it")
    between_sites = folder.enrolment.exists()
    if served and not between_sites and folder.ledger_file.exists():
        raise StoreError(f"{path} holds a simulation, in which no site was asked; choose another folder with --out")
    if between_sites and not served and not folder.is_finished:
        raise StoreError(
            f"{path} holds a run between real sites, who alone have its images; go on with: polyclinic serve "
            f"SERVER.yaml {folder.recipe} --out {path}"
        )
    if begun.finish != recipe.finish and folder.is_finished:
        raise StoreError(f"{path} holds a run with another finish; remove its result.json to repeat the end alone")
