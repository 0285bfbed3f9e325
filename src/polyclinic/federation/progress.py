"""How a run proceeds (`RoundOptions`), and the state of its loop from round to round (`Progress`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from polyclinic.core import SiteId
from polyclinic.federation.robust.rules import PLAIN_MEAN, Aggregation
from polyclinic.federation.robust.store import MEMORY
from polyclinic.federation.round_log import RoundLog, mean_report, middle_report
from polyclinic.federation.schedules import EarlyStop, Schedule

PLATEAU_THRESHOLD = 1e-4
"""The share by which a loss must fall to count as better for the plateau schedule, as in torch."""
LOWER_IS_BETTER = ("loss", "ece")


@dataclass(frozen=True)
class RoundOptions:
    """How a run proceeds, independent of the algorithm and the engine."""

    rounds: int
    run: str = "run"
    seed: int = 0
    cohort: int | None = None
    """Sites per round; None: all."""
    cohort_order: Literal["random", "cyclic"] = "random"
    """A cohort is drawn at random each round, or sites take turns in the federation's order."""
    quorum: int = 1
    deadline: float | None = None
    schedule: Schedule = Schedule()
    early_stop: EarlyStop | None = None
    evaluate_every: int = 1
    """Evaluate where the round number is a multiple of this; 0: only at the end."""
    snapshot_every: int = 1
    max_norm: float = 1e6
    aggregate: Aggregation = PLAIN_MEAN
    update_memory: int = MEMORY
    """Bytes of updates kept in memory until a cohort is complete; further ones are kept on disk."""


@dataclass(frozen=True)
class Progress:
    """The state of the loop, which a resume needs beside the algorithm's."""

    round: int = 0
    lr_reductions: int = 0
    best_loss: float = math.inf
    best_middle_loss: float = math.inf
    rounds_without_lower_loss: int = 0
    best: float = math.inf
    best_middle: float = math.inf
    rounds_without_improvement: int = 0
    stopped: bool = False
    budget_exhausted: bool = False
    """Stopped because the privacy budget could not cover the next round."""
    run: str = ""
    """A hash of recipe and data: a run resumes with the same ones or not at all."""
    memory_rounds: Mapping[SiteId, int] = field(default_factory=dict)
    """Sites that keep a memory, and their last round that counted. Sites without memory never appear."""

    def as_json(self) -> dict[str, object]:
        return {k: None if v == math.inf else v for k, v in asdict(self).items()}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Progress:
        values: Any = {k: math.inf if v is None else v for k, v in fields.items()}
        return Progress(**values)


def advance_progress(progress: Progress, log: RoundLog, rules: RoundOptions) -> Progress:
    """Return the progress after a round: schedule and early stopping follow the metrics that the sites reported.

    A round is better if their mean is, or their median: so one site that reports ever worse figures does not end a run.
    """
    loss, middle = mean_report(log, "loss", rules.aggregate), middle_report(log, "loss", rules.aggregate)
    if loss is not None:
        lower = loss < progress.best_loss * (1 - PLATEAU_THRESHOLD)
        lower_middle = middle is not None and middle < progress.best_middle_loss * (1 - PLATEAU_THRESHOLD)
        worse = 0 if lower or lower_middle else progress.rounds_without_lower_loss + 1
        reduce = rules.schedule.name == "plateau" and worse > rules.schedule.patience
        progress = replace(
            progress,
            best_loss=loss if lower else progress.best_loss,
            best_middle_loss=middle if lower_middle and middle is not None else progress.best_middle_loss,
            rounds_without_lower_loss=0 if reduce else worse,
            lr_reductions=progress.lr_reductions + reduce,
        )
    stop = rules.early_stop
    value = mean_report(log, stop.metric, rules.aggregate) if stop else None
    if stop is not None and value is not None:
        sign = 1 if stop.metric in LOWER_IS_BETTER else -1
        value, middle = sign * value, middle_report(log, stop.metric, rules.aggregate)
        better = value < progress.best - stop.min_delta
        better_middle = middle is not None and sign * middle < progress.best_middle - stop.min_delta
        worse = 0 if better or better_middle else progress.rounds_without_improvement + 1
        progress = replace(
            progress,
            best=value if better else progress.best,  # small steps add up to an improvement
            best_middle=sign * middle if better_middle and middle is not None else progress.best_middle,
            rounds_without_improvement=worse,
            stopped=worse >= stop.patience,
        )
    return progress
