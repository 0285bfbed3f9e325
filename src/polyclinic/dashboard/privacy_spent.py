"""The ε that a private run has spent so far, from its ledger and its recipe, before its own privacy page exists."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from polyclinic.core import RecipeError, Stream
from polyclinic.dashboard.run import RunStatus
from polyclinic.evaluation.rows import ChargeRow
from polyclinic.federation.privacy_budget import PrivacyBudget
from polyclinic.privacy.plan import PrivacyConfig, PrivacyPlan
from polyclinic.runs.privacy_plan import placeholder_private

SHARE = 0.05
"""The largest share of time for accounting, which is slow for long runs and takes the processor from them."""


@dataclass(frozen=True)
class Spent:
    epsilon: float | None
    """None: no finite figure."""
    config: PrivacyConfig
    round: int
    """Charged up to here: a round is charged before it begins."""
    no_guarantee_reason: str = ""
    left_out: str = ""
    """What the figure leaves out."""
    is_final: bool = False
    """Reported by the finished run."""

    def to_json(self) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon,
            "delta": self.config.delta,
            "unit": self.config.unit,
            "allowed": self.config.epsilon,
            "charged_to_round": self.round,
            "no_guarantee_reason": self.no_guarantee_reason,
            "leaves_out": self.left_out,
        }


class SpentSoFar:
    """Computes the ε of running runs, not more often than is worth its time."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[int, Spent, float]] = {}

    def spent_by(self, run: RunStatus) -> Spent | None:
        config = run.recipe.privacy if run.recipe is not None else None
        if config is None or run.recipe is None:
            return None
        if run.summary is not None:
            if (found := run.summary.privacy) is None:
                return None
            return Spent(found.epsilon, config, run.summary.rounds, found.no_guarantee_reason, is_final=True)
        key, charges = (run.method, run.number), [row for row in run.ledger if isinstance(row, ChargeRow)]
        known = self._known.get(key)
        rested = known is not None and (time.monotonic() >= known[2] or run.state != "running")
        if known is None or (known[0] != len(charges) and rested):
            began = time.monotonic()
            spent = _price_charges(run, config, charges)
            ended = time.monotonic()
            rest = (ended - began) / SHARE if known is not None else 0.0  # at first, accountants are being loaded
            known = self._known[key] = len(charges), spent, ended + rest
        return known[1]


def _price_charges(run: RunStatus, config: PrivacyConfig, charges: Sequence[ChargeRow]) -> Spent:
    assert run.recipe is not None
    plan = PrivacyPlan(
        config, noise=0.0, rounds=(), site_sizes={}, jobs={}, max_sites_per_record=config.max_sites_per_record or 1
    )
    budget = PrivacyBudget(plan, Stream(0))
    budget.load_charges(charges)
    epsilon = math.inf
    with suppress(RecipeError):
        epsilon = plan.worst_epsilon(budget.total_spends())
    reason = config.no_guarantee_reason
    if config.unit != "site":
        reason = run.recipe.build_algorithm(placeholder_private(config)).no_guarantee_reason() or reason
    paid = max((row.round for row in charges if row.privacy), default=0)
    return Spent(epsilon if math.isfinite(epsilon) else None, config, paid, reason, _describe_left_out(config))


def _describe_left_out(config: PrivacyConfig) -> str:
    parts = []
    if config.unit != "site" and config.max_sites_per_record is None:
        parts.append(f"what more it costs one {config.unit} that is at several sites")
    if config.ledger is not None:
        parts.append("what earlier runs on the same images have cost")
    return " and ".join(parts)
