"""What the commands share: how they speak, and the options many of them have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.text import Text

from polyclinic.config.recipe import bundled_recipes
from polyclinic.core.errors import RecipeError

out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets (or POLYCLINIC_DATA).")]

Settings = Annotated[list[str] | None, typer.Option("--set", help="Set a key of the recipe: training.batch=16")]
Track = Annotated[
    list[str] | None, typer.Option("--track", help="Follow it elsewhere too: tensorboard or mlflow; may be repeated.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="The seed all randomness comes from.")]


def print_message(sentence: str) -> None:
    err.print(Text(sentence), soft_wrap=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def parse_settings(settings: list[str] | None, **given: Any) -> dict[str, Any]:
    """`--set key=value` pairs, values read as YAML, with the options that have a flag of their own."""
    found: dict[str, Any] = {}
    for text in settings or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise RecipeError(f"--set {text!r} is not key=value; write for example --set training.batch=16")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):
            raise RecipeError(f"--set {text!r}: the value is not YAML; quote it") from None
    return found | {key.replace("__", "."): value for key, value in given.items() if value is not None}


def find_recipe(name: str) -> Path:
    """A path, or the name of one of ours."""
    ours = bundled_recipes()
    if Path(name).is_file():
        return Path(name)
    if name in ours:
        return ours[name]
    if Path(name).is_dir():
        raise RecipeError(
            f"{name} is a folder; give a recipe file, or go on with a run there: polyclinic resume {name}"
        )
    raise RecipeError(f"there is no recipe {name!r}: give a file, or one of ours: {', '.join(ours) or 'none'}")
