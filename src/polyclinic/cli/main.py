"""The command line. A person's mistake gets one sentence and a non-zero exit code, never a traceback."""

from __future__ import annotations

import errno
import io
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from polyclinic.algorithms import ALGORITHMS
from polyclinic.cli import data as cli_data
from polyclinic.cli import deploy, plan, provision, site, weights
from polyclinic.cli.attack import attack_command
from polyclinic.cli.audit import audit_command
from polyclinic.cli.board import board_command
from polyclinic.cli.common import (
    Data,
    Json,
    Seed,
    Settings,
    Track,
    err,
    find_recipe,
    out,
    parse_settings,
    print_json,
    print_message,
)
from polyclinic.cli.display import Display, comparison_table, result_table
from polyclinic.cli.explain import explain_command
from polyclinic.cli.features import features_command
from polyclinic.cli.predict import export_command, predict_command
from polyclinic.cli.report import report_command, write_report
from polyclinic.config.recipe import Recipe, bundled_recipes
from polyclinic.core.errors import PolyclinicError, RecipeError, StoreError
from polyclinic.core.strict_yaml import read_yaml
from polyclinic.core.text import slugify
from polyclinic.data import DATASETS, Options
from polyclinic.data.loading.options import ImageOptions
from polyclinic.evaluation.comparison import Comparison
from polyclinic.evaluation.summary import package_versions
from polyclinic.experiments.compare import compare, compare_folders
from polyclinic.experiments.reproduce import reproduce as reproduce_paper
from polyclinic.experiments.reproduce import results_folder, write_page
from polyclinic.models import MODELS
from polyclinic.privacy.transforms import STAGES
from polyclinic.runs.experiment import run as run_recipe

SAME_COMMAND = "go on with the same command"


class ErrorReportingGroup(TyperGroup):
    """Tells a person's mistakes, and what the disk says, in one sentence and without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolyclinicError as error:
            print_message(f"error: {error}")
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            print_message(
                f"error: {error.filename or 'the system'}: {error.strerror or error}; mend that and try again"
            )
        raise typer.Exit(1)


app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Federated learning on medical images, for hospitals that differ.",
)
app.add_typer(cli_data.app, name="data")
app.add_typer(site.app, name="site")
app.add_typer(weights.app, name="weights")
app.add_typer(provision.app, name="provision")
app.command("serve")(deploy.serve)
app.command("join")(deploy.join)
app.command("status")(deploy.status)
app.command("plan")(plan.plan)
app.command("audit")(audit_command)
app.command("attack")(attack_command)
app.command("features")(features_command)
app.command("explain")(explain_command)
app.command("report")(report_command)
app.command("board")(board_command)
app.command("predict")(predict_command)
app.command("export")(export_command)


@contextmanager
def progress_display(way_on: Callable[[], str] = lambda: SAME_COMMAND, about: str = "") -> Iterator[Display]:
    """Show what happens. Ctrl-C loses nothing: say how to go on."""
    try:
        with Display(err, about) as display:
            yield display
    except KeyboardInterrupt:
        print_message(f"stopped; nothing that was finished is lost: {way_on()}")
        raise typer.Exit(130) from None


def print_comparison(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        print_json(comparison.to_json())
        return
    out.print(comparison_table(comparison))
    if comparison.folder is not None:
        written = [
            comparison.folder / name for name in ("report.html", "report.md", "curves.png", "forgetting.png", "auc.png")
        ]
        out.print(Text("written: " + "  ".join(str(path) for path in written if path.exists())), soft_wrap=True)


def report_failures(comparison: Comparison) -> None:
    """The table of what ended was shown; what did not end is a failure all the same."""
    for failure in comparison.failures:
        print_message(f"error: {failure}")
    if comparison.failures:
        raise typer.Exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(package_versions()["polyclinic"])
        raise typer.Exit


@app.callback()
def main_callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning on medical images, for hospitals that differ."""


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("polyclinic-demo"),
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare several methods on five phantom hospitals: under two minutes, no data needed."""
    recipe = Recipe.load(bundled_recipes()["demo"], parse_settings(None, seed=seed))
    with progress_display(about=recipe.about) as display:
        comparison = compare([recipe], 1, folder, None, display.on_event, display.start_run)
    write_report([folder], folder / "report.html")
    print_comparison(comparison, as_json)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of one of ours.")],
    settings: Settings = None,
    data: Data = None,
    engine: Annotated[str | None, typer.Option(help="Where site work runs: local, stacked, auto or ray.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or auto.")] = None,
    seed: Seed = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Where to write (default: runs/NAME).")] = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Run one recipe."""
    given = parse_settings(settings, seed=seed, engine__name=engine, engine__device=device, track=track or None)
    loaded = Recipe.load(find_recipe(recipe), given)
    _run_recipe(loaded, folder or Path("runs") / slugify(loaded.name), data, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an interrupted run.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Set a key no round depends on: finish.lr=0.0001")
    ] = None,
    data: Data = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Go on with an interrupted run; the result is the same as if it had never stopped."""
    if not (folder / "recipe.yaml").is_file():
        raise StoreError(
            f"{folder} holds no run (recipe.yaml is missing); give the folder that `run` wrote to, or, for a "
            "comparison, the same command again"
        )
    _run_recipe(
        Recipe.load(folder / "recipe.yaml", parse_settings(settings, track=track or None)), folder, data, as_json
    )


def _run_recipe(recipe: Recipe, folder: Path, data: Path | None, as_json: bool) -> None:
    def way_on() -> str:
        again = ["polyclinic", "resume", str(folder), *(["--data", str(data)] if data else [])]
        return f"go on with {shlex.join(again)}" if (folder / "recipe.yaml").exists() else SAME_COMMAND

    with progress_display(way_on) as display:
        display.start_run(recipe, 0, 1)
        result = run_recipe(recipe, folder, data, display.on_event)
    if as_json:
        print_json(result.summary)
        return
    out.print(result_table(result.summary))
    out.print(Text(f"run: {folder}"), soft_wrap=True)


@app.command("compare")
def compare_command(
    what: Annotated[
        list[str], typer.Argument(metavar="RECIPE|DIR...", help="Recipes to run, or folders of finished runs.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds each method gets.")] = 1,
    settings: Settings = None,
    data: Data = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Where to write (default: runs/NAME).")] = None,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Several methods × seeds in one table; finished runs are not repeated."""
    folders = [Path(name) for name in what if Path(name).is_dir()]
    if folders and len(folders) < len(what):
        raise RecipeError("give either recipes to run or folders of finished runs, not both")
    if folders and settings:
        raise RecipeError("--set changes recipes, and these folders hold runs that have ended; leave --set out")
    if folders:
        print_comparison(compare_folders(folders, folder), as_json)
        return
    given = parse_settings(settings, track=track or None)
    recipes = [Recipe.from_values(read_yaml(path), given, str(path)) for path in map(find_recipe, what)]
    target = folder or Path("runs") / slugify(recipes[0].name)
    with progress_display() as display:
        comparison = compare(recipes, seeds, target, data, display.on_event, display.start_run)
    write_report([target], target / "report.html")
    print_comparison(comparison, as_json)
    report_failures(comparison)


@app.command("list")
def list_command(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="algorithms, models, datasets, stages or recipes")],
    as_json: Json = False,
) -> None:
    """What a recipe can name."""
    listings = {
        "algorithms": _list_algorithms,
        "models": _list_models,
        "datasets": _list_datasets,
        "stages": _list_stages,
        "recipes": _list_recipes,
    }
    if what not in listings:
        raise RecipeError(f"there is no list of {what!r}; choose one of {', '.join(listings)}")
    rows = listings[what]()
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*(Text(", ".join(cell) or "–" if isinstance(cell, list) else str(cell)) for cell in row.values()))
    out.print(table)


def _list_algorithms() -> list[dict[str, Any]]:
    return _describe_modules(ALGORITHMS)


def _list_stages() -> list[dict[str, Any]]:
    return _describe_modules(STAGES)


def _describe_modules(registry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What has a file of its own, whose first words are about it."""
    rows = []
    for name, kind in registry.items():
        doc = (sys.modules[kind.__module__].__doc__ or "").split("\n\n")[0]
        options = [option.name for option in fields(kind) if option.name != "training"]
        rows.append({"name": name, "options": options, "about": " ".join(doc.split())})
    return rows


def _list_models() -> list[dict[str, Any]]:
    return [
        {"name": name, "min_pixels": spec.min_size, "about": spec.description, "paper": spec.paper}
        for name, spec in MODELS.items()
    ]


def _list_datasets() -> list[dict[str, Any]]:
    return [
        {"name": name, "about": spec.about, "licence": spec.licence, "options": _dataset_options(spec.options)}
        for name, spec in DATASETS.items()
    ]


def _dataset_options(kind: type[Options]) -> list[str]:
    """Its options beside those that every set of image files has (docs/data.md)."""
    common = ImageOptions.model_fields if issubclass(kind, ImageOptions) else {}
    return [name for name in kind.model_fields if name not in common] + (["image options"] if common else [])


def _list_recipes() -> list[dict[str, Any]]:
    return [{"name": name, "about": Recipe.load(path).about} for name, path in bundled_recipes().items()]


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="A folder of recipes/: a paper.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="A small honest version, on the CPU, in five minutes.")
    ] = False,
    data: Data = None,
    only: Annotated[str | None, typer.Option("--only", help="Run only this table; the page keeps the others.")] = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Only write the page again, from kept figures.")] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Where the runs go (default: runs/PAPER).")] = None,
    as_json: Json = False,
) -> None:
    """Run all recipes of a paper and write its page of results (docs/results/; with --quick into the output folder)."""
    target = folder or Path("runs") / (f"{paper}-quick" if quick else paper)
    if rebuild:
        page, comparisons = write_page(paper, quick, target if quick else results_folder())
    else:
        with progress_display() as display:
            page, comparisons = reproduce_paper(
                paper, quick, target, data, display.on_event, display.start_run, only=only
            )
    if as_json:
        print_json({"page": str(page), "tables": [c.to_json() for c in comparisons]})
        return
    for comparison in comparisons:
        out.print(comparison_table(comparison))
    out.print(Text(f"page: {page}"), soft_wrap=True)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no Greek still gets its table
    app()
