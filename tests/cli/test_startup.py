"""Commands that compute nothing answer at once: they load no torch and take little processor time."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import polyclinic
from polyclinic.cli.main import COMMANDS, app

HEAVY = ("torch", "numpy", "scipy", "sklearn", "matplotlib", "torchvision", "pydantic")
RUN = "import sys; from polyclinic.__main__ import main; sys.argv[0] = 'polyclinic'\ntry: main()\nfinally: "
COMMAND_NAMES = [name for commands in COMMANDS.values() for name in commands]


def run_command(*arguments: str) -> tuple[list[str], float]:
    """Run `polyclinic ARGUMENTS`; return the heavy modules that it loaded, and its processor time in seconds."""
    listing = f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": str(Path(polyclinic.__file__).parents[1])}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", RUN + listing, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert found.returncode == 0, found.stderr
    assert found.stdout
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    loaded: list[str] = eval(found.stderr)
    return loaded, seconds


@pytest.mark.parametrize(
    ("call", "limit"),
    [
        ("--version", 0.4),
        ("--help", 0.6),
        ("list algorithms", 1.0),
        ("list models", 1.0),
        ("list stages", 1.0),
        ("list recipes", 1.0),
    ],
)
def test_commands_that_compute_nothing_answer_at_once(call: str, limit: float) -> None:
    """The limits are several times what it takes, so that a busy machine does not fail it, but loading torch does."""
    loaded, seconds = run_command(*call.split())
    assert loaded == []
    assert seconds <= limit


def walk(command: Any, name: str = "polyclinic") -> Iterator[tuple[str, Any]]:
    for key, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, f"{name} {key}")
    yield name, command


def test_every_command_option_and_argument_is_explained() -> None:
    missing = []
    for name, command in walk(typer.main.get_command(app)):
        missing += [] if command.help else [name]
        missing += [f"{name} {param.name}" for param in command.params if not param.help]
    assert missing == []


def test_the_help_of_a_command_loads_nothing_heavy() -> None:
    """One process shows all of them: a module that one loads stays, and counts against that one and all after it."""
    script = f"""
import json, sys
from polyclinic.__main__ import main
loaded = {{}}
for name in {COMMAND_NAMES}:
    sys.argv = ["polyclinic", name, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, name
    loaded[name] = [module for module in {HEAVY} if module in sys.modules]
print(json.dumps(loaded), file=sys.stderr)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(polyclinic.__file__).parents[1])}
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    assert [name for name in COMMAND_NAMES if f"Usage: polyclinic {name} " not in found.stdout] == []
    assert json.loads(found.stderr) == {name: [] for name in COMMAND_NAMES}
