"""Where site work runs. The round loop knows only `Engine.exchange`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from polyclinic.core import Failure, SiteId


class Engine(Protocol):
    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, bytes | Failure]]:
        """Deliver one message to each site and yield the replies as they come, in any order."""
        ...
