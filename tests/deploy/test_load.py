"""What a server bears: many sites with small messages, and few with large ones."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from starlette.requests import Request

from polyclinic.core.types import SiteId
from polyclinic.deploy.config import FederationConfig, ServerSection
from polyclinic.deploy.flower.gateway import NEXT_MESSAGE, REPLY, Gateway
from polyclinic.deploy.flower.server import FlowerEngine
from polyclinic.deploy.processes import open_server
from polyclinic.deploy.provisioning.provision import provision_federation
from polyclinic.federation.mailbox import Outbox
from polyclinic.storage import messages
from tests.deploy.flower.test_gateway import attending, server
from tests.deploy.memory_grid import SITES, MemoryGrid, orders, said
from tests.deploy.real_processes import free_port, until

ROOT = Path(__file__).parents[2]


def outbox(size: int = 1000) -> Outbox:
    weights = {"model": {"w": torch.arange(size, dtype=torch.float32)}}
    return Outbox({site: {"run": "r", "round": 1, "site": site} for site in SITES}, lambda _: weights)


def test_a_message_and_its_reply_are_one_request_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kits, paths = tmp_path / "kits", Counter[str]()
    section = ServerSection(host="127.0.0.1", port=free_port())
    provision_federation(FederationConfig(federation="test", server=section, sites=SITES), kits)
    honest = Gateway._answer_site

    async def counted(self: Gateway, request: Request, send: Any, site: SiteId) -> None:
        paths[request.scope["path"]] += 1
        await honest(self, request, send, site)

    monkeypatch.setattr(Gateway, "_answer_site", counted)
    with open_server(server(kits, tmp_path)) as reception, attending(kits, reception, "hill", tmp_path / "hill"):
        until(lambda: reception.link.connected_sites() == ["hill"], "hill's coming", 15)
        ask = {"hill": orders(size=1_000_000)["hill"]}
        for _ in range(10):
            assert isinstance(said(reception.engine, ask)["hill"], bytes)
        assert paths[REPLY] == 10
        assert 10 <= paths[NEXT_MESSAGE] <= 22, "a request that was notified of nothing may come between two messages"
        assert paths.total() <= 35
        assert len([one for one in reception.link.limits.connections if one.site]) <= 2, "which are used again"


class Keeping(MemoryGrid):
    """Keeps the parts of all messages."""

    def send_message(self, site: SiteId, parts: tuple[bytes, ...]) -> str:
        self.parts = [*getattr(self, "parts", []), parts]
        return super().send_message(site, parts)


def test_the_tensors_of_a_round_are_encoded_once_and_let_go_when_sent() -> None:
    grid = Keeping(dict.fromkeys(SITES, bytes))
    sent = outbox()
    exchange = FlowerEngine(grid, 0.0).exchange(1, sent, 20)
    answers = dict(exchange)
    assert answers == {site: sent[site] for site in SITES}
    assert len({id(body) for _, body in grid.parts}) == 1
    again = outbox()
    for site, answer in FlowerEngine(MemoryGrid(dict.fromkeys(SITES, bytes)), 0.0).exchange(1, again, 20):
        assert again._last is None
        assert messages.decode(answer).fields["site"] == site  # type: ignore[arg-type]


@pytest.mark.heavy
@pytest.mark.parametrize(("load", "rounds"), [("many", 6), ("large", 3)])
def test_fifty_sites_and_large_messages_are_within_the_bars(load: str, rounds: int) -> None:
    """`python -m pytest -m heavy tests/deploy/test_load.py`, about two minutes."""
    command = [sys.executable, "-m", "benchmarks.flower", "--load", load, "--rounds", f"{rounds}"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=500).stdout
    seconds, memory = re.search(r"seconds a round \[(.*)\]", told), re.search(r"at most (\d+)", told)
    assert seconds is not None
    assert memory is not None
    if load == "many":
        assert statistics.median(map(float, seconds[1].split(","))) <= 2.5
    else:
        assert int(memory[1]) <= 1300
