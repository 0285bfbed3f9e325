"""A paper's experiments again: every recipe under recipes/PAPER, one page of results."""

import json
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from polyclinic.config.bundled import bundled_recipes, recipes_folder
from polyclinic.config.recipe import Recipe
from polyclinic.core import RecipeError, StoreError
from polyclinic.evaluation.claims import evaluate_claims
from polyclinic.evaluation.comparison import Comparison, summarise_methods
from polyclinic.evaluation.summary import Metric, ModelScores, PartScores, RunSummary
from polyclinic.experiments.compare import compare
from polyclinic.federation.rounds import Watch
from polyclinic.reporting.render_markdown import render_table, to_markdown, write_figures
from polyclinic.reporting.report import build_results_page
from polyclinic.reporting.sections.tests import claims_overview
from polyclinic.storage.files import make_folder, write_atomically

SEEDS = 5

_KEPT_RUNS = TypeAdapter(dict[str, list[RunSummary]])
"""The runs of a comparison by method, as docs/results/data holds them."""


def reproduce(
    paper: str,
    quick: bool,
    out: Path,
    data: Path | None = None,
    watch: Watch = lambda *_: None,
    begin: Callable[[Recipe, int, int], None] = lambda *_: None,
    results: Path | None = None,
    only: str | None = None,
    seeds: int = SEEDS,
) -> tuple[Path, list[Comparison]]:
    """Run the paper's recipes with so many `seeds` each, or `only` one table, and write its page.

    A recipe named quick*.yaml belongs to the quick version, whose page goes into `out`; every other to the full one,
    whose figures are kept in docs/results/data/ and whose page in docs/results/ is made from them.
    """
    chosen = paper_recipes(paper, quick)
    if only is not None and only not in chosen:
        raise RecipeError(f"{paper} has no table {only!r}; there are: {', '.join(chosen)}")
    folder = out if quick else results or results_folder()
    make_folder(folder / "data")
    for table, path in chosen.items():
        if only not in (None, table):
            continue
        comparison = compare([Recipe.load(path)], seeds, out / table, data, watch, begin)
        kept = json.dumps(_to_kept_json(comparison), allow_nan=False, separators=(",", ":")) + "\n"
        write_atomically(folder / "data" / f"{paper}-{table}.json", kept.encode())
    return write_page(paper, quick, folder)


def paper_recipes(paper: str, quick: bool) -> dict[str, Path]:
    """Return the recipes of a paper's quick or full version, by table."""
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
    """Write the page from the figures that are kept, without running anything."""
    every = paper_recipes(paper, quick)
    kept = {table: folder / "data" / f"{paper}-{table}.json" for table in every}
    tabled = [table for table, path in kept.items() if path.exists()] or list(every)
    comparisons = [_load_comparison(kept[table], Recipe.load(every[table])) for table in tabled]
    head = [f"<!-- Written by `polyclinic reproduce {paper}{' --quick' if quick else ''}`; do not edit. -->", ""]
    overview = claims_overview({c.title: evaluate_claims(c.claims, c.results) for c in comparisons})
    if overview:
        phantom = all(run.data == "phantom" for c in comparisons for runs in c.results.values() for run in runs)
        drawn = "On drawn (phantom) images: this shows how the page reads, and is evidence of nothing."
        head += [
            "# What our data says about the paper's claims",
            "",
            *([drawn, ""] if phantom else []),
            render_table(overview),
            "",
        ]
    if missing := [Recipe.load(path).name for table, path in every.items() if table not in tabled]:
        head += [f"Not run yet: {'; '.join(missing)}.", ""]
    notes = recipes_folder() / paper / "notes.md"
    remarks = [notes.read_text(encoding="utf-8")] if notes.exists() and not quick else []
    page = folder / f"{paper}.md"
    tables = []
    for table, comparison in zip(tabled, comparisons, strict=True):
        report, prefix = build_results_page(comparison), f"{paper}-{table}-"
        write_figures(report, folder, prefix)
        tables.append(to_markdown(report, prefix, folder))
    write_atomically(page, "\n".join([*head, *remarks, *tables]).encode())
    return page, comparisons


def _to_kept_json(comparison: Comparison) -> dict[str, object]:
    """Return the part of a comparison that a page shows: figures by method and seed, without intervals and details."""
    runs = {name: [_trim_summary(r).to_json() for r in found] for name, found in comparison.results.items()}
    return {"title": comparison.title, "about": comparison.about, "paper": dict(comparison.paper), "runs": runs}


def _trim_summary(run: RunSummary) -> RunSummary:
    """A summary with every figure that a claim may ask for, rounded; of a private run also the headline's details."""
    model, headline, finish = run.headline.model, run.headline, run.finish
    if run.privacy is None:
        scores = headline.scores.model_copy(update={"details": {}})
        headline = headline.model_copy(update={"scores": scores})
    if finish is not None:
        epochs = [
            {"epoch": e["epoch"], "validation_accuracy": round(e["validation_accuracy"], 4)} for e in finish.history
        ]
        finish = finish.model_copy(update={"history": epochs})
    return run.model_copy(
        update={
            "headline": headline,
            "finish": finish,
            "merged": {model: _trim_scores(run.merged.get(model, {}))},
            "sites": {site: {model: _trim_scores(models.get(model, {}))} for site, models in run.sites.items()},
            "engine": None,
            "released": [],
            "absent": {},
            "doubted": {},
        }
    )


def _trim_scores(parts: ModelScores) -> ModelScores:
    return {
        part: PartScores(
            n=scores.n,
            metrics={
                name: Metric(value=None if value is None else round(value, 6)) for name, value in scores.values.items()
            },
        )
        for part, scores in parts.items()
    }


def _load_comparison(path: Path, recipe: Recipe) -> Comparison:
    """Read kept figures; the text beside them is that of the recipe today."""
    try:
        runs = _KEPT_RUNS.validate_python(json.loads(path.read_bytes())["runs"])
    except (OSError, ValueError, LookupError, TypeError):
        raise StoreError(f"{path} is missing or damaged; run `polyclinic reproduce` without --rebuild first") from None
    return Comparison(
        recipe.name, tuple(summarise_methods(runs)), runs, None, recipe.about, recipe.paper, claims=recipe.claims
    )


def results_folder() -> Path:
    """Return docs/results of the checkout with the recipes; without one, of the current folder."""
    folder = recipes_folder().parent / "docs" / "results"
    return folder if folder.is_dir() else Path("docs") / "results"
