"""Follows the folder of a run or a comparison while other processes write it."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from polyclinic.config.recipe import Recipe
from polyclinic.core import PolyclinicError, StoreError
from polyclinic.dashboard.privacy_spent import Spent, SpentSoFar
from polyclinic.dashboard.run import METRICS, Curve, RunStatus
from polyclinic.deploy.status import read_status
from polyclinic.evaluation.rows import group_pairs
from polyclinic.evaluation.summary import Cost
from polyclinic.experiments.compare import PLAN_FILE
from polyclinic.reporting.formatting import format_count
from polyclinic.storage.files import explain_os_errors
from polyclinic.storage.run_folder import DEEPEST, MOST_RUNS, PATIENCE, RunFolder, State, find_runs

CACHE_SECONDS = 0.5
"""Seconds for which one reading serves every request."""
FOLDER_HINT = "give the folder that `polyclinic run` or `polyclinic compare` writes to"


@dataclass(frozen=True, eq=False)
class PageState:
    """The state of the folder's runs at one time."""

    title: str
    runs: tuple[RunStatus, ...]
    single: bool
    """One run, and not a comparison that may have just one so far."""
    spent: Mapping[RunStatus, Spent] = field(default_factory=dict)

    @cached_property
    def methods(self) -> dict[str, list[RunStatus]]:
        return group_pairs((run.method, run) for run in self.runs)

    def runs_in_state(self, *states: State) -> list[RunStatus]:
        return [run for run in self.runs if run.state in states]

    @property
    def current_run(self) -> RunStatus | None:
        """The run whose sites are shown: the only one, or the one that is running."""
        return self.runs[0] if self.single else next(iter(self.runs_in_state("running")), None)

    @property
    def seconds_since_news(self) -> float | None:
        """Since any file of any run was written."""
        return min((run.seconds_since_news for run in self.runs if run.seconds_since_news is not None), default=None)

    @property
    def state(self) -> State:
        if self.single:
            return self.runs[0].state
        if not self.runs_in_state("running", "finished", "failed", "stopped", "unreadable"):
            return "waiting"
        between = (
            self.runs_in_state("waiting")
            and not self.runs_in_state("stopped")
            and self.seconds_since_news is not None
            and self.seconds_since_news < PATIENCE
        )
        if self.runs_in_state("running") or between:
            return "running"
        if self.runs_in_state("waiting", "stopped", "unreadable"):
            return "stopped"
        return "failed" if self.runs_in_state("failed") else "finished"

    @property
    def sentence(self) -> str:
        """The state in words; it changes from round to round."""
        if self.single:
            return self.runs[0].sentence
        ended = f"{len(self.runs_in_state('finished'))} of {format_count(len(self.runs), 'run')} finished"
        wrong = ", ".join(
            f"{len(found)} {state}" for state in ("failed", "unreadable") if (found := self.runs_in_state(state))
        )
        ended += f", {wrong}" if wrong else ""
        if self.state == "waiting":
            return "Not yet started."
        if self.current_run is not None:
            status = self.current_run.sentence.removeprefix("Running: ")
            return f"Running: {ended}. {self.run_label(self.current_run)}: {status}"
        if self.state == "running":
            return f"Running: {ended}; the next is being prepared."
        return f"{self.state.capitalize()}: {ended}{'; no process is at work' if self.state == 'stopped' else ''}."

    def run_label(self, run: RunStatus) -> str:
        return run.method if len(self.methods[run.method]) == 1 else f"{run.method}, run {run.number}"

    @property
    def rounds_played(self) -> tuple[int, int]:
        """Rounds played, and rounds in all. A run that has ended early counts with the rounds that it played."""
        over = ("finished", "failed", "unreadable")
        return sum(r.rounds_done for r in self.runs), sum(
            r.rounds_done if r.state in over else r.rounds for r in self.runs
        )

    @property
    def seconds_left(self) -> float | None:
        """For the current run and those to come, which take as long as others of their method, or as all on average."""
        if self.single or self.state != "running":
            return self.runs[0].seconds_left if self.single else None
        known = {name: [r.median_round_seconds for r in runs] for name, runs in self.methods.items()}
        each = {name: fmean(v) for name, found in known.items() if (v := [s for s in found if s is not None])}
        if not each:
            return None
        usual = fmean(each.values())
        begun = [run.seconds_left for run in self.runs_in_state("running")]
        to_come = [
            run for run in self.runs_in_state("waiting", "running") if run.seconds_left is None and not run.is_testing
        ]
        return sum(filter(None, begun)) + sum((r.rounds - r.rounds_done) * each.get(r.method, usual) for r in to_come)

    @property
    def cost(self) -> Cost:
        """Of all runs together."""
        names = ("bytes_down", "bytes_up", "seconds", "site_seconds", "refused", "failed")
        return Cost(**{name: sum(getattr(run.cost, name) for run in self.runs) for name in names})

    def curves_by_name(self, metric: str) -> dict[str, Curve]:
        """A run's curves, or the mean of each method over the seeds that have reported the round so far."""
        if self.single:
            return self.runs[0].curves[metric]
        return {
            name: _mean_curve([next(iter(run.curves[metric].values()), ()) for run in runs])
            for name, runs in self.methods.items()
        }

    def seconds_by_method(self) -> dict[str, Curve]:
        """Seconds of each round, by method."""
        return {name: _mean_curve([run.round_times for run in runs]) for name, runs in self.methods.items()}

    def to_json(self) -> dict[str, Any]:
        """The state for programs."""
        played, total = self.rounds_played
        found: dict[str, Any] = {
            "title": self.title,
            "kind": "run" if self.single else "comparison",
            "state": self.state,
            "sentence": self.sentence,
            "round": self.runs[0].current_round if self.single else played,
            "rounds": self.runs[0].rounds if self.single else total,
            "seconds_left": self.seconds_left,
            "seconds_since_news": self.seconds_since_news,
            "cost": self.cost.model_dump(),
            "curves": {metric: self.curves_by_name(metric) for metric in METRICS},
            "runs": [
                run.to_json() | {"privacy": self.spent[run].to_json() if run in self.spent else None}
                for run in self.runs
            ],
        }
        if self.current_run is not None:
            found["sites"] = [vars(site) for site in self.current_run.sites]
            found["failures"] = [vars(failure) for failure in self.current_run.failures]
        return found


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    values = group_pairs(point for curve in curves for point in curve)
    return [(round, fmean(found)) for round, found in sorted(values.items())]


class Follower:
    """Reads a folder for everyone who asks."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise StoreError(f"there is no folder {folder}; {FOLDER_HINT}")
        with explain_os_errors(folder, "read", FOLDER_HINT):
            empty = not any(folder.iterdir())
        if not empty and not any(find_runs(folder, DEEPEST)) and not any(find_plans(folder)):
            raise StoreError(f"{folder} holds no run (recipe.yaml is missing); {FOLDER_HINT}")
        self.folder = folder.resolve()
        self._spent, self._lock = SpentSoFar(), threading.Lock()
        self._folders: dict[Path, RunFolder] = {}
        self._runs: dict[Path, RunStatus] = {}
        self._seen: PageState | None = None
        self._until = 0.0

    def read_state(self) -> PageState:
        """The folder as it is now."""
        with self._lock:
            if self._seen is None or time.monotonic() > self._until:
                self._seen = self._read_folder()
                self._until = time.monotonic() + CACHE_SECONDS
            return self._seen

    def _read_folder(self) -> PageState:
        places = [found.path for found in find_runs(self.folder, DEEPEST, MOST_RUNS)]
        runs = [] if places == [self.folder] else list(self._read_runs(places))
        single = not runs
        if single:
            runs = [self._read_run(self.folder, self._folder_label(self.folder))]
        known = self._read_plan(self.folder / PLAN_FILE).get("title") or self._folder_label(self.folder)
        spent = {run: found for run in runs if (found := self._price_run(run)) is not None}
        return PageState(runs[0].method if single else str(known), tuple(runs), single, spent)

    def _read_runs(self, places: Sequence[Path]) -> Iterator[RunStatus]:
        """The runs that comparisons have planned, then those that no plan names."""
        planned = self._planned_runs()
        numbers: dict[str, int] = {}
        for place in dict.fromkeys([*planned, *places]):
            method, rounds = planned.get(place) or (self._folder_label(place), 0)
            numbers[method] = numbers.get(method, 0) + 1
            yield self._read_run(place, method, numbers[method], rounds)

    def _planned_runs(self) -> dict[Path, tuple[str, int]]:
        """Method and rounds of the planned runs, by folder."""
        found: dict[Path, tuple[str, int]] = {}
        for path in find_plans(self.folder):
            above = path.parent.relative_to(self.folder).as_posix()
            for row in self._read_plan(path).get("runs", ()):
                name = row["method"] if above == "." else f"{above}: {row['method']}"
                place = (path.parent / row["folder"]).resolve()
                if place.is_relative_to(self.folder):
                    found[place] = str(name), int(row["rounds"])
        return found

    def _read_plan(self, path: Path) -> dict[str, Any]:
        """The plan of a comparison; {} where it is damaged, since runs that have begun are found anyway."""
        try:
            found = self._files(path.parent).read_if_changed(path, lambda place: json.loads(place.read_bytes()))
            keys = set.intersection(*map(set, found["runs"])) if found else set()
            return found if found and {"method", "folder", "rounds"} <= keys else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _folder_label(self, place: Path) -> str:
        """Without the seed, which a comparison gives to the last folder as its name."""
        if place.name.startswith("seed-"):
            place = place.parent
        return place.name if place in (self.folder, self.folder.parent) else place.relative_to(self.folder).as_posix()

    def _files(self, folder: Path) -> RunFolder:
        """One object for each folder, since it remembers what it has read."""
        return self._folders.setdefault(folder, RunFolder(folder))

    def _read_run(self, folder: Path, method: str, number: int = 1, rounds: int = 0) -> RunStatus:
        files = self._files(folder)
        try:
            before = files.is_locked  # asked twice: a run may begin or end while its files are being read
            recipe = files.read_if_changed(files.recipe, Recipe.load)
            found = RunStatus(
                recipe.name if recipe is not None and folder == self.folder else method,
                number,
                recipe.rounds if recipe is not None else rounds,
                recipe,
                files.summary,
                files.ledger(tolerant=True),
                files.metrics(tolerant=True),
                read_status(folder),
                before or files.is_locked,
                files.last_written,
            )
            return self._reuse_unchanged(folder, found)
        except (PolyclinicError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return RunStatus(method, number, rounds, problem=f"{type(error).__name__}, {error}".rstrip("."))

    def _reuse_unchanged(self, folder: Path, run: RunStatus) -> RunStatus:
        """The status of the last reading, with all that has been computed from it, if no file has changed."""
        before = self._runs.get(folder)
        if before is not None and all(_is_same(vars(run)[f.name], vars(before)[f.name]) for f in fields(run)):
            return before
        _ = run.to_json(), run.sites, run.failures, run.curves, run.by_site  # errors in the files are raised here
        self._runs[folder] = run
        return run

    def _price_run(self, run: RunStatus) -> Spent | None:
        try:
            return self._spent.spent_by(run)
        except (PolyclinicError, KeyError, TypeError, ValueError):
            return None


def _is_same(one: Any, other: Any) -> bool:
    """Long lists are compared by identity: an unchanged file gives the same list."""
    return one is other if isinstance(one, list) else bool(one == other)


def find_plans(folder: Path) -> Iterator[Path]:
    """The plans of comparisons in a folder."""
    yield from sorted(path for depth in range(DEEPEST - 1) for path in folder.glob("*/" * depth + PLAN_FILE))
