"""Tracking of a run in TensorBoard or MLflow: every figure under the name that it has in the run's own files.

Points are read from the run's folder, and only for rounds that a snapshot keeps: those never run again. So a run that
was interrupted goes on in the same place with no step twice, and tracking cannot change a run.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

from polyclinic.config.recipe import Recipe
from polyclinic.core import HELD_OUT, SiteId, Stream
from polyclinic.evaluation.rounds import final_rows, mean_over_sites, sum_costs
from polyclinic.evaluation.rows import LEDGER_ROW, METRIC_ROW, CostRow, EvaluateRow, LedgerRow, MetricRow, SiteOutcome
from polyclinic.evaluation.summary import PartScores, RunSummary
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.privacy.plan import PrivacyPlan
from polyclinic.runs.result import RunResult
from polyclinic.runs.tracking.backends import MLflow, Points, TensorBoard
from polyclinic.storage.journal import add_interrupted_rounds
from polyclinic.storage.run_folder import RunFolder

T = TypeVar("T")
MetricPoints = dict[tuple[str, int], float]


def track_finished(result: RunResult, recipe: Recipe) -> RunResult:
    """Add a finished run to the trackers that lack it or its end."""
    if recipe.track and result.folder is not None:
        RunTracking(recipe, result.folder).write_final(result.summary)
    return result


class RunTracking:
    """The points of one run, written to its trackers as its rounds end."""

    def __init__(self, recipe: Recipe, folder: Path, plan: PrivacyPlan | None = None) -> None:
        self.recipe, self.folder = recipe, folder
        files = RunFolder(folder)
        self.metrics, self.ledger = RowTail(files.metrics_file, METRIC_ROW), RowTail(files.ledger_file, LEDGER_ROW)
        self.charged: list[LedgerRow] = []
        self.budget = PrivacyBudget(plan, Stream(0)) if plan is not None and plan.has_guarantee else None
        self.trackers: dict[str, tuple[TensorBoard | MLflow, set[tuple[str, int]]]] | None = None
        self.warned = False

    def begin_round(self, round: int) -> None:
        """Write the points of all rounds before this one, if a snapshot keeps them."""
        if (round - 1) % self.recipe.snapshot_every == 0:
            self.write_points(self.collect_points(round))

    def write_final(self, summary: RunSummary) -> None:
        """Write the points that are left, and those of the result."""
        self.write_points({**self.collect_points(), **final_points(summary)})
        self.close(finished=True)

    def collect_points(self, before: float = math.inf) -> MetricPoints:
        """Return the points of all new rows. The ledger may also have later rounds, which were lost and run again."""
        self.charged += self.ledger.read_new()
        ready = [row for row in self.charged if row.round < before]
        self.charged = [row for row in self.charged if row.round >= before]
        return {**validation_points(self.metrics.read_new()), **cost_points(ready, self.budget)}

    def write_points(self, points: Points) -> None:
        """Write what each tracker lacks. Only a tracker that cannot be opened stops the run, before it begins."""
        if self.trackers is None:
            self.trackers = {}
            for kind in self.recipe.track:
                opened = (
                    TensorBoard(self.folder)
                    if kind == "tensorboard"
                    else MLflow(self.folder, self.recipe.name, recipe_parameters(self.recipe))
                )
                self.trackers[kind] = opened, opened.written_points()
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

    def _warn_once(self, name: str, error: Exception) -> None:
        if not self.warned:
            logging.getLogger(__name__).warning(
                "%s could not be updated (%s); the run goes on, and the same command adds what is missing",
                name,
                (str(error) or repr(error)).splitlines()[0],
            )
        self.warned = True


class RowTail(Generic[T]):
    """The rows that were added to a file of JSON lines since it was last read."""

    def __init__(self, path: Path, row: TypeAdapter[T]) -> None:
        self.path, self.row, self.seen = path, row, 0

    def read_new(self) -> list[T]:
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.seen)
            whole = file.read().rpartition(b"\n")[0]
        self.seen += len(whole) + bool(whole)
        return [self.row.validate_json(line) for line in whole.splitlines()]


def validation_points(rows: Iterable[MetricRow]) -> MetricPoints:
    """Return the metrics of each round's model on validation images, at every site and over all."""
    rounds: dict[int, list[EvaluateRow]] = defaultdict(list)
    for row in rows:
        if isinstance(row, EvaluateRow):
            rounds[row.round].append(row)
    found: MetricPoints = {}
    for round, reports in rounds.items():
        found |= report_points(round, [row for row in reports if row.site != HELD_OUT])
        found |= _mean_points(f"{HELD_OUT}/", round, [row for row in reports if row.site == HELD_OUT])
    return found


def report_points(round: int, reports: Sequence[EvaluateRow]) -> MetricPoints:
    """Means over all sites, then every site's own; of personal models where there are some."""
    found = _mean_points("", round, reports)
    for site in dict.fromkeys(row.site for row in reports):
        found |= _mean_points(f"site/{sanitize_name(site)}/", round, [row for row in reports if row.site == site])
    return found


def _mean_points(before: str, round: int, rows: Sequence[EvaluateRow]) -> MetricPoints:
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    means = ((name, mean_over_sites(rows, name)) for name in names)
    return {(before + name, round): value for name, value in means if value is not None}


def cost_points(rows: Sequence[LedgerRow], budget: PrivacyBudget | None) -> MetricPoints:
    """From the ledger: bytes, seconds, refusals and failures of each round, with all its attempts, and ε after it."""
    rounds: dict[int, list[CostRow]] = defaultdict(list)
    for row in add_interrupted_rounds(rows):
        if isinstance(row, CostRow):
            rounds[row.round].append(row)
    found: MetricPoints = {}
    for round, attempts in rounds.items():
        cost = sum_costs(attempts).model_dump(exclude={"run_seconds"})
        found |= {(name, round): float(value) for name, value in cost.items()}
        for site in dict.fromkeys(site for row in attempts for site in row.sites):
            costs = _site_costs([row.sites[site] for row in attempts if site in row.sites])
            found |= {(f"site/{sanitize_name(site)}/{name}", round): value for name, value in costs.items()}
    if budget is not None:
        for row in rows:
            budget.load_charges([row])
            if row.event == "round" and math.isfinite(epsilon := budget.plan.worst_epsilon(budget.total_spends())):
                found["epsilon", row.round] = epsilon
    return found


def _site_costs(outcomes: Sequence[SiteOutcome]) -> dict[str, float]:
    """Return the cost of one site in a round."""
    total = {
        "bytes_down": float(sum(outcome.down for outcome in outcomes)),
        "bytes_up": float(sum(outcome.up for outcome in outcomes)),
        "seconds": float(sum(outcome.seconds for outcome in outcomes)),
    }
    return total if outcomes[-1].drift is None else total | {"drift": outcomes[-1].drift}


def final_points(summary: RunSummary) -> MetricPoints:
    """From the summary: the last round's model on validation images, and the headline on test images."""
    round, best, privacy = summary.rounds, summary.headline, summary.privacy
    found: MetricPoints = {}
    if privacy and privacy.has_guarantee and privacy.epsilon is not None:
        found["epsilon", round] = privacy.epsilon
    if best.part != "test":  # then validation metrics may be those that sites reported of the round before
        return found
    found |= report_points(round, final_rows(summary)) | _metric_points("test/", round, best.scores)
    for site in summary.sites:
        if scores := summary.headline_at(site):
            found |= _metric_points(f"test/site/{sanitize_name(site)}/", round, scores)
    return found


def _metric_points(before: str, round: int, scores: PartScores) -> MetricPoints:
    return {(before + name, round): value for name, value in scores.values.items() if value is not None}


def sanitize_name(site: SiteId) -> str:
    """Return the site's name in characters that every tracker accepts."""
    return re.sub(r"[^\w. -]|^\.+$", "_", site)


def recipe_parameters(recipe: Recipe) -> dict[str, object]:
    """Return the recipe's dotted keys; without the seed where a private run's noise may come from it."""
    values = recipe.model_dump(mode="json")
    found: dict[str, object] = {"rounds": recipe.rounds, "data.name": recipe.data.name, "model.name": recipe.model.name}
    for section in ("algorithm", "training"):
        found |= {f"{section}.{key}": value for key, value in values[section].items()}
    return found if recipe.privacy else {"seed": recipe.seed, **found}
