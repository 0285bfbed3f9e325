"""The plan at work: what each round is charged, before it is played, and whether the next one can still be paid.

A round that is played again after a crash, from the same state, releases the very same numbers: noise is drawn from
the site's secret, the round and the weights received. So equal rounds from equal states are counted once; a round that
is played again from any other state draws other noise, and is counted again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

from polyclinic.core.contract import Bundle, SiteId, Stream
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.plan import RELEASED, PrivacyPlan
from polyclinic.privacy.shared_ledger import SharedLedger
from polyclinic.privacy.transforms.noise import add_noise_to, largest_weight
from polyclinic.storage.messages import hash_tensors


class PrivacyBudget:
    """Keeps a run within its plan."""

    def __init__(self, plan: PrivacyPlan, secret: Stream, passbook: SharedLedger | None = None) -> None:
        """`secret`: where noise comes from that the server itself adds; `passbook`: what several runs share."""
        self.plan, self.secret, self.shared_ledger = plan, secret, passbook
        self.charged_attempts: dict[tuple[int, str], dict[SiteId, tuple[Spend, ...]]] = {}

    @property
    def reports_metrics(self) -> bool:
        """Whether sites report metrics at all."""
        return self.plan.config.metrics != "suppress"

    @property
    def hides_drift(self) -> bool:
        """How far an update went before the server's noise is the site's secret."""
        return self.plan.config.unit == "site" and self.plan.config.at == "server"

    def add_server_noise(self, round: int, before: Bundle, after: Bundle, weights: Sequence[float]) -> Bundle:
        """The new state with the server's noise, where the plan trusts the server to add it."""
        wish = self.plan.config
        if wish.unit != "site" or wish.at != "server":
            return after
        std = self.plan.noise * wish.clip * largest_weight(weights)
        # Named by the mean it covers: if another set of sites answers when a round is repeated, so must the noise be.
        return add_noise_to(
            after, RELEASED, std, self.secret.child(round, hash_tensors(before), hash_tensors(after), repr(std))
        )

    def load_charges(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take over what a ledger says was charged before."""
        for row in rows:
            if row.get("event") == "charge" and row.get("privacy"):
                self._record_charge(int(row["round"]), row["privacy"])
                if self.shared_ledger is not None:
                    self.shared_ledger.known.add((int(row["round"]), row["privacy"]["of"]))

    def charge_round(
        self, round: int, cohort: Sequence[SiteId], state: Bundle, remembered: bool = False
    ) -> dict[str, Any]:
        """What the round will release, to be written down before anything is sent.

        `remembered`: sites keep a memory, which the server cannot compare: then every attempt is counted. So it is
        where the server adds the noise, for its mean depends on who answered.
        """
        spends = {site: [list(astuple(spend)) for spend in self.plan.round_spends(site)] for site in cohort}
        attempt = f"-{self._count_attempts(round)}" if remembered or self.hides_drift else ""
        found: dict[str, Any] = {"of": self._release_id(state) + attempt, "sites": spends}
        if not math.isinf(self.plan.metrics_noise):
            found["metrics"] = [self.plan.metrics_noise, self.plan.models]
        if self.shared_ledger is not None:
            seen = self.shared_ledger.enter_charge(
                round,
                self.plan.max_sites_per_record,
                found,
                lambda earlier: self._within_budget(round, cohort, state, earlier),
            )
            found["account"] = list(seen)
        self._record_charge(round, found)
        return found

    def can_afford(self, round: int, cohort: Sequence[SiteId], state: Bundle) -> bool:
        """Whether the round can be played without spending more than was wished."""
        return self._within_budget(
            round, cohort, state, self.shared_ledger.earlier_spends() if self.shared_ledger else ()
        )

    def _within_budget(self, round: int, cohort: Sequence[SiteId], state: Bundle, earlier: tuple[Spend, ...]) -> bool:
        if earlier != self.plan.earlier:
            self.plan = replace(self.plan, earlier=earlier)
        cap = self.plan.config.epsilon
        if cap is None or (round, self._release_id(state)) in self.charged_attempts or self._follows_plan(cap):
            return True
        spent = self.total_spends()
        after = {site: (*spent.get(site, ()), *self.plan.round_spends(site)) for site in cohort}
        return self.plan.worst_epsilon({**spent, **after}) <= cap

    def _count_attempts(self, round: int) -> int:
        return sum(known == round for known, _ in self.charged_attempts)

    def _release_id(self, state: Bundle) -> str:
        """What a round's release depends on: the weights, the noise, the clip, and which kind of device draws it."""
        device = next((t.device.type for group in state.values() for t in group.values()), "cpu")
        terms = f"{hash_tensors(state)}|{self.plan.noise!r}|{self.plan.config.clip!r}|{device}"
        return hashlib.sha256(terms.encode()).hexdigest()[:16]

    def _follows_plan(self, cap: float) -> bool:
        """Nothing was charged twice, and all of it can be paid."""
        return (
            len({round for round, _ in self.charged_attempts}) == len(self.charged_attempts)
            and self.plan.epsilon <= cap
        )

    def total_spends(self) -> dict[SiteId, tuple[Spend, ...]]:
        """Of every site, all that this run was charged."""
        total: dict[SiteId, dict[Spend, int]] = {}
        for charged in self.charged_attempts.values():
            for site, spends in charged.items():
                for spend in spends:
                    once = Spend(spend.noise, spend.rate, 1, spend.group)
                    mine = total.setdefault(site, {})
                    mine[once] = mine.get(once, 0) + spend.times
        return {site: tuple(replace(s, times=times) for s, times in mine.items()) for site, mine in total.items()}

    def _record_charge(self, round: int, found: Mapping[str, Any]) -> None:
        spends = {site: tuple(Spend(*spend) for spend in rows) for site, rows in found["sites"].items()}
        self.charged_attempts[round, found["of"]] = spends
