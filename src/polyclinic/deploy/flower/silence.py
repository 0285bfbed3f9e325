"""Connected sites that do not answer: they are said, and with a quorum a round does not wait for them for ever."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from polyclinic.core import SiteId
from polyclinic.reporting.formatting import format_duration


@dataclass(frozen=True)
class SilenceRule:
    """How long a silent site is waited for."""

    quorum: int | None = None
    """Answers without which a round waits for every site; None: it always does."""
    times: float = 20.0
    """With a quorum: how many times as long as the slowest of those that answered a further site may take …"""
    least: float = 600.0
    """… but at least so many seconds."""
    notice: float = 60.0
    """A site is said to be silent after so many seconds, if that is five times as long as the others took."""


@dataclass
class SilenceWatch:
    """Watches the sites of one exchange.

    Args:
        rule: How long to wait.
        report: Is called with a site and a sentence about its silence, ever more rarely.
        clock: The time in seconds.
    """

    rule: SilenceRule
    report: Callable[[SiteId, str], None] = lambda *_: None
    clock: Callable[[], float] = time.monotonic
    answered: int = 0
    slowest: float = 0.0
    """Seconds that the slowest of the sites that answered took."""
    begun: float = field(init=False)
    _next_notice: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun, self._next_notice = self.clock(), self.rule.notice

    def note_answer(self) -> None:
        """Note that a site has answered now."""
        self.answered, self.slowest = self.answered + 1, self.clock() - self.begun

    def report_silence(self, sites: Iterable[SiteId]) -> None:
        """Report the sites that are at work much longer than the others were."""
        waited = self.clock() - self.begun
        if waited < self._next_notice or (self.answered and waited < 5 * self.slowest):
            return
        self._next_notice = 2 * waited
        others = f"; the others took {format_duration(self.slowest)}" if self.answered else ""
        for site in sites:
            self.report(site, f"{site} has been at work for {format_duration(waited)}{others}{self._describe_limit()}")

    def _describe_limit(self) -> str:
        limit = self.limit
        return "" if limit is None else f"; the round goes on without it after {format_duration(limit)}"

    @property
    def limit(self) -> float | None:
        """Seconds from the beginning after which a round goes on without the silent sites; None: it waits."""
        if self.rule.quorum is None or self.answered < self.rule.quorum:
            return None
        return max(self.rule.least, self.rule.times * self.slowest)

    def is_over(self) -> bool:
        """Return whether the sites that have not answered are no longer waited for."""
        limit = self.limit
        return limit is not None and self.clock() - self.begun >= limit
