"""Flower's grid without a network: its real messages, taken apart and put together as on the way, to sites in here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from polyclinic.core.errors import EngineError
from polyclinic.core.types import SiteId
from polyclinic.deploy.flower.client import SiteConnection, build_reply
from polyclinic.deploy.flower.server import FlowerEngine
from polyclinic.storage import messages as wire

Answer = Callable[[bytes], bytes]
SITES = ("harbour", "hill", "lake")


class MemoryGrid(Grid):
    """A site is asked when its reply is pulled. `lost`: nodes that take messages and never answer."""

    def __init__(self, answers: Mapping[int, Answer]) -> None:
        self.answers, self.lost, self.away = dict(answers), set[int](), set[int]()
        self.came = dict.fromkeys(answers, "first")
        self.sent: dict[str, Message] = {}
        self.names: list[str] = []
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, last_activated_at=came) for node, came in self.came.items() if self.here(node)]

    def here(self, node: int) -> bool:
        return node not in self.away

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            arrived = travelled(message)
            self.sent[arrived.metadata.message_id] = arrived
            names.append(arrived.metadata.message_id)
        self.names += names
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for name in list(message_ids):
            message = self.sent[name]
            node = message.metadata.dst_node_id
            if node in self.away:
                found.append(Message(Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), reply_to=message))
            elif node not in self.lost:
                found.append(travelled(build_reply(message, self.answers[node])))
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError


def travelled(message: Message) -> Message:
    """The message as it arrives: through Flower's objects and their bytes."""
    name = message.object_id
    with no_object_id_recompute():
        pieces = {part: thing.deflate() for part, thing in get_all_nested_objects(message).items()}
    arrived = cast(Message, inflate_object_from_contents(name, pieces))
    arrived.metadata.__dict__["_message_id"] = name
    return arrived


def engine_of(answers: Mapping[SiteId, Answer], patience: float = 0.0) -> FlowerEngine:
    """The engine with sites in this process."""
    nodes = {site: 100 + number for number, site in enumerate(answers)}
    return FlowerEngine(MemoryGrid({nodes[site]: answer for site, answer in answers.items()}), nodes, patience)


def content(data: RecordDict) -> list[str]:
    """The names of all arrays in a record, for tests of how many there are."""
    return [f"{record}/{name}" for record, arrays in data.array_records.items() for name in arrays]


def echo(site: SiteId) -> Callable[[bytes], bytes]:
    """A site that returns what it was sent, in its own name."""

    def answer(data: bytes) -> bytes:
        message = wire.decode(data)
        return wire.encode({**message.fields, "by": site}, message.tensors)

    return answer


def orders(round: int = 1, size: int = 10) -> dict[SiteId, bytes]:
    tensor = torch.arange(size, dtype=torch.float32)
    return {site: wire.encode({"run": "r", "round": round, "site": site}, {"model": {"w": tensor}}) for site in SITES}


def said(engine: FlowerEngine, sent: dict[SiteId, bytes], deadline: float | None = 20) -> dict[SiteId, Any]:
    found = {}
    for site, answer in engine.exchange(1, sent, deadline):
        assert site not in found
        found[site] = answer
    return found


@contextmanager
def at_work(attendance: SiteConnection, said: list[str], wake: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A site's process, here a thread; what ends it is said."""

    def work() -> None:
        try:
            attendance.serve_forever()
        except EngineError as error:
            said.append(f"error: {error}")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        attendance.stop.set()
        wake()
        thread.join(timeout=15)
        assert not thread.is_alive()
