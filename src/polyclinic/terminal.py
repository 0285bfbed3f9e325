"""What the commands share: how they speak, and the options many of them have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")]
Data = Annotated[Path | None, typer.Option("--data", help="Folder of the data sets (or POLYCLINIC_DATA).")]


def tell(sentence: str) -> None:
    err.print(Text(sentence), soft_wrap=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
