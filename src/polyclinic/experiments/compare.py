"""Comparisons: several methods with several seeds. Finished runs are read back, missing ones are run."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from polyclinic.analysis.features import measure_site_classifier
from polyclinic.config.identity import check_same_recipe, method_identity
from polyclinic.config.recipe import Recipe
from polyclinic.core import DataError, RecipeError, RoundFailed, StoreError, slugify
from polyclinic.evaluation.comparison import SITE_CLASSIFIER_ACCURACY, Comparison, summarise_methods
from polyclinic.evaluation.summary import RunSummary
from polyclinic.federation.rounds import Watch
from polyclinic.reporting.render_markdown import write_markdown
from polyclinic.reporting.report import build_report
from polyclinic.reporting.report_data import gather_report_data
from polyclinic.runs.experiment import Experiment, run
from polyclinic.runs.finished_run import open_run
from polyclinic.runs.sites import FederatedDataset, load_sites
from polyclinic.runs.tracking.backends import check_tracking
from polyclinic.storage.files import make_folder, write_json
from polyclinic.storage.run_folder import RunFolder, find_runs

PLAN_FILE = "runs.json"
"""In a comparison's folder: the runs that it is going to play."""


def expand_grid(recipes: Sequence[Recipe], seeds: int) -> dict[str, list[Recipe]]:
    """Every method of every recipe, under its name, once per seed."""
    methods: dict[str, Recipe] = {}
    for recipe in recipes:
        found = {name: recipe.method_recipe(name) for name in recipe.methods} or {recipe.name: recipe}
        for name, method in found.items():
            if slugify(name) in map(slugify, methods):
                raise RecipeError(f"two methods are called {name!r}, or nearly so; give each a name of its own")
            methods[name] = method
    return {
        name: [method.model_copy(update={"seed": method.seed + k}) for k in range(seeds)]
        for name, method in methods.items()
    }


def compare(
    recipes: Sequence[Recipe],
    seeds: int,
    out: Path,
    data: Path | None = None,
    watch: Watch = lambda *_: None,
    begin: Callable[[Recipe, int, int], None] = lambda *_: None,
) -> Comparison:
    """Run every method with every seed, draw the figures, and write the table into `out`.

    `begin` is called before each run with its recipe, the number of runs that are done, and their total.
    """
    loaded: dict[str, FederatedDataset] = {}

    def load(recipe: Recipe) -> FederatedDataset:
        key = f"{recipe.seed} {recipe.data.model_dump_json()}"
        if key not in loaded:
            loaded[key] = load_sites(recipe, data)
        return loaded[key]

    plan = {
        name: [(recipe, out / slugify(name) / f"seed-{recipe.seed}") for recipe in runs]
        for name, runs in expand_grid(recipes, seeds).items()
    }
    claims = [claim for recipe in recipes for claim in recipe.claims]
    classified = {name for claim in claims if claim.metric == SITE_CLASSIFIER_ACCURACY for name in claim.methods}
    _check_plan(plan, classified, load, data)
    title = ", ".join(recipe.name for recipe in recipes)
    _write_plan(title, plan, out)
    results: dict[str, list[RunSummary]] = {}
    failures: list[str] = []
    planned = [(name, recipe, folder) for name, runs in plan.items() for recipe, folder in runs]
    for done, (name, recipe, folder) in enumerate(planned):
        begin(recipe, done, len(planned))
        try:
            found = run(recipe, folder, data, watch, None if RunFolder(folder).is_finished else load(recipe)).summary
            if name in classified:
                accuracy = _site_classifier_accuracy(RunFolder(folder), partial(load, recipe))
                found = found.model_copy(update={SITE_CLASSIFIER_ACCURACY: accuracy})
            results.setdefault(name, []).append(found)
        except RoundFailed as error:
            failures.append(f"{name}, seed {recipe.seed}, did not end: {error}")
    if not results:
        raise RoundFailed(failures[0])
    about = "\n\n".join(recipe.about for recipe in recipes if recipe.about)
    paper = {method: text for recipe in recipes for method, text in recipe.paper.items()}
    comparison = Comparison(
        title, tuple(summarise_methods(results)), results, out, about, paper, tuple(failures), claims
    )
    folders = {name: [RunFolder(path) for _, path in runs] for name, runs in plan.items()}
    write_comparison(comparison, {name: [f for f in found if f.is_finished] for name, found in folders.items()})
    return comparison


def _site_classifier_accuracy(folder: RunFolder, load: Callable[[], FederatedDataset]) -> float | None:
    """Kept beside the run, so that reading it back needs no images; None where features have no such figure."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        kept = json.loads(folder.site_classifier.read_text(encoding="utf-8"))[SITE_CLASSIFIER_ACCURACY]
        return None if kept is None else float(kept)
    accuracy = None
    with suppress(DataError):  # too few images, or features that are not finite: no reason to lose the comparison
        accuracy = measure_site_classifier(open_run(folder.path, None, dataset=load()))
    write_json(folder.site_classifier, {SITE_CLASSIFIER_ACCURACY: accuracy})
    return accuracy


def _check_plan(
    plan: Mapping[str, Sequence[tuple[Recipe, Path]]],
    classified: Collection[str],
    load: Callable[[Recipe], FederatedDataset],
    data: Path | None,
) -> None:
    """Raise an error about a run that cannot be done, before hours go into the others."""
    for name, runs in plan.items():
        if name in classified and any(recipe.clusters for recipe, _ in runs):
            raise RecipeError(
                f"{name} has a network for each cluster, whose features have no {SITE_CLASSIFIER_ACCURACY}; drop the "
                "claim"
            )
        for recipe, folder in runs:
            check_same_recipe(folder, recipe)
            check_tracking(recipe.track, folder)
        for recipe, _ in [pair for pair in runs if not RunFolder(pair[1]).is_finished][:1]:
            Experiment(recipe, data=data, dataset=load(recipe))


def _write_plan(title: str, plan: Mapping[str, Sequence[tuple[Recipe, Path]]], out: Path) -> None:
    """Write the runs that are planned, for the dashboard."""
    make_folder(out)
    runs = [
        {"method": name, "folder": str(folder.relative_to(out)), "rounds": recipe.rounds}
        for name, found in plan.items()
        for recipe, folder in found
    ]
    write_json(out / PLAN_FILE, {"title": title, "runs": runs})


def compare_folders(folders: Sequence[Path], out: Path | None) -> Comparison:
    """Compare runs that have finished; runs whose recipes differ in the seed only are one method."""
    found: dict[str, dict[int, tuple[Recipe, RunFolder]]] = {}
    for folder in folders:
        finished = [one for one in find_runs(folder) if one.is_finished]
        if not finished:
            raise StoreError(
                f"{folder} holds no finished run; `polyclinic resume {folder}` finishes an interrupted one"
            )
        for one in finished:
            recipe = Recipe.load(one.recipe)
            found.setdefault(method_identity(recipe), {}).setdefault(recipe.seed, (recipe, one))
    runs = [[seeds[seed] for seed in sorted(seeds)] for seeds in found.values()]
    plan = dict(zip(_label_methods([seeds[0] for seeds in runs]), runs, strict=True))
    results = {name: [run.read_summary() for _, run in seeds] for name, seeds in plan.items()}
    comparison = Comparison("comparison", tuple(summarise_methods(results)), results, out)
    if out is not None:
        write_comparison(comparison, {name: [run for _, run in seeds] for name, seeds in plan.items()})
    return comparison


def _label_methods(methods: Sequence[tuple[Recipe, RunFolder]]) -> list[str]:
    """The shortest unique names: the recipe's, with the algorithm, or the folder's."""
    names = [recipe.name for recipe, _ in methods]
    longer = [f"{recipe.name} ({recipe.algorithm.name})" for recipe, _ in methods]
    folders = [str(run.path) for _, run in methods]
    return next(labels for labels in (names, longer, folders) if len(set(labels)) == len(labels))


def write_comparison(comparison: Comparison, folders: Mapping[str, Sequence[RunFolder]]) -> None:
    """Write the report as Markdown, with its charts, and the methods as JSON into the comparison's folder."""
    out = comparison.folder
    assert out is not None
    make_folder(out)
    write_json(out / "comparison.json", comparison.to_json())
    write_markdown(build_report(gather_report_data(comparison, folders)), out / "report.md")
