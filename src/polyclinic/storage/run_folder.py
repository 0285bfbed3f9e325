"""The folder of a run: the names of its files, and their contents read back. No other module spells these names."""

import fcntl
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args

from pydantic import TypeAdapter, ValidationError

from polyclinic.core import HELD_OUT, SiteId, StoreError
from polyclinic.evaluation.metrics import Predictions
from polyclinic.evaluation.rows import LEDGER_ROW, METRIC_ROW, LedgerRow, MetricRow
from polyclinic.evaluation.summary import SCHEMA_VERSION, RunSummary
from polyclinic.storage.files import LOCK, explain_os_errors, write_json
from polyclinic.storage.predictions import load_predictions

T = TypeVar("T")
State = Literal["finished", "running", "waiting", "failed", "stopped", "unreadable"]
STATES: tuple[State, ...] = get_args(State)
PATIENCE = 60.0
"""Seconds without news after which a run counts as stopped, where the system does not say who holds its lock."""
DEEPEST, MOST_RUNS = 4, 500


class RunFolder:
    """A run's folder, which another process may be writing. A file is read again only after it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.metrics_file, self.ledger_file = path / "metrics.jsonl", path / "ledger.jsonl"
        self.snapshots, self.site_memory = path / "snapshots", path / "sites"
        self.result, self.predictions_file = path / "result.json", path / "predictions.safetensors"
        self.model, self.student = path / "model.safetensors", path / "student.safetensors"
        self.privacy_page, self.privacy_plan = path / "privacy.md", path / "plan.json"
        self.secret = path / "secret"
        """The key of a private run's noise, until the run has ended."""
        self.masks = path / "masks"
        """What was heard in rounds whose updates are masked, for a resume."""
        self.engine, self.mlflow = path / "engine.json", path / "mlflow.json"
        self.lock, self.status = path / LOCK, path / "status.json"
        self.enrolment = path / "enrolled.json"
        """Of a run between real sites: how they described themselves when it began."""
        self.statements = path / "signatures.jsonl"
        """Of a run between real sites: what its sites signed that they received."""
        self.teachers_figure, self.forgetting_figure = path / "teachers.png", path / "forgetting.svg"
        self.features_figure, self.saliency_folder = path / "features.png", path / "explain"
        self.attack_folder = path / "attack"
        self.site_classifier = path / "site_classifier_accuracy.json"
        self._kept: dict[tuple[Path, str], tuple[tuple[int, int, int], object]] = {}

    def prepare(self) -> None:
        """Make the folder, or explain why that is not possible; delete files that a killed process left unfinished."""
        with explain_os_errors(self.path):
            self.snapshots.mkdir(parents=True, exist_ok=True)
            for place in (self.path, self.snapshots, *self.site_memory.glob("*")):
                for unfinished in place.glob(".*.[0-9]*.tmp"):
                    unfinished.unlink(missing_ok=True)
            (probe := self.path / ".probe").write_bytes(b"")
            probe.unlink()

    @property
    def exists(self) -> bool:
        """Whether this is the folder of a run, or is becoming one."""
        return any(path.exists() for path in (self.recipe, self.ledger_file, self.lock, self.status))

    @property
    def is_finished(self) -> bool:
        return self.result.exists()

    @property
    def summary(self) -> RunSummary | None:
        """The run's summary; None as long as it has not finished."""
        return self.read_if_changed(self.result, _read_summary)

    def read_summary(self) -> RunSummary:
        """The summary of a finished run."""
        if (summary := self.summary) is None:
            raise StoreError(f"the run in {self.path} has not ended; go on with: polyclinic resume {self.path}")
        return summary

    def write_summary(self, summary: RunSummary) -> None:
        write_json(self.result, summary.to_json())

    def metrics(self, tolerant: bool = False) -> list[MetricRow]:
        """The rows of metrics.jsonl. A half-written last line is left out; `tolerant`: so is all after a bad line."""
        return self._rows(self.metrics_file, METRIC_ROW, tolerant)

    def ledger(self, tolerant: bool = False) -> list[LedgerRow]:
        """The rows of ledger.jsonl, likewise, without checking their chain (`Ledger` does)."""
        return self._rows(self.ledger_file, LEDGER_ROW, tolerant)

    def predictions(self) -> Mapping[tuple[SiteId, str, str], Predictions]:
        """The final models' predictions, by site, model and part; {} where none were kept."""
        return self.read_if_changed(self.predictions_file, load_predictions) or {}

    def headline_predictions(self, site: SiteId | None = None) -> Predictions | None:
        """Predictions of the headline's model on one site's images, or on all; None where they were not kept."""
        summary, kept = self.read_summary(), self.predictions()
        model, part = summary.headline.model, summary.headline.part
        if model == HELD_OUT:
            return kept.get((HELD_OUT, HELD_OUT, part)) if site is None else None
        if site is not None:
            return kept.get((site, model, part))
        found = [kept[name, model, part] for name in summary.sites if (name, model, part) in kept]
        return Predictions.merge(found) if found and sum(map(len, found)) == summary.headline.scores.n else None

    @property
    def state(self) -> State:
        try:
            if self.is_finished:
                return "finished" if self.summary else "unreadable"
            ledger = self.ledger()
        except (StoreError, OSError):
            return "unreadable"
        if ledger and ledger[-1].event == "failed round":
            return "failed"
        locked, written = self.is_locked, self.last_written
        if locked or (locked is None and written is not None and time.time() - written < PATIENCE):
            return "running"
        return "stopped" if ledger else "waiting"

    @property
    def last_written(self) -> float | None:
        """The time of the last change to a file of the run."""
        times = []
        for path in (self.ledger_file, self.metrics_file, self.recipe, self.result, self.snapshots):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times, default=None)

    @property
    def is_locked(self) -> bool | None:
        """Whether another process holds the folder's lock; None where the system does not say.

        The lock is only queried: trying it would take it for a moment. Not for the process that runs: a process that
        closes a file gives up its locks on it.
        """
        linux = sys.platform != "darwin"
        layout = "hhqqi4x" if linux else "qqihh"
        nothing = (0, 0, 0)
        query = (fcntl.F_RDLCK, os.SEEK_SET, *nothing) if linux else (*nothing, fcntl.F_RDLCK, os.SEEK_SET)
        try:
            with open(self.lock, "rb") as file:
                answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(layout, *query))
        except FileNotFoundError:
            return False
        except OSError:
            return None
        return bool(struct.unpack(layout, answer)[0 if linux else 3] != fcntl.F_UNLCK)

    def read_if_changed(self, path: Path, parse: Callable[[Path], T], key: str = "") -> T | None:
        """Parse a file of the run, or return the earlier result if it has not changed; None: no such file yet.

        `key` distinguishes several ways of parsing one file.
        """
        try:
            found = path.stat()
            mark = found.st_mtime_ns, found.st_size, found.st_ino
            kept = self._kept.get((path, key))
            if kept is None or kept[0] != mark:
                kept = self._kept[path, key] = mark, parse(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cast(T, kept[1])

    def _rows(self, path: Path, row: TypeAdapter[T], tolerant: bool) -> list[T]:
        return self.read_if_changed(path, lambda place: _read_rows(place, row, tolerant), str(tolerant)) or []


def find_runs(folder: Path, deepest: int | None = None, most: int | None = None) -> Iterator[RunFolder]:
    """The runs in a folder, or the folder itself; folders within a run are left out."""
    found = 0
    for place, inner, _ in os.walk(folder):
        here = RunFolder(Path(place))
        if here.exists:
            inner.clear()
            found += 1
            yield here
        if found == most:
            return
        deep = len(here.path.relative_to(folder).parts) == deepest
        inner[:] = [] if deep else sorted(name for name in inner if not name.startswith("."))


def _read_summary(path: Path) -> RunSummary:
    try:
        data = path.read_bytes()
        version = json.loads(data).get("schema_version", 1)
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{path} was written by another version of polyclinic (schema {version}, not {SCHEMA_VERSION}); remove "
                f"it and run `polyclinic resume {path.parent}`, which repeats the final evaluation only"
            )
        return RunSummary.model_validate_json(data)
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise StoreError(f"{path} is damaged ({reason}); remove it and run again: only the end is repeated") from error


def _read_rows(path: Path, row: TypeAdapter[T], tolerant: bool) -> list[T]:
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            rows.append(row.validate_json(line))
        except ValidationError as error:
            if tolerant and error.errors()[0]["type"] == "json_invalid":  # a row that is only half written
                break
            raise StoreError(f"{path} is damaged in line {len(rows) + 1}; restore it from a backup") from error
    return rows
