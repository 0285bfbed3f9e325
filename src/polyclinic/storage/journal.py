"""The journal of the round loop: charges, metrics, costs and snapshots, written to a run's folder or kept in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from polyclinic.core import Bundle, SiteId, StoreError, failpoint
from polyclinic.evaluation.rows import LEDGER_ROW, METRIC_ROW, ChargeRow, CostRow, LedgerRow, MetricRow, SiteOutcome
from polyclinic.storage.ledger import Ledger
from polyclinic.storage.messages import Message
from polyclinic.storage.metrics_file import MetricsFile
from polyclinic.storage.run_folder import RunFolder
from polyclinic.storage.snapshots import LEAST_KEPT, SnapshotStore

Fields = Mapping[str, object]
"""A row as JSON; it is read back as a typed row (`evaluation/rows.py`)."""


@dataclass
class RamJournal:
    """Keeps rows in lists; cannot resume."""

    rows: list[MetricRow] = field(default_factory=list)
    costs: list[LedgerRow] = field(default_factory=list)
    masks: Path | None = None
    """Where to keep what is heard in masked rounds; None: in memory."""

    def resume(self) -> Message | None:
        return None

    def charge_round(self, round: int, sites: Sequence[SiteId], privacy: Fields | None = None) -> None:
        self.costs.append(ChargeRow(round=round, sites=list(sites), privacy=dict(privacy) if privacy else None))

    def read_charges(self) -> list[ChargeRow]:
        return [row for row in self.costs if isinstance(row, ChargeRow)]

    def append_metrics(self, rows: Sequence[Fields]) -> None:
        self.rows.extend(map(METRIC_ROW.validate_python, rows))

    def append_cost(self, event: str, round: int, seconds: float, sites: Mapping[SiteId, Fields]) -> None:
        self.costs.append(
            LEDGER_ROW.validate_python({"event": event, "round": round, "seconds": seconds, "sites": dict(sites)})
        )

    def save_snapshot(self, round: int, state: Bundle, progress: Fields) -> None:
        """Nothing to keep."""

    def oldest_snapshot(self) -> int:
        return 0


class FolderJournal:
    """Writes `metrics.jsonl`, `ledger.jsonl` and `snapshots/` in a run's folder."""

    def __init__(self, path: Path, keep_snapshots: int = LEAST_KEPT) -> None:
        self.folder = RunFolder(path)
        self.folder.prepare()
        self.snapshots = SnapshotStore(self.folder.snapshots, keep_snapshots)
        self.ledger = Ledger(self.folder.ledger_file)
        self._metrics = MetricsFile(self.folder.metrics_file)
        self.masks: Path | None = self.folder.masks

    @property
    def rows(self) -> list[MetricRow]:
        return self.folder.metrics()

    @property
    def costs(self) -> list[LedgerRow]:
        return add_interrupted_rounds(self.folder.ledger())

    def resume(self) -> Message | None:
        """Go back to the newest valid snapshot, and return it: the state, and the loop's progress among the fields.

        Later metrics are dropped; later charges and costs are not.
        """
        snapshot = self.snapshots.load()
        if snapshot is None:
            self._metrics.truncate(0)
            if self.ledger.rows:
                self.ledger.append(event="resumed", round=0)
            return None
        fields, round = snapshot.fields, snapshot.fields["round"]
        if not self.ledger.includes(fields["ledger_rows"], fields["ledger_chain"]):
            raise StoreError(
                f"{self.ledger.path} lacks rows that the snapshot of round {round} counts, so the run's cost is "
                "not known in full and it cannot be resumed; restore the file or start anew in another folder"
            )
        self._metrics.truncate(fields["metrics_size"], fields["metrics_sha256"])
        self.ledger.append(event="resumed", round=round)
        return snapshot

    def charge_round(self, round: int, sites: Sequence[SiteId], privacy: Fields | None = None) -> None:
        """Write the charge of a round before anything is sent; it is synced before this returns."""
        self.ledger.append(event="charge", round=round, sites=list(sites), privacy=privacy)
        failpoint("charge-written")

    def read_charges(self) -> list[ChargeRow]:
        return [row for row in self.folder.ledger() if isinstance(row, ChargeRow)]

    def append_metrics(self, rows: Sequence[Fields]) -> None:
        self._metrics.append(rows)
        failpoint("metrics-written")

    def append_cost(self, event: str, round: int, seconds: float, sites: Mapping[SiteId, Fields]) -> None:
        self.ledger.append(event=event, round=round, seconds=float(f"{seconds:.6f}"), sites=dict(sites))
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
        """Return the earliest round that a resume could go back to."""
        return self.snapshots.oldest_round()


Journal: TypeAlias = RamJournal | FolderJournal
"""What the round loop writes to, and resumes from."""


def add_interrupted_rounds(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Add the cost of rounds that were interrupted: as much as when the round was repeated, since it is not known how
    far it came."""
    played = {row.round: row for row in rows if isinstance(row, CostRow) and row.event in ("round", "evaluation")}
    found: list[LedgerRow] = []
    for row, after in zip(rows, [*rows[1:], None], strict=False):
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
