"""The processes of a deployment: the server with Flower's SuperLink in it, and a site; their folders, logs and locks.

Neither process starts another, so a killed one leaves nothing behind. Flower keeps nothing on disk (its database is in
memory): a run resumes from our snapshot, never from Flower's. `ChildProcess` is for programs that start these
processes, such as rehearsals, tests and benchmarks.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyclinic.core import EngineError, RecipeError, SiteId, StoreError
from polyclinic.deploy.config import ServerConfig, is_loopback, parse_address
from polyclinic.deploy.provisioning.certificates import check_server_files, check_site_files, read_revoked_keys
from polyclinic.deploy.provisioning.kit import FLWR
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.release_log import timestamp
from polyclinic.storage.files import explain_os_errors, lock_folder, write_json

if TYPE_CHECKING:
    from polyclinic.deploy.flower.server import FlowerEngine, SuperLink

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DATABASE": ":flwr-in-memory:",
}
"""Keeps Flower from the internet, from installing packages, and from the disk."""
LOG_BYTES, LOG_FILES = 1 << 20, 3
STATUS, STOPPED = "status.json", "stopped"
WAITING = "waiting for sites"
PATIENCE = 30.0
"""Seconds that a site may be away before a run that does not need it goes on."""
MAX_REFUSALS = 50
"""How many different refusals are listed; further ones are only counted."""


def prepare_role_folder(folder: Path) -> None:
    """Create a role's folder and set Flower's environment. Call it before Flower is imported."""
    found = _flower_version()
    if found != FLWR:
        raise EngineError(f"this needs flwr {FLWR}, here is {found or 'none'}; pip install 'polyclinic[flower]'")
    with explain_os_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.update(ENVIRONMENT, FLWR_HOME=str(folder / "flower"))


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


def _flower_version() -> str:
    try:
        return importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        return ""


class ServerStatus:
    """The server's state and its sites', written to `status.json` while the server runs."""

    def __init__(self, config: ServerConfig, folders: Sequence[Path]) -> None:
        self.config, self.folders = config, list(folders)
        self.refusals: Counter[tuple[SiteId, str]] = Counter()
        self.facts: dict[str, object] = {"state": WAITING}
        self.absent: dict[SiteId, str] = {}
        self.last_failures: dict[SiteId, str] = {}
        self.report: Callable[[str], None] = lambda _: None
        """Is called with a sentence when a site disconnects or reconnects, once all have joined."""
        self.patient = False
        """Whether rounds wait for sites that have disconnected."""
        self._here: set[SiteId] = set()
        self.log = logging.getLogger("polyclinic.runs.server_training")
        self._lock = threading.Lock()
        self._over = threading.Event()

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
        self.update_facts(state="asking sites to enrol")

    def update_facts(self, **facts: Any) -> None:
        self.facts.update(facts)

    def record_event(self, event: str, info: Mapping[str, Any]) -> None:
        """Record an event of the run."""
        if event == "round":
            self.update_facts(state="running", round=info["round"], asked=list(info["cohort"]))
        elif event == "absent":
            self.log.warning("%s did not enrol: %s: %s", info["site"], info["kind"], info["why"])
            self.absent[info["site"]] = f"{info['kind']}: {info['why']}"
        elif event == "site" and info["outcome"] != "accepted":
            self.log.warning("round %d: %s %s: %s", info["round"], info["site"], info["outcome"], info.get("why", ""))
            self.last_failures[info["site"]] = f"{info['outcome']}: {info.get('why', '')}"
        elif event == "evaluated" and "outcome" in info:
            self.log.warning("after the last round: %s %s: %s", info["site"], info["outcome"], info["why"])
            self.last_failures[info["site"]] = f"{info['outcome']}: {info['why']}"

    def update_until_closed(self, link: SuperLink) -> None:
        """Write the file every two seconds until `close` is called."""
        while True:
            over = self._over.wait(2)
            if not over:
                self.report_changes({site for site, node in link.nodes.items() if node in link.connected_nodes()})
            self.write_status(link, running=not over)
            if over:
                return

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
            "sites": {site: _site_presence(link, site, running) for site in self.config.sites},
            "refusals": refusals,
        }
        for folder in self.folders:
            with contextlib.suppress(OSError, StoreError):  # a full disk may have room again later
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / STATUS, status)

    def close(self) -> None:
        self._over.set()


def _site_presence(link: SuperLink, site: SiteId, running: bool) -> dict[str, object]:
    seen = link.gate.last_seen.get(site)
    state = "connected" if running and link.nodes[site] in link.connected_nodes() else "away" if seen else "never seen"
    when = None if seen is None else datetime.fromtimestamp(seen, UTC).isoformat(timespec="seconds")
    return {"state": state, "seen": when}


class SiteRegistration:
    """A server that sites can join, and the sites that have."""

    def __init__(self, link: SuperLink, engine: FlowerEngine, board: ServerStatus) -> None:
        self.link, self.engine, self.board = link, engine, board

    def connected_sites(self) -> list[SiteId]:
        here = self.link.connected_nodes()
        return [site for site, node in self.link.nodes.items() if node in here]

    def wait_for_sites(self, seconds: float | None, needed: int, report: Callable[[str], None]) -> dict[SiteId, str]:
        """Wait for all sites, or after `seconds` for as many as are `needed`.

        Returns the sites that are missing, and why. Raises `EngineError` if fewer than needed have joined by then.
        """
        begun, reported = time.monotonic(), None
        while True:
            here = self.connected_sites()
            missing = [site for site in self.link.nodes if site not in here]
            if not missing:
                return {}
            if seconds is not None and time.monotonic() > begun + seconds:
                if len(here) >= needed:
                    report(f"going on without {', '.join(missing)}")
                    return dict.fromkeys(missing, f"it did not come within {seconds:g} s")
                raise EngineError(
                    f"{len(here)} of {len(self.link.nodes)} sites came within {seconds:g} s, {needed} are needed; "
                    f"missing: {', '.join(missing)}"
                )
            if missing != reported:
                report(f"{len(here)} of {len(self.link.nodes)} sites are here; waiting for {', '.join(missing)}")
                reported = missing
            time.sleep(0.2)


@contextlib.contextmanager
def open_server(
    config: ServerConfig, out: Path | None = None, patience: float = PATIENCE
) -> Iterator[SiteRegistration]:
    """Run the server until the block ends. `out`: the run's folder, which gets a copy of the status."""
    if config.insecure and not is_loopback(config.host):
        raise RecipeError(
            f"without TLS a server may only listen on this machine, and {config.host} is another; set insecure: false"
        )
    if not config.sites:
        raise RecipeError("server.yaml names no site that could join; create kits with `polyclinic provision`")
    prepare_role_folder(config.folder)
    if not config.insecure:
        check_server_files(config.certificate, config.key, config.ca, config.host)
    with lock_folder(config.folder):
        from polyclinic.deploy.flower.server import FlowerEngine, LinkGrid, SuperLink

        board = ServerStatus(config, [config.folder, *([out] if out else [])])
        pair = None if config.insecure else (config.certificate, config.key)
        link = SuperLink(
            config.sites, listen_address(config.host), config.port, pair, board.count_refusal, config.federation
        )
        link.revoked = read_revoked_keys(config.revoked)
        with log_to_file(config.folder / "server.log"), link:
            follower = threading.Thread(target=board.update_until_closed, args=(link,), daemon=True)
            follower.start()
            try:
                yield SiteRegistration(link, FlowerEngine(LinkGrid(link), link.nodes, patience), board)
            finally:
                board.close()
                follower.join(timeout=5)


def listen_address(host: str) -> str:
    """The address to listen on if sites reach the server by this name: the loopback interface, or all interfaces."""
    if is_loopback(host):
        return "127.0.0.1" if parse_address(host) is None else host
    return "::" if (address := parse_address(host)) is not None and address.version == 6 else "0.0.0.0"


def serve_site(
    config: SiteConfig,
    answer: Callable[[bytes], bytes],
    report: Callable[[str], None],
    is_idle: Callable[[], bool] = lambda: False,
) -> None:
    """Run a site until SIGTERM or Ctrl-C.

    Args:
        config: site.yaml.
        answer: Turns a message into a reply (`SiteMessageHandler.answer_message`).
        report: Is called with a sentence whenever the state of the connection changes.
        is_idle: Whether the site takes part in no run at the moment.
    """
    for name in ("server", "key") if config.insecure else ("server", "key", "ca"):
        if not getattr(config, name):
            raise RecipeError(f"site.yaml lacks the key {name!r}; use the file of the kit")
    assert config.key is not None
    host = config.server.rpartition(":")[0].strip("[]")
    if config.insecure and not is_loopback(host):
        raise RecipeError(
            f"without TLS a site may only join a server on its own machine, and {host} is another; set insecure: false"
        )
    prepare_role_folder(config.folder)
    authority = None if config.insecure else config.ca
    if authority is not None:
        check_site_files(authority, config.key)
    log = logging.getLogger("polyclinic.site")

    def note(state: str, pid: int | None) -> None:
        log.info(state)
        about = {"site": config.site, "server": config.server, "pid": pid, "since": timestamp(), "state": state}
        with contextlib.suppress(StoreError):  # a full disk is reported elsewhere, and may have room again later
            write_json(config.folder / STATUS, about)

    def say(sentence: str) -> None:
        note(sentence, os.getpid())
        report(sentence)

    with lock_folder(config.folder / "joined"):
        from polyclinic.deploy.flower.client import SiteConnection

        names = config.federation, config.site
        attendance = SiteConnection(config.server, authority, config.key, config.folder, answer, say, is_idle, names)
        with log_to_file(config.folder / "flower.log"), terminate_as_interrupt():
            try:
                attendance.serve_forever()
            except EngineError as error:
                note(f"{STOPPED}: {error}", None)
                raise
            except KeyboardInterrupt:
                note(STOPPED, None)
                raise


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that files are closed and sites sign off."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ChildProcess:
    """A process started by a program that also ends it; it dies with its parent, however that ends."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @staticmethod
    def start_polyclinic(
        *arguments: str | Path, log: Path, environment: Mapping[str, str] | None = None
    ) -> ChildProcess:
        return ChildProcess([sys.executable, "-m", "polyclinic", *map(str, arguments)], log, environment)

    def kill(self) -> None:
        """Kill the process and everything it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, seconds: float = 10) -> int:
        """Terminate the process, kill it after `seconds`, and return its exit code."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()
        return self.process.returncode

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _die_with_parent() -> None:
    set_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def read_status(folder: Path) -> dict[str, Any] | None:
    """The status that the process of this folder last wrote; None if it wrote none."""
    try:
        found = json.loads((folder / STATUS).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    return found | {"alive": _is_alive(found.get("pid"))}


def _is_alive(pid: object) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
