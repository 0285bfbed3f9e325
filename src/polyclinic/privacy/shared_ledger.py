"""What all runs on the same images have cost together: `privacy.ledger` names a file that they share.

Each charge is entered before the round it pays for begins. A run counts what earlier runs have entered as spent, as if
their dearest records were its own; the same round of the same run, begun again from the same weights, is counted once.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyclinic.core.contract import SiteId
from polyclinic.core.errors import RecipeError, RoundFailed, StoreError
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.privacy.plan import worst_candidates
from polyclinic.storage.run_files import Ledger, explain_os_errors

COMPARED = 1e-5
"""δ at which records of one run are ranked."""


class SharedLedger:
    """One file for all runs; `run` is this one's own mark, `unit` whom charges are about.

    `known`: what this run knows to be charged to itself (rounds, and what they started from). Whatever else carries its
    mark was another attempt, with other noise or from other weights, and counts as another run's.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        unit: str,
        known: Iterable[tuple[int, str]] = (),
        seen: tuple[int, str] | None = None,
    ) -> None:
        """`seen`: how many rows the file had, and its last link, when this run last wrote to it."""
        self.path, self.run, self.unit, self.known, self.seen = path, run, unit, set(known), seen

    def earlier_spends(self) -> tuple[Spend, ...]:
        """What other runs have cost the record that paid most in each: sites may have been divided differently."""
        if not self.path.exists() and self.seen is None:
            return ()
        with self._lock():
            return self._read_earlier(Ledger(self.path))

    def _read_earlier(self, ledger: Ledger) -> tuple[Spend, ...]:
        if self.seen is not None and not ledger.includes(*self.seen):
            raise StoreError(
                f"{self.path} lacks charges that this run has seen there, so what its images have cost can no longer "
                "be told; restore the file"
            )
        rows = ledger.read()
        if other := {row["unit"] for row in rows} - {self.unit}:
            raise RecipeError(
                f"privacy.ledger {self.path} holds charges of unit {other.pop()}, but this plan has unit {self.unit}; "
                "give each unit a file of its own"
            )
        runs: dict[str, dict[tuple[int, str], Mapping[str, Any]]] = {}
        holders: dict[str, int] = {}
        for row in rows:
            if row["run"] != self.run or (row["round"], row["privacy"]["of"]) not in self.known:
                runs.setdefault(row["run"], {})[row["round"], row["privacy"]["of"]] = row["privacy"]["sites"]
                holders[row["run"]] = row["holders"]
        return tuple(spend for run, charged in runs.items() for spend in _worst_spends(charged.values(), holders[run]))

    def enter_charge(
        self, round: int, holders: int, privacy: Mapping[str, Any], affords: Callable[..., bool]
    ) -> tuple[int, str]:
        """Refused if, by what other runs have entered meanwhile, it can no longer be paid. Returns the new `seen`."""
        self.known.add((round, privacy["of"]))
        with self._lock():
            ledger = Ledger(self.path)
            if not affords(self._read_earlier(ledger)):
                raise RoundFailed(
                    f"round {round} cannot be paid any more: other runs have spent what {self.path} allows; raise "
                    "privacy.epsilon, or leave it at that"
                )
            ledger.append(run=self.run, round=round, unit=self.unit, holders=holders, privacy=dict(privacy))
            self.seen = ledger.rows, ledger.chain
        return self.seen

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """By one process at a time."""
        if self.path.is_dir():
            raise RecipeError(f"privacy.ledger {self.path} is a folder; name a file")
        with explain_os_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path.with_name(f".{self.path.name}.lock"), "wb")  # noqa: SIM115
        with file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield


def _worst_spends(charged: Iterable[Mapping[SiteId, Any]], holders: int) -> tuple[Spend, ...]:
    """Of one run, a composition that is no cheaper than any record's."""
    spent: dict[SiteId, tuple[Spend, ...]] = {}
    for sites in charged:
        for site, spends in sites.items():
            spent[site] = (*spent.get(site, ()), *(Spend(*spend) for spend in spends))
    return max(worst_candidates(spent, holders), key=lambda one: epsilon(one, COMPARED), default=())
