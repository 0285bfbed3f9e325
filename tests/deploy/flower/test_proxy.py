"""A hospital's proxy between a site and the server: TLS goes through it untouched, and a refusal is understood."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.flower.client import SiteConnection
from polyclinic.deploy.processes import SiteRegistration, open_server
from tests.deploy.memory_grid import at_work, echo, orders, said
from tests.deploy.real_processes import free_port, until


@contextmanager
def proxy(allow: bool) -> Iterator[tuple[str, list[str]]]:
    """A proxy that only knows CONNECT; yields its address, and the first line of every request."""
    asked: list[str] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                sink.sendall(piece)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def handle(client: socket.socket) -> None:
        with client, suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1)
            asked.append(head.split(b"\r\n")[0].decode())
            if not allow:
                client.sendall(b"HTTP/1.1 403 Forbidden by the hospital\r\nContent-Length: 0\r\n\r\n")
                return
            host, _, port = asked[-1].split()[1].rpartition(":")
            with socket.create_connection((host, int(port)), 10) as onward:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=pump, args=(onward, client), daemon=True)
                back.start()
                pump(client, onward)
                back.join(5)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                threading.Thread(target=handle, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def reception(kits: Path, tmp_path: Path) -> Iterator[SiteRegistration]:
    config = ServerConfig.load(kits / "server" / "server.yaml")
    with open_server(config.model_copy(update={"folder": tmp_path / "server", "port": free_port()})) as found:
        yield found


@contextmanager
def attending(kits: Path, tmp_path: Path, reception: SiteRegistration) -> Iterator[list[str]]:
    kit, told = kits / "sites" / "hill", list[str]()
    at = f"127.0.0.1:{reception.link.port}"
    site = SiteConnection(at, kit / "ca.crt", kit / "site.key", tmp_path, echo("hill"), told.append, retry=1.0)
    with at_work(site, told, lambda: reception.link.gate.notify_site("hill")):
        yield told


def test_a_site_works_through_a_proxy_that_connects(
    kits: Path, tmp_path: Path, reception: SiteRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy(allow=True) as (address, asked):
        monkeypatch.setenv("HTTPS_PROXY", address)
        with attending(kits, tmp_path, reception) as told:
            until(lambda: reception.link.connected_sites() == ["hill"], "hill's coming", 20)
            sent = {"hill": orders(size=500_000)["hill"]}
            assert said(reception.engine, sent) == {"hill": echo("hill")(sent["hill"])}
        assert set(asked) == {f"CONNECT 127.0.0.1:{reception.link.port} HTTP/1.1"}
        assert told == [f"connected to 127.0.0.1:{reception.link.port}"]


def test_a_proxy_that_refuses_is_named_and_tried_again(
    kits: Path, tmp_path: Path, reception: SiteRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy(allow=False) as (address, asked):
        monkeypatch.setenv("HTTPS_PROXY", address)
        with attending(kits, tmp_path, reception) as told:
            until(lambda: len(asked) > 1, "a second try", 20)
            assert told[0].startswith(f"the proxy in HTTPS_PROXY does not connect to 127.0.0.1:{reception.link.port}")
            assert "403 Forbidden by the hospital" in told[0]
            assert len(told) == 1
