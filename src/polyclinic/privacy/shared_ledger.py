"""The privacy ledger that all runs on the same images share (`privacy.ledger` of a recipe).

Each charge is entered before its round begins. A run adds the charges of all other runs to its own, as if their records
that were charged most were its own; a round that is repeated from the same weights is charged once.
"""

import fcntl
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from polyclinic.core import RecipeError, RoundFailed, SiteId, StoreError
from polyclinic.privacy.accounting import Spend, epsilon
from polyclinic.privacy.plan import worst_candidates
from polyclinic.storage.files import explain_os_errors
from polyclinic.storage.ledger import Ledger

PrivacyCharge: TypeAlias = dict[str, Any]
"""What a round releases, as JSON: the `Spend`s of its `sites`, and a hash of all that the release depends on (`of`)."""
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
        runs: dict[str, dict[tuple[int, str], PrivacyCharge]] = defaultdict(dict)
        max_sites: dict[str, int] = {}
        for row in rows:
            charge = row["round"], row["privacy"]["of"]
            if row["run"] != self.run or charge not in self.known:
                runs[row["run"]][charge] = row["privacy"]
                max_sites[row["run"]] = row["holders"]
        return tuple(
            spend for run, charges in runs.items() for spend in _worst_spends(charges.values(), max_sites[run])
        )

    def enter_charge(
        self, round: int, max_sites: int, privacy: PrivacyCharge, affords: Callable[[tuple[Spend, ...]], bool]
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
            ledger.append(run=self.run, round=round, unit=self.unit, holders=max_sites, privacy=privacy)
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


def _worst_spends(charges: Iterable[PrivacyCharge], max_sites: int) -> tuple[Spend, ...]:
    """Return a composition of one run's charges whose ε is an upper bound for each of its records."""
    spent: dict[SiteId, list[Spend]] = defaultdict(list)
    for charge in charges:
        for site, spends in charge["sites"].items():
            spent[site] += (Spend(*spend) for spend in spends)
    return max(worst_candidates(spent, max_sites), key=lambda one: epsilon(one, COMPARED), default=())
