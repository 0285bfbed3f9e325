"""What the round loop writes down: to a run's folder, or to memory when a run needs no folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from polyclinic.core.contract import Bundle, SiteId
from polyclinic.core.errors import StoreError
from polyclinic.core.failpoints import failpoint
from polyclinic.storage.run_files import Ledger, MetricsFile, SnapshotStore, prepare_folder

SPENT = ("down", "up", "seconds")


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on: the state after `round`, and the loop's own progress."""

    round: int
    state: Bundle
    progress: Mapping[str, Any]


class Journal(Protocol):
    def resume(self) -> Resumed | None: ...

    def charge_round(self, round: int, sites: Sequence[SiteId], privacy: Mapping[str, Any] | None = None) -> None:
        """Before anything is sent: what this round may release. Synced before it returns."""
        ...

    def read_charges(self) -> list[dict[str, Any]]:
        """Every charge so far."""
        ...

    def append_metrics(self, rows: list[dict[str, Any]]) -> None: ...

    def append_cost(
        self, event: str, round: int, seconds: float, sites: Mapping[SiteId, Mapping[str, Any]]
    ) -> None: ...

    def save_snapshot(self, round: int, state: Bundle, progress: Mapping[str, Any]) -> None: ...

    def oldest_snapshot(self) -> int:
        """The earliest round a resume could go back to."""
        ...


@dataclass
class RamJournal:
    """Keeps rows in lists; cannot resume."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)

    def resume(self) -> Resumed | None:
        return None

    def charge_round(self, round: int, sites: Sequence[SiteId], privacy: Mapping[str, Any] | None = None) -> None:
        self.costs.append({"event": "charge", "round": round, "sites": list(sites), "privacy": privacy})

    def read_charges(self) -> list[dict[str, Any]]:
        return [row for row in self.costs if row["event"] == "charge"]

    def append_metrics(self, rows: list[dict[str, Any]]) -> None:
        self.rows.extend(rows)

    def append_cost(self, event: str, round: int, seconds: float, sites: Mapping[SiteId, Mapping[str, Any]]) -> None:
        self.costs.append({"event": event, "round": round, "seconds": seconds, "sites": dict(sites)})

    def save_snapshot(self, round: int, state: Bundle, progress: Mapping[str, Any]) -> None:
        """Nothing to keep."""

    def oldest_snapshot(self) -> int:
        return 0


class FolderJournal:
    """A run's folder: `metrics.jsonl`, `ledger.jsonl`, `snapshots/`."""

    def __init__(self, folder: Path) -> None:
        prepare_folder(folder)
        self.folder = folder
        self.snapshots = SnapshotStore(folder)
        self.ledger = Ledger(folder / "ledger.jsonl")
        self._metrics = MetricsFile(folder / "metrics.jsonl")

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._metrics.read()

    @property
    def costs(self) -> list[dict[str, Any]]:
        return add_interrupted_rounds(self.ledger.read())

    def resume(self) -> Resumed | None:
        """The newest sound snapshot; what was measured after it is forgotten, what was spent after it is not."""
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

    def charge_round(self, round: int, sites: Sequence[SiteId], privacy: Mapping[str, Any] | None = None) -> None:
        self.ledger.append(event="charge", round=round, sites=list(sites), privacy=privacy)
        failpoint("charge-written")

    def read_charges(self) -> list[dict[str, Any]]:
        return [row for row in self.ledger.read() if row["event"] == "charge"]

    def append_metrics(self, rows: list[dict[str, Any]]) -> None:
        self._metrics.append(rows)
        failpoint("metrics-written")

    def append_cost(self, event: str, round: int, seconds: float, sites: Mapping[SiteId, Mapping[str, Any]]) -> None:
        self.ledger.append(event=event, round=round, seconds=round_seconds(seconds), sites=dict(sites))
        failpoint("ledger-written")

    def save_snapshot(self, round: int, state: Bundle, progress: Mapping[str, Any]) -> None:
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


def add_interrupted_rounds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add what rounds cost that were begun and cut short: nobody knows how far they came, so all of it is counted."""
    played = {row["round"]: row for row in rows if row["event"] in ("round", "evaluation")}
    found: list[dict[str, Any]] = []
    for row, after in pairwise([*rows, {"event": "end"}]):
        found.append(dict(row))
        if (
            row["event"] == "charge"
            and after["event"] not in ("round", "failed round", "evaluation")
            and row["round"] in played
        ):
            again = played[row["round"]]
            sites = {site: {k: note.get(k, 0) for k in SPENT} for site, note in again["sites"].items()}
            found.append({**again, "event": "interrupted round", "sites": sites})
    return found
