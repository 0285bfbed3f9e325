"""What a server and a site write about themselves while they run: `status.json`, and a log file.

`polyclinic status` and the dashboard read the status by `read_status`, without Flower.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from polyclinic.core import SiteId, StoreError, __version__
from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.notices import ATTENTION, JsonLines, Notifier
from polyclinic.deploy.site.release_log import timestamp
from polyclinic.deploy.upkeep import server_expiries
from polyclinic.storage.files import write_json
from polyclinic.storage.messages import Fields

if TYPE_CHECKING:
    from polyclinic.deploy.flower.server import SuperLink
    from polyclinic.deploy.site.config import SiteConfig

LOG_BYTES, LOG_FILES = 1 << 20, 3
STATUS, STOPPED = "status.json", "stopped"
WAITING, IDLE = "waiting for sites", "waiting for a recipe"
MAX_REFUSALS = 50
"""How many different refusals of a site, and of strangers, are listed; further ones are only counted."""


@contextlib.contextmanager
def log_to_file(path: Path, as_json: bool = False, on_terminal: bool = False) -> Iterator[None]:
    """Send our log lines and Flower's to one rotated file, replacing the handlers that Flower installs on import.

    Args:
        path: The file.
        as_json: Write one JSON object a line.
        on_terminal: Write the same lines to the terminal, too.
    """
    found: list[logging.Handler] = [
        _TolerantLog(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1, encoding="utf-8", delay=True)
    ]
    if on_terminal:
        found.append(_TolerantTerminal(sys.stderr))
    text = logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    for handler in found:
        handler.setFormatter(JsonLines() if as_json else text)
    loggers = [logging.getLogger(name) for name in ("flwr", "uvicorn", "polyclinic")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers[:], logger.propagate = found, False
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)
        for handler in found:
            handler.close()


class _TolerantLog(RotatingFileHandler):
    """A log that drops lines while the disk is full, and raises nothing."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _TolerantTerminal(logging.StreamHandler[TextIO]):
    """A log on a terminal that may be gone, and raises nothing."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        pass


class ServerStatus:
    """The server's state and its sites', written to `status.json` while the server runs."""

    def __init__(
        self, config: ServerConfig, folders: Sequence[Path], report: Callable[[str], None] = lambda _: None
    ) -> None:
        self.config, self.folders = config, list(folders)
        self.refusals: Counter[tuple[SiteId, str]] = Counter()
        self.facts: dict[str, object] = {"state": WAITING}
        self.tally = Tally()
        self.warnings: Sequence[str] = ()
        """What a person should know before it is too late, as `Upkeep` finds it."""
        self.notifier = Notifier(config.notify)
        self.absent: dict[SiteId, str] = {}
        self.doubted: dict[SiteId, str] = {}
        """A sentence about each site that counts as fewer images than it claims."""
        self.last_failures: dict[SiteId, str] = {}
        self.outliers: dict[SiteId, str] = {}
        """The last sentence about each site whose update was far from the others'."""
        self.silent: dict[SiteId, str] = {}
        """A sentence about each connected site that has not answered for long."""
        self.report = self.report_between_runs = report
        """Is called with a sentence when a site disconnects or reconnects, once all have joined, or keys change."""
        self.patient = False
        """Whether rounds wait for sites that have disconnected."""
        self._here: set[SiteId] = set()
        self.log = logging.getLogger("polyclinic.runs.server_training")
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def count_refusal(self, site: SiteId, why: str) -> None:
        """Count a request that the gateway refused."""
        with self._lock:
            key, listed = (site, why), sum(of == site for of, _ in self.refusals)
            if key not in self.refusals and listed >= MAX_REFUSALS:
                key = site, "others"
            self.refusals[key] += 1
            count = self.refusals[key]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th …: a flood does not fill the log
            self.log.warning("refused %s: %s (%d times)", site or "a stranger", key[1], count)

    def begin_run(self, recipe: str, rounds: int, folder: Path) -> None:
        """A run begins, whose folder gets a copy of the status from now on."""
        self.absent, self.doubted, self.last_failures = {}, {}, {}
        self.folders[1:] = [folder]
        self.facts = {"state": WAITING, "recipe": recipe, "rounds": rounds, "folder": str(folder.resolve())}

    def await_run(self, link: SuperLink) -> None:
        """A run has ended, and the server waits for the next one."""
        self.write_status(link, running=False)
        self.folders[1:], self.facts = [], {"state": IDLE}
        self.report, self.patient = self.report_between_runs, False

    def begin_enrolment(self, here: Iterable[SiteId]) -> None:
        """The sites have joined, and are asked whether they take part."""
        self._here = set(here)
        self.facts["state"] = "asking sites to enrol"

    def record_event(self, event: str, info: Fields) -> None:
        """Record an event of the run."""
        self.tally.count_event(event, info)
        if self.config.log == "json":
            fields = {"event": event, **{key: info[key] for key in info if key not in ("message", "time")}}
            self.log.info("%s", event, extra={"fields": fields})
        if event == "round":
            self.facts |= {"state": "running", "round": info["round"], "asked": list(info["cohort"])}
        elif event == "absent":
            self.log.warning("%s did not enrol: %s: %s", info["site"], info["kind"], info["why"])
            self.absent[info["site"]] = f"{info['kind']}: {info['why']}"
        elif event == "unregistered":
            self.log.info("%s", info["why"])
        elif event == "doubted":
            self.log.warning("%s %s", info["site"], info["why"])
            self.doubted[info["site"]] = info["why"]
        ended = event == "round done" and (info.get("stopped") or info["round"] == self.facts.get("rounds"))
        if ended or event == "evaluated":
            self.facts["state"] = "evaluating"
        if event in ("site", "evaluated"):
            self.silent.pop(info["site"], None)
        if event == "outlier":
            self.log.warning("round %s: %s", info["round"], info["why"])
            self.outliers[info["site"]] = f"round {info['round']}: {info['why']}"
        elif event in ("site", "evaluated") and (info.get("outcome", "accepted") != "accepted" or info.get("why")):
            when, why = f"round {info['round']}" if event == "site" else "after the last round", info.get("why", "")
            self.log.warning("%s: %s %s: %s", when, info["site"], info["outcome"], why)
            self.last_failures[info["site"]] = f"{info['outcome']}: {why}"

    def report_silence(self, site: SiteId, sentence: str) -> None:
        """Say that a connected site has not answered for long, on the terminal, in the log and in the status."""
        self.silent[site] = sentence.removeprefix(f"{site} ")
        self.say(sentence)

    def say(self, sentence: str) -> None:
        """Report a sentence on the terminal and in the log."""
        self.log.warning("%s", sentence)
        self.report(sentence)

    def update_until_closed(self, link: SuperLink, look: Callable[[], Sequence[str]] = tuple) -> None:
        """Write the file every two seconds until `closed` is set. `look`: does the upkeep, and returns warnings."""
        while True:
            self.warnings = look()
            if self.closed.wait(2):
                break
            self.report_changes(set(link.connected_sites()))
            self.write_status(link)
        self.write_status(link, running=False)

    def report_changes(self, here: set[SiteId]) -> None:
        """Report sites that have connected or disconnected since the last call, once all have joined."""
        gone, come, self._here = self._here - here, here - self._here, here
        left = "has gone away" + ("; the run waits for it, as the recipe names no quorum" if self.patient else "")
        if self.facts["state"] not in (WAITING, IDLE):
            for site in sorted(gone | come):
                self.say(f"{site} {left if site in gone else 'is back'}")
                if site in gone and self.patient:
                    self.notifier.send(ATTENTION, f"{site} {left}")

    def build_status(self, link: SuperLink, running: bool = True) -> dict[str, Any]:
        """Everything that is known of the server, its sites and its run at this moment."""
        with self._lock:
            refusals = [{"site": site, "why": why, "times": n} for (site, why), n in self.refusals.items()]
        return {
            "federation": self.config.federation,
            "server": f"{self.config.host}:{self.config.port}",
            "pid": os.getpid() if running else None,
            "written": timestamp(),
            **self.facts,
            **({"absent": self.absent} if self.absent else {}),
            **({"doubted": self.doubted} if self.doubted else {}),
            **({"last failure": self.last_failures} if self.last_failures else {}),
            **({"silent": self.silent} if self.silent else {}),
            **({"outlier": self.outliers} if self.outliers else {}),
            "sites": {site: _site_presence(link, site, running) for site in self.config.sites},
            "refusals": refusals,
            "warnings": list(self.warnings),
            "certificates": {name: timestamp(end) for name, end in server_expiries(self.config).items()},
            "counts": self.tally.to_json(),
        }

    def write_status(self, link: SuperLink, running: bool = True) -> None:
        """Write the status into the server's folder and the run's."""
        status = self.build_status(link, running)
        for folder in self.folders:
            with contextlib.suppress(OSError, StoreError):  # a full disk may have room again later
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / STATUS, status)


def _site_presence(link: SuperLink, site: SiteId, running: bool) -> dict[str, object]:
    seen = link.gate.last_seen.get(site)
    state = "connected" if running and site in link.connected_sites() else "away" if seen else "never seen"
    when = None if seen is None else timestamp(datetime.fromtimestamp(seen, UTC))
    version = link.gate.versions.get(site, __version__)
    return {"state": state, "seen": when, **({} if version == __version__ else {"version": version})}


class ConnectionStatus:
    """A site's state, written to `status.json` whenever it changes, and reported as a sentence."""

    def __init__(self, config: SiteConfig, report: Callable[[str], None]) -> None:
        self.config, self.report = config, report
        self.warnings: Sequence[str] = ()
        """What a person should know before it is too late."""
        self.state = ""

    def report_state(self, sentence: str) -> None:
        """Report the state of the connection, and write it."""
        self.write_state(sentence, os.getpid())
        self.report(sentence)

    def report_warning(self, sentence: str) -> None:
        """Report something that people should mend in time, and write it beside the state."""
        self.write_state(self.state, os.getpid())
        self.report(f"warning: {sentence}")

    def write_state(self, state: str, pid: int | None) -> None:
        """Write a state; `pid`: the process that is at work, None if it ends."""
        self.state = state
        logging.getLogger("polyclinic.site").info(state)
        facts = {"site": self.config.site, "server": self.config.server, "pid": pid, "since": timestamp()}
        with contextlib.suppress(StoreError):  # a full disk is reported elsewhere, and may have room again later
            write_json(self.config.folder / STATUS, {**facts, "state": state, "warnings": list(self.warnings)})


class Tally:
    """What this process has counted since it started, for monitoring: rounds, replies, bytes, outliers."""

    def __init__(self) -> None:
        self.rounds, self.seconds = 0, 0.0
        self.replies: defaultdict[SiteId, Counter[str]] = defaultdict(Counter)
        self.bytes: defaultdict[SiteId, Counter[str]] = defaultdict(Counter)
        self.outliers: Counter[SiteId] = Counter()

    def count_event(self, event: str, info: Fields) -> None:
        """Count what an event of the run says."""
        if event == "round done":
            self.rounds += 1
            self.seconds += info["seconds"]
        elif event == "site":
            self.replies[info["site"]][info.get("outcome") or "silent"] += 1
            self.bytes[info["site"]].update(down=info.get("down", 0), up=info.get("up", 0))
            self.outliers[info["site"]] += bool(info.get("outlier"))

    def to_json(self) -> dict[str, Any]:
        counts = {"rounds": self.rounds, "seconds": self.seconds, "outliers": dict(self.outliers)}
        return {**counts, "replies": _plain(self.replies), "bytes": _plain(self.bytes)}


def _plain(counted: Mapping[SiteId, Counter[str]]) -> dict[SiteId, dict[str, int]]:
    return {site: dict(counts) for site, counts in list(counted.items())}


def read_status(folder: Path) -> dict[str, Any] | None:
    """The status that the process of this folder last wrote; None if it wrote none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / STATUS).read_text())
        if isinstance(found, dict):
            pid = found.get("pid")
            return found | {"alive": isinstance(pid, int) and psutil.pid_exists(pid)}
    return None
