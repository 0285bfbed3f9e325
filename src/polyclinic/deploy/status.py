"""What a server and a site write about themselves while they run: `status.json`, and a log file.

`polyclinic status` and the dashboard read the status by `read_status`, without Flower.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from polyclinic.core import SiteId, StoreError
from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.site.release_log import timestamp
from polyclinic.storage.files import write_json

if TYPE_CHECKING:
    from polyclinic.deploy.flower.server import SuperLink

LOG_BYTES, LOG_FILES = 1 << 20, 3
STATUS, STOPPED = "status.json", "stopped"
WAITING = "waiting for sites"
MAX_REFUSALS = 50
"""How many different refusals are listed; further ones are only counted."""


@contextlib.contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Send our log lines and Flower's to one rotated file, replacing the handlers that Flower installs on import."""
    handler = _TolerantLog(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("flwr", "uvicorn", "polyclinic")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)
        handler.close()


class _TolerantLog(RotatingFileHandler):
    """A log that drops lines while the disk is full, and raises nothing."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class ServerStatus:
    """The server's state and its sites', written to `status.json` while the server runs."""

    def __init__(self, config: ServerConfig, folders: Sequence[Path]) -> None:
        self.config, self.folders = config, list(folders)
        self.refusals: Counter[tuple[SiteId, str]] = Counter()
        self.facts: dict[str, object] = {"state": WAITING}
        self.absent: dict[SiteId, str] = {}
        self.last_failures: dict[SiteId, str] = {}
        self.outliers: dict[SiteId, str] = {}
        """The last sentence about each site whose update was far from the others'."""
        self.silent: dict[SiteId, str] = {}
        """A sentence about each connected site that has not answered for long."""
        self.report: Callable[[str], None] = lambda _: None
        """Is called with a sentence when a site disconnects or reconnects, once all have joined."""
        self.patient = False
        """Whether rounds wait for sites that have disconnected."""
        self._here: set[SiteId] = set()
        self.log = logging.getLogger("polyclinic.runs.server_training")
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def count_refusal(self, site: SiteId, why: str) -> None:
        """Count a request that the gateway refused."""
        with self._lock:
            key = (site, why) if (site, why) in self.refusals or len(self.refusals) < MAX_REFUSALS else ("", "others")
            self.refusals[key] += 1
            count = self.refusals[key]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th …: a flood does not fill the log
            self.log.warning("refused %s: %s (%d times)", site or "a stranger", why, count)

    def begin_enrolment(self, here: Iterable[SiteId]) -> None:
        """The sites have joined, and are asked whether they take part."""
        self._here = set(here)
        self.facts["state"] = "asking sites to enrol"

    def record_event(self, event: str, info: Mapping[str, Any]) -> None:
        """Record an event of the run."""
        if event == "round":
            self.facts |= {"state": "running", "round": info["round"], "asked": list(info["cohort"])}
        elif event == "absent":
            self.log.warning("%s did not enrol: %s: %s", info["site"], info["kind"], info["why"])
            self.absent[info["site"]] = f"{info['kind']}: {info['why']}"
        if event in ("site", "evaluated"):
            self.silent.pop(info["site"], None)
        if event == "outlier":
            self.log.warning("round %s: %s", info["round"], info["why"])
            self.outliers[info["site"]] = f"round {info['round']}: {info['why']}"
        elif event in ("site", "evaluated") and info.get("outcome", "accepted") != "accepted":
            when, why = f"round {info['round']}" if event == "site" else "after the last round", info.get("why", "")
            self.log.warning("%s: %s %s: %s", when, info["site"], info["outcome"], why)
            self.last_failures[info["site"]] = f"{info['outcome']}: {why}"

    def report_silence(self, site: SiteId, sentence: str) -> None:
        """Say that a connected site has not answered for long, on the terminal, in the log and in the status."""
        self.log.warning("%s", sentence)
        self.silent[site] = sentence.removeprefix(f"{site} ")
        self.report(sentence)

    def update_until_closed(self, link: SuperLink) -> None:
        """Write the file every two seconds until `closed` is set."""
        while not self.closed.wait(2):
            self.report_changes(set(link.connected_sites()))
            self.write_status(link)
        self.write_status(link, running=False)

    def report_changes(self, here: set[SiteId]) -> None:
        """Report sites that have connected or disconnected since the last call, once all have joined."""
        gone, come, self._here = self._here - here, here - self._here, here
        left = "has gone away" + ("; the run waits for it, as the recipe names no quorum" if self.patient else "")
        if self.facts["state"] != WAITING:
            for site in sorted(gone | come):
                self.log.warning("%s %s", site, left if site in gone else "is back")
                self.report(f"{site} {left if site in gone else 'is back'}")

    def write_status(self, link: SuperLink, running: bool = True) -> None:
        with self._lock:
            refusals = [{"site": site, "why": why, "times": n} for (site, why), n in self.refusals.items()]
        status = {
            "federation": self.config.federation,
            "server": f"{self.config.host}:{self.config.port}",
            "pid": os.getpid() if running else None,
            "written": timestamp(),
            **self.facts,
            **({"absent": self.absent} if self.absent else {}),
            **({"last failure": self.last_failures} if self.last_failures else {}),
            **({"silent": self.silent} if self.silent else {}),
            **({"outlier": self.outliers} if self.outliers else {}),
            "sites": {site: _site_presence(link, site, running) for site in self.config.sites},
            "refusals": refusals,
        }
        for folder in self.folders:
            with contextlib.suppress(OSError, StoreError):  # a full disk may have room again later
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / STATUS, status)


def _site_presence(link: SuperLink, site: SiteId, running: bool) -> dict[str, object]:
    seen = link.gate.last_seen.get(site)
    state = "connected" if running and site in link.connected_sites() else "away" if seen else "never seen"
    return {"state": state, "seen": None if seen is None else timestamp(datetime.fromtimestamp(seen, UTC))}


def read_status(folder: Path) -> dict[str, Any] | None:
    """The status that the process of this folder last wrote; None if it wrote none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / STATUS).read_text())
        if isinstance(found, dict):
            pid = found.get("pid")
            return found | {"alive": isinstance(pid, int) and psutil.pid_exists(pid)}
    return None
