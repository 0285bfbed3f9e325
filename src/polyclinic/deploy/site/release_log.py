"""Writes the logs that a site keeps for itself: `releases.jsonl`, a row for every reply, and `site.log`.

`message_handler.py` writes them; `polyclinic site` reads them.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from polyclinic.core import StoreError
from polyclinic.storage.files import append_line, explain_os_errors
from polyclinic.storage.ledger import Ledger, read_chain

MOST = 4 << 20
"""The bytes after which a new file is begun."""
KEPT = 4
"""How many older files are kept."""
UNPROTECTED = "unprotected"
"""Stands for ε in the row of a release without a guarantee."""
LOG, REFUSED, FAILED = "site.log", "refused", "failed"
"""The file of the site's own log, and the words with which lines about problems begin."""


class RotatingLog:
    """A text file that is rotated: `name.jsonl` is the newest, then `name.1.jsonl`, and so on."""

    def __init__(self, path: Path, most: int = MOST, kept: int = KEPT) -> None:
        self.path, self.most, self.kept = path, most, kept

    def append_line(self, line: str) -> None:
        """Append a line, and sync it to disk before returning."""
        with explain_os_errors(self.path.parent):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size + len(line) >= self.most:
                self._rotate_files()
        append_line(self.path, line)

    def _rotate_files(self) -> None:
        for number in range(self.kept - 1, 0, -1):
            if self._rotated_path(number).exists():
                self._rotated_path(number).replace(self._rotated_path(number + 1))
        self.path.replace(self._rotated_path(1))

    def _rotated_path(self, number: int) -> Path:
        return self.path.with_suffix(f".{number}{self.path.suffix}")

    def read_lines(self) -> list[str]:
        """All lines, the oldest first."""
        paths = [*map(self._rotated_path, range(self.kept, 0, -1)), self.path]
        return [line for path in paths if path.exists() for line in path.read_text(encoding="utf-8").splitlines()]


class UnboundedRuns(NamedTuple):
    """How many runs left a site without a privacy plan, and how many different updates they sent."""

    runs: int
    updates: int

    @property
    def sentence(self) -> str:
        """What to tell people of it; "" where there was none."""
        if not self.runs:
            return ""
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        updates = "1 update" if self.updates == 1 else f"{self.updates} updates"
        return f"{runs} left without a plan ({updates}); no epsilon bounds them"


class ReleaseLog:
    """`releases.jsonl`: one row for every reply that carries data, in a chain of hashes. The file only grows.

    A reply that leaves again has a row when it has left 2, 4, 8 … times, so that a server that repeats one order cannot
    fill the disk.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "releases.jsonl"
        self._ledger: Ledger | None = None
        self._size = 0
        self._times: Counter[tuple[str, str]] = Counter()

    def record_release(
        self,
        data: bytes,
        kinds: Mapping[str, int],
        *,
        run: str,
        round: int,
        purpose: str,
        epsilon: float | None,
    ) -> None:
        """Record a reply before it leaves. `epsilon`: of all releases of the site so far; None without a guarantee."""
        ledger, digest = self._open(), hashlib.sha256(data).hexdigest()
        times = self._times[run, digest] + 1
        if times & (times - 1) == 0:
            ledger.append(
                time=timestamp(),
                run=run,
                round=round,
                purpose=purpose,
                kinds=dict(kinds),
                bytes=len(data),
                epsilon=_describe_epsilon(epsilon),
                sha256=digest,
                **({"times": times} if times > 1 else {}),
            )
            self._size = self.path.stat().st_size
        self._times[run, digest] = times

    def verify_chain(self) -> tuple[int, str]:
        """Return the number of rows and the last hash; raises `StoreError` if a row was changed or is missing."""
        return read_chain(self.path)

    def read_entries(self) -> list[dict[str, Any]]:
        """All complete entries: a killed process may have left an incomplete one."""
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []:
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def count_unbounded(self) -> UnboundedRuns:
        """Count the runs that sent updates without a privacy plan. A recipe that was run again counts once, as a run;
        its updates count again where they differ."""
        bare = [row for row in self.read_entries() if row["purpose"] == "train" and row["epsilon"] == UNPROTECTED]
        return UnboundedRuns(len({row["run"] for row in bare}), len({(row["run"], row["sha256"]) for row in bare}))

    def _open(self) -> Ledger:
        """The log as it is on the disk: read again if somebody else has written, or a write was torn."""
        with explain_os_errors(self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            size = self.path.stat().st_size if self.path.exists() else 0
        if self._ledger is None or size != self._size:
            try:
                self._ledger = Ledger(self.path)
            except StoreError:
                read_chain(self.path)  # says what is wrong
                raise
            self._times = Counter({(row["run"], row["sha256"]): row.get("times", 1) for row in self.read_entries()})
        return self._ledger


def last_trouble(folder: Path) -> tuple[str, str] | None:
    """The time and the sentence of the last refusal or failure in the site's log; None if it has none."""
    for line in reversed(RotatingLog(folder / LOG).read_lines()):
        when, _, sentence = line.partition(" ")
        if sentence.startswith((f"{REFUSED}, ", f"{FAILED}, ")):
            return when, sentence
    return None


def _describe_epsilon(epsilon: float | None) -> float | str:
    if epsilon is None:
        return UNPROTECTED
    return round(epsilon, 6) if epsilon < math.inf else "infinite"


def timestamp(when: datetime | None = None) -> str:
    return (when or datetime.now(UTC)).isoformat(timespec="seconds")
