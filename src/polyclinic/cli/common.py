"""Output, options and the search for recipes that all commands share."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from polyclinic.config.bundled import bundled_recipes
from polyclinic.core import RecipeError

if TYPE_CHECKING:
    from polyclinic.core import Stream
    from polyclinic.runs.finished_run import FinishedRun

out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON. Progress goes to standard error.")]
Data = Annotated[Path | None, typer.Option("--data", help="The folder of the datasets (default: POLYCLINIC_DATA).")]

Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set a key of the recipe, such as training.batch=16. May be repeated.")
]
Track = Annotated[list[str] | None, typer.Option("--track", help="Also log to tensorboard or mlflow. May be repeated.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The seed of all randomness.")]


def plain_table(*columns: Column | str) -> Table:
    return Table(*columns, box=None, padding=(0, 1), pad_edge=False)


def titled_table(title: str, *columns: Column | str) -> Table:
    return Table(*columns, title=Text(title), box=None, padding=(0, 1), title_justify="left", caption_justify="left")


def number_columns(*names: str) -> list[Column]:
    return [Column(name, justify="right", no_wrap=True) for name in names]


def print_message(sentence: str) -> None:
    err.print(Text(sentence), soft_wrap=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def parse_settings(settings: list[str] | None, **given: Any) -> dict[str, Any]:
    """Return the values of `--set key=value` by key, read as YAML, and those of `given` options that are not None."""
    found: dict[str, Any] = {}
    for text in settings or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise RecipeError(f"--set {text!r} is not key=value; write for example --set training.batch=16")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):
            raise RecipeError(f"--set {text!r}: the value is not valid YAML; quote it") from None
    return found | {key.replace("__", "."): value for key, value in given.items() if value is not None}


def find_recipe(name: str) -> Path:
    """Return the path of a recipe, which is given as a path or as the name of a bundled recipe."""
    ours = bundled_recipes()
    if Path(name).is_file():
        return Path(name)
    if name in ours:
        return ours[name]
    if Path(name).is_dir():
        raise RecipeError(
            f"{name} is a folder; give a recipe file, or continue the run in it: polyclinic resume {name}"
        )
    near = _find_close_recipes(name, list(ours))
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    raise RecipeError(
        f"there is no recipe {name!r}{meant}: no file {Path(name).absolute()}, and no bundled recipe of that name; "
        "give a file, or the name of a bundled recipe"
    )


def _find_close_recipes(name: str, bundled: list[str]) -> list[str]:
    """Return recipes whose names are nearly this one: files of the same folder, and bundled ones."""
    given = Path(name)
    with contextlib.suppress(OSError):
        files = {path.name: str(path) for pattern in ("*.yaml", "*.yml") for path in given.parent.glob(pattern)}
        if found := difflib.get_close_matches(given.name, files, 2, cutoff=0.7):
            return [files[one] for one in found]
    by_end = {one.rpartition("/")[2]: one for one in bundled}
    stem = name.removesuffix(".yaml")
    close = difflib.get_close_matches(stem, bundled, 2, cutoff=0.75)
    return close or [by_end[one] for one in difflib.get_close_matches(stem, by_end, 1, cutoff=0.75)]


def open_runs(
    folders: Sequence[Path], data: Path | None, device: str | None, seed: int | None, purpose: str
) -> tuple[list[FinishedRun], Stream]:
    """Open finished runs; also return a random stream for a purpose, from `seed` or from the first run's."""
    from polyclinic.core import Stream
    from polyclinic.runs.finished_run import open_run

    runs = [open_run(folder, data, device) for folder in folders]
    return runs, Stream(runs[0].recipe.seed if seed is None else seed, (purpose,))
