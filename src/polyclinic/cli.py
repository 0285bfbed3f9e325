"""The command line. A person's mistake gets one sentence and a non-zero exit code, never a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyclinic.algorithms import ALGORITHMS
from polyclinic.compare import Comparison, compare, compare_folders
from polyclinic.data import DATASETS
from polyclinic.display import Display, comparison_table, result_table
from polyclinic.errors import PolyclinicError, RecipeError, StoreError
from polyclinic.experiment import run as run_recipe
from polyclinic.models import MODELS
from polyclinic.recipe import Recipe, our_recipes, read_yaml
from polyclinic.reproduce import reproduce as reproduce_paper
from polyclinic.reproduce import results_folder, write_page

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Federated learning on medical images, for hospitals that differ.",
)
out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets (or POLYCLINIC_DATA).")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Set a key of the recipe: training.batch=16")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="The seed all randomness comes from.")]


@contextmanager
def resumable(folder: Path, command: str) -> Iterator[None]:
    """Ctrl-C loses nothing; say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(Text(f"stopped; nothing is lost. Go on with: {command}"), soft_wrap=True)
        raise typer.Exit(130) from None
    except StoreError as error:
        err.print(Text(f"error: {error}"), soft_wrap=True)
        if (folder / "recipe.yaml").exists():
            err.print(Text(f"go on with: {command}"), soft_wrap=True)
        raise typer.Exit(1) from None


def parse_settings(settings: list[str] | None, **given: Any) -> dict[str, Any]:
    """`--set key=value` pairs, values read as YAML, with the options that have a flag of their own."""
    found: dict[str, Any] = {}
    for text in settings or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise RecipeError(f"--set {text!r} is not key=value; write for example --set training.batch=16")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise RecipeError(f"--set {text!r}: the value is not YAML; quote it") from None
    return found | {key.replace("__", "."): value for key, value in given.items() if value is not None}


def find_recipe(name: str) -> Path:
    """A path, or the name of one of ours."""
    ours = our_recipes()
    if Path(name).is_file():
        return Path(name)
    if name in ours:
        return ours[name]
    raise RecipeError(f"there is no recipe {name!r}: give a file, or one of ours: {', '.join(ours) or 'none'}")


def show_comparison(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        print(json.dumps(comparison.as_json(), indent=2))
        return
    out.print(comparison_table(comparison))
    if comparison.folder is not None and (comparison.folder / "report.md").exists():
        out.print(
            Text(f"report: {comparison.folder / 'report.md'}   curves: {comparison.folder / 'curves.png'}"),
            soft_wrap=True,
        )


@app.command()
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Where to write.")] = Path("polyclinic-demo"),
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare several methods on five phantom hospitals: under two minutes, no data needed."""
    recipe = Recipe.load(our_recipes()["demo"], parse_settings(None, seed=seed))
    if not as_json:
        out.print(Text(recipe.about), soft_wrap=True)
    with resumable(folder, f"polyclinic demo --out {folder}"), Display(err) as display:
        comparison = compare([recipe], 1, folder, None, display.watch, display.begin)
    show_comparison(comparison, as_json)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of one of ours.")],
    settings: Settings = None,
    data: Data = None,
    engine: Annotated[str | None, typer.Option(help="Where site work runs: local.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or auto.")] = None,
    seed: Seed = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Where to write (default: runs/NAME).")] = None,
    as_json: Json = False,
) -> None:
    """Run one recipe."""
    given = parse_settings(settings, seed=seed, engine__name=engine, engine__device=device)
    loaded = Recipe.load(find_recipe(recipe), given)
    _run(loaded, folder or Path("runs") / loaded.name, data, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of an interrupted run.")],
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Go on with an interrupted run; the result is the same as if it had never stopped."""
    if not (folder / "recipe.yaml").is_file():
        raise StoreError(f"{folder} holds no run (recipe.yaml is missing); give the folder that `run --out` wrote to")
    _run(Recipe.load(folder / "recipe.yaml"), folder, data, as_json)


def _run(recipe: Recipe, folder: Path, data: Path | None, as_json: bool) -> None:
    with resumable(folder, f"polyclinic resume {folder}"), Display(err) as display:
        display.begin(recipe, 0, 1)
        result = run_recipe(recipe, folder, data, display.watch)
    if as_json:
        print(json.dumps(result.summary, indent=2))
        return
    out.print(result_table(result.summary))
    out.print(Text(f"run: {folder}"), soft_wrap=True)


@app.command("compare")
def compare_command(
    what: Annotated[list[str], typer.Argument(help="Recipes to run, or folders of finished runs.")],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds each method gets.")] = 1,
    settings: Settings = None,
    data: Data = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Where to write (default: runs/NAME).")] = None,
    as_json: Json = False,
) -> None:
    """Several methods × seeds in one table; finished runs are not repeated."""
    folders = [Path(name) for name in what if Path(name).is_dir()]
    if folders and len(folders) < len(what):
        raise RecipeError("give either recipes to run or folders of finished runs, not both")
    if folders:
        show_comparison(compare_folders(folders, folder), as_json)
        return
    given = parse_settings(settings)
    recipes = [Recipe.of(read_yaml(path), given, str(path)) for path in map(find_recipe, what)]
    target = folder or Path("runs") / recipes[0].name
    again = f"polyclinic compare {' '.join(what)} --seeds {seeds} --out {target}"
    with resumable(target, again), Display(err) as display:
        comparison = compare(recipes, seeds, target, data, display.watch, display.begin)
    show_comparison(comparison, as_json)


@app.command("list")
def list_command(
    what: Annotated[str, typer.Argument(help="algorithms, models, datasets or recipes")],
    as_json: Json = False,
) -> None:
    """What a recipe can name."""
    listings = {"algorithms": _algorithms, "models": _models, "datasets": _datasets, "recipes": _recipes}
    if what not in listings:
        raise RecipeError(f"there is no list of {what!r}; choose one of {', '.join(listings)}")
    rows = listings[what]()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in rows[0] if rows else ():
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    out.print(table)


def _algorithms() -> list[dict[str, Any]]:
    rows = []
    for name, kind in ALGORITHMS.items():
        doc = (sys.modules[kind.__module__].__doc__ or "").split("\n\n")[0]
        options = [f for f in kind.__dataclass_fields__ if f != "training"]
        rows.append({"name": name, "options": ", ".join(options) or "–", "what it is": " ".join(doc.split())})
    return rows


def _models() -> list[dict[str, Any]]:
    return [
        {"name": n, "smallest image": s.minimum, "what it is": s.about, "paper": s.paper} for n, s in MODELS.items()
    ]


def _datasets() -> list[dict[str, Any]]:
    return [{"name": n, "what it is": s.about, "licence": s.licence} for n, s in DATASETS.items()]


def _recipes() -> list[dict[str, Any]]:
    return [{"name": name, "what it is": Recipe.load(path).about} for name, path in our_recipes().items()]


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help="A folder of recipes/: a paper.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="A small honest version, on the CPU, in five minutes.")
    ] = False,
    data: Data = None,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Only write the page again, from kept figures.")] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Where the runs go (default: runs/PAPER).")] = None,
    as_json: Json = False,
) -> None:
    """Run all recipes of a paper and write its page of results (docs/results/; with --quick into the output folder)."""
    target = folder or Path("runs") / (f"{paper}-quick" if quick else paper)
    again = f"polyclinic reproduce {paper}{' --quick' if quick else ''} --out {target}"
    if rebuild:
        page, comparisons = write_page(paper, quick, target if quick else results_folder())
    else:
        with resumable(target, again), Display(err) as display:
            page, comparisons = reproduce_paper(paper, quick, target, data, display.watch, display.begin)
    if as_json:
        print(json.dumps({"page": str(page), "tables": [c.as_json() for c in comparisons]}, indent=2))
        return
    for comparison in comparisons:
        out.print(comparison_table(comparison))
    out.print(Text(f"page: {page}"), soft_wrap=True)


def main() -> None:
    try:
        app()
    except PolyclinicError as error:
        err.print(Text(f"error: {error}"), soft_wrap=True)
        sys.exit(1)
