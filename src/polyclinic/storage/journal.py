"""The journal of the round loop: charges, metrics, costs and snapshots, written to a run's folder or kept in memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from polyclinic.core import Bundle, SiteId, StoreError, failpoint
from polyclinic.evaluation.rows import LEDGER_ROW, METRIC_ROW, ChargeRow, CostRow, LedgerRow, MetricRow, SiteOutcome
from polyclinic.storage.ledger import Ledger
from polyclinic.storage.metrics_file import MetricsFile
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.snapshots import SnapshotStore

Fields = Mapping[str, object]
"""A row as JSON; it is read back as a typed row (`evaluation/rows.py`)."""


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on: the state after `round`, and the loop's own progress."""

    round: int
    state: Bundle
    progress: Mapping[str, Any]


class Journal(Protocol):
    def resume(self) -> Resumed | None: ...

    def charge_round(self, round: int, sites: Sequence[SiteId], privacy: Fields | None = None) -> None:
        """Write the charge of a round before anything is sent; it is synced before this returns."""
        ...

    def read_charges(self) -> list[ChargeRow]: ...

    def append_metrics(self, rows: Sequence[Fields]) -> None: ...

    def append_cost(self, event: str, round: int, seconds: float, sites: Mapping[SiteId, Fields]) -> None: ...

    def save_snapshot(self, round: int, state: Bundle, progress: Fields) -> None: ...

    def oldest_snapshot(self) -> int:
        """The earliest round that a resume could go back to."""
        ...


@dataclass
class RamJournal:
    """Keeps rows in lists; cannot resume."""

    rows: list[MetricRow] = field(default_factory=list)
    costs: list[LedgerRow] = field(default_factory=list)

    def resume(self) -> Resumed | None:
        return None

    def charge_round(self, round: int, sites: Sequence[SiteId], privacy: Fields | None = None) -> None:
        self.costs.append(ChargeRow(round=round, sites=list(sites), privacy=dict(privacy) if privacy else None))

    def read_charges(self) -> list[ChargeRow]:
        return [row for row in self.costs if isinstance(row, ChargeRow)]

    def append_metrics(self, rows: Sequence[Fields]) -> None:
        self.rows.extend(map(METRIC_ROW.validate_python, rows))

    def append_cost(self, event: str, round: int, seconds: float, sites: Mapping[SiteId, Fields]) -> None:
        row = {"event": event, "round": round, "seconds": seconds, "sites": dict(sites)}
        self.costs.append(LEDGER_ROW.validate_python(row))

    def save_snapshot(self, round: int, state: Bundle, progress: Fields) -> None:
        """Nothing to keep."""

    def oldest_snapshot(self) -> int:
        return 0


class FolderJournal:
    """Writes `metrics.jsonl`, `ledger.jsonl` and `snapshots/` in a run's folder."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.folder.prepare()
        self.snapshots = SnapshotStore(self.folder.snapshots)
        self.ledger = Ledger(self.folder.ledger_file)
        self._metrics = MetricsFile(self.folder.metrics_file)

    @property
    def rows(self) -> list[MetricRow]:
        return self.folder.metrics()

    @property
    def costs(self) -> list[LedgerRow]:
        return add_interrupted_rounds(self.folder.ledger())

    def resume(self) -> Resumed | None:
        """Go back to the newest valid snapshot. Later metrics are dropped; later charges and costs are not."""
        found = self.snapshots.load()
        if found is None:
            self._metrics.truncate(0)
            if self.ledger.rows:
                self.ledger.append(event="resumed", round=0)
            return None
        round, message = found
        fields = message.fields
        if not self.ledger.includes(fields["ledger_rows"], fields["ledger_chain"]):
            raise StoreError(
                f"{self.ledger.path} lacks rows that the snapshot of round {round} has seen; what the run has cost "
                "can no longer be shown, so it cannot be resumed: restore the file or start anew in another folder"
            )
        self._metrics.truncate(fields["metrics_size"], fields["metrics_sha256"])
        self.ledger.append(event="resumed", round=round)
        return Resumed(round, message.tensors, fields["progress"])

    def charge_round(self, round: int, sites: Sequence[SiteId], privacy: Fields | None = None) -> None:
        self.ledger.append(event="charge", round=round, sites=list(sites), privacy=privacy)
        failpoint("charge-written")

    def read_charges(self) -> list[ChargeRow]:
        return [row for row in self.folder.ledger() if isinstance(row, ChargeRow)]

    def append_metrics(self, rows: Sequence[Fields]) -> None:
        self._metrics.append(rows)
        failpoint("metrics-written")

    def append_cost(self, event: str, round: int, seconds: float, sites: Mapping[SiteId, Fields]) -> None:
        self.ledger.append(event=event, round=round, seconds=round_seconds(seconds), sites=dict(sites))
        failpoint("ledger-written")

    def save_snapshot(self, round: int, state: Bundle, progress: Fields) -> None:
        fields = {
            "progress": dict(progress),
            "ledger_rows": self.ledger.rows,
            "ledger_chain": self.ledger.chain,
            "metrics_size": self._metrics.size(),
            "metrics_sha256": self._metrics.checksum(),
        }
        self.snapshots.save(round, state, fields)
        failpoint("snapshot-written")

    def oldest_snapshot(self) -> int:
        return self.snapshots.oldest_round()


def round_seconds(seconds: float) -> float:
    return round(seconds, 6)


def add_interrupted_rounds(rows: Iterable[LedgerRow]) -> list[LedgerRow]:
    """Add the cost of rounds that were interrupted: as much as when the round was repeated, since nobody knows how far
    it came."""
    every = list(rows)
    played = {row.round: row for row in every if isinstance(row, CostRow) and row.event in ("round", "evaluation")}
    found: list[LedgerRow] = []
    for row, after in pairwise([*every, None]):
        assert row is not None
        found.append(row)
        ended = after is not None and after.event in ("round", "failed round", "evaluation")
        if isinstance(row, ChargeRow) and not ended and row.round in played:
            again = played[row.round]
            sites = {
                name: SiteOutcome(down=site.down, up=site.up, seconds=site.seconds)
                for name, site in again.sites.items()
            }
            found.append(again.model_copy(update={"event": "interrupted round", "sites": sites}))
    return found
