"""Accounts for the privacy budget that all runs have spent at this site, in a ledger that only the site writes.

`participation.py` charges every round here before it is computed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from polyclinic.core import DataError, Refused, RoundFailed, SiteId, StoreError
from polyclinic.deploy.site.policy import Budget
from polyclinic.evaluation.rows import group_pairs
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.plan import PrivacyPlan, SiteSize, Unit
from polyclinic.privacy.shared_ledger import SharedLedger, price_ledger
from polyclinic.privacy.worst_case import RunCost, run_cost, worst_epsilon
from polyclinic.storage.files import write_json
from polyclinic.storage.ledger import Ledger

Charge: TypeAlias = dict[str, tuple[Spend, ...]]
"""The releases that training images pay for (under the site's name), validation images (under VALIDATION) and test
images (under TEST). An image is one of them, so the most expensive counts."""
VALIDATION, TEST = "validation", "test"
LEDGER, LEDGER_SEEN = "ledger.jsonl", "ledger.seen.json"


class PrivacyAccount:
    """One run's entries in the site's ledger. `run` identifies the run together with its terms."""

    def __init__(
        self, folder: Path, site: SiteId, run: str, plan: PrivacyPlan, budget: Budget | None, cohorts: bool = False
    ) -> None:
        """`cohorts`: the site takes part in some rounds only, and does not know in advance in which."""
        self.site, self.run, self.plan, self.budget, self.cohorts = site, run, plan, budget, cohorts
        self.path, self._seen = folder / LEDGER, folder / LEDGER_SEEN

    def round_releases(self, models: int = 0) -> Charge:
        """The releases of one round; `models`: the number of models it reports noised metrics of, if more than planned.

        Metrics are charged in every round, asked for or not: the server may ask for them in a repeated message.
        """
        plan = self.plan
        charge: Charge = {self.site: plan.round_spends(self.site)}
        if plan.config.metrics == "count":
            largest = plan.site_sizes[self.site].largest_validation if plan.config.unit == "patient" else 1
            charge[VALIDATION] = (Spend(plan.metrics_noise, times=max(models, plan.models), group=largest),)
        return charge

    def final_releases(self, models: int, group: int) -> Charge:
        """The noised scores of `models` final models on test images, which no round uses; `group`: the most test images
        of one patient. Raises `Refused` if they would cost a test image (or patient) more than all rounds cost one of
        validation, which is what the server's own account has room for.
        """
        plan = self.plan
        spends = (Spend(plan.metrics_noise, times=models, group=group if plan.config.unit == "patient" else 1),)
        if plan.epsilon_of(spends) > plan.epsilon_of(plan.validation_spends(len(plan.rounds))):
            raise Refused(
                "privacy",
                f"noised scores of the test images of {self.site} would cost more than the recipe plans; privacy.group "
                "bounds the images of a patient",
            )
        return {TEST: spends}

    def check_whole_run(self) -> None:
        """Raise `Refused` unless the whole run, added to the charges in the ledger, stays within the budget."""
        charges = self._charges_of_run()
        again = len(charges) - len({round for round, _ in charges})
        whole = {
            who: tuple(replace(spend, times=spend.times * len(self.plan.rounds)) for spend in spends)
            for who, spends in self.round_releases(self.plan.models).items()
        }
        solved = self.plan.config.noise is None and not self.cohorts  # else the run may stop earlier
        if not self._is_within_recipe_epsilon(whole if solved else self.round_releases(self.plan.models)):
            raise Refused("privacy", f"the noise is too little for what the recipe promises the records of {self.site}")
        total = _sum_charges([whole, *list(charges.values())[-again or len(charges) :]])
        if not self._is_within_budget(total, self._site_ledger().earlier_runs()):
            assert self.budget is not None
            cost, limit = self._epsilon_after(total, self._site_ledger().earlier_runs()), self.budget
            raise Refused(
                "budget",
                f"this run would cost more than the privacy budget of {self.site} has left; ask for fewer rounds, or "
                "for more noise",
            ) from DataError(f"all runs would cost {cost:.3g} of {limit.epsilon:g} at δ = {limit.delta:g}")

    def charge_round(self, round: int, of: str, charge: Charge) -> None:
        """Record the next round's releases. `of` identifies them exactly: repeating the same release costs nothing."""
        charges = self._charges_of_run()
        if (round, of) in charges:
            return
        total = _sum_charges([*charges.values(), charge])
        if not self._is_within_recipe_epsilon(total):
            raise Refused("privacy", f"round {round} would cost {self.site} more than the recipe promises")
        if not self.plan.has_guarantee:  # later runs must not build upon an ε that protects nobody
            charge = {who: tuple(replace(spend, noise=0.0) for spend in spends) for who, spends in charge.items()}
        spent_by = {who: [list(astuple(spend)) for spend in spends] for who, spends in charge.items()}
        try:
            seen = self._site_ledger().enter_charge(
                round,
                replace(self.plan, max_sites_per_record=1, site_sizes=self._sizes_of(charge)),
                {"of": of, "sites": spent_by},
                lambda earlier: self._is_within_budget(total, earlier),
            )
        except RoundFailed:
            raise Refused("budget", f"the privacy budget of {self.site} cannot pay round {round}") from None
        write_json(self._seen, list(seen))

    def _sizes_of(self, charge: Charge) -> Mapping[SiteId, SiteSize]:
        """Return the numbers of images that a charge is about: of test images, too, where it is for their scores."""
        sizes = self.plan.site_sizes
        return {site: size.with_tests() for site, size in sizes.items()} if TEST in charge else sizes

    def epsilon_spent(self) -> float:
        """The ε of everything this site has released, in all runs of this unit."""
        total = _sum_charges(self._charges_of_run().values())
        return self._epsilon_after(total, self._site_ledger().earlier_runs())

    def _epsilon_after(self, charge: Mapping[str, Sequence[Spend]], earlier: tuple[RunCost, ...]) -> float:
        own = run_cost(charge.values(), neighbours=self.plan.config.neighbours)
        return worst_epsilon((own, *earlier), (self.budget or self.plan.config).delta)

    def _is_within_recipe_epsilon(self, charge: Mapping[str, Sequence[Spend]]) -> bool:
        """Whether the run stays within its recipe's ε: a server cannot lower the noise that the recipe promises."""
        promised = self.plan.config.epsilon
        return (
            promised is None
            or not self.plan.has_guarantee
            or replace(self.plan, earlier=(), max_sites_per_record=1).worst_epsilon(charge) <= promised
        )

    def _is_within_budget(self, charge: Mapping[str, Sequence[Spend]], earlier: tuple[RunCost, ...]) -> bool:
        return self.budget is None or self._epsilon_after(charge, earlier) <= self.budget.epsilon

    def _site_ledger(self) -> SharedLedger:
        unit, known = self.plan.config.unit, self._charges_of_run()
        return SharedLedger(self.path, self.run, unit, known, self._ledger_marker(), strict=False)

    def _ledger_marker(self) -> tuple[int, str] | None:
        return _read_marker(self._seen)

    def _charges_of_run(self) -> dict[tuple[int, str], Charge]:
        """The charges of this run, by round and release."""
        return {
            (row["round"], row["privacy"]["of"]): {
                who: tuple(Spend(*spend) for spend in spends) for who, spends in row["privacy"]["sites"].items()
            }
            for row in (Ledger(self.path).read() if self.path.exists() else [])
            if row["run"] == self.run
        }


def price_site_ledger(folder: Path, delta: float) -> dict[Unit, float | str]:
    """Return ε by unit of all that a site has released in all runs, or the reason why it cannot be known."""
    return price_ledger(folder / LEDGER, delta, _read_marker(folder / LEDGER_SEEN))


def _read_marker(path: Path) -> tuple[int, str] | None:
    """Return the ledger's length and hash at the last charge: one that has lost rows since would under-report ε."""
    if not path.exists():
        return None
    try:
        rows, chain = json.loads(path.read_text())
        return int(rows), str(chain)
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path} is damaged ({error}); restore it from a backup") from None


def _sum_charges(charges: Iterable[Charge]) -> Charge:
    charged = group_pairs(pair for charge in charges for pair in charge.items())
    return {who: tuple(chain.from_iterable(spends)) for who, spends in charged.items()}
