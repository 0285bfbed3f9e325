"""The server's side of a deployment: an engine whose sites are elsewhere, and the link that they connect to.

The messages and the round loop are ours, and a message travels in one request (`flower/gateway.py`); Flower 1.41 keeps
account of its nodes, the sites: which are registered, and which are connected. At a site, a long-lived process of ours
(`flower/client.py`) uses Flower's own client. The application that a server can ship with a run of Flower's is never
fetched, so no foreign code can run. At the server, Flower's SuperLink (the application that `flower-superlink` serves,
kept in memory) runs in the process of the round loop, behind the gateway. A site is identified by its key alone.

Only this folder and `federation/engines/flower_envelope.py` import flwr; its releases change these interfaces, so one
version is pinned.
"""

import asyncio
import errno
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self, cast

import uvicorn
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.supercore.constant import NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.main import create_app
from uvicorn.protocols.http.h11_impl import H11Protocol

from polyclinic.core import PROTOCOL, EngineError, Failure, Refused, SiteId
from polyclinic.deploy.flower.connections import Connection, ConnectionLimits, raise_descriptor_limit
from polyclinic.deploy.flower.gateway import Gateway
from polyclinic.deploy.flower.message_queue import MessageQueue
from polyclinic.deploy.flower.silence import SilenceRule, SilenceWatch
from polyclinic.deploy.provisioning.certificates import PublicKey, read_public_key
from polyclinic.federation.engines import Answer
from polyclinic.federation.mailbox import DividedMessages, message_parts
from polyclinic.storage import messages as wire

MAX_ATTEMPTS = 5
"""How often one message is sent to a site that keeps going away: the message itself may be what ends it."""
MAX_HEAD_BYTES = 16 << 10
"""Of a request's line and headers."""
ERRORS_ONLY = logging.getLogger("uvicorn.requests")
ERRORS_ONLY.setLevel(logging.ERROR)


class MessageLink(Protocol):
    """What carries messages to sites and replies back."""

    def connected_since(self) -> Mapping[SiteId, str]:
        """The connected sites, and when each connected."""
        ...

    def send_message(self, site: SiteId, parts: tuple[bytes, ...]) -> str:
        """Send a site a message, given as its parts, and return a name for it."""
        ...

    def wait_for_reply(self, seconds: float) -> tuple[str, bytes] | None:
        """Return the name of a message and the reply to it, once for each; None if none comes within the time."""
        ...

    def withdraw_message(self, name: str) -> None:
        """Forget a message. A reply to it may still come, or not."""
        ...


class FlowerEngine:
    """Exchanges messages with sites that are Flower nodes.

    Args:
        link: What carries the messages.
        patience: Seconds that a site may be away before a round goes on without it.
    """

    def __init__(self, link: MessageLink, patience: float = 30.0) -> None:
        self.link, self.patience = link, patience
        self.report: Callable[[str], None] = lambda _: None
        """Is called with a sentence when a message is sent again."""
        self.silence = SilenceRule()
        self.report_silence: Callable[[SiteId, str], None] = lambda _site, _sentence: None
        """How long silent sites are waited for, and who is told of them."""
        self.away: dict[SiteId, float] = {}
        """When each absent site was first missed; kept from one exchange to the next."""

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        """Send each site its message and yield the answers. A site that reconnects gets its message again; it answers
        a repeated message with the same bytes."""
        exchange = _Exchange(self, sent)
        try:
            for site in sent:
                exchange.send_message(site)
            if isinstance(sent, DividedMessages):
                sent.release_shared()
            yield from exchange.resend_or_give_up()
            while exchange.unanswered_sites() and (deadline is None or time.monotonic() < exchange.begun + deadline):
                yield from exchange.collect_answer(0.2)
                if time.monotonic() >= exchange.looked + 0.5:
                    yield from exchange.resend_or_give_up()
                    yield from exchange.give_up_silent_sites()
            yield from (
                (site, Failure("late", f"no reply within {deadline:g} s")) for site in exchange.unanswered_sites()
            )
        finally:
            exchange.withdraw_messages(list(exchange.asked))


class _Exchange:
    """The state of one call of `exchange`."""

    def __init__(self, engine: FlowerEngine, sent: Mapping[SiteId, bytes]) -> None:
        self.engine, self.sent = engine, sent
        self.begun = self.looked = time.monotonic()
        self.silence = SilenceWatch(engine.silence, engine.report_silence)
        self.here = engine.link.connected_since()
        self.asked: dict[str, SiteId] = {}
        self.absent: set[SiteId] = set()
        """Sites that are not connected and have not received their message."""
        self.since: dict[SiteId, str] = {}
        """When each site had last connected at the time its message was sent."""
        self.times: Counter[SiteId] = Counter()
        self.sent_at: dict[SiteId, float] = {}

    def send_message(self, site: SiteId) -> None:
        if site not in self.here:
            self.mark_away(site)
            return
        name = self.engine.link.send_message(site, message_parts(self.sent, site))
        self.asked[name], self.since[site] = site, self.here[site]
        self.times[site] += 1
        self.sent_at[site] = time.monotonic()
        self.mark_back(site)

    def mark_away(self, site: SiteId) -> None:
        self.absent.add(site)
        self.engine.away.setdefault(site, time.monotonic())

    def mark_back(self, site: SiteId) -> None:
        self.absent.discard(site)
        self.engine.away.pop(site, None)

    def collect_answer(self, seconds: float) -> Iterable[tuple[SiteId, Answer]]:
        """Yield the next answer, if one comes within so many seconds."""
        name, *replies = self.engine.link.wait_for_reply(seconds) or ("",)
        if (site := self.asked.get(name)) is not None:
            self.forget_site(site)
            self.silence.note_answer()
            yield site, _read_reply(replies.pop())  # so that only who is given the reply holds it

    def resend_or_give_up(self) -> Iterable[tuple[SiteId, Answer]]:
        """Resend to sites that have reconnected; give up sites that have been away too long."""
        self.looked, self.here = time.monotonic(), self.engine.link.connected_since()
        for site in self.unanswered_sites():
            came, former = self.here.get(site), self.since.get(site)
            if came is None:
                self.mark_away(site)
                if self.looked >= self.engine.away[site] + self.engine.patience:
                    self.forget_site(site)
                    yield site, Failure("dead", f"it has been away for {self.looked - self.engine.away[site]:.0f} s")
            elif came == former:
                self.mark_back(site)
            elif self.times[site] == MAX_ATTEMPTS:
                self.forget_site(site)
                yield site, Failure("dead", f"it went away {MAX_ATTEMPTS} times while at work on this")
            else:
                self.report_repetition(site)
                self.send_message(site)

    def report_repetition(self, site: SiteId) -> None:
        """Say why a round takes longer than usual: a site that had its message has begun anew."""
        if site in self.sent_at:
            lost = time.monotonic() - self.sent_at[site]
            self.engine.report(
                f"{site} went away while at work and is back: it gets the message of {lost:.0f} s ago once more"
            )

    def give_up_silent_sites(self) -> Iterable[tuple[SiteId, Answer]]:
        """Report connected sites that do not answer; with a quorum, go on without them after a while."""
        silent = list(dict.fromkeys(self.asked.values()))
        if self.silence.is_over():
            self.withdraw_messages(list(self.asked))
            yield from ((site, Failure("late", f"no reply within {self.silence.limit:.0f} s")) for site in silent)
        else:
            self.silence.report_silence(silent)

    def unanswered_sites(self) -> list[SiteId]:
        return list(dict.fromkeys([*self.asked.values(), *self.absent]))

    def forget_site(self, site: SiteId) -> None:
        """Expect no answer of this site any more."""
        self.withdraw_messages([name for name, of in self.asked.items() if of == site])
        self.absent.discard(site)

    def withdraw_messages(self, names: Iterable[str]) -> None:
        """Expect no more answers to these messages, and delete them."""
        for name in names:
            del self.asked[name]
            self.engine.link.withdraw_message(name)


def _read_reply(data: bytes) -> bytes | Failure:
    with suppress(Refused):  # the caller reports what is wrong with it
        if len(data) <= 1 << 16 and "failure" in (fields := wire.decode(data).fields):
            words = "".join(letter if letter.isprintable() else " " for letter in str(fields.get("why", "")))
            return Failure("refused" if fields["failure"] == "refused" else "error", words[:500])
    return data


@dataclass
class SuperLink:
    """Flower's SuperLink in this process, behind the gateway, with the sites' public keys registered."""

    keys: Mapping[SiteId, Path]
    """The file of each site's public key."""
    host: str
    port: int
    certificate: tuple[Path, Path] | None
    """The files of certificate and key; None serves without TLS."""
    refused: Callable[[SiteId, str], None] = lambda *_: None
    federation: str = ""
    nodes: dict[SiteId, int] = field(default_factory=dict)
    revoked: Sequence[tuple[PublicKey, str]] = ()
    """Revoked keys, each with a description of its owner."""

    def __enter__(self) -> Self:
        app = create_app()
        app.state.enable_supernode_auth = True
        self.state = cast(InMemoryLinkState, app.state.linkstate_factory.state())
        known = {public_key_to_bytes(read_public_key(path)): site for site, path in self.keys.items()}
        for key, site in known.items():
            self.nodes[site] = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=site)
        former = {public_key_to_bytes(key): whose for key, whose in self.revoked}
        self.limits = ConnectionLimits(len(known), raise_descriptor_limit(), self.refused)
        self.messages = MessageQueue()
        self.gate = Gateway(app, known, PROTOCOL, self.messages, self.limits, self.refused, self.federation, former)
        self._start_http_server()
        return self

    def connected_since(self) -> dict[SiteId, str]:
        here = {node.node_id: node.last_activated_at for node in self.state.get_node_info(statuses=[NodeStatus.ONLINE])}
        return {site: here[node] for site, node in self.nodes.items() if node in here}

    def connected_sites(self) -> list[SiteId]:
        return list(self.connected_since())

    def registered_sites(self) -> list[SiteId]:
        """The sites whose key is registered now, in the federation's order."""
        registered = set(self.gate.keys.values())
        return [site for site in self.nodes if site in registered]

    def reload_certificate(self, certificate: Path, key: Path) -> None:
        """Show another certificate from the next connection on."""
        if self.server.config.ssl is not None:
            self.server.config.ssl.load_cert_chain(certificate, key)

    def send_message(self, site: SiteId, parts: tuple[bytes, ...]) -> str:
        return self.messages.put(site, parts)

    def wait_for_reply(self, seconds: float) -> tuple[str, bytes] | None:
        return self.messages.wait_for_reply(seconds)

    def withdraw_message(self, name: str) -> None:
        self.messages.withdraw(name)

    def _start_http_server(self) -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((self.host, self.port))
            self.socket.listen(1024)
        except OSError as error:
            self.socket.close()
            hint = "is another server running there?"
            if error.errno == errno.EADDRNOTAVAIL:
                hint = "this machine has no such address: correct `listen` in server.yaml"
            raise EngineError(f"cannot listen on {self.host}:{self.port} ({error.strerror}); {hint}") from None
        certificate, key = self.certificate or (None, None)
        config = uvicorn.Config(
            self.gate,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            http=_SiteProtocol,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
        )
        self.server = _LimitedServer(config, self.socket, self.limits)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            if not self.thread.is_alive():
                raise EngineError("Flower's SuperLink did not start; the server's log says why")
            time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self.gate.release_waiters()
        self.server.should_exit = True
        self.thread.join(timeout=5)
        self.socket.close()


class _LimitedServer(uvicorn.Server):
    """uvicorn's server, whose connections are accepted by `ConnectionLimits`."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self.listener, self.limits = listener, limits
        self.servers: list[asyncio.base_events.Server] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.accepting = asyncio.create_task(
            self.limits.accept_forever(self.listener, self._make_protocol, self.config.ssl)
        )
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.accepting.cancel()
        await super().shutdown(sockets)

    def _make_protocol(self, connection: Connection) -> asyncio.Protocol:
        protocol = _SiteProtocol(self.config, self.server_state, {"connection": connection})
        protocol.connection, protocol.limits = connection, self.limits
        return protocol


class _SiteProtocol(H11Protocol):
    """uvicorn's HTTP protocol on a limited connection. What is no HTTP is counted, not logged line by line."""

    connection: Connection
    limits: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.logger, self.access_log = ERRORS_ONLY, False

    def send_400_response(self, msg: str) -> None:
        self.limits.refuse(self.connection, "no HTTP")
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.limits.discard(self.connection)
