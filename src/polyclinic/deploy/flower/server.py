"""Sites elsewhere, over Flower 1.41: our messages and our loop; Flower carries the bytes and knows who is who.

At a site runs one long-lived process of ours. It speaks to the server by Flower's own client of its Fleet interface, as
`flower-supernode` does, but asks for work at once instead of every 3 s, and answers from the installed package: the
application that a server can ship with a run is never even fetched, so no foreign code can run (and nothing is
imported anew for each message). At the server, Flower's SuperLink (the application that `flower-superlink` serves, kept
in memory) runs inside the process of the round loop, behind `deploy.gate`; the loop reaches it through Flower's Grid
without a way over HTTP. A site is known by the key that was registered for it, whatever it says of itself.

This and `engines.flower_site` are the only modules that import flwr; its releases change these interfaces, so it is
pinned to one.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any, cast

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

from polyclinic import __version__
from polyclinic.core.contract import Failure, SiteId
from polyclinic.core.errors import EngineError, Refused
from polyclinic.deploy.flower.client import BEAT, NONCE
from polyclinic.deploy.flower.gateway import Gateway
from polyclinic.deploy.provisioning.certificates import read_public_key
from polyclinic.federation.engines import Answer
from polyclinic.federation.engines.flower_envelope import pack_message, unpack_message
from polyclinic.storage import messages as wire

if TYPE_CHECKING:
    from polyclinic.deploy.provisioning.certificates import PublicKey

TIMES = 5
"""So often a site that goes away and comes back is asked the same; then it seems to be what it dies of."""
LONGEST = 30 * 86_400.0
"""Seconds after which Flower forgets a message; rounds have deadlines of their own."""


def build_message(data: bytes, node: int) -> Message:
    """A message to a site. Flower calls things by their hash, and whoever knows the name of a message may answer it:
    so a random end makes names that nobody can guess."""
    return Message(pack_message(data + secrets.token_bytes(NONCE)), node, "query", ttl=LONGEST)


class FlowerEngine:
    """Sites behind a grid of Flower's, each known by its node. `patience`: seconds that one may be away and come back
    before rounds go on without it."""

    def __init__(self, grid: Grid, nodes: Mapping[SiteId, int], patience: float = 30.0) -> None:
        self.grid, self.nodes, self.patience = grid, dict(nodes), patience
        self.away: dict[SiteId, float] = {}
        """Since when sites have been away, from one exchange to the next."""
        self.pause: Callable[[float], object] = grid.wait_for_reply if isinstance(grid, LinkGrid) else time.sleep

    def exchange(
        self, round: int, sent: Mapping[SiteId, bytes], deadline: float | None
    ) -> Iterable[tuple[SiteId, Answer]]:
        """Sites that come back within the round get their message again: what a site does for it has effect once."""
        visit = _Exchange(self, sent, deadline)
        try:
            for site in sent:
                visit.send_message(site)
            yield from visit.resend_or_give_up()
            while visit.has_pending and not visit.is_expired:
                yield from visit.collect_answers()
                if time.monotonic() >= visit.looked + 1:
                    yield from visit.resend_or_give_up()
                if visit.has_pending:
                    self.pause(0.2)
            yield from ((site, Failure("late", f"no reply within {deadline:g} s")) for site in visit.close_expired())
        finally:
            visit.withdraw_messages(list(visit.asked))

    def close(self) -> None:
        """Hang up."""
        if isinstance(self.grid, HttpGrid):
            self.grid.close()


class _Exchange:
    """One exchange under way."""

    def __init__(self, engine: FlowerEngine, sent: Mapping[SiteId, bytes], deadline: float | None) -> None:
        self.engine, self.sent, self.deadline = engine, sent, deadline
        self.begun = self.looked = time.monotonic()
        self.asked: dict[str, SiteId] = {}
        self.absent: set[SiteId] = set()
        """Sites that no message could reach so far."""
        self.since: dict[SiteId, str] = {}
        """When each site had last come, as its message was sent."""
        self.times: Counter[SiteId] = Counter()

    @property
    def has_pending(self) -> bool:
        return bool(self.asked or self.absent)

    @property
    def is_expired(self) -> bool:
        return self.has_pending and self.deadline is not None and time.monotonic() >= self.begun + self.deadline

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
        """Nodes that are there, and when each came."""
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
                yield site, answer

    def read_answer(self, name: str) -> bytes | Failure | None:
        try:
            found = list(self.engine.grid.pull_messages([name]))
            return _read_reply(found[0]) if found else None
        except Exception as error:  # a stranger's bytes, read by Flower: whatever that leads to is the site's failure
            return Failure("refused", f"its reply could not be read ({type(error).__name__})")

    def resend_or_give_up(self) -> Iterable[tuple[SiteId, Answer]]:
        """Who came back gets its message again; who stays away is given up."""
        self.looked, here = time.monotonic(), self.connected_nodes()
        for site in self.close_expired():
            came = here.get(self.engine.nodes[site])
            if came is not None and (site in self.absent or came != self.since[site]):
                if self.times[site] == TIMES:
                    self.withdraw_messages([name for name, of in self.asked.items() if of == site])
                    self.absent.discard(site)
                    yield site, Failure("dead", f"it went away {TIMES} times while at work on this")
                else:
                    self.send_message(site)
            elif site in self.absent and self.looked >= self.engine.away[site] + self.engine.patience:
                self.absent.remove(site)
                yield site, Failure("dead", f"it has been away for {self.looked - self.engine.away[site]:.0f} s")

    def close_expired(self) -> list[SiteId]:
        return list(dict.fromkeys([*self.asked.values(), *self.absent]))

    def withdraw_messages(self, names: Iterable[str]) -> None:
        """What was asked under these names is no longer asked, and takes no room anywhere."""
        for name in names:
            del self.asked[name]
            if isinstance(self.engine.grid, LinkGrid):
                self.engine.grid.delete_message(name)


def _read_reply(reply: Message) -> bytes | Failure:
    if reply.has_error():
        gone = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
        return Failure("dead" if reply.error.code in gone else "error", wire.format_untrusted(reply.error.reason))
    data = unpack_message(reply)
    if len(data) > 1 << 16:
        return data
    try:
        fields = wire.decode(data).fields
    except Refused:
        return data  # whoever asked says what is wrong with it
    if "failure" not in fields:
        return data
    words = "".join(letter if letter.isprintable() else " " for letter in str(fields.get("why", "")))
    return Failure("refused" if fields["failure"] == "refused" else "error", words[:500])


class LinkGrid(HttpGrid):
    """Flower's grid, straight to the SuperLink of this process."""

    def __init__(self, link: SuperLink) -> None:
        super().__init__(token="none: nothing travels")
        state, task, self.link = link.state, link.state.get_task_by_token(link.token), link
        names = (
            "push_messages",
            "pull_messages",
            "push_object",
            "pull_object",
            "confirm_message_received",
            "get_nodes",
        )
        calls = {
            "".join(map(str.capitalize, name.split("_"))): partial(
                getattr(runtime_handlers, name), state=state, task=task
            )
            for name in names
        }
        self._client = cast(Any, _RuntimeCalls(calls))
        self.set_run(state.get_run_info(run_ids=[link.run])[0])
        self.news = threading.Event()
        link.gate.arrived = self.news.set

    def wait_for_reply(self, seconds: float) -> None:
        """Until something of a reply comes."""
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
        """Replies that have come whole: one that comes slowly shall not keep others waiting."""
        found: list[Message] = []
        for name in filter(self._pull_complete, message_ids):
            reply = self.link.state.message_ins_id_to_message_res_id.get(name)
            try:
                found += super().pull_messages([name])
            except Exception:
                if reply is not None:
                    self.link.state.object_store.delete(reply)
                raise
        return found

    def _pull_complete(self, name: str) -> bool:
        reply = self.link.state.message_ins_id_to_message_res_id.get(name)
        if reply is None:
            return True
        store = self.link.state.object_store
        with suppress(NoObjectInStoreError):
            return all(store.get(part.object_id) for part in iterate_object_tree(store.get_object_tree(reply)))
        return True

    def delete_message(self, name: str) -> None:
        """A message, its reply, and all their pieces: Flower itself keeps those of messages that nobody took."""
        reply = self.link.state.message_ins_id_to_message_res_id.get(name)
        for thing in (name, reply):
            if thing is not None:
                self.link.state.object_store.delete(thing)
        self.link.state.delete_messages({name})

    def close(self) -> None:
        """The link is closed by who opened it."""


class _RuntimeCalls:
    def __init__(self, calls: Mapping[str, Callable[..., Any]]) -> None:
        self.__dict__.update(calls)


@dataclass
class SuperLink:
    """Flower's SuperLink in this process, with the sites' keys registered."""

    keys: Mapping[SiteId, Path]
    """The public key of every site that may join."""
    host: str
    port: int
    certificate: tuple[Path, Path] | None
    """Certificate and its key; None: without TLS."""
    refused: Callable[[SiteId, str], None] = lambda *_: None
    federation: str = ""
    nodes: dict[SiteId, int] = field(default_factory=dict)
    withdrawn: Sequence[tuple[PublicKey, str]] = ()
    """Keys that are no longer taken, and whose they were."""

    def __enter__(self) -> SuperLink:
        app = create_app()
        app.state.enable_supernode_auth = True
        self.state = cast(InMemoryLinkState, app.state.linkstate_factory.state())
        known = {public_key_to_bytes(read_public_key(path)): site for site, path in self.keys.items()}
        for key, site in known.items():
            self.nodes[site] = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=site)
        self._open_run()
        former = {public_key_to_bytes(key): whose for key, whose in self.withdrawn}
        self.gate = Gateway(app, known, self.nodes, __version__, _read_senders, self.refused, self.federation, former)
        self._start_http_server()
        self.over = threading.Event()
        threading.Thread(target=self._refresh_heartbeats, daemon=True).start()
        return self

    def connected_nodes(self) -> dict[int, str]:
        """Nodes that are there, and when each came."""
        return {node.node_id: node.last_activated_at for node in self.state.get_node_info(statuses=[NodeStatus.ONLINE])}

    def _open_run(self) -> None:
        """A run without an application: sites have theirs."""
        self.run = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self.task = cast(int, self.state.get_run_info(run_ids=[self.run])[0].primary_task_id)
        self.token = cast(str, self.state.claim_task(self.task))
        self.state.activate_task(self.task)
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = self.run, self.task, SUPERLINK_NODE_ID

    def _start_http_server(self) -> None:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self.socket = socket.socket(family)
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
        while not self.over.wait(BEAT):
            self.state.acknowledge_task_heartbeat(self.task)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.gate.release_waiters()
        self.state.finish_task(self.task, SubStatus.COMPLETED, "")
        self.server.should_exit = True
        self.thread.join(timeout=5)
        self.socket.close()


def _read_senders(path: str, body: bytes) -> set[int]:
    """The nodes in whose name a request is made."""
    if path.endswith("pull-messages"):
        return {PullMessagesRequest.FromString(body).node.node_id}
    request = PushMessagesRequest.FromString(body)
    names = [message.metadata.message_id for message in request.messages_list]
    if names != [tree.object_id for tree in request.message_object_trees] or len(names) != 1:
        raise ValueError("a reply must be one message, and what follows its pieces")
    return {request.node.node_id, *(message.metadata.src_node_id for message in request.messages_list)}
