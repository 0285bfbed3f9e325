"""Files that another process is writing: read as far as they are whole, and never touched."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from polyclinic.config.recipe import Recipe
from polyclinic.deploy.processes import STATUS
from polyclinic.experiments.compare import PLAN_FILE

T = TypeVar("T")
SIGNS = ("recipe.yaml", "ledger.jsonl", ".lock", STATUS)
"""What shows that a folder is a run's, or is becoming one."""
DEEPEST, MOST_RUNS = 4, 500


class Reader:
    """Reads a file again only when it has changed: a page that asks every two seconds costs next to nothing."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[tuple[int, int, int], Any]] = {}

    def read(self, path: Path, parse: Callable[[Path], T]) -> T | None:
        """None where there is no such file yet."""
        try:
            found = path.stat()
            mark = found.st_mtime_ns, found.st_size, found.st_ino
            kept = self._kept.get(path)
            if kept is None or kept[0] != mark:
                kept = self._kept[path] = mark, parse(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        value: T = kept[1]
        return value

    def read_rows(self, path: Path) -> list[dict[str, Any]]:
        return self.read(path, _parse_complete_rows) or []

    def read_json(self, path: Path) -> Any:
        return self.read(path, lambda place: json.loads(place.read_bytes()))

    def read_recipe(self, path: Path) -> Recipe | None:
        return self.read(path, Recipe.load)


def _parse_complete_rows(path: Path) -> list[dict[str, Any]]:
    """Up to the first that cannot be read: of the last, perhaps only a half is written."""
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def find_runs(folder: Path) -> Iterator[Path]:
    """The runs' folders in a folder, or the folder itself; what lies within a run is not looked at."""
    found = 0
    for place, inner, files in os.walk(folder):
        here = Path(place)
        if any(sign in files for sign in SIGNS):
            inner.clear()
            found += 1
            yield here
        if found >= MOST_RUNS:
            return
        deep = len(here.relative_to(folder).parts) >= DEEPEST
        inner[:] = [] if deep else sorted(name for name in inner if not name.startswith("."))


def find_plans(folder: Path) -> Iterator[Path]:
    """The lists of runs of comparisons in a folder."""
    yield from sorted(path for depth in range(DEEPEST - 1) for path in folder.glob("*/" * depth + PLAN_FILE))


def last_written_at(folder: Path) -> float | None:
    """When a run was last heard of."""
    times = []
    for name in ("ledger.jsonl", "metrics.jsonl", "recipe.yaml", "result.json", "snapshots"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def is_locked(folder: Path) -> bool | None:
    """Whether another process holds the lock of a run's folder; None where the system does not say.

    It is only asked about: to try the lock would, for a moment, take it. Not for the process that runs: whoever closes
    a file gives up the locks it has on it.
    """
    linux = sys.platform != "darwin"
    layout = "hhqqi4x" if linux else "qqihh"
    nothing = (0, 0, 0)
    asked = (fcntl.F_RDLCK, os.SEEK_SET, *nothing) if linux else (*nothing, fcntl.F_RDLCK, os.SEEK_SET)
    try:
        with open(folder / ".lock", "rb") as file:
            told = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(layout, *asked))
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return bool(struct.unpack(layout, told)[0 if linux else 3] != fcntl.F_UNLCK)
