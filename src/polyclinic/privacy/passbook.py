"""What all runs on the same images have cost together: `privacy.ledger` names a file that they share.

Each charge is entered before the round it pays for begins. A run counts what earlier runs have entered as spent, by
site; the same round of the same run, begun again from the same weights, is counted once.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyclinic.core import SiteId
from polyclinic.errors import RecipeError
from polyclinic.privacy.account import Spend
from polyclinic.store import Ledger, named_failure


class Passbook:
    """One file for all runs; `run` is this one's own mark, `unit` whom charges are about."""

    def __init__(self, path: Path, run: str, unit: str) -> None:
        self.path, self.run, self.unit = path, run, unit

    def earlier(self) -> dict[SiteId, tuple[Spend, ...]]:
        """What other runs have spent, by site."""
        if not self.path.exists():
            return {}
        with self._held():
            rows = Ledger(self.path).read()
        if other := {row["unit"] for row in rows} - {self.unit}:
            raise RecipeError(
                f"privacy.ledger {self.path} holds charges of unit {other.pop()}, but this plan has unit {self.unit}; "
                "give each unit a file of its own"
            )
        found: dict[tuple[str, int, str], Mapping[str, Any]] = {}
        for row in rows:
            if row["run"] != self.run:
                found[row["run"], row["round"], row["privacy"]["of"]] = row["privacy"]["sites"]
        spent: dict[SiteId, list[Spend]] = {}
        for sites in found.values():
            for site, spends in sites.items():
                spent.setdefault(site, []).extend(Spend(*spend) for spend in spends)
        return {site: tuple(spends) for site, spends in spent.items()}

    def enter(self, round: int, privacy: Mapping[str, Any]) -> None:
        with self._held():
            Ledger(self.path).append(run=self.run, round=round, unit=self.unit, privacy=dict(privacy))

    @contextmanager
    def _held(self) -> Iterator[None]:
        """By one process at a time."""
        with named_failure(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path.with_name(f".{self.path.name}.lock"), "wb")  # noqa: SIM115
        with file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield
