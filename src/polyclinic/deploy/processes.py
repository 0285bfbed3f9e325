"""The processes of a deployment: the server with Flower's SuperLink in it, and a site; their folders and locks.

Neither process starts another, so a killed one leaves nothing behind. Flower keeps nothing on disk (its database is in
memory): a run resumes from our snapshot, never from Flower's.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from polyclinic.core import EngineError, RecipeError, SiteId
from polyclinic.deploy.config import ServerConfig, is_loopback, split_host_port
from polyclinic.deploy.flower.client import MAX_MESSAGE_BYTES, SiteConnection
from polyclinic.deploy.flower.key_register import KeyRegister
from polyclinic.deploy.flower.server import FlowerEngine, SuperLink
from polyclinic.deploy.monitor import serve_monitor
from polyclinic.deploy.notices import ATTENTION, Notifier
from polyclinic.deploy.provisioning.certificates import (
    check_server_files,
    check_site_files,
    current_time,
    read_certificate,
    read_revoked_keys,
)
from polyclinic.deploy.provisioning.peer_list import read_peers
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.status import STOPPED, ConnectionStatus, ServerStatus, log_to_file
from polyclinic.deploy.upkeep import Daily, Upkeep, site_warnings
from polyclinic.storage.files import lock_folder, make_folder

PATIENCE = 30.0
"""Seconds that a site may be away before a run that does not need it goes on."""


def prepare_role_folder(folder: Path) -> None:
    """Create a role's folder, and keep Flower's files in it."""
    make_folder(folder, 0o700)
    os.environ["FLWR_HOME"] = str(folder / "flower")


class SiteRegistration:
    """A server that sites can join, and the sites that have."""

    def __init__(self, link: SuperLink, engine: FlowerEngine, board: ServerStatus) -> None:
        self.link, self.engine, self.board = link, engine, board

    def read_peers(self) -> dict[str, object] | None:
        """The list of sites as the authority signed it, by which sites know each other; None without TLS."""
        config = self.board.config
        if config.insecure and not config.peers.exists():
            return None
        return read_peers(config.peers, config.ca, config.federation)

    def wait_for_sites(
        self, seconds: float | None, quorum: int | None, report: Callable[[str], None]
    ) -> dict[SiteId, str]:
        """Wait for all sites, or after `seconds` for as many as the quorum (None: all).

        Returns the sites that are missing, and why. Raises `EngineError` if fewer than needed have joined by then.
        """
        begun, reported = time.monotonic(), None
        while True:
            here, sites = self.link.connected_sites(), self.link.registered_sites()
            missing, needed = [site for site in sites if site not in here], quorum or len(sites)
            if not missing:
                return {}
            if seconds is not None and time.monotonic() > begun + seconds:
                if len(here) >= needed:
                    report(f"going on without {', '.join(missing)}")
                    return dict.fromkeys(missing, f"it did not come within {seconds:g} s")
                raise EngineError(
                    f"{len(here)} of {len(sites)} sites came within {seconds:g} s, {needed} are needed; "
                    f"missing: {', '.join(missing)}"
                )
            if missing != reported:
                report(f"{len(here)} of {len(sites)} sites are here; waiting for {', '.join(missing)}")
                reported = missing
            time.sleep(0.2)


@contextlib.contextmanager
def open_server(
    config: ServerConfig,
    out: Path | None = None,
    patience: float = PATIENCE,
    file: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[SiteRegistration]:
    """Run the server until the block ends.

    Args:
        config: server.yaml.
        out: The run's folder, which gets a copy of the status.
        patience: Seconds that a site may be away before a run that does not need it goes on.
        file: The path of server.yaml; sites' keys are read again whenever it changes.
        report: Is called with a sentence that no run is there to report.
    """
    _check_server(config)
    prepare_role_folder(config.folder)
    host, port = config.listen_address
    with lock_folder(config.folder):
        board = ServerStatus(config, [config.folder, *([out] if out else [])], report)
        link = SuperLink(
            config.sites,
            host,
            port,
            None if config.insecure else (config.certificate, config.key),
            board.count_refusal,
            config.federation,
            revoked=read_revoked_keys(config.revoked),
        )
        as_json = config.log == "json"
        logged = log_to_file(config.folder / "server.log", as_json, on_terminal=as_json)
        with logged, link, _open_monitor(config, board, link):
            upkeep = Upkeep(
                config,
                file,
                KeyRegister(link),
                link.reload_certificate,
                board.say,
                partial(board.notifier.send, ATTENTION),
            )

            def look() -> Sequence[str]:
                upkeep.look()
                board.config = upkeep.config
                return upkeep.warnings

            follower = threading.Thread(target=board.update_until_closed, args=(link, look), daemon=True)
            follower.start()
            engine = FlowerEngine(link, patience)
            engine.report = board.say
            try:
                yield SiteRegistration(link, engine, board)
            finally:
                board.closed.set()
                follower.join(timeout=5)


def _check_server(config: ServerConfig) -> None:
    """Raise if the server cannot work with these settings."""
    for host in (config.host, config.listen_address[0]):
        if config.insecure and not is_loopback(host):
            raise RecipeError(
                f"without TLS a server may only listen on this machine, and {host} is another; set insecure: false"
            )
    if not config.sites:
        raise RecipeError("server.yaml names no site that could join; create kits with `polyclinic provision`")
    if not config.insecure:
        check_server_files(config.certificate, config.key, config.ca, config.host)


def _open_monitor(
    config: ServerConfig, board: ServerStatus, link: SuperLink
) -> contextlib.AbstractContextManager[int | None]:
    """The listener for monitoring systems, if server.yaml asks for one."""
    if not config.monitor:
        return contextlib.nullcontext()
    return serve_monitor(split_host_port(config.monitor), lambda: board.build_status(link))


def serve_site(
    config: SiteConfig,
    answer: Callable[[bytes], bytes],
    report: Callable[[str], None],
    is_idle: Callable[[], bool] = lambda: False,
    largest_message: Callable[[], int] = lambda: MAX_MESSAGE_BYTES,
    note_absence: Callable[[], None] = lambda: None,
    is_done: Callable[[], bool] = lambda: False,
) -> None:
    """Run a site until SIGTERM or Ctrl-C, whatever happens to the server or the connection meanwhile.

    Args:
        config: site.yaml.
        answer: Turns a message into a reply (`SiteMessageHandler.answer_message`).
        report: Is called with a sentence whenever the state of the connection changes.
        is_idle: Whether the site takes part in no run at the moment.
        largest_message: The most bytes of a message that the site takes now (`SiteMessageHandler.largest_message`).
        note_absence: Is called when rounds may have passed without the site (`SiteMessageHandler.note_absence`).
        is_done: Whether the site shall end, asked about once a second.
    """
    authority, key = _check_site(config)
    prepare_role_folder(config.folder)
    board, notifier = ConnectionStatus(config, report), Notifier(config.notify)
    with lock_folder(config.folder / "joined"):
        connection = SiteConnection(
            config.server,
            authority,
            key,
            config.folder,
            answer,
            board.report_state,
            is_idle,
            (config.federation, config.site),
            partial(notifier.send, ATTENTION),
            config.retry,
            largest_message,
            note_absence,
            is_done,
        )
        over = threading.Event()
        watcher = threading.Thread(target=_watch_site, args=(connection, board, notifier, is_done, over), daemon=True)
        with log_to_file(config.folder / "flower.log", config.log == "json"), terminate_as_interrupt():
            watcher.start()
            try:
                connection.serve_forever()
            finally:
                over.set()
                board.write_state(STOPPED, None)


def _check_site(config: SiteConfig) -> tuple[Path | None, Path]:
    """The files of authority and key; raises for what this site's own people must mend before it can ever work."""
    for name in ("server", "key") if config.insecure else ("server", "key", "ca"):
        if not getattr(config, name):
            raise RecipeError(f"site.yaml lacks the key {name!r}; use the file of the kit")
    assert config.key is not None
    host = config.server.rpartition(":")[0].strip("[]")
    if config.insecure and not is_loopback(host):
        raise RecipeError(
            f"without TLS a site may only join a server on its own machine, and {host} is another; set insecure: false"
        )
    authority = None if config.insecure else config.ca
    if authority is not None:  # its dates are checked before every connection: another file, or time, may mend them
        check_site_files(authority, config.key, read_certificate(authority).not_valid_after_utc)
    return authority, config.key


def _watch_site(
    connection: SiteConnection,
    board: ConnectionStatus,
    notifier: Notifier,
    is_done: Callable[[], bool],
    over: threading.Event,
) -> None:
    """Warn once a day before a certificate expires, and end the connection when the site is done."""
    daily = Daily()
    while not over.wait(1):
        if is_done():
            connection.stop.set()
        now = current_time()
        board.warnings = site_warnings(connection.authority, connection.certificate_end, now)
        for sentence in daily.due(board.warnings, now):
            board.report_warning(sentence)
            notifier.send(ATTENTION, sentence)


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that files are closed and sites sign off."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
