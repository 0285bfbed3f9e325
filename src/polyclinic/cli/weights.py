"""Weights that others have published, made readable: `polyclinic weights`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from polyclinic.cli.common import Json, out, print_json
from polyclinic.models.weights.convert import convert_checkpoint as convert_checkpoint

app = typer.Typer(no_args_is_help=True, help="Weights from other people's files.")


@app.callback()
def weights() -> None:
    """Weights from other people's files."""


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A torch checkpoint (.pt, .pth, .p).")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.")],
    key: Annotated[str | None, typer.Option("--key", help="Where in the checkpoint the weights are: model")] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", help="Only names that begin so, and without it: four_view_resnet.cc.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Turn a torch checkpoint into a safetensors file for `model.weights`; nothing in it is run (docs/recipes.md)."""
    found = convert_checkpoint(source, target, key, prefix)
    if as_json:
        print_json({"file": str(target), **asdict(found)})
        return
    out.print(Text(f"written: {target} ({found.tensors} tensors, {found.values:,} values)"), soft_wrap=True)
