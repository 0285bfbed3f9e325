"""What an audit found: what was attacked, the tests, and the verdict."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from polyclinic.core import SiteId
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.gaussian_tests import SURE, GaussianTest
from polyclinic.privacy.one_run_bound import CanaryBound
from polyclinic.privacy.plan import PrivacyPlan

NOTHING_FOUND, REFUTED, NO_POWER = 0, 1, 3
"""Exit codes: nothing contradicts the claim, and the audit could have; the claim is refuted; it could not have."""
UPDATES, METRICS, WEIGHTS = "whole updates", "metrics of validation images", "weights"
CANARY_SHARE = 0.8
"""The canaries' share of 1 − confidence: the tests have power to spare."""
OF_MEMBER = "in movements of one member"
MOVEMENTS = "sensitivity", "mean movement of a sum"


def job_kind(number: int) -> str:
    """Return the kind of what a round's training job releases."""
    return f"{WEIGHTS}, training job {number + 1}"


@dataclass(frozen=True)
class AuditResult:
    """The outcome of attacks on a claim."""

    engine: str
    """The engine that ran the attacked rounds …"""
    stacked: int
    """… and the most sites that it ran as one."""
    unit: str
    sites: tuple[SiteId, ...]
    site: SiteId
    """The site with the largest ε."""
    rounds: int
    planned_rounds: int
    canaries: int
    kinds: tuple[str, ...]
    """The kinds of release that the plan charges."""
    claimed: float
    """ε of the attacked rounds at that site, by the accountant …"""
    measured: float
    """… and what it would be with noise and sensitivity as measured."""
    delta: float
    confidence: float
    tests: tuple[GaussianTest, ...]
    canary_bound: CanaryBound | None = None
    no_guarantee_reason: str = ""
    """Why ε is no guarantee, whatever the audit finds."""

    @property
    def level(self) -> float:
        """The level of each test (Bonferroni)."""
        share = 1 - (0.0 if self.canary_bound is None else CANARY_SHARE)
        return (1 - self.confidence) * share / max(len(self.tests), 1)

    @property
    def contradictions(self) -> list[GaussianTest]:
        return [test for test in self.tests if test.p_value < self.level]

    @property
    def is_refuted(self) -> bool:
        return bool(self.contradictions) or (self.canary_bound is not None and self.canary_bound.is_refuted)

    @property
    def not_attacked(self) -> list[str]:
        """The kinds that the plan charges and no attack has reached, or none with power."""
        return [kind for kind in self.kinds if not self._has_power(kind)]

    def _has_power(self, kind: str) -> bool:
        """Whether half the noise, and twice the sensitivity, would have been found."""
        own = [test for test in self.tests if test.kind == kind and test.power >= SURE]
        noise = any(test.what.startswith("noise") for test in own)
        moved = any(test.what in MOVEMENTS for test in own)
        return noise and (moved or not (kind == UPDATES or kind.startswith(WEIGHTS)))

    @property
    def exit_code(self) -> int:
        return REFUTED if self.is_refuted else NO_POWER if self.not_attacked else NOTHING_FOUND

    @property
    def scope(self) -> str:
        """What was attacked, and what was not."""
        together = f", {self.stacked} sites at once" if self.stacked > 1 else ""
        rounds = f"{self.rounds} of {self.planned_rounds} rounds on the engine {self.engine}{together}"
        planted = f" with {self.canaries:,} canaries (unit {self.unit})" if self.canaries else f" (unit {self.unit})"
        reached = [kind for kind in self.kinds if kind not in self.not_attacked]
        missed = f" Not attacked, or without power: {'; '.join(self.not_attacked)}." if self.not_attacked else ""
        return f"Attacked {rounds}{planted}: {'; '.join(reached) or 'nothing'}.{missed}"

    @property
    def verdict(self) -> str:
        found = [self._headline, self.scope, *self._figures()]
        return " ".join(
            [*found, f"There is no guarantee: {self.no_guarantee_reason}."] if self.no_guarantee_reason else found
        )

    @property
    def _headline(self) -> str:
        if self.is_refuted:
            return "The claim is refuted: " + "; ".join(self._accusations()) + "."
        if self.not_attacked:
            return "This audit could not have refuted the claim, and found no contradiction."
        return "No contradiction found. That is no proof: a better attack might find more."

    def _accusations(self) -> Iterator[str]:
        for test in sorted(self.contradictions, key=lambda test: test.p_value)[:3]:
            yield (
                f"{test.kind}: {test.what} is {test.measured:.3g}, where {test.charged:.3g} is charged "
                f"(p = {test.p_value:.1g})"
            )
        if len(self.contradictions) > 3:
            yield f"{len(self.contradictions) - 3} more tests"
        if self.canary_bound is not None and self.canary_bound.is_refuted:
            yield self.canary_bound.sentence

    def _figures(self) -> Iterator[str]:
        value = f"{self.measured:.3g}" if math.isfinite(self.measured) else "infinite"
        yield f"With noise and sensitivity as measured ε would be {value}; {self.claimed:.3g} is claimed."
        if self.canary_bound is not None and not self.canary_bound.is_refuted:
            yield f"Canaries: {self.canary_bound.sentence}."
        yield f"{len(self.tests)} tests at {100 * self.confidence:g} % confidence in all."

    def as_json(self) -> dict[str, object]:
        bound = self.canary_bound
        return {
            **{k: v for k, v in vars(self).items() if k not in ("tests", "canary_bound")},
            "measured": self.measured if math.isfinite(self.measured) else None,
            "claimed": self.claimed if math.isfinite(self.claimed) else None,
            "tests": [test.as_json() for test in self.tests],
            "canary_bound": None if bound is None else {**vars(bound), "refuted": bound.is_refuted},
            "not_attacked": self.not_attacked,
            "refuted": self.is_refuted,
            "exit_code": self.exit_code,
            "verdict": self.verdict,
        }


def charged_kinds(plan: PrivacyPlan) -> tuple[str, ...]:
    """Return the kinds of release that a plan charges."""
    if plan.config.unit == "site":
        return (UPDATES,)
    jobs = max((len(jobs) for jobs in plan.jobs.values()), default=0)
    metrics = () if math.isinf(plan.metrics_noise) else (METRICS,)
    return (*map(job_kind, range(jobs)), *plan.other_releases, *metrics)


def round_spends(plan: PrivacyPlan, site: SiteId) -> list[tuple[str, Spend]]:
    """Return what a round releases of one unit at a site, with its kind."""
    kinds = [kind for kind in charged_kinds(plan) if kind != METRICS]
    return list(zip(kinds, plan.round_spends(site), strict=True))


def epsilon_as_measured(plan: PrivacyPlan, site: SiteId, rounds: int, tests: Iterable[GaussianTest] = ()) -> float:
    """Return ε of the first rounds at a site, with noise, sensitivity and rates as these tests measured them."""
    played, found = sum(site in cohort for cohort in plan.rounds[:rounds]), list(tests)
    return plan.epsilon_of(
        [
            _as_measured(spend, [t for t in found if t.kind == kind]).repeated(played)
            for kind, spend in round_spends(plan, site)
        ]
    )


def _as_measured(spend: Spend, tests: list[GaussianTest]) -> Spend:
    found = {test.what: test.measured / test.charged for test in tests if test.charged}
    reach, rate = max(1.0, found.get("sensitivity", 1.0)), found.get("mean movement of a sum", 1.0)
    noise = found.get("noise", 1.0) / reach
    # Of several tensors that one charge pays for, each tells 1/σ, and all together the root of the sum of squares.
    if apart := [ratio for what, ratio in found.items() if what.endswith(OF_MEMBER)]:
        noise = sum(ratio**-2 for ratio in apart) ** -0.5 if min(apart) > 0 else 0.0
    # Movements beyond a clip raise the mean movement as well.
    return replace(spend, noise=spend.noise * noise, rate=min(1.0, spend.rate * max(1.0, rate / reach)))
