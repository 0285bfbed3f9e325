"""The commands `compare` and `reproduce`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

import polyclinic
from polyclinic.cli.common import (
    Data,
    Json,
    Settings,
    Track,
    find_recipe,
    out,
    parse_settings,
    print_json,
)
from polyclinic.cli.display import (
    comparison_table,
    print_comparison,
    progress_display,
    report_failures,
)
from polyclinic.core import RecipeError, read_yaml, slugify


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
