"""What all runs together have cost this site's records, in a ledger of its own that no server writes to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, TypeAlias

from polyclinic.core.contract import SiteId
from polyclinic.core.errors import Refused, RoundFailed, StoreError
from polyclinic.deploy.site.policy import Budget
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.privacy.plan import PrivacyPlan, worst_candidates
from polyclinic.privacy.shared_ledger import SharedLedger
from polyclinic.storage.run_files import Ledger, write_json

Charge: TypeAlias = dict[str, tuple[Spend, ...]]
"""What training images pay, and what validation images pay: an image is either, so the dearer counts."""
VALIDATION = "validation"


class PrivacyAccount:
    """One run's page in the site's ledger. `run` names the run and its terms: under others it would be another run."""

    def __init__(
        self, folder: Path, site: SiteId, run: str, plan: PrivacyPlan, budget: Budget | None, cohorts: bool = False
    ) -> None:
        """cohorts: the site takes part in some rounds only, nobody here knows in which."""
        self.site, self.run, self.plan, self.budget, self.cohorts = site, run, plan, budget, cohorts
        self.path = folder / f"ledger-{plan.config.unit}.jsonl"
        self._seen = folder / f"ledger-{plan.config.unit}.seen.json"

    def round_releases(self, models: int = 0) -> Charge:
        """A round's releases; `models`: of how many, at least, it tells noised metrics."""
        plan = self.plan
        charge: Charge = {self.site: plan.round_spends(self.site)}
        if plan.config.metrics == "count" and models:
            largest = plan.site_sizes[self.site].largest_validation if plan.config.unit == "patient" else 1
            charge[VALIDATION] = (Spend(plan.metrics_noise, times=max(models, plan.models), group=largest),)
        return charge

    def check_whole_run(self) -> None:
        """The whole run, beside what the ledger holds already, must be within the budget before it begins."""
        known = self._charges_of_run()
        again = len(known) - len({round for round, _ in known})
        whole = _repeat_charge(self.round_releases(self.plan.models), len(self.plan.rounds))
        if self.plan.config.noise is None and not self.cohorts and not self._check_recipe_epsilon(whole):
            raise Refused("privacy", f"the noise is too little for what the recipe promises the records of {self.site}")
        if not self._check_budget(
            _sum_charges([whole, *list(known.values())[-again or len(known) :]]), self._other_runs()
        ):
            raise Refused(
                "budget",
                f"this run would cost more than the privacy budget of {self.site} has left; ask for fewer rounds, or "
                "for more noise",
            )

    def charge_round(self, round: int, of: str, charge: Charge) -> None:
        """Write down what a round will release, before it does. `of` names the very release: again, it is free."""
        known = self._charges_of_run()
        if (round, of) in known:
            return
        total = _sum_charges([*known.values(), charge])
        if not self._check_recipe_epsilon(total):
            raise Refused("privacy", f"round {round} would cost {self.site} more than the recipe promises")
        told = {who: [list(astuple(spend)) for spend in spends] for who, spends in charge.items()}
        try:
            seen = self._site_ledger().enter_charge(
                round, 1, {"of": of, "sites": told}, lambda earlier: self._check_budget(total, earlier)
            )
        except RoundFailed:
            raise Refused("budget", f"the privacy budget of {self.site} cannot pay round {round}") from None
        write_json(self._seen, list(seen))

    def epsilon_spent(self) -> float:
        """ε of all that this site has released, in all runs of this unit."""
        return self._epsilon_after(_sum_charges(list(self._charges_of_run().values())), self._other_runs())

    def _epsilon_after(self, charge: Mapping[str, Sequence[Spend]], earlier: tuple[Spend, ...]) -> float:
        delta = self.budget.delta if self.budget else self.plan.config.delta
        return max(epsilon((*one, *earlier), delta) for one in worst_candidates(charge, 1) or [()])

    def _check_recipe_epsilon(self, charge: Mapping[str, Sequence[Spend]]) -> bool:
        """Whether one run stays within its recipe's own ε: a server cannot send less noise than it promised."""
        wish = self.plan.config
        return (
            wish.epsilon is None
            or replace(self.plan, earlier=(), max_sites_per_record=1).worst_epsilon(charge) <= wish.epsilon
        )

    def _check_budget(self, charge: Mapping[str, Sequence[Spend]], earlier: tuple[Spend, ...]) -> bool:
        return self.budget is None or self._epsilon_after(charge, earlier) <= self.budget.epsilon

    def _other_runs(self) -> tuple[Spend, ...]:
        return self._site_ledger().earlier_spends()

    def _site_ledger(self) -> SharedLedger:
        return SharedLedger(self.path, self.run, self.plan.config.unit, self._charges_of_run(), self._ledger_marker())

    def _ledger_marker(self) -> tuple[int, str] | None:
        """How far the ledger had come: one that lost rows since would forget what was spent."""
        if not self._seen.exists():
            return None
        try:
            rows, chain = json.loads(self._seen.read_text())
            return int(rows), str(chain)
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(f"{self._seen} is damaged ({error}); restore it from a backup") from None

    def _charges_of_run(self) -> dict[tuple[int, str], Charge]:
        """What this run was charged, by round and release."""
        rows: list[dict[str, Any]] = Ledger(self.path).read() if self.path.exists() else []
        return {
            (row["round"], row["privacy"]["of"]): {
                who: tuple(Spend(*spend) for spend in spends) for who, spends in row["privacy"]["sites"].items()
            }
            for row in rows
            if row["run"] == self.run
        }


def _repeat_charge(charge: Charge, rounds: int) -> Charge:
    return {who: tuple(replace(s, times=s.times * rounds) for s in spends) for who, spends in charge.items()}


def _sum_charges(charges: Sequence[Mapping[str, Sequence[Spend]]]) -> Charge:
    total: Charge = {}
    for charge in charges:
        for who, spends in charge.items():
            total[who] = (*total.get(who, ()), *spends)
    return total
