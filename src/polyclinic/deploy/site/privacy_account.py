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
from polyclinic.privacy.plan import Plan, candidates
from polyclinic.privacy.shared_ledger import SharedLedger
from polyclinic.storage.run_files import Ledger, write_json

Charge: TypeAlias = dict[str, tuple[Spend, ...]]
"""What training images pay, and what validation images pay: an image is either, so the dearer counts."""
VALIDATION = "validation"


class Account:
    """One run's page in the site's ledger. `run` names the run and its terms: under others it would be another run."""

    def __init__(
        self, folder: Path, site: SiteId, run: str, plan: Plan, budget: Budget | None, cohorts: bool = False
    ) -> None:
        """cohorts: the site takes part in some rounds only, nobody here knows in which."""
        self.site, self.run, self.plan, self.budget, self.cohorts = site, run, plan, budget, cohorts
        self.path = folder / f"ledger-{plan.wish.unit}.jsonl"
        self._seen = folder / f"ledger-{plan.wish.unit}.seen.json"

    def round(self, models: int = 0) -> Charge:
        """A round's releases; `models`: of how many, at least, it tells noised metrics."""
        plan = self.plan
        charge: Charge = {self.site: plan.round_of(self.site)}
        if plan.wish.metrics == "count" and models:
            largest = plan.holdings[self.site].largest_validation if plan.wish.unit == "patient" else 1
            charge[VALIDATION] = (Spend(plan.metrics_noise, times=max(models, plan.models), group=largest),)
        return charge

    def refuse_run(self) -> None:
        """The whole run, beside what the ledger holds already, must be within the budget before it begins."""
        known = self._own()
        again = len(known) - len({round for round, _ in known})
        whole = _times(self.round(self.plan.models), len(self.plan.rounds))
        if self.plan.wish.noise is None and not self.cohorts and not self._as_promised(whole):
            raise Refused("privacy", f"the noise is too little for what the recipe promises the records of {self.site}")
        if not self._within(_summed([whole, *list(known.values())[-again or len(known) :]]), self._earlier()):
            raise Refused(
                "budget",
                f"this run would cost more than the privacy budget of {self.site} has left; ask for fewer rounds, or "
                "for more noise",
            )

    def charge(self, round: int, of: str, charge: Charge) -> None:
        """Write down what a round will release, before it does. `of` names the very release: again, it is free."""
        known = self._own()
        if (round, of) in known:
            return
        total = _summed([*known.values(), charge])
        if not self._as_promised(total):
            raise Refused("privacy", f"round {round} would cost {self.site} more than the recipe promises")
        told = {who: [list(astuple(spend)) for spend in spends] for who, spends in charge.items()}
        try:
            seen = self._book().enter(round, 1, {"of": of, "sites": told}, lambda earlier: self._within(total, earlier))
        except RoundFailed:
            raise Refused("budget", f"the privacy budget of {self.site} cannot pay round {round}") from None
        write_json(self._seen, list(seen))

    def spent(self) -> float:
        """ε of all that this site has released, in all runs of this unit."""
        return self._price(_summed(list(self._own().values())), self._earlier())

    def _price(self, charge: Mapping[str, Sequence[Spend]], earlier: tuple[Spend, ...]) -> float:
        delta = self.budget.delta if self.budget else self.plan.wish.delta
        return max(epsilon((*one, *earlier), delta) for one in candidates(charge, 1) or [()])

    def _as_promised(self, charge: Mapping[str, Sequence[Spend]]) -> bool:
        """Whether one run stays within its recipe's own ε: a server cannot send less noise than it promised."""
        wish = self.plan.wish
        return wish.epsilon is None or replace(self.plan, earlier=(), holders=1).price(charge) <= wish.epsilon

    def _within(self, charge: Mapping[str, Sequence[Spend]], earlier: tuple[Spend, ...]) -> bool:
        return self.budget is None or self._price(charge, earlier) <= self.budget.epsilon

    def _earlier(self) -> tuple[Spend, ...]:
        return self._book().earlier()

    def _book(self) -> SharedLedger:
        return SharedLedger(self.path, self.run, self.plan.wish.unit, self._own(), self._last())

    def _last(self) -> tuple[int, str] | None:
        """How far the ledger had come: one that lost rows since would forget what was spent."""
        if not self._seen.exists():
            return None
        try:
            rows, chain = json.loads(self._seen.read_text())
            return int(rows), str(chain)
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(f"{self._seen} is damaged ({error}); restore it from a backup") from None

    def _own(self) -> dict[tuple[int, str], Charge]:
        """What this run was charged, by round and release."""
        rows: list[dict[str, Any]] = Ledger(self.path).read() if self.path.exists() else []
        return {
            (row["round"], row["privacy"]["of"]): {
                who: tuple(Spend(*spend) for spend in spends) for who, spends in row["privacy"]["sites"].items()
            }
            for row in rows
            if row["run"] == self.run
        }


def _times(charge: Charge, rounds: int) -> Charge:
    return {who: tuple(replace(s, times=s.times * rounds) for s in spends) for who, spends in charge.items()}


def _summed(charges: Sequence[Mapping[str, Sequence[Spend]]]) -> Charge:
    total: Charge = {}
    for charge in charges:
        for who, spends in charge.items():
            total[who] = (*total.get(who, ()), *spends)
    return total
