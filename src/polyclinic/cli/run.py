"""The commands `run`, `resume`, `demo` and `list`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from polyclinic.cli.common import (
    Data,
    Json,
    Seed,
    Settings,
    Track,
    find_recipe,
    out,
    parse_settings,
    print_json,
)
from polyclinic.cli.display import (
    SAME_COMMAND,
    print_comparison,
    print_result,
    progress_display,
)
from polyclinic.config.bundled import bundled_recipes
from polyclinic.core import RecipeError, StoreError, read_yaml, slugify

if TYPE_CHECKING:
    from polyclinic.config.recipe import Recipe
    from polyclinic.data.options import Options


def demo_command(
    folder: Annotated[Path, typer.Option("--out", help="The output folder.")] = Path("polyclinic-demo"),
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare several methods on five simulated sites. Takes under two minutes and needs no data."""
    from polyclinic.config.recipe import Recipe
    from polyclinic.experiments.api import report
    from polyclinic.experiments.compare import compare

    recipe = Recipe.load(bundled_recipes()["demo"], parse_settings(None, seed=seed))
    with progress_display(about=recipe.about) as display:
        comparison = compare([recipe], 1, folder, None, display.on_event, display.start_run)
    report([folder], folder / "report.html")
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
    from polyclinic.config.recipe import Recipe

    given = parse_settings(settings, seed=seed, engine__name=engine, engine__device=device, track=track or None)
    loaded = Recipe.load(find_recipe(recipe), given)
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
    from polyclinic.config.recipe import Recipe

    if not (folder / "recipe.yaml").is_file():
        raise StoreError(
            f"{folder} holds no run (recipe.yaml is missing); give the folder that `run` wrote to, or, for a "
            "comparison, the same command again"
        )
    _run_recipe(
        Recipe.load(folder / "recipe.yaml", parse_settings(settings, track=track or None)), folder, data, as_json
    )


def _run_recipe(recipe: Recipe, folder: Path, data: Path | None, as_json: bool) -> None:
    from polyclinic.runs.experiment import run as run_recipe

    def way_on() -> str:
        again = ["polyclinic", "resume", str(folder), *(["--data", str(data)] if data else [])]
        return f"continue with {shlex.join(again)}" if (folder / "recipe.yaml").exists() else SAME_COMMAND

    with progress_display(way_on) as display:
        display.start_run(recipe, 0, 1)
        result = run_recipe(recipe, folder, data, display.on_event)
    print_result(result, folder, as_json)


def list_command(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="algorithms, models, datasets, stages or recipes")],
    as_json: Json = False,
) -> None:
    """List the algorithms, models, datasets, stages or recipes that can be named."""
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
    from polyclinic.algorithms import describe_algorithms

    return [{"name": name, "options": d.options, "about": d.about} for name, d in describe_algorithms().items()]


def _list_stages() -> list[dict[str, Any]]:
    from polyclinic.privacy.transforms import describe_transforms

    return [{"name": name, "options": d.options, "about": d.about} for name, d in describe_transforms().items()]


def _list_models() -> list[dict[str, Any]]:
    from polyclinic.models import MODELS

    return [
        {"name": name, "min_pixels": spec.min_size, "about": spec.description, "paper": spec.paper}
        for name, spec in MODELS.items()
    ]


def _list_datasets() -> list[dict[str, Any]]:
    from polyclinic.data import DATASETS, describe_datasets

    about = describe_datasets()
    return [
        {"name": name, "about": about[name], "licence": spec.licence, "options": _dataset_options(spec.options)}
        for name, spec in DATASETS.items()
    ]


def _dataset_options(kind: type[Options]) -> list[str]:
    """Return the options of a dataset; "image options" stands for those of all image files (docs/data.md)."""
    from polyclinic.data.loading.image_options import ImageOptions

    common = ImageOptions.model_fields if issubclass(kind, ImageOptions) else {}
    return [name for name in kind.model_fields if name not in common] + (["image options"] if common else [])


def _list_recipes() -> list[dict[str, Any]]:
    return [{"name": name, "about": read_yaml(path).get("about", "")} for name, path in bundled_recipes().items()]
