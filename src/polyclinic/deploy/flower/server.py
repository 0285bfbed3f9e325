"""The server's side of Flower 1.41: an engine whose sites are Flower nodes, and the SuperLink that they connect to.

The messages and the round loop are ours; Flower carries the bytes and authenticates the sites. At a site, a long-lived
process of ours (`flower/client.py`) uses Flower's own client of the fleet interface, as `flower-supernode` does, but
asks for work at once instead of every 3 s, and answers from the installed package. The application that a server can
ship with a run is never fetched, so no foreign code can run. At the server, Flower's SuperLink (the application that
`flower-superlink` serves, kept in memory) runs in the process of the round loop, behind `flower/gateway.py`; the loop
calls it directly through Flower's Grid. A site is identified by its registered key alone.

Only this folder and `federation/engines/flower_envelope.py` import flwr; its releases change these interfaces, so one
version is pinned.
"""

import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import uvicorn
from flwr.app import Message
from flwr.common.constant import (
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    ErrorCode,
    SubStatus,
)
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.serverapp import Grid
from flwr.supercore.constant import NOOP_FEDERATION_ID, NodeStatus, TaskType
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.superlink.main import create_app
from flwr.superlink.servicer.runtime import runtime_handlers

from polyclinic.core import EngineError, Failure, Refused, SiteId, __version__
from polyclinic.deploy.flower.client import HEARTBEAT_SECONDS, NONCE
from polyclinic.deploy.flower.gateway import Gateway
from polyclinic.deploy.flower.silence import SilenceRule, SilenceWatch
from polyclinic.deploy.provisioning.certificates import PublicKey, read_public_key
from polyclinic.federation.engines import Answer
from polyclinic.federation.engines.flower_envelope import pack_message, unpack_message
from polyclinic.storage import messages as wire

RUNTIME_CALLS = (
    "push_messages",
    "pull_messages",
    "push_object",
    "pull_object",
    "confirm_message_received",
    "get_nodes",
)
MAX_ATTEMPTS = 5
"""How often one message is sent to a site that keeps going away: the message itself may be what ends it."""
UNAVAILABLE = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
MESSAGE_TTL = 30 * 86_400.0
"""Seconds after which Flower drops a message; rounds have shorter deadlines of their own."""


def build_message(data: bytes, node: int) -> Message:
    """Build a message to a site. Flower identifies a message by its hash and accepts a reply from anyone who knows it:
    random bytes at the end make the hash impossible to guess."""
    return Message(pack_message(data + secrets.token_bytes(NONCE)), node, "query", ttl=MESSAGE_TTL)


class FlowerEngine:
    """Exchanges messages with sites that are Flower nodes.

    Args:
        grid: Flower's access to the SuperLink.
        nodes: The node of each site.
        patience: Seconds that a site may be away before a round goes on without it.
    """

    def __init__(self, grid: Grid, nodes: Mapping[SiteId, int], patience: float = 30.0) -> None:
        self.grid, self.nodes, self.patience = grid, dict(nodes), patience
        self.silence, self.report_silence = SilenceRule(), lambda _site, _sentence: None
        """How long silent sites are waited for, and who is told of them."""
        self.away: dict[SiteId, float] = {}
        """When each absent site was first missed; kept from one exchange to the next."""
        self.pause: Callable[[float], object] = grid.wait_for_reply if isinstance(grid, LinkGrid) else time.sleep

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        """Send each site its message and yield the answers. A site that reconnects gets its message again; it answers
        a repeated message with the same bytes."""
        exchange = _Exchange(self, sent)
        try:
            for site in sent:
                exchange.send_message(site)
            yield from exchange.resend_or_give_up()
            while exchange.unanswered_sites() and (deadline is None or time.monotonic() < exchange.begun + deadline):
                yield from exchange.collect_answers()
                if time.monotonic() >= exchange.looked + 1:
                    yield from exchange.resend_or_give_up()
                    yield from exchange.give_up_silent_sites()
                if exchange.unanswered_sites():
                    self.pause(0.2)
            yield from (
                (site, Failure("late", f"no reply within {deadline:g} s")) for site in exchange.unanswered_sites()
            )
        finally:
            exchange.withdraw_messages(list(exchange.asked))

    def close(self) -> None:
        """Close the connection to a SuperLink in another process."""
        if isinstance(self.grid, HttpGrid):
            self.grid.close()


class _Exchange:
    """The state of one call of `exchange`."""

    def __init__(self, engine: FlowerEngine, sent: Mapping[SiteId, bytes]) -> None:
        self.engine, self.sent = engine, sent
        self.begun = self.looked = time.monotonic()
        self.silence = SilenceWatch(engine.silence, engine.report_silence)
        self.asked: dict[str, SiteId] = {}
        self.absent: set[SiteId] = set()
        """Sites that are not connected and have not received their message."""
        self.since: dict[SiteId, str] = {}
        """When each site had last connected at the time its message was sent."""
        self.times: Counter[SiteId] = Counter()

    def send_message(self, site: SiteId) -> None:
        here = self.connected_nodes()
        node = self.engine.nodes[site]
        if node in here:
            (name,) = self.engine.grid.push_messages([build_message(self.sent[site], node)]) or [""]
            if name:
                self.asked[name], self.since[site] = site, here[node]
                self.times[site] += 1
                self.absent.discard(site)
                self.engine.away.pop(site, None)
                return
        self.mark_away(site)

    def mark_away(self, site: SiteId) -> None:
        self.absent.add(site)
        self.engine.away.setdefault(site, time.monotonic())

    def connected_nodes(self) -> dict[int, str]:
        """The connected nodes, and when each connected."""
        return {node.node_id: node.last_activated_at for node in self.engine.grid.get_nodes()}

    def collect_answers(self) -> Iterable[tuple[SiteId, Answer]]:
        for name, site in list(self.asked.items()):
            if name not in self.asked:
                continue
            answer = self.read_answer(name)
            if isinstance(answer, Failure) and answer.kind == "dead":
                self.withdraw_messages([name])
                if site not in self.asked.values():
                    self.mark_away(site)
            elif answer is not None:
                self.withdraw_messages([other for other, of in self.asked.items() if of == site])
                self.absent.discard(site)
                self.silence.note_answer()
                yield site, answer

    def read_answer(self, name: str) -> bytes | Failure | None:
        try:
            found = list(self.engine.grid.pull_messages([name]))
            return _read_reply(found[0]) if found else None
        except Exception as error:  # Flower parses untrusted bytes: whatever that raises is the site's failure
            return Failure("refused", f"its reply could not be read ({type(error).__name__})")

    def resend_or_give_up(self) -> Iterable[tuple[SiteId, Answer]]:
        """Resend to sites that have reconnected; give up sites that have been away too long."""
        self.looked, here = time.monotonic(), self.connected_nodes()
        for site in self.unanswered_sites():
            came = here.get(self.engine.nodes[site])
            if came is not None and (site in self.absent or came != self.since[site]):
                if self.times[site] == MAX_ATTEMPTS:
                    self.withdraw_messages([name for name, of in self.asked.items() if of == site])
                    self.absent.discard(site)
                    yield site, Failure("dead", f"it went away {MAX_ATTEMPTS} times while at work on this")
                else:
                    self.send_message(site)
            elif site in self.absent and self.looked >= self.engine.away[site] + self.engine.patience:
                self.absent.remove(site)
                yield site, Failure("dead", f"it has been away for {self.looked - self.engine.away[site]:.0f} s")

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

    def withdraw_messages(self, names: Iterable[str]) -> None:
        """Expect no more answers to these messages, and delete them."""
        for name in names:
            del self.asked[name]
            if isinstance(self.engine.grid, LinkGrid):
                self.engine.grid.delete_message(name)


def _read_reply(reply: Message) -> bytes | Failure:
    if reply.has_error():
        reason = wire.format_untrusted(reply.error.reason)
        return Failure("dead" if reply.error.code in UNAVAILABLE else "error", reason)
    data = unpack_message(reply)
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
        self._open_run()
        former = {public_key_to_bytes(key): whose for key, whose in self.revoked}
        self.gate = Gateway(app, known, self.nodes, __version__, _read_senders, self.refused, self.federation, former)
        self._start_http_server()
        self.over = threading.Event()
        threading.Thread(target=self._refresh_heartbeats, daemon=True).start()
        return self

    def connected_sites(self) -> list[SiteId]:
        here = {node.node_id for node in self.state.get_node_info(statuses=[NodeStatus.ONLINE])}
        return [site for site, node in self.nodes.items() if node in here]

    def _open_run(self) -> None:
        """Create Flower's run without an application, since the sites have theirs."""
        self.run = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self.task = cast(int, self.state.get_run_info(run_ids=[self.run])[0].primary_task_id)
        self.token = cast(str, self.state.claim_task(self.task))
        self.state.activate_task(self.task)
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = self.run, self.task, SUPERLINK_NODE_ID

    def _start_http_server(self) -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((self.host, self.port))
        except OSError as error:
            self.socket.close()
            raise EngineError(
                f"cannot listen on {self.host}:{self.port} ({error.strerror}); is another server running there?"
            ) from None
        certificate, key = self.certificate or (None, None)
        self.server = uvicorn.Server(
            uvicorn.Config(
                self.gate,
                ssl_certfile=certificate,
                ssl_keyfile=key,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
            )
        )
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            if not self.thread.is_alive():
                raise EngineError("Flower's SuperLink did not start; the server's log says why")
            time.sleep(0.02)

    def _refresh_heartbeats(self) -> None:
        while not self.over.wait(HEARTBEAT_SECONDS):
            self.state.acknowledge_task_heartbeat(self.task)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.gate.release_waiters()
        self.state.finish_task(self.task, SubStatus.COMPLETED, "")
        self.server.should_exit = True
        self.thread.join(timeout=5)
        self.socket.close()


class LinkGrid(HttpGrid):
    """Flower's grid, calling the SuperLink of this process without HTTP."""

    def __init__(self, link: SuperLink) -> None:
        super().__init__(token="none: nothing travels")
        state, task, self.link = link.state, link.state.get_task_by_token(link.token), link
        calls = {
            "".join(map(str.capitalize, name.split("_"))): partial(
                getattr(runtime_handlers, name), state=state, task=task
            )
            for name in RUNTIME_CALLS
        }
        self._client = cast(Any, SimpleNamespace(**calls))
        self.set_run(state.get_run_info(run_ids=[link.run])[0])
        self.news = threading.Event()
        link.gate.arrived = self.news.set

    def wait_for_reply(self, seconds: float) -> None:
        """Wait until a piece of a reply arrives, for at most so many seconds."""
        self.news.wait(seconds)
        self.news.clear()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sizes = {message.metadata.dst_node_id: len(unpack_message(message)) for message in messages}
        names = super().push_messages(messages)
        for site, node in self.link.nodes.items():
            if node in sizes:
                self.link.gate.notify_site(site, sizes[node])
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that have arrived completely, so that a slow one does not delay the others."""
        found: list[Message] = []
        for name in filter(self._is_complete, message_ids):
            reply = self.link.state.message_ins_id_to_message_res_id.get(name)
            try:
                found += super().pull_messages([name])
            except Exception:
                if reply is not None:
                    self.link.state.object_store.delete(reply)
                raise
        return found

    def _is_complete(self, name: str) -> bool:
        reply, store = self.link.state.message_ins_id_to_message_res_id.get(name), self.link.state.object_store
        with suppress(NoObjectInStoreError):
            if reply is not None:
                return all(store.get(part.object_id) for part in iterate_object_tree(store.get_object_tree(reply)))
        return True

    def delete_message(self, name: str) -> None:
        """Delete a message, its reply and all their pieces; Flower itself keeps a reply that nobody has fetched."""
        reply = self.link.state.message_ins_id_to_message_res_id.get(name)
        for stored in filter(None, (name, reply)):
            self.link.state.object_store.delete(stored)
        self.link.state.delete_messages({name})

    def close(self) -> None:
        """Do nothing: the SuperLink is closed by the code that opened it."""


def _read_senders(path: str, body: bytes) -> set[int]:
    """The nodes in whose name a request is made."""
    if path.endswith("pull-messages"):
        return {PullMessagesRequest.FromString(body).node.node_id}
    request = PushMessagesRequest.FromString(body)
    names = [message.metadata.message_id for message in request.messages_list]
    if names != [tree.object_id for tree in request.message_object_trees] or len(names) != 1:
        raise ValueError("a reply must be one message, and what follows its pieces")
    return {request.node.node_id, *(message.metadata.src_node_id for message in request.messages_list)}
