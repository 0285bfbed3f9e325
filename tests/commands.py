"""Commands as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from polyclinic.cli.main import app


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def document(*arguments: str | Path) -> Any:
    """What a command prints with --json: exactly one valid document on standard output."""
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=pytest.fail)


def refused(*arguments: str | Path) -> str:
    """The one sentence that a mistake gets; nothing else is printed."""
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    told: str = result.stderr
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert told.endswith("\n")
    return told
