"""A paper's experiments again: every recipe under recipes/PAPER, one page of results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyclinic.config.recipe import Recipe, bundled_recipes, recipes_folder
from polyclinic.core.errors import RecipeError, StoreError
from polyclinic.evaluation import claims
from polyclinic.evaluation.comparison import Comparison, mean_of_known, metric_value, summarise_methods
from polyclinic.experiments.compare import compare
from polyclinic.federation.rounds import Watch
from polyclinic.reporting.markdown.comparison import markdown
from polyclinic.reporting.markdown.privacy import draw_price
from polyclinic.reporting.markdown.rounds import draw_forgetting, draw_progress
from polyclinic.reporting.markdown.server import draw_students
from polyclinic.storage.run_files import explain_os_errors, write_atomically

FULL_SEEDS, QUICK_SEEDS = 5, 5
KEPT = (
    "algorithm",
    "data",
    "seed",
    "rounds",
    "hospitals",
    "model",
    "headline",
    "sites",
    "drift",
    "cost",
    "sha256",
    "versions",
    "classes",
    "privacy",
    "public",
    "finish",
    "clusters",
    "progress",
    "forgetting",
    "told_apart",
    "pooled",
    "remarks",
)


def reproduce(
    paper: str,
    quick: bool,
    out: Path,
    data: Path | None = None,
    watch: Watch = lambda *_: None,
    begin: Callable[[Recipe, int, int], None] = lambda *_: None,
    results: Path | None = None,
    only: str | None = None,
) -> tuple[Path, list[Comparison]]:
    """Run the paper's recipes, or `only` one table, and write its page.

    A recipe named quick*.yaml belongs to the quick version, whose page goes into `out`; every other to the full one,
    whose figures are kept in docs/results/data/ and whose page in docs/results/ is made from them.
    """
    chosen = paper_recipes(paper, quick)
    if only is not None and only not in chosen:
        raise RecipeError(f"{paper} has no table {only!r}; there are: {', '.join(chosen)}")
    seeds = QUICK_SEEDS if quick else FULL_SEEDS
    folder = out if quick else results or results_folder()
    with explain_os_errors(folder):
        (folder / "data").mkdir(parents=True, exist_ok=True)
    for table, path in chosen.items():
        if only not in (None, table):
            continue
        comparison = compare([Recipe.load(path)], seeds, out / table, data, watch, begin)
        kept = json.dumps(_to_kept_json(comparison), allow_nan=False) + "\n"
        write_atomically(folder / "data" / f"{paper}-{table}.json", kept.encode())
    return write_page(paper, quick, folder)


def paper_recipes(paper: str, quick: bool) -> dict[str, Path]:
    """The recipes of a paper's quick or full version, by table."""
    ours = {name: path for name, path in bundled_recipes().items() if "/" in name}
    found = {name.split("/")[1]: path for name, path in ours.items() if name.split("/")[0] == paper}
    if not found:
        papers = sorted({name.split("/")[0] for name in ours})
        raise RecipeError(f"there are no recipes for {paper!r}; there are some for: {', '.join(papers) or 'none'}")
    chosen = {table: path for table, path in found.items() if table.startswith("quick") == quick}
    if not chosen:
        raise RecipeError(
            f"{paper} has no {'quick' if quick else 'full'} version; try it {'without' if quick else 'with'} --quick"
        )
    return chosen


def write_page(paper: str, quick: bool, folder: Path) -> tuple[Path, list[Comparison]]:
    """The page from the figures that are kept: runs nothing."""
    every = paper_recipes(paper, quick)
    kept = {table: folder / "data" / f"{paper}-{table}.json" for table in every}
    tabled = [table for table, path in kept.items() if path.exists()] or list(every)
    comparisons = [_with_recipe_text(_load_comparison(kept[table]), Recipe.load(every[table])) for table in tabled]
    head = [f"<!-- Written by `polyclinic reproduce {paper}{' --quick' if quick else ''}`; do not edit. -->", ""]
    summary = claims.claims_overview({c.title: claims.evaluate_claims(c.claims, c.results) for c in comparisons})
    if summary:
        head += ["# What our data says about the paper's claims", "", *_phantom_warning(comparisons), *summary, ""]
    if missing := [Recipe.load(path).name for table, path in every.items() if table not in tabled]:
        head += [f"Not run yet: {'; '.join(missing)}.", ""]
    notes = recipes_folder() / paper / "notes.md"
    remarks = [notes.read_text(encoding="utf-8")] if notes.exists() and not quick else []
    page = folder / f"{paper}.md"
    tables = [
        markdown(c)
        + _privacy_figure(c, folder / f"{paper}-{table}.png")
        + _progress_figure(c, folder / f"{paper}-{table}-rounds.png")
        + _student_figure(c, folder / f"{paper}-{table}-student.png")
        + _forgetting_figure(c, folder / f"{paper}-{table}-forgetting.png")
        for table, c in zip(tabled, comparisons, strict=True)
    ]
    write_atomically(page, "\n".join([*head, *remarks, *tables]).encode())
    return page, comparisons


def _privacy_figure(comparison: Comparison, path: Path) -> str:
    return f"\n![accuracy against ε]({path.name})\n" if draw_price(comparison, path) else ""


def _progress_figure(comparison: Comparison, path: Path) -> str:
    if not draw_progress(comparison, path):
        return ""
    found = {name: [metric_value(run, "converged") for run in runs] for name, runs in comparison.results.items()}
    told = [f"{name} {mean_of_known(rounds):.1f}" for name, rounds in found.items() if not any(map(math.isnan, rounds))]
    when = "Rounds until validation accuracy, where it was measured often enough, is within a point of its best (mean)"
    return f"\n![accuracy over rounds]({path.name})\n" + (f"\n{when}: {', '.join(told)}.\n" if told else "")


def _student_figure(comparison: Comparison, path: Path) -> str:
    return f"\n![the student over epochs]({path.name})\n" if draw_students(comparison, path) else ""


def _forgetting_figure(comparison: Comparison, path: Path) -> str:
    return f"\n![forgetting over rounds]({path.name})\n" if draw_forgetting(comparison, path) else ""


def _phantom_warning(comparisons: Sequence[Comparison]) -> list[str]:
    if all(run["data"] == "phantom" for c in comparisons for runs in c.results.values() for run in runs):
        return ["On drawn (phantom) images: this shows how the page reads, and is evidence of nothing.", ""]
    return []


def _with_recipe_text(comparison: Comparison, recipe: Recipe) -> Comparison:
    """Kept figures under what the recipe says of them today."""
    return replace(comparison, title=recipe.name, about=recipe.about, paper=recipe.paper, claims=recipe.claims)


def _to_kept_json(comparison: Comparison) -> dict[str, Any]:
    """What a page needs of a comparison: figures by method and seed, no images, no pictures."""
    runs = {name: [_trim_summary(r) for r in found] for name, found in comparison.results.items()}
    return {"title": comparison.title, "about": comparison.about, "paper": dict(comparison.paper), "runs": runs}


def _trim_summary(result: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {key: result.get(key) for key in KEPT}
    if kept["privacy"] is None:
        kept["headline"] = {k: v for k, v in kept["headline"].items() if k != "confusion"}
    if kept["finish"]:
        epochs = [(int(e["epoch"]), round(e["validation_accuracy"], 4)) for e in kept["finish"]["history"]]
        kept["finish"] = {**kept["finish"], "history": epochs}
    model = kept["headline"]["model"]
    kept["merged"] = {model: _trim_parts(result["merged"].get(model, {}))}
    kept["sites"] = {site: {model: _trim_parts(models.get(model, {}))} for site, models in result["sites"].items()}
    return kept


def _trim_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Every figure a claim may ask for; intervals and confusion matrices stay in the run's folder."""
    return {part: _round_values(row) if isinstance(row, Mapping) else round(row, 6) for part, row in parts.items()}


def _round_values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items() if not isinstance(v, dict | list)}


def _load_comparison(path: Path) -> Comparison:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Comparison(
            kept["title"], tuple(summarise_methods(kept["runs"])), kept["runs"], None, kept["about"], kept["paper"]
        )
    except (OSError, ValueError, LookupError, TypeError):
        raise StoreError(f"{path} is missing or damaged; run `polyclinic reproduce` without --rebuild first") from None


def results_folder() -> Path:
    """docs/results of the checkout that the recipes lie in; elsewhere, a folder of that name right here."""
    folder = recipes_folder().parent / "docs" / "results"
    return folder if folder.is_dir() else Path("docs") / "results"
