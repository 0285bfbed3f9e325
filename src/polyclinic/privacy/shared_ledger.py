"""The privacy ledger that all runs on the same images share (`privacy.ledger` of a recipe, and a site's own account).

Each charge is entered before its round begins. A run adds the costs of all other runs to its own, as if the record
that it charges most had been charged most by them, too; a round that is repeated from the same weights is charged once.

Runs may have protected different units, or other neighbours. What a run released of a patient (or site) bounds what it
released of one of its images; what it released of an image bounds what it released of a patient with that many images.
A patient of images, or an image of sites, may have been at all sites of such a run.
If any run's neighbours are data sets in which a record is replaced, all are priced so, which costs more.
"""

import fcntl
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from polyclinic.core import RecipeError, RoundFailed, SiteId, StoreError
from polyclinic.privacy.accounting import Spend
from polyclinic.privacy.plan import PrivacyPlan, Unit
from polyclinic.privacy.worst_case import RunCost, run_cost, worst_epsilon
from polyclinic.storage.files import explain_os_errors
from polyclinic.storage.ledger import Ledger, LedgerRow

PrivacyCharge: TypeAlias = dict[str, Any]
"""What a round releases, as JSON: the `Spend`s of its `sites`, a hash of all that the release depends on (`of`), and
`metrics`: the `Spend`s of a validation image."""
UNITS: tuple[Unit, ...] = ("image", "patient", "site")
"""From the smallest to the largest."""
ONE_SUM = "the sum of all sites"
"""Stands for the sites of a round that releases one sum with one noise."""


class SharedLedger:
    """One file for all runs.

    Args:
        path: The file.
        run: The name of this run.
        unit: What its plan protects.
        known: The charges in this run's own ledger (round, and a hash of what it started from). Other charges under
            its name are of another attempt, with other noise or from other weights, and count as another run's.
        seen: The number of rows and the last link of the file when this run last wrote to it.
        strict: Refuse a file with charges of units that are no bound on this one; else their ε counts as infinite.
    """

    def __init__(
        self,
        path: Path,
        run: str,
        unit: Unit,
        known: Iterable[tuple[int, str]] = (),
        seen: tuple[int, str] | None = None,
        strict: bool = True,
    ) -> None:
        self.path, self.run, self.unit, self.known, self.seen = path, run, unit, set(known), seen
        self.strict = strict

    def earlier_runs(self) -> tuple[RunCost, ...]:
        """Return the cost of each other run; its sites may have been others."""
        if not self.path.exists() and self.seen is None:
            return ()
        with self._lock():
            return self._read_earlier(Ledger(self.path))

    def _read_earlier(self, ledger: Ledger) -> tuple[RunCost, ...]:
        if self.seen is not None and not ledger.includes(*self.seen):
            raise StoreError(
                f"{self.path} lacks charges that this run has seen there, so ε of its images is unknown; restore the "
                "file"
            )
        runs: dict[str, dict[tuple[int, str], LedgerRow]] = defaultdict(dict)
        for row in ledger.read():
            if "run" not in row:
                raise RecipeError(f"{self.path} is the ledger of one run; give the file that privacy.ledger names")
            charge = row["round"], row["privacy"]["of"]
            if row["run"] != self.run or charge not in self.known:
                runs[row["run"]][charge] = row
        return tuple(self._cost(list(rows.values())) for rows in runs.values())

    def _cost(self, rows: list[LedgerRow]) -> RunCost:
        """Return what one run has released, by site, and of validation images: each is a candidate."""
        if not self.strict and any(self._group_of(row) is None for row in rows):
            return run_cost([[Spend(0.0)]])
        spent: dict[SiteId, list[Spend]] = defaultdict(list)
        metrics: list[Spend] = []
        for row in rows:
            group = self._group_of(row) or self._refuse_unit(row)
            charged = row["privacy"]["sites"]
            if row.get("one_sum", True) and row["unit"] != self.unit:  # which a record at all its sites moves so far
                charged, group = {ONE_SUM: next(iter(charged.values()), [])}, group * len(charged)
            for site, spends in charged.items():
                spent[site] += (_in_groups(Spend(*spend), group) for spend in spends)
            metrics += (_in_groups(Spend(*spend), group) for spend in row["privacy"].get("metrics", ()))
        counted = rows[0]["unit"] == self.unit or (rows[0]["unit"], self.unit) == ("patient", "image")
        most = int(rows[0]["holders" if counted else "all_sites"])
        return run_cost([*spent.values(), *[metrics] * most], most, rows[0]["neighbours"])

    def _group_of(self, row: LedgerRow) -> int | None:
        """Return how many of the units that a charge protects are one unit of this ledger's reader; None: no bound."""
        if UNITS.index(row["unit"]) >= UNITS.index(self.unit):
            return 1
        return None if self.unit == "site" or row["group"] is None else int(row["group"])

    def _refuse_unit(self, row: LedgerRow) -> NoReturn:
        why = "no bound on a site" if self.unit == "site" else "no bound on a patient whose images are not known"
        raise RecipeError(
            f"{self.path} holds charges of unit {row['unit']}, which are {why}; set the unit to {row['unit']}, and "
            "keep the file: it is the only record of what was spent"
        )

    def enter_charge(
        self, round: int, plan: PrivacyPlan, privacy: PrivacyCharge, affords: Callable[[tuple[RunCost, ...]], bool]
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
            ledger.append(
                run=self.run,
                round=round,
                unit=plan.config.unit,
                neighbours=plan.config.neighbours,
                holders=plan.max_sites_per_record,
                all_sites=len(plan.site_sizes),
                one_sum=plan.releases_sums,
                group=plan.images_per_patient,
                privacy=privacy,
            )
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


def price_ledger(path: Path, delta: float, seen: tuple[int, str] | None = None) -> dict[Unit, float | str]:
    """Return ε at δ of all that the runs in a ledger have released of one image, of one patient, and of a site.

    Where ε of a unit cannot be known, the reason stands in its place.
    """
    found: dict[Unit, float | str] = {}
    for unit in UNITS:
        try:
            found[unit] = worst_epsilon(SharedLedger(path, "", unit, seen=seen).earlier_runs(), delta)
        except RecipeError as error:
            found[unit] = str(error)
    return found


def _in_groups(spend: Spend, group: int) -> Spend:
    return replace(spend, group=spend.group * group)
