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
from polyclinic.privacy.plan import RELEASED, Plan
from polyclinic.privacy.shared_ledger import SharedLedger
from polyclinic.privacy.transforms.noise import largest_share, with_noise
from polyclinic.storage.messages import digest


class PrivacyBudget:
    """Keeps a run within its plan."""

    def __init__(self, plan: Plan, secret: Stream, passbook: SharedLedger | None = None) -> None:
        """`secret`: where noise comes from that the server itself adds; `passbook`: what several runs share."""
        self.plan, self.secret, self.passbook = plan, secret, passbook
        self.seen: dict[tuple[int, str], dict[SiteId, tuple[Spend, ...]]] = {}

    @property
    def tells(self) -> bool:
        """Whether sites report metrics at all."""
        return self.plan.wish.metrics != "suppress"

    @property
    def hides_drift(self) -> bool:
        """How far an update went before the server's noise is the site's secret."""
        return self.plan.wish.unit == "site" and self.plan.wish.at == "server"

    def noised(self, round: int, before: Bundle, after: Bundle, weights: Sequence[float]) -> Bundle:
        """The new state with the server's noise, where the plan trusts the server to add it."""
        wish = self.plan.wish
        if wish.unit != "site" or wish.at != "server":
            return after
        std = self.plan.noise * wish.clip * largest_share(weights)
        # Named by the mean it covers: if another set of sites answers when a round is repeated, so must the noise be.
        return with_noise(after, RELEASED, std, self.secret.child(round, digest(before), digest(after), repr(std)))

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take over what a ledger says was charged before."""
        for row in rows:
            if row.get("event") == "charge" and row.get("privacy"):
                self._note(int(row["round"]), row["privacy"])
                if self.passbook is not None:
                    self.passbook.known.add((int(row["round"]), row["privacy"]["of"]))

    def charge(self, round: int, cohort: Sequence[SiteId], state: Bundle, remembered: bool = False) -> dict[str, Any]:
        """What the round will release, to be written down before anything is sent.

        `remembered`: sites keep a memory, which the server cannot compare: then every attempt is counted. So it is
        where the server adds the noise, for its mean depends on who answered.
        """
        spends = {site: [list(astuple(spend)) for spend in self.plan.round_of(site)] for site in cohort}
        attempt = f"-{self._attempts(round)}" if remembered or self.hides_drift else ""
        found: dict[str, Any] = {"of": self._of(state) + attempt, "sites": spends}
        if not math.isinf(self.plan.metrics_noise):
            found["metrics"] = [self.plan.metrics_noise, self.plan.models]
        if self.passbook is not None:
            seen = self.passbook.enter(
                round, self.plan.holders, found, lambda earlier: self._pays(round, cohort, state, earlier)
            )
            found["account"] = list(seen)
        self._note(round, found)
        return found

    def affords(self, round: int, cohort: Sequence[SiteId], state: Bundle) -> bool:
        """Whether the round can be played without spending more than was wished."""
        return self._pays(round, cohort, state, self.passbook.earlier() if self.passbook else ())

    def _pays(self, round: int, cohort: Sequence[SiteId], state: Bundle, earlier: tuple[Spend, ...]) -> bool:
        if earlier != self.plan.earlier:
            self.plan = replace(self.plan, earlier=earlier)
        cap = self.plan.wish.epsilon
        if cap is None or (round, self._of(state)) in self.seen or self._as_planned(cap):
            return True
        spent = self.spent()
        after = {site: (*spent.get(site, ()), *self.plan.round_of(site)) for site in cohort}
        return self.plan.price({**spent, **after}) <= cap

    def _attempts(self, round: int) -> int:
        return sum(known == round for known, _ in self.seen)

    def _of(self, state: Bundle) -> str:
        """What a round's release depends on: the weights, the noise, the clip, and which kind of device draws it."""
        device = next((t.device.type for group in state.values() for t in group.values()), "cpu")
        terms = f"{digest(state)}|{self.plan.noise!r}|{self.plan.wish.clip!r}|{device}"
        return hashlib.sha256(terms.encode()).hexdigest()[:16]

    def _as_planned(self, cap: float) -> bool:
        """Nothing was charged twice, and all of it can be paid."""
        return len({round for round, _ in self.seen}) == len(self.seen) and self.plan.epsilon <= cap

    def spent(self) -> dict[SiteId, tuple[Spend, ...]]:
        """Of every site, all that this run was charged."""
        total: dict[SiteId, dict[Spend, int]] = {}
        for charged in self.seen.values():
            for site, spends in charged.items():
                for spend in spends:
                    once = Spend(spend.noise, spend.rate, 1, spend.group)
                    mine = total.setdefault(site, {})
                    mine[once] = mine.get(once, 0) + spend.times
        return {site: tuple(replace(s, times=times) for s, times in mine.items()) for site, mine in total.items()}

    def _note(self, round: int, found: Mapping[str, Any]) -> None:
        spends = {site: tuple(Spend(*spend) for spend in rows) for site, rows in found["sites"].items()}
        self.seen[round, found["of"]] = spends
