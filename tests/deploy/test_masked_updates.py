"""What a server of real sites ever holds of one site's update behind masks: nothing, in its memory, on its disk, and on
the wire. The same search finds every update without masks, so that it can fail.

The server is a process of its own, with TLS and keys. The sites are threads of the test, which therefore knows their
updates; they are real connections all the same.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic import Recipe
from polyclinic.core.types import Bundle, SiteId
from polyclinic.deploy.flower.client import SiteConnection
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.message_handler import SiteMessageHandler
from polyclinic.federation.secure_aggregation.site import MaskingSite
from polyclinic.storage import messages
from polyclinic.storage.run_folder import RunFolder
from tests.deploy.example_sites import ApprovingHandler, recipe, simulation
from tests.deploy.masking import FIVE
from tests.deploy.memory_grid import at_work
from tests.deploy.real_processes import Ward, furnish, until
from tests.driving import Ask

PATTERN = 48
"""Bytes of a planted pattern: twelve values of an update, which nothing has by chance."""
SEARCHED = (("agree", 1), ("train", 2), ("agree", 2), ("unmask", 2))
"""When the server has all updates of a round; when it has their sum, and some of the next; before and after shares."""
CHUNK = 1 << 26
"""Bytes of memory that are read at a time."""


@dataclass
class Observer:
    """Searches a server for updates that it knows."""

    folder: Path
    pid: int = 0
    planted: dict[bytes, tuple[SiteId, int]] = field(default_factory=dict)
    """By pattern the site and round of which it is."""
    wire: list[bytes] = field(default_factory=list)
    found: dict[str, set[tuple[SiteId, int]]] = field(default_factory=lambda: {"memory": set(), "disk": set()})
    searched: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def plant(self, site: SiteId, round: int, *vectors: np.ndarray[Any, Any]) -> None:
        """Note a pattern of each vector, from the place where the last of them, the change, has most values."""
        changes, values = vectors[-1], PATTERN // 4
        starts = range(0, len(changes) - values, values)
        kinds = [len(np.unique(part[part != 0])) for part in (changes[start : start + values] for start in starts)]
        best = starts[int(np.argmax(kinds))]
        assert max(kinds) >= values - 4, "a pattern has values of its own"
        for vector in vectors:
            self.planted[vector[best : best + values].tobytes()] = site, round

    def search(self, data: bytes) -> set[tuple[SiteId, int]]:
        return {whose for pattern, whose in list(self.planted.items()) if pattern in data}

    def search_server(self) -> None:
        """Search the memory and the disk of the server, one search at a time."""
        with self.lock:
            for data in memory_of(self.pid):
                self.searched += len(data)
                self.found["memory"] |= self.search(data)
            for path in [*self.folder.glob("masked*/**/*"), *self.folder.glob("k/server/**/*")]:
                if path.is_file():
                    self.found["disk"] |= self.search(path.read_bytes())


def memory_of(pid: int) -> Iterator[bytes]:
    """The memory that a process can write to, region by region."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if bounds is not None:
                start, end = (int(bound, 16) for bound in bounds.groups())
                for place in range(start, end, CHUNK):
                    try:
                        memory.seek(place)
                        yield memory.read(min(CHUNK, end - place) + PATTERN)
                    except OSError:
                        break


@contextmanager
def observed_sites(folder: Path, observer: Observer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Five sites at work, whose updates the observer knows, and which have the server searched as it has them."""
    plain = MaskingSite._quantise

    def quantise(self: MaskingSite, update: Bundle, received: Bundle, *more: Any) -> Mapping[str, Any]:
        vectors = plain(self, update, received, *more)
        first = min(update["model"])  # as the integers begin
        new = update["model"][first].numpy().reshape(-1)
        change = new - received["model"][first].numpy().reshape(-1)
        observer.plant(self.site, more[0].round, vectors["model"][: len(new)], new, change)
        return vectors

    monkeypatch.setattr(MaskingSite, "_quantise", quantise)
    configs = {site: SiteConfig.load(folder / "k" / "sites" / site / "site.yaml") for site in FIVE}
    said: list[str] = []
    with ExitStack() as all_of_them:
        for site, config in configs.items():
            handler = ApprovingHandler(config, said.append)
            assert handler.keyring is not None, "the kit has the keys of all sites"

            def answer(data: bytes, site: SiteId = site, handler: SiteMessageHandler = handler) -> bytes:
                fields = messages.decode(data).fields
                moment = fields["purpose"], fields.get("round")
                reply = handler.answer_message(data)
                observer.wire.append(reply)
                if site == FIVE[-1] and moment in SEARCHED:
                    observer.search_server()
                return reply

            assert config.key is not None
            names = config.federation, site
            connection = SiteConnection(
                config.server, config.ca, config.key, config.folder, answer, said.append, lambda: False, names
            )
            all_of_them.enter_context(at_work(connection, said))
        yield said


def play(ask: Ask, folder: Path, found: Recipe, monkeypatch: pytest.MonkeyPatch) -> tuple[Observer, str]:
    """A run between real connections; what the observer found, and the SHA-256 of the final state."""
    furnish(folder, FIVE)
    observer = Observer(folder)
    with Ward(folder, ask) as ward:
        server = ward.serve(found, "masked", really=True)
        observer.pid = server.pid
        with observed_sites(folder, observer, monkeypatch) as said:
            try:
                until(lambda: server.code() is not None, "the end of the run", 900)
            except AssertionError as error:
                raise AssertionError("\n".join([str(error), ward.said(), *said])) from None
        assert server.code() == 0, ward.said()
    return observer, RunFolder(folder / "masked").read_summary().sha256


@pytest.mark.heavy
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="searches the memory of a process by /proc")
@pytest.mark.parametrize("masks", [True, False])
def test_no_update_is_in_the_servers_memory_on_its_disk_or_on_the_wire(
    masks: bool, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command: `./scripts/test --heavy tests/deploy/test_masked_updates.py`."""
    asked = recipe(rounds=2, stages=[{"name": "mask", "masks": masks}], snapshot_every=1)
    observer, sha256 = play(ask, tmp_path, asked, monkeypatch)
    everybody = {(site, round) for site in FIVE for round in (1, 2)}
    assert set(observer.planted.values()) == everybody
    assert observer.searched > 2**28
    wire = set().union(*map(observer.search, observer.wire))
    if masks:
        assert (observer.found["memory"], observer.found["disk"], wire) == (set(), set(), set())
    else:
        assert wire == everybody
        assert len(observer.found["memory"]) >= len(FIVE)
    assert sha256 == simulation(asked, tmp_path).run().summary.sha256
