"""What a private run has spent so far, by its ledger and its recipe, before its own page tells."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyclinic.core.contract import Stream
from polyclinic.core.errors import RecipeError
from polyclinic.dashboard.run import RunStatus
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.privacy.plan import PrivacyConfig, PrivacyPlan
from polyclinic.runs.privacy_plan import placeholder_private

SHARE = 0.05
"""Of the time, at most, that goes into pricing: long runs are dear to price, and the processor is the run's."""


@dataclass(frozen=True)
class Spent:
    epsilon: float | None
    """None: no finite figure."""
    wish: PrivacyConfig
    round: int
    """Charged up to here: a round is charged before it begins."""
    caveat: str = ""
    """Why it is no guarantee."""
    beside: str = ""
    """What the figure leaves out."""
    over: bool = False
    """Told by the run itself, at its end."""

    def to_json(self) -> dict[str, Any]:
        told = {"epsilon": self.epsilon, "delta": self.wish.delta, "unit": self.wish.unit, "allowed": self.wish.epsilon}
        return told | {"charged_to_round": self.round, "caveat": self.caveat, "leaves_out": self.beside}


class SpentSoFar:
    """Prices runs, not more often than is worth it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[int, Spent, float]] = {}

    def spent_by(self, run: RunStatus) -> Spent | None:
        wish = run.recipe.privacy if run.recipe is not None else None
        if wish is None or run.recipe is None:
            return None
        if run.summary is not None:
            return _spent_when_finished(run.summary, wish)
        key, charges = (run.method, run.number), [row for row in run.ledger if row["event"] == "charge"]
        known = self._known.get(key)
        rested = known is not None and (time.monotonic() >= known[2] or run.state != "running")
        if known is None or (known[0] != len(charges) and rested):
            began = time.monotonic()
            spent = _price_charges(run, wish, charges)
            ended = time.monotonic()
            rest = (ended - began) / SHARE if known is not None else 0.0  # at first, accountants are being loaded
            known = self._known[key] = len(charges), spent, ended + rest
        return known[1]


def _spent_when_finished(summary: Mapping[str, Any], wish: PrivacyConfig) -> Spent | None:
    """By a finished run itself."""
    found = summary.get("privacy")
    if not found:
        return None
    return Spent(found["epsilon"][found["accountant"]], wish, int(summary["rounds"]), found["caveat"], over=True)


def _price_charges(run: RunStatus, wish: PrivacyConfig, charges: Sequence[Mapping[str, Any]]) -> Spent:
    assert run.recipe is not None
    plan = PrivacyPlan(wish, noise=0.0, rounds=(), site_sizes={}, jobs={}, max_sites_per_record=wish.holders or 1)
    guard = PrivacyBudget(plan, Stream(0))
    guard.load_charges(charges)
    try:
        epsilon: float | None = plan.worst_epsilon(guard.total_spends())
    except RecipeError:
        epsilon = None
    caveat = run.recipe.build_algorithm(placeholder_private(wish)).no_guarantee_reason() if wish.unit != "site" else ""
    paid = max((int(row["round"]) for row in charges if row.get("privacy")), default=0)
    known = epsilon is not None and math.isfinite(epsilon)
    return Spent(epsilon if known else None, wish, paid, caveat, _describe_left_out(wish))


def _describe_left_out(wish: PrivacyConfig) -> str:
    told = []
    if wish.unit != "site" and wish.holders is None:
        told.append(f"what more it costs one {wish.unit} that is at several sites")
    if wish.ledger is not None:
        told.append("what earlier runs on the same images have cost")
    return " and ".join(told)
