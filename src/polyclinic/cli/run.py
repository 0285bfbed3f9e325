"""Commands that run recipes: `demo`, `run`, `resume`, `compare`, `reproduce` and `list`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column
from rich.text import Text

import polyclinic
from polyclinic.algorithms import describe_algorithms
from polyclinic.cli.common import (
    Data,
    Json,
    Seed,
    Settings,
    Track,
    find_recipe,
    out,
    parse_settings,
    plain_table,
    print_json,
    print_message,
)
from polyclinic.cli.display import (
    SAME_COMMAND,
    comparison_table,
    print_comparison,
    print_result,
    progress_display,
    report_failures,
)
from polyclinic.config.bundled import bundled_recipes
from polyclinic.core import RecipeError, StoreError, read_yaml, slugify
from polyclinic.data import DATASETS, describe_datasets
from polyclinic.models import MODELS
from polyclinic.privacy.transforms import describe_transforms

if TYPE_CHECKING:
    from polyclinic.data.options import Options


def demo_command(
    folder: Annotated[Path, typer.Option("--out", help="The output folder.")] = Path("polyclinic-demo"),
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare several methods on five simulated sites. Takes under two minutes and needs no data."""
    from polyclinic.experiments.compare import compare

    recipe = polyclinic.Recipe.load(bundled_recipes()["demo"], parse_settings(None, seed=seed))
    with progress_display(about=recipe.about) as display:
        comparison = compare([recipe], 1, folder, None, display.on_event, display.start_run)
    polyclinic.report([folder], folder / "report.html")
    print_comparison(comparison, as_json)


def run_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a bundled recipe.")],
    settings: Settings = None,
    data: Data = None,
    engine: Annotated[str | None, typer.Option(help="How sites are simulated: local, stacked, auto or ray.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    seed: Seed = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The output folder (default: runs/NAME).")] = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Run a recipe: train, evaluate and write the results."""
    given = parse_settings(settings, seed=seed, engine__name=engine, engine__device=device, track=track or None)
    loaded = polyclinic.Recipe.load(find_recipe(recipe), given)
    _run_recipe(loaded, folder or Path("runs") / slugify(loaded.name), data, as_json)


def resume_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an interrupted run.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Set a key that no round depends on, such as finish.lr=0.0001.")
    ] = None,
    data: Data = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Continue an interrupted run. The result is the same as without the interruption."""
    if not (folder / "recipe.yaml").is_file():
        raise StoreError(
            f"{folder} holds no run (recipe.yaml is missing); give the folder that `run` wrote to, or, for a "
            "comparison, the same command again"
        )
    recipe = polyclinic.Recipe.load(folder / "recipe.yaml", parse_settings(settings, track=track or None))
    _run_recipe(recipe, folder, data, as_json)


def rollback_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run that has not ended.")],
    to: Annotated[int, typer.Option("--to", min=1, help="The round whose model the run goes on from.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before rounds are undone.")] = False,
    as_json: Json = False,
) -> None:
    """Let a run go on from an earlier round, to undo what a site has done. Privacy charges are not taken back."""
    from polyclinic.storage.rollback import plan_rollback, roll_back

    planned = plan_rollback(folder, to)
    if planned.undone > to and not yes:
        _confirm_rollback(to + 1, planned.undone)
    found = roll_back(folder, to)
    if as_json:
        print_json(asdict(found))
        return
    print_message(f"the run goes on from round {found.round}; rounds {found.round + 1} to {found.undone} are undone")
    if not found.between_sites:
        print_message(f"continue with: polyclinic resume {shlex.quote(str(folder))}")
        return
    print_message(
        "continue with the same serve command; a site that is sent other contents for a round than it answered refuses "
        "them until a person there allows the round, by the command that its refusal names"
    )


def _confirm_rollback(first: int, last: int) -> None:
    """Ask whether rounds shall be undone, and end if not; raises `StoreError` where nobody can be asked."""
    if not sys.stdin.isatty():
        raise StoreError(f"rounds {first} to {last} would be undone, and there is no terminal to ask; give --yes")
    if not typer.confirm(f"Undo rounds {first} to {last}?", err=True):
        raise typer.Exit(1)


def _run_recipe(recipe: polyclinic.Recipe, folder: Path, data: Path | None, as_json: bool) -> None:
    def way_on() -> str:
        again = ["polyclinic", "resume", str(folder), *(["--data", str(data)] if data else [])]
        return f"continue with {shlex.join(again)}" if (folder / "recipe.yaml").exists() else SAME_COMMAND

    with progress_display(way_on) as display:
        display.start_run(recipe, 0, 1)
        result = polyclinic.run(recipe, folder, data, display.on_event)
    print_result(result, folder, as_json)


def list_command(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="algorithms, models, datasets, stages or recipes")],
    as_json: Json = False,
) -> None:
    """List the algorithms, models, datasets, stages or recipes that can be named."""
    rows = _describe_names(what)
    if as_json:
        print_json(rows)
        return
    table = plain_table(*(Column(name.replace("_", " "), overflow="fold", no_wrap=name == "name") for name in rows[0]))
    for row in rows:
        table.add_row(*(Text(", ".join(cell) or "–" if isinstance(cell, list) else str(cell)) for cell in row.values()))
    out.print(table)


def _describe_names(what: str) -> list[dict[str, object]]:
    match what:
        case "algorithms" | "stages":
            described = describe_algorithms() if what == "algorithms" else describe_transforms()
            return [{"name": name, "options": d.options, "about": d.about} for name, d in described.items()]
        case "models":
            return [
                {"name": name, "min_pixels": spec.min_size, "about": spec.description, "paper": spec.paper}
                for name, spec in MODELS.items()
            ]
        case "datasets":
            about = describe_datasets()
            return [
                {"name": name, "about": about[name], "licence": spec.licence, "options": _dataset_options(spec.options)}
                for name, spec in DATASETS.items()
            ]
        case "recipes":
            return [{"name": name, "about": read_yaml(p).get("about", "")} for name, p in bundled_recipes().items()]
    raise RecipeError(f"there is no list of {what!r}; choose one of algorithms, models, datasets, stages, recipes")


def _dataset_options(kind: type[Options]) -> list[str]:
    """Return the options of a dataset; "image options" stands for those of all image files (docs/data.md)."""
    from polyclinic.data.loading.image_options import ImageOptions

    common = ImageOptions.model_fields if issubclass(kind, ImageOptions) else {}
    return [name for name in kind.model_fields if name not in common] + (["image options"] if common else [])


def compare_command(
    what: Annotated[
        list[str], typer.Argument(metavar="RECIPE|DIR...", help="Recipes to run, or folders of finished runs.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="The number of seeds of each method.")] = 1,
    settings: Settings = None,
    data: Data = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The output folder (default: runs/NAME).")] = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Compare several methods over several seeds in one table. Finished runs are not repeated."""
    from polyclinic.experiments.compare import compare, compare_folders

    folders = [Path(name) for name in what if Path(name).is_dir()]
    if folders and len(folders) < len(what):
        raise RecipeError("give either recipes to run or folders of finished runs, not both")
    if folders and settings:
        raise RecipeError("--set changes recipes, and these folders hold finished runs; leave out --set")
    if folders:
        print_comparison(compare_folders(folders, folder), as_json)
        return
    given = parse_settings(settings, track=track or None)
    recipes = [polyclinic.Recipe.from_values(read_yaml(path), given, str(path)) for path in map(find_recipe, what)]
    target = folder or Path("runs") / slugify(recipes[0].name)
    with progress_display() as display:
        comparison = compare(recipes, seeds, target, data, display.on_event, display.start_run)
    polyclinic.report([target], target / "report.html")
    print_comparison(comparison, as_json)
    report_failures(comparison)


def reproduce_command(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="The name of a paper, a folder of recipes/.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small version that takes five minutes on a CPU.")] = False,
    data: Data = None,
    only: Annotated[str | None, typer.Option("--only", help="Run only this table. The page keeps the others.")] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Write the page again from saved results, without running.")
    ] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="The number of seeds of each method.")] = 5,
    folder: Annotated[Path | None, typer.Option("--out", help="The folder of the runs (default: runs/PAPER).")] = None,
    as_json: Json = False,
) -> None:
    """Run all recipes of a paper and write its page of results, into docs/results/ or, with --quick, into --out."""
    from polyclinic.experiments.reproduce import reproduce as reproduce_paper, results_folder, write_page

    target = folder or Path("runs") / (f"{paper}-quick" if quick else paper)
    if rebuild:
        page, comparisons = write_page(paper, quick, target if quick else results_folder())
    else:
        with progress_display() as display:
            page, comparisons = reproduce_paper(
                paper, quick, target, data, display.on_event, display.start_run, only=only, seeds=seeds
            )
    if as_json:
        print_json({"page": str(page), "tables": [c.to_json() for c in comparisons]})
        return
    for comparison in comparisons:
        out.print(comparison_table(comparison))
    out.print(Text(f"page: {page}"), soft_wrap=True)
