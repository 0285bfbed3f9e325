"""The processes of a deployment: the server with Flower's SuperLink in it, and a site; their folders and locks.

Neither process starts another, so a killed one leaves nothing behind. Flower keeps nothing on disk (its database is in
memory): a run resumes from our snapshot, never from Flower's.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from polyclinic.core import EngineError, RecipeError, SiteId, StoreError
from polyclinic.deploy.config import ServerConfig, is_loopback, parse_address
from polyclinic.deploy.flower.client import MAX_MESSAGE_BYTES, SiteConnection
from polyclinic.deploy.flower.server import FlowerEngine, SuperLink
from polyclinic.deploy.provisioning.certificates import check_server_files, check_site_files, read_revoked_keys
from polyclinic.deploy.provisioning.peer_list import read_peers
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.release_log import timestamp
from polyclinic.deploy.status import STATUS, STOPPED, ServerStatus, log_to_file
from polyclinic.storage.files import lock_folder, make_folder, write_json

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

    def wait_for_sites(self, seconds: float | None, needed: int, report: Callable[[str], None]) -> dict[SiteId, str]:
        """Wait for all sites, or after `seconds` for as many as are `needed`.

        Returns the sites that are missing, and why. Raises `EngineError` if fewer than needed have joined by then.
        """
        begun, reported = time.monotonic(), None
        while True:
            here = self.link.connected_sites()
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
        board = ServerStatus(config, [config.folder, *([out] if out else [])])
        link = SuperLink(
            config.sites,
            listen_address(config.host),
            config.port,
            None if config.insecure else (config.certificate, config.key),
            board.count_refusal,
            config.federation,
            revoked=read_revoked_keys(config.revoked),
        )
        with log_to_file(config.folder / "server.log"), link:
            follower = threading.Thread(target=board.update_until_closed, args=(link,), daemon=True)
            follower.start()
            try:
                yield SiteRegistration(link, FlowerEngine(link, patience), board)
            finally:
                board.closed.set()
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
    largest_message: Callable[[], int] = lambda: MAX_MESSAGE_BYTES,
    note_absence: Callable[[], None] = lambda: None,
) -> None:
    """Run a site until SIGTERM or Ctrl-C.

    Args:
        config: site.yaml.
        answer: Turns a message into a reply (`SiteMessageHandler.answer_message`).
        report: Is called with a sentence whenever the state of the connection changes.
        is_idle: Whether the site takes part in no run at the moment.
        largest_message: The most bytes of a message that the site takes now (`SiteMessageHandler.largest_message`).
        note_absence: Is called when rounds may have passed without the site (`SiteMessageHandler.note_absence`).
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

    def write_state(state: str, pid: int | None) -> None:
        logging.getLogger("polyclinic.site").info(state)
        with contextlib.suppress(StoreError):  # a full disk is reported elsewhere, and may have room again later
            write_json(
                config.folder / STATUS,
                {"site": config.site, "server": config.server, "pid": pid, "since": timestamp(), "state": state},
            )

    def report_state(sentence: str) -> None:
        write_state(sentence, os.getpid())
        report(sentence)

    with lock_folder(config.folder / "joined"):
        connection = SiteConnection(
            config.server,
            authority,
            config.key,
            config.folder,
            answer,
            report_state,
            is_idle,
            (config.federation, config.site),
            largest_message,
            note_absence,
        )
        with log_to_file(config.folder / "flower.log"), terminate_as_interrupt():
            try:
                connection.serve_forever()
            except EngineError as error:
                write_state(f"{STOPPED}: {error}", None)
                raise
            except KeyboardInterrupt:
                write_state(STOPPED, None)
                raise


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that files are closed and sites sign off."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
