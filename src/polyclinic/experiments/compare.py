"""Several methods, several seeds, one table: runs what is missing, reads what is there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from polyclinic.config.recipe import Recipe
from polyclinic.core.errors import DataError, RecipeError, RoundFailed, StoreError
from polyclinic.core.text import slugify
from polyclinic.evaluation.claims import TOLD_APART
from polyclinic.evaluation.comparison import Comparison, mean_of_known, summarise_methods
from polyclinic.federation.rounds import HELD_OUT, Watch
from polyclinic.reporting.markdown.comparison import markdown
from polyclinic.reporting.markdown.rounds import draw_forgetting
from polyclinic.reporting.run_folder import method_identity
from polyclinic.runs.experiment import Experiment, FederatedDataset, check_same_recipe, load_sites, read_result, run
from polyclinic.runs.finished_run import open_run
from polyclinic.runs.tracking.backends import check_tracking
from polyclinic.storage.run_files import MetricsFile, explain_os_errors, write_atomically, write_json

PLAN_FILE = "runs.json"
"""What a comparison is going to run, in its folder."""


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
    """Run every method with every seed (finished runs are read back), draw the pictures, write the table."""
    gathered: dict[str, FederatedDataset] = {}

    def hospitals(recipe: Recipe) -> FederatedDataset:
        key = f"{recipe.seed} {recipe.data.model_dump_json()}"
        if key not in gathered:
            gathered[key] = load_sites(recipe, data)
        return gathered[key]

    plan = {
        name: [(recipe, out / slugify(name) / f"seed-{recipe.seed}") for recipe in runs]
        for name, runs in expand_grid(recipes, seeds).items()
    }
    claims = [claim for recipe in recipes for claim in recipe.claims]
    looked_at = {name for claim in claims if claim.metric == TOLD_APART for name in claim.methods}
    _check_plan(plan, looked_at, hospitals, data)
    title = ", ".join(recipe.name for recipe in recipes)
    _write_plan(title, plan, out)
    total, done = sum(map(len, plan.values())), 0
    results: dict[str, list[Mapping[str, Any]]] = {}
    failures: list[str] = []
    for name, runs in plan.items():
        for recipe, folder in runs:
            begin(recipe, done, total)
            known = None if _is_finished(folder) else hospitals(recipe)
            try:
                found = run(recipe, folder, data, watch, known).summary
                if name in looked_at:
                    found = {**found, TOLD_APART: _site_classifier_accuracy(folder, partial(hospitals, recipe))}
                results.setdefault(name, []).append(found)
            except RoundFailed as error:
                failures.append(f"{name}, seed {recipe.seed}, did not end: {error}")
            done += 1
    results = {name: found for name, found in results.items() if found}
    if not results:
        raise RoundFailed(failures[0])
    about = "\n\n".join(recipe.about for recipe in recipes if recipe.about)
    paper = {method: text for recipe in recipes for method, text in recipe.paper.items()}
    comparison = Comparison(
        title, tuple(summarise_methods(results)), results, out, about, paper, tuple(failures), claims
    )
    write_comparison(
        comparison, {name: [folder for _, folder in runs if _is_finished(folder)] for name, runs in plan.items()}
    )
    return comparison


def _site_classifier_accuracy(folder: Path, hospitals: Callable[[], FederatedDataset]) -> float | None:
    """Kept beside the run, so that reading it back needs no images; None where features have no such figure."""
    path = folder / f"{TOLD_APART}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        kept = json.loads(path.read_text(encoding="utf-8"))[TOLD_APART]
        return None if kept is None else float(kept)
    from polyclinic.analysis.features import measure_site_classifier

    figure = None
    with suppress(DataError):  # too few images, or features that are not finite: no reason to lose the comparison
        figure = measure_site_classifier(open_run(folder, None, dataset=hospitals()))
    write_json(path, {TOLD_APART: figure})
    return figure


def _check_plan(
    plan: Mapping[str, Sequence[tuple[Recipe, Path]]],
    looked_at: Collection[str],
    hospitals: Callable[[Recipe], FederatedDataset],
    data: Path | None,
) -> None:
    """What cannot run is refused before hours go into what can."""
    for name, runs in plan.items():
        if name in looked_at and any(recipe.clusters for recipe, _ in runs):
            raise RecipeError(
                f"{name} has a network for each cluster, whose features have no {TOLD_APART}; drop the claim"
            )
        for recipe, folder in runs:
            check_same_recipe(folder, recipe)
            check_tracking(recipe.track, folder)
        for recipe, _ in [pair for pair in runs if not _is_finished(pair[1])][:1]:
            Experiment(recipe, data=data, dataset=hospitals(recipe))


def _write_plan(title: str, plan: Mapping[str, Sequence[tuple[Recipe, Path]]], out: Path) -> None:
    """What is going to run, for those who follow it."""
    with explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    runs = [
        {"method": name, "folder": str(folder.relative_to(out)), "rounds": recipe.rounds}
        for name, found in plan.items()
        for recipe, folder in found
    ]
    write_json(out / PLAN_FILE, {"title": title, "runs": runs})


def _is_finished(folder: Path) -> bool:
    return (folder / "result.json").exists()


def compare_folders(folders: Sequence[Path], out: Path | None) -> Comparison:
    """Runs that have already ended, side by side; runs whose recipes differ in the seed only are one method."""
    found: dict[str, dict[int, tuple[Recipe, Path]]] = {}
    for folder in folders:
        paths = sorted(path.parent for path in folder.rglob("result.json"))
        if not paths:
            raise StoreError(
                f"{folder} holds no finished run; `polyclinic resume {folder}` finishes an interrupted one"
            )
        for path in paths:
            recipe = Recipe.load(path / "recipe.yaml")
            found.setdefault(method_identity(recipe), {}).setdefault(recipe.seed, (recipe, path))
    runs = [[seeds[seed] for seed in sorted(seeds)] for seeds in found.values()]
    plan = dict(zip(_label_methods([seeds[0] for seeds in runs]), runs, strict=True))
    results = {name: [read_result(path).summary for _, path in seeds] for name, seeds in plan.items()}
    comparison = Comparison("comparison", tuple(summarise_methods(results)), results, out)
    if out is not None:
        write_comparison(comparison, {name: [path for _, path in seeds] for name, seeds in plan.items()})
    return comparison


def _label_methods(methods: Sequence[tuple[Recipe, Path]]) -> list[str]:
    """The shortest names that tell methods apart: the recipe's, with the algorithm, or the folder's."""
    named = [recipe.name for recipe, _ in methods]
    longer = [f"{recipe.name} ({recipe.algorithm.name})" for recipe, _ in methods]
    folders = [str(path) for _, path in methods]
    return next(labels for labels in (named, longer, folders) if len(set(labels)) == len(labels))


def validation_curve(folder: Path, result: Mapping[str, Any], metric: str) -> dict[int, float]:
    """A run's metric on validation images after each round: the mean over sites, weighted by their size."""
    totals: dict[int, list[tuple[float, int]]] = {}
    for row in MetricsFile(folder / "metrics.jsonl").read():
        if row["event"] == "evaluate" and row["site"] != HELD_OUT and row.get(metric) is not None:
            totals.setdefault(row["round"], []).append((row[metric], row["n"]))
    last = [
        (parts["validation"][metric], parts["validation"]["n"])
        for models in result["sites"].values()
        for name, parts in models.items()
        if name in ("global", "personal") and parts.get("validation", {}).get(metric) is not None
    ]
    if last:
        totals[result["rounds"]] = last
    return {r: sum(v * n for v, n in rows) / sum(n for _, n in rows) for r, rows in sorted(totals.items())}


def write_comparison(comparison: Comparison, folders: Mapping[str, Sequence[Path]]) -> None:
    """The pictures, the table as Markdown, and everything as JSON, into the comparison's folder."""
    out = comparison.folder
    assert out is not None
    with explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    _draw_figures(comparison, folders, out)
    write_json(out / "comparison.json", comparison.to_json())
    write_atomically(out / "report.md", markdown(comparison).encode())


def _draw_figures(comparison: Comparison, folders: Mapping[str, Sequence[Path]], out: Path) -> None:
    from polyclinic.reporting.figures import (  # matplotlib takes a second to load
        ComparisonRow,
        draw_comparison,
        draw_curves,
    )

    series = {}
    for name, results in comparison.results.items():
        found = [validation_curve(*run, "accuracy") for run in zip(folders[name], results, strict=True)]
        shared = sorted(set.intersection(*(set(points) for points in found)))
        series[name] = [(r, mean_of_known([points[r] for points in found])) for r in shared]
    if any(series.values()):
        title = f"{comparison.title}: accuracy on the hospitals' validation images"
        draw_curves(series, title, "communication round", "accuracy", out / "curves.png")
    draw_forgetting(comparison, out / "forgetting.png")
    bars = [
        ComparisonRow(line.name, line.figures["auc"].mean, line.figures["auc"].low, line.figures["auc"].high)
        for line in comparison.lines
        if not math.isnan(line.figures["auc"].mean)
    ]
    if bars:
        draw_comparison(bars, f"{comparison.title}: AUC on {comparison.judged_on}", "AUC", out / "auc.png")
