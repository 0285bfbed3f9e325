"""The privacy budget of a run: each round is charged before it begins, and the run stops before it exceeds its ε.

A round that is repeated after a crash from the same state releases the very same numbers, since noise is drawn from the
site's secret, the round and the weights received. So it is charged once; a round that is repeated from any other state
draws other noise, and is charged again. ε itself is computed in `privacy.accounting`.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace

from polyclinic.core import Bundle, SiteId, Stream
from polyclinic.evaluation.rows import ChargeRow, LedgerRow
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.plan import RELEASED, PrivacyPlan
from polyclinic.privacy.shared_ledger import PrivacyCharge, SharedLedger
from polyclinic.privacy.transforms.noise import add_noise_to, largest_weight
from polyclinic.privacy.worst_case import RunCost
from polyclinic.storage.messages import hash_tensors


class PrivacyBudget:
    """Keeps a run within its privacy plan."""

    def __init__(self, plan: PrivacyPlan, secret: Stream, shared_ledger: SharedLedger | None = None) -> None:
        """`secret`: the source of the server's noise; `shared_ledger`: the charges of all runs on the same images."""
        self.plan, self.secret, self.shared_ledger = plan, secret, shared_ledger
        self.charged_attempts: dict[tuple[int, str], dict[SiteId, tuple[Spend, ...]]] = {}

    @property
    def reports_metrics(self) -> bool:
        """Whether sites may report metrics during the run."""
        return self.plan.config.metrics != "suppress"

    @property
    def hides_drift(self) -> bool:
        """Whether the distance that an update moved must not be logged: noise at the server does not protect it."""
        return self.plan.config.unit == "site" and self.plan.config.noise_at == "server"

    def add_server_noise(self, round: int, before: Bundle, after: Bundle, weights: Sequence[float]) -> Bundle:
        """Return the state after aggregation, with noise if the server adds it; `weights`: those of the updates."""
        config = self.plan.config
        if config.unit != "site" or config.noise_at != "server":
            return after
        std = self.plan.noise * config.clip_norm * largest_weight(weights)
        # Seeded by the mean that it covers: if other sites answer when a round is repeated, the noise is fresh.
        return add_noise_to(
            after, RELEASED, std, self.secret.child(round, hash_tensors(before), hash_tensors(after), repr(std))
        )

    def load_charges(self, rows: Iterable[LedgerRow]) -> None:
        """Take over what a ledger says was charged before."""
        for row in rows:
            if isinstance(row, ChargeRow) and row.privacy:
                self._record_charge(row.round, row.privacy)
                if self.shared_ledger is not None:
                    self.shared_ledger.known.add((row.round, row.privacy["of"]))

    def charge_round(
        self, round: int, cohort: Sequence[SiteId], state: Bundle, remembered: bool = False
    ) -> PrivacyCharge:
        """Charge the round and return the ledger entry, which must be written before anything is sent.

        `remembered`: sites keep a memory, which the server cannot compare, so every attempt is charged. So it is where
        the server adds the noise, since its mean depends on which sites answer.
        """
        spends = {site: [list(astuple(spend)) for spend in self.plan.round_spends(site)] for site in cohort}
        attempts = sum(known == round for known, _ in self.charged_attempts)
        attempt = f"-{attempts}" if remembered or self.hides_drift else ""
        found: PrivacyCharge = {"of": self._release_id(state) + attempt, "sites": spends}
        if not math.isinf(self.plan.metrics_noise):
            found["metrics"] = [list(astuple(spend)) for spend in self.plan.validation_spends(1)]
        if self.shared_ledger is not None:
            found["account"] = self.shared_ledger.enter_charge(
                round,
                self.plan,
                found,
                lambda earlier: self._within_budget(round, cohort, state, earlier),
            )
        self._record_charge(round, found)
        return found

    def can_afford(self, round: int, cohort: Sequence[SiteId], state: Bundle) -> bool:
        """Whether the run stays within privacy.epsilon if this round is played."""
        return self._within_budget(
            round, cohort, state, self.shared_ledger.earlier_runs() if self.shared_ledger else ()
        )

    def _within_budget(self, round: int, cohort: Sequence[SiteId], state: Bundle, earlier: tuple[RunCost, ...]) -> bool:
        if earlier != self.plan.earlier:
            self.plan = replace(self.plan, earlier=earlier)
        cap = self.plan.config.epsilon
        if cap is None or (round, self._release_id(state)) in self.charged_attempts or self._follows_plan(round, cap):
            return True
        spent = self.total_spends()
        spent |= {site: (*spent.get(site, ()), *self.plan.round_spends(site)) for site in cohort}
        reported = Counter([*cohort, *(site for charged in self.charged_attempts.values() for site in charged)])
        metrics = self.plan.epsilon_of(self.plan.validation_spends(max(reported.values())))
        return max(metrics, self.plan.worst_epsilon(spent)) <= cap

    def _release_id(self, state: Bundle) -> str:
        """Return a hash of all that a round's release depends on: weights, noise, clip, and the kind of device."""
        device = next((t.device.type for group in state.values() for t in group.values()), "cpu")
        noise = self.plan.noise, sorted(self.plan.site_noise.items())
        terms = f"{hash_tensors(state)}|{noise!r}|{self.plan.config.clip!r}|{device}"
        return hashlib.sha256(terms.encode()).hexdigest()[:16]

    def _follows_plan(self, round: int, cap: float) -> bool:
        """Whether no round is charged twice, this one included, and the whole plan is within `cap`."""
        charged = [round, *(other for other, _ in self.charged_attempts)]
        return len(set(charged)) == len(charged) and self.plan.epsilon <= cap

    def was_charged(self, round: int) -> bool:
        """Whether an attempt at this round was charged before."""
        return any(charged == round for charged, _ in self.charged_attempts)

    def total_spends(self) -> dict[SiteId, tuple[Spend, ...]]:
        """Return all that this run was charged, by site."""
        total: dict[SiteId, Counter[Spend]] = defaultdict(Counter)
        for charged in self.charged_attempts.values():
            for site, spends in charged.items():
                for spend in spends:
                    total[site][replace(spend, times=1)] += spend.times
        return {site: tuple(replace(s, times=times) for s, times in mine.items()) for site, mine in total.items()}

    def _record_charge(self, round: int, found: PrivacyCharge) -> None:
        self.charged_attempts[round, found["of"]] = {
            site: tuple(Spend(*spend) for spend in rows) for site, rows in found["sites"].items()
        }
