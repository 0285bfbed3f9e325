"""The privacy ledger that all runs on the same images share (`privacy.ledger` of a recipe).

Each charge is entered before its round begins. A run adds the charges of all other runs to its own, as if their records
that were charged most were its own; a round that is repeated from the same weights is charged once.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyclinic.core import RecipeError, RoundFailed, SiteId, StoreError
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.privacy.plan import worst_candidates
from polyclinic.storage.files import explain_os_errors
from polyclinic.storage.ledger import Ledger

COMPARED = 1e-5
"""δ at which the records of one run are ranked."""


class SharedLedger:
    """One file for all runs; `run` identifies this one, `unit` is what its plan protects.

    `known`: the charges in this run's own ledger (round, and a hash of what it started from). Other charges under its
    name are of another attempt, with other noise or from other weights, and count as those of another run.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        unit: str,
        known: Iterable[tuple[int, str]] = (),
        seen: tuple[int, str] | None = None,
    ) -> None:
        """`seen`: the number of rows and the last link of the file when this run last wrote to it."""
        self.path, self.run, self.unit, self.known, self.seen = path, run, unit, set(known), seen

    def earlier_spends(self) -> tuple[Spend, ...]:
        """Return the spends of the most charged record of each other run; its sites may have been others."""
        if not self.path.exists() and self.seen is None:
            return ()
        with self._lock():
            return self._read_earlier(Ledger(self.path))

    def _read_earlier(self, ledger: Ledger) -> tuple[Spend, ...]:
        if self.seen is not None and not ledger.includes(*self.seen):
            raise StoreError(
                f"{self.path} lacks charges that this run has seen there, so ε of its images is unknown; restore the "
                "file"
            )
        rows = ledger.read()
        if other := {row["unit"] for row in rows} - {self.unit}:
            raise RecipeError(
                f"privacy.ledger {self.path} holds charges of unit {other.pop()}, but this plan has unit {self.unit}; "
                "give each unit a file of its own"
            )
        runs: dict[str, dict[tuple[int, str], Mapping[str, Any]]] = {}
        max_sites: dict[str, int] = {}
        for row in rows:
            if row["run"] != self.run or (row["round"], row["privacy"]["of"]) not in self.known:
                runs.setdefault(row["run"], {})[row["round"], row["privacy"]["of"]] = row["privacy"]["sites"]
                max_sites[row["run"]] = row["holders"]
        return tuple(
            spend for run, charged in runs.items() for spend in _worst_spends(charged.values(), max_sites[run])
        )

    def enter_charge(
        self, round: int, max_sites: int, privacy: Mapping[str, Any], affords: Callable[..., bool]
    ) -> tuple[int, str]:
        """Enter a round's charge and return the new `seen`; raises `RoundFailed` if other runs have left too little."""
        self.known.add((round, privacy["of"]))
        with self._lock():
            ledger = Ledger(self.path)
            if not affords(self._read_earlier(ledger)):
                raise RoundFailed(
                    f"round {round} would exceed privacy.epsilon, since other runs have added charges to {self.path}; "
                    "raise privacy.epsilon, or stop using these images"
                )
            ledger.append(run=self.run, round=round, unit=self.unit, holders=max_sites, privacy=dict(privacy))
            self.seen = ledger.rows, ledger.chain
        return self.seen

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock the file for one process at a time."""
        if self.path.is_dir():
            raise RecipeError(f"privacy.ledger {self.path} is a folder; name a file")
        with explain_os_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path.with_name(f".{self.path.name}.lock"), "wb")  # noqa: SIM115
        with file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            yield


def _worst_spends(charged: Iterable[Mapping[SiteId, Any]], max_sites: int) -> tuple[Spend, ...]:
    """Return a composition of one run's charges whose ε is an upper bound for each of its records."""
    spent: dict[SiteId, tuple[Spend, ...]] = {}
    for sites in charged:
        for site, spends in sites.items():
            spent[site] = (*spent.get(site, ()), *(Spend(*spend) for spend in spends))
    return max(worst_candidates(spent, max_sites), key=lambda one: epsilon(one, COMPARED), default=())
