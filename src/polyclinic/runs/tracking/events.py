"""A run told to TensorBoard or MLflow as it goes on: every figure under the name that our own files have for it.

What is told is read from the run's own folder, and only of rounds that a snapshot keeps: those are never played again.
So a run that was interrupted goes on in the same place with no step twice, and nothing here can change a run.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyclinic.core.contract import SiteId, Stream
from polyclinic.evaluation.metrics import METRICS
from polyclinic.evaluation.summary import headline_at_site, sum_costs
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.federation.round_log import RoundLog, mean_report
from polyclinic.federation.rounds import HELD_OUT
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.runs.tracking.backends import MLflow, Points, TensorBoard, Tracker
from polyclinic.storage.journal import add_interrupted_rounds

if TYPE_CHECKING:
    from polyclinic.config.recipe import Recipe
    from polyclinic.reporting.run_folder import RunResult
    from polyclinic.runs.experiment import Experiment

Row = Mapping[str, Any]
MetricPoints = dict[tuple[str, int], float]


def run_tracked(experiment: Experiment) -> RunResult:
    """Run it, telling what its recipe's `track` names."""
    recipe, folder = experiment.recipe, experiment.folder
    if not recipe.track or folder is None:
        return experiment.run()
    tracks, watch = RunTracking(recipe, folder, experiment.plan), experiment.watch

    def watched(event: str, info: Mapping[str, Any]) -> None:
        if event == "round":
            tracks.begin_round(info["round"])
        watch(event, info)

    experiment.watch = watched
    try:
        result = experiment.run()
    except BaseException:
        tracks.close(finished=False)
        raise
    tracks.write_final(result.summary)
    return result


def track_finished(result: RunResult, recipe: Recipe) -> RunResult:
    """A run that has ended, told to trackers that have not heard of it, or not to its end."""
    if recipe.track and result.folder is not None:
        RunTracking(recipe, result.folder).write_final(result.summary)
    return result


class RunTracking:
    """What trackers were told of a run, and what there is to tell."""

    def __init__(self, recipe: Recipe, folder: Path, plan: PrivacyPlan | None = None) -> None:
        self.recipe, self.folder = recipe, folder
        self.metrics, self.ledger = JsonLinesTail(folder / "metrics.jsonl"), JsonLinesTail(folder / "ledger.jsonl")
        self.charged: list[dict[str, Any]] = []
        self.guard = PrivacyBudget(plan, Stream(0)) if plan is not None and plan.has_guarantee else None
        self.trackers: dict[str, tuple[Tracker, set[tuple[str, int]]]] | None = None
        self.warned = False

    def begin_round(self, round: int) -> None:
        """All that was played before it, if a snapshot has it."""
        if (round - 1) % self.recipe.snapshot_every == 0:
            self.write_points(self.collect_points(round))

    def write_final(self, summary: Row) -> None:
        """The rest, and what the run came to."""
        self.write_points({**self.collect_points(), **final_points(summary)})
        self.close(finished=True)

    def collect_points(self, before: float = math.inf) -> MetricPoints:
        """Of everything that was written down since it was last asked for. The ledger may also know of later rounds:
        such as were lost, and will be played again."""
        self.charged += self.ledger.read_new()
        ready = [row for row in self.charged if row["round"] < before]
        self.charged = [row for row in self.charged if row["round"] >= before]
        return {**validation_points(self.metrics.read_new()), **cost_points(ready, self.guard)}

    def write_points(self, points: Points) -> None:
        """Trackers that cannot be opened stop a run before it begins; one that fails later does not."""
        if self.trackers is None:
            opened = {name: self._open_tracker(name) for name in self.recipe.track}
            self.trackers = {name: (tracker, tracker.written_points()) for name, tracker in opened.items()}
        for name, (tracker, known) in self.trackers.items():
            new = {at: points[at] for at in sorted(points, key=lambda at: at[1]) if at not in known}
            try:
                if new:
                    tracker.write_points(new)
                known.update(new)
            except Exception as error:  # whatever its library raises
                self._warn_once(name, error)

    def close(self, finished: bool) -> None:
        for name, (tracker, _) in (self.trackers or {}).items():
            try:
                tracker.close(finished)
            except Exception as error:
                self._warn_once(name, error)

    def _open_tracker(self, name: str) -> Tracker:
        return (
            TensorBoard(self.folder)
            if name == "tensorboard"
            else MLflow(self.folder, self.recipe.name, recipe_parameters(self.recipe))
        )

    def _warn_once(self, name: str, error: Exception) -> None:
        if not self.warned:
            told = (
                "%s could not be told how the run goes on (%s); the run does, and the same command adds what is missing"
            )
            logging.getLogger(__name__).warning(told, name, (str(error) or repr(error)).splitlines()[0])
        self.warned = True


class JsonLinesTail:
    """The rows that were added to a file of JSON lines since it was last read."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, 0

    def read_new(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.seen)
            whole = file.read().rpartition(b"\n")[0]
        self.seen += len(whole) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]


def validation_points(rows: Iterable[Row]) -> MetricPoints:
    """Of the rows of metrics.jsonl: how each round's model did on validation images, at every site and over all."""
    rounds: dict[int, dict[SiteId, list[Row]]] = {}
    for row in rows:
        if row["event"] == "evaluate":
            rounds.setdefault(row["round"], {}).setdefault(row["site"], []).append(row)
    found: MetricPoints = {}
    for round, told in rounds.items():
        apart = told.pop(HELD_OUT, [])
        found |= report_points(round, told) | _mean_points(f"{HELD_OUT}/", round, {HELD_OUT: apart})
    return found


def report_points(round: int, reports: Mapping[SiteId, Sequence[Row]]) -> MetricPoints:
    """Means over all sites, then every site's own; of personal models where there are some."""
    found = _mean_points("", round, reports)
    for site, rows in reports.items():
        found |= _mean_points(f"site/{sanitize_name(site)}/", round, {site: rows})
    return found


def _mean_points(before: str, round: int, reports: Mapping[SiteId, Sequence[Row]]) -> MetricPoints:
    book = RoundLog(reports={site: [dict(row) for row in rows] for site, rows in reports.items()})
    means = {(before + metric, round): mean_report(book, metric) for metric in METRICS}
    return {at: value for at, value in means.items() if value is not None}


def cost_points(rows: Sequence[Row], budget: PrivacyBudget | None) -> MetricPoints:
    """Of the ledger's: bytes, seconds, refusals and failures of each round, with all its attempts, and ε after it."""
    rounds: dict[int, list[Row]] = {}
    for row in add_interrupted_rounds(rows):
        if isinstance(row.get("sites"), dict):
            rounds.setdefault(row["round"], []).append(row)
    found: MetricPoints = {}
    for round, attempts in rounds.items():
        found |= {(name, round): float(value) for name, value in sum_costs(attempts).items()}
        for site in dict.fromkeys(site for row in attempts for site in row["sites"]):
            notes = [row["sites"][site] for row in attempts if site in row["sites"]]
            found |= {
                (f"site/{sanitize_name(site)}/{name}", round): value for name, value in _site_costs(notes).items()
            }
    if budget is not None:
        for each in rows:
            budget.load_charges([each])
            if each["event"] == "round" and math.isfinite(epsilon := budget.plan.worst_epsilon(budget.total_spends())):
                found["epsilon", each["round"]] = epsilon
    return found


def _site_costs(notes: Sequence[Row]) -> dict[str, float]:
    """What one site did in a round."""
    total = {
        name: float(sum(note.get(key, 0) for note in notes))
        for name, key in (("bytes_down", "down"), ("bytes_up", "up"), ("seconds", "seconds"))
    }
    drift = notes[-1].get("drift")
    return total if drift is None else total | {"drift": float(drift)}


def final_points(summary: Row) -> MetricPoints:
    """Of a result: the last round's model on validation images, and what the run is judged by on test images."""
    round, best, privacy = summary["rounds"], summary["headline"], summary.get("privacy")
    found: MetricPoints = {}
    if privacy and not privacy["caveat"] and (epsilon := privacy["epsilon"][privacy["accountant"]]) is not None:
        found["epsilon", round] = epsilon
    if best["part"] != "test":  # then validation figures may be those that sites told of the round before
        return found
    told = {
        site: [{"model": name, **parts["validation"]} for name, parts in models.items() if _is_reported(name, parts)]
        for site, models in summary["sites"].items()
    }
    found |= report_points(round, told) | _metric_points("test/", round, best)
    for site in summary["sites"]:
        found |= _metric_points(f"test/site/{sanitize_name(site)}/", round, headline_at_site(summary, site))
    return found


def _is_reported(name: str, parts: Row) -> bool:
    return name in ("global", "personal") and "validation" in parts


def _metric_points(before: str, round: int, row: Row) -> MetricPoints:
    return {(before + metric, round): row[metric] for metric in METRICS if row.get(metric) is not None}


def sanitize_name(site: SiteId) -> str:
    """A site's name as part of a figure's, in characters that every tracker takes."""
    return re.sub(r"[^\w. -]|^\.+$", "_", site)


def recipe_parameters(recipe: Recipe) -> dict[str, Any]:
    """A recipe's keys, dotted, for tables of runs; without the seed where a private run's noise may come from it."""
    values = recipe.model_dump(mode="json")
    found = {"rounds": recipe.rounds, "data.name": recipe.data.name, "model.name": recipe.model.name}
    for section in ("algorithm", "training"):
        found |= {f"{section}.{key}": value for key, value in values[section].items()}
    return found if recipe.privacy else {"seed": recipe.seed, **found}
