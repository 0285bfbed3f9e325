"""The engine without a network: its messages are handed to sites in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from polyclinic.core.errors import EngineError
from polyclinic.core.types import SiteId
from polyclinic.deploy.flower.client import SiteConnection
from polyclinic.deploy.flower.server import FlowerEngine
from polyclinic.storage import messages as wire

Answer = Callable[[bytes], bytes]
SITES = ("harbour", "hill", "lake")


class MemoryGrid:
    """A link to sites that are asked when their reply is waited for. `lost`: sites that take messages and never
    answer; `away`: sites that are not connected."""

    def __init__(self, answers: Mapping[SiteId, Answer]) -> None:
        self.answers, self.lost, self.away = dict(answers), set[SiteId](), set[SiteId]()
        self.came = dict.fromkeys(answers, "first")
        self.sent: dict[str, tuple[SiteId, bytes]] = {}
        self.waiting: list[str] = []

    @property
    def names(self) -> list[str]:
        """Of all messages that were ever sent."""
        return list(self.sent)

    def connected_since(self) -> Mapping[SiteId, str]:
        return {site: came for site, came in self.came.items() if site not in self.away}

    def send_message(self, site: SiteId, parts: tuple[bytes, ...]) -> str:
        name = f"message {len(self.sent)}"
        self.sent[name] = site, b"".join(parts)
        self.waiting.append(name)
        return name

    def wait_for_reply(self, seconds: float) -> tuple[str, bytes] | None:
        for name in self.waiting:
            site = self.sent[name][0]
            if site not in self.away and site not in self.lost:
                self.waiting.remove(name)
                reply = self.reply(name)
                return None if reply is None else (name, reply)
        time.sleep(min(seconds, 0.02))
        return None

    def reply(self, name: str) -> bytes | None:
        """What a site says to a message; None if it dies of it."""
        site, data = self.sent[name]
        return self.answers[site](data)

    def withdraw_message(self, name: str) -> None:
        if name in self.waiting:
            self.waiting.remove(name)


def engine_of(answers: Mapping[SiteId, Answer], patience: float = 0.0) -> FlowerEngine:
    """The engine with sites in this process."""
    return FlowerEngine(MemoryGrid(answers), patience)


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
