"""A site bounds what a server may send: by what the recipe's own networks need, and by little while there is no run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.deploy.flower.client import SiteConnection
from polyclinic.deploy.flower.connection_errors import Disconnected
from polyclinic.deploy.provisioning.certificates import encode_private_key, generate_key
from polyclinic.deploy.site import participation
from polyclinic.deploy.site.message_handler import MAX_IDLE_MESSAGE, MAX_MESSAGE, SiteMessageHandler
from tests.deploy.example_sites import EVERY, Crossing, config, deployed, desks, recipe


class Measured(Crossing):
    """Every message must be one that the site takes at that moment."""

    def answer(self, site: SiteId, data: bytes) -> bytes | Failure:
        assert len(data) <= self.desks[site].largest_message()
        return super().answer(site, data)


@pytest.mark.parametrize("case", ["fedavg", "scaffold", "fedmp", "pfedcdp in three clusters"])
def test_no_honest_message_is_too_large(case: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allowance of 256 MB would hide a mistake: here it is the room for a message's head."""
    monkeypatch.setattr(participation, "MESSAGE_ALLOWANCE", 1 << 14)
    sites = desks(home, f"size {case}")
    assert {site.largest_message() for site in sites.values()} == {MAX_IDLE_MESSAGE}
    crossing = Measured(sites)
    deployed(recipe(**{**EVERY[case], "rounds": 2}), home, crossing)
    site, largest = max(crossing.sent, key=lambda item: len(item[1]))
    assert len(largest) <= sites[site].largest_message() <= 10 * len(largest) + (1 << 15)


def test_after_a_restart_the_first_message_may_be_large(home: Path) -> None:
    crossing = Crossing(desks(home, "size restarted"))
    deployed(recipe(rounds=1), home, crossing)
    again = SiteMessageHandler(config(home, "hill", "size restarted"))
    assert again.largest_message() == MAX_MESSAGE


class EndlessAnswer(BaseHTTPRequestHandler):
    """A server that answers everything with success and a gigabyte."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(1 << 30))
        self.end_headers()
        try:
            for _ in range(1 << 10):
                self.wfile.write(bytes(1 << 20))
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_answer_of_any_size_is_not_taken(tmp_path: Path) -> None:
    key = tmp_path / "site.key"
    key.touch(0o600)
    key.write_bytes(encode_private_key(generate_key()))
    with serving(EndlessAnswer) as address:
        site = SiteConnection(address, None, key, tmp_path, bytes)
        before = psutil.Process().memory_info().rss
        with site.client, pytest.raises(Disconnected):
            site._activate_node()
        assert psutil.Process().memory_info().rss - before < 64 << 20
