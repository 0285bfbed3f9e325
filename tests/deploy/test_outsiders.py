"""T3: whoever reaches the port without a key cannot use up a server's time, memory or descriptors, nor name a site."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import ssl
import statistics
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

import httpx

from polyclinic.core import PROTOCOL
from polyclinic.core.types import SiteId
from polyclinic.deploy.config import FederationConfig, ServerSection
from polyclinic.deploy.flower import connections, gateway
from polyclinic.deploy.flower.client import SiteConnection
from polyclinic.deploy.flower.connections import Connection, ConnectionLimits
from polyclinic.deploy.flower.gateway import MESSAGE_NAME, NEXT_MESSAGE, REPLY
from polyclinic.deploy.processes import SiteRegistration, open_server
from polyclinic.deploy.provisioning.provision import provision_federation
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.storage.files import explain_os_errors
from tests.deploy.child_process import ChildProcess
from tests.deploy.flower.test_gateway import attending, connecting, server, trusting
from tests.deploy.memory_grid import SITES, at_work, echo, orders, said
from tests.deploy.outsider import HALF_A_HELLO, HALF_A_REQUEST
from tests.deploy.real_processes import free_port, until

HILL = {"hill": orders()["hill"]}


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("federation") / "kits"
    provision_federation(
        FederationConfig(federation="test", server=ServerSection(host="127.0.0.1", port=free_port()), sites=SITES),
        folder,
    )
    return folder


@pytest.fixture
def reception(kits: Path, tmp_path: Path) -> Iterator[SiteRegistration]:
    with open_server(server(kits, tmp_path)) as found:
        yield found


def public_key(kits: Path, site: SiteId, reception: SiteRegistration) -> str:
    """The header with a site's public key, which is no secret."""
    (key,) = [key for key, of in reception.link.gate.keys.items() if of == site]
    return b64encode(key).decode()


def test_with_the_public_key_alone_nobody_is_woken_and_nothing_is_charged(
    kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    """What the review did: unsigned requests in hill's name took its messages and used up what it may send."""
    at = f"https://127.0.0.1:{reception.link.port}"
    headers = {"flwr-public-key": public_key(kits, "hill", reception), "polyclinic-protocol": str(PROTOCOL)}
    forged = {"flwr-timestamp": datetime.now(UTC).isoformat(), "flwr-signature": b64encode(bytes(100)).decode()}
    with connecting(kits, reception, "hill", tmp_path) as hill, httpx.Client(verify=trusting(kits)) as outsider:
        hill._activate_node()
        name = reception.link.messages.put("hill", (b"a message",))
        for number in range(4):
            answer = outsider.post(f"{at}{NEXT_MESSAGE}", headers=headers | (forged if number % 2 else {}))
            assert answer.status_code == 401
        for _ in range(3):
            begun = time.monotonic()
            reply = headers | forged | {MESSAGE_NAME: name}
            assert outsider.post(f"{at}{REPLY}", content=bytes(8 << 20), headers=reply).status_code == 401
        assert time.monotonic() - begun < 5
        assert not reception.link.messages.messages[name].collected
        assert reception.link.gate.last_seen.keys() == {"hill"}, "since it connected"
        assert hill._pull_message() == (name, b"a message")
        hill._push_reply(name, b"a reply")
        assert reception.link.messages.wait_for_reply(5) == (name, b"a reply")
    assert not [site for site, _ in reception.board.refusals if site], "no site is blamed"
    assert sum(reception.board.refusals.values()) == 7


def test_an_old_signature_and_another_sites_are_refused(
    kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    at = f"https://127.0.0.1:{reception.link.port}{NEXT_MESSAGE}"
    reception.link.gate.hold = 0
    with connecting(kits, reception, "hill", tmp_path) as hill, httpx.Client(verify=trusting(kits)) as outsider:
        with hill._send_request(NEXT_MESSAGE, [], 0, {}) as answer:
            asked = answer.request.headers
            signed = {name: asked[name] for name in asked if name.startswith(("flwr", "polyclinic"))}
        assert outsider.post(at, headers=signed).status_code == 204, "a test that cannot sign proves nothing"
        assert outsider.post(at, headers=signed | {"flwr-timestamp": "2026-01-01T00:00:00+00:00"}).status_code == 401
        lake = signed | {"flwr-public-key": public_key(kits, "lake", reception)}
        assert outsider.post(at, headers=lake).status_code == 401
        with pytest.MonkeyPatch.context() as later:
            later.setattr(gateway, "MAX_SIGNATURE_AGE", -1.0)
            assert outsider.post(at, headers=signed).status_code == 401


@contextmanager
def idle_connections(port: int, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            one.sendall(first)
            found.append(one)
        yield found


def closed(one: socket.socket) -> bool:
    """Whether the other end has closed the connection."""
    one.settimeout(0)
    try:
        return one.recv(4096) == b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


@pytest.mark.parametrize("way", ["silent", "half a handshake", "a handshake", "half a request", "no HTTP"])
def test_a_connection_without_a_signed_request_is_closed_in_seconds(
    way: str, kits: Path, reception: SiteRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNSIGNED_SECONDS", 1.0)
    raw = socket.create_connection(("127.0.0.1", reception.link.port), 5)
    if way == "silent":
        one = raw
    elif way == "half a handshake":
        raw.sendall(HALF_A_HELLO)
        one = raw
    else:
        one = trusting(kits).wrap_socket(raw, server_hostname="127.0.0.1")
        one.sendall({"a handshake": b"", "half a request": HALF_A_REQUEST, "no HTTP": b"\0" * 100 + b"\r\n\r\n"}[way])
    with one:
        until(lambda: reception.link.limits.connections or closed(one), "its acceptance", 5)
        until(lambda: closed(one), "its end", 6)
    until(lambda: not reception.link.limits.connections, "its release", 5)
    assert any("127.0.0.1" in why for _, why in reception.board.refusals)


def test_a_head_without_end_takes_no_memory(kits: Path, reception: SiteRegistration) -> None:
    raw = socket.create_connection(("127.0.0.1", reception.link.port), 5)
    with trusting(kits).wrap_socket(raw, server_hostname="127.0.0.1") as one, suppress(OSError):
        one.sendall(b"POST / HTTP/1.1\r\n")
        for number in range(1000):
            assert number < 100, "it should have been cut off"
            one.sendall(b"X-More: " + b"x" * 8000 + b"\r\n")
            time.sleep(0.01)
    assert ("", "no HTTP, from 127.0.0.1") in reception.board.refusals


def test_idle_connections_harm_neither_rounds_nor_descriptors(
    kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    """Some hundred in small; the full size is below."""
    link, before = reception.link, len(os.listdir("/proc/self/fd"))
    with attending(kits, reception, "hill", tmp_path / "hill"):
        until(lambda: link.connected_sites() == ["hill"], "hill's coming", 15)
        for number in range(3):
            with idle_connections(link.port, 300, HALF_A_HELLO if number else b"") as strangers:
                until(lambda: sum(map(closed, strangers)) > 200, "room for others", 15)
                assert len(link.limits.connections) <= link.limits.most_unsigned + connections.SITE_CONNECTIONS
                assert said(reception.engine, HILL) == {"hill": echo("hill")(HILL["hill"])}
                assert link.connected_sites() == ["hill"]
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 5, "the release of descriptors", 15)
    assert not [site for site, _ in reception.board.refusals if site]
    refused = [why for _, why in reception.board.refusals if "without a signed request" in why]
    assert refused
    assert all("127.0.0.1" in why for why in refused), "by address"


def test_a_server_without_descriptors_recovers(kits: Path, tmp_path: Path, reception: SiteRegistration) -> None:
    """Not even the connections that are allowed find a descriptor, and nothing ends."""
    link = reception.link
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    outside = [socket.socket() for _ in range(30)]
    with attending(kits, reception, "hill", tmp_path / "hill"):
        until(lambda: link.connected_sites() == ["hill"], "hill's coming", 15)
        used = max(map(int, os.listdir("/proc/self/fd")))
        fillers = [os.dup(0)]
        while fillers[-1] < used + 1:  # so that no lower number is free
            fillers.append(os.dup(0))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 3, hard))
            for one in outside:
                one.connect(("127.0.0.1", link.port))
            exhausted = ("", "connections that this machine has no descriptor for")
            until(lambda: exhausted in reception.board.refusals, "the refusal", 15)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for one in outside:
                one.close()
            for filler in fillers:
                os.close(filler)
        assert said(reception.engine, HILL) == {"hill": echo("hill")(HILL["hill"])}
        assert link.thread.is_alive()


def test_too_many_open_files_are_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="ulimit -n") as found, explain_os_errors(tmp_path / "metrics.jsonl"):
        raise OSError(24, "Too many open files")
    assert "make room" not in str(found.value)


def test_a_site_that_asks_too_often_waits(kits: Path, tmp_path: Path, reception: SiteRegistration) -> None:
    reception.link.gate.hold = 0
    with connecting(kits, reception, "hill", tmp_path) as hill:
        begun = time.monotonic()
        for _ in range(160):
            assert hill._pull_message() is None
        assert time.monotonic() - begun > 160 / gateway.SITE_REQUESTS_PER_SECOND - gateway.BURST_SECONDS - 0.1


def test_a_reply_that_trickles_is_cut_off(
    kits: Path, tmp_path: Path, reception: SiteRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "QUIET_SECONDS", 0.5)

    def trickle() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x"
            time.sleep(0.1)

    with connecting(kits, reception, "hill", tmp_path) as hill:
        hill._activate_node()
        name = reception.link.messages.put("hill", (b"a message",))
        assert hill._pull_message() == (name, b"a message")
        begun = time.monotonic()
        with pytest.raises(httpx.TransportError), hill._send_request(REPLY, trickle(), 100, {MESSAGE_NAME: name}):
            pass
        assert time.monotonic() - begun < 5
        hill._push_reply(name, b"a reply")
        assert reception.link.messages.wait_for_reply(5) == (name, b"a reply")
    assert ("hill", "a request or reply of which too few bytes pass") in reception.board.refusals


def test_strangers_make_room_by_age_and_never_at_the_cost_of_sites() -> None:
    """The rules by themselves: an address, all addresses, a site that opens too many, and IPv6 networks."""
    refused: list[str] = []
    limits = ConnectionLimits(5, 20_000, lambda _, why: refused.append(why))
    pairs = [socket.socketpair() for _ in range(400)]
    try:
        ends = iter(one for one, _ in pairs)

        def come(address: str) -> Connection:
            found = limits._admit(next(ends), address)
            found.since = float(len(limits.connections))
            return found

        sites = [come("10.0.0.1") for _ in range(3)]
        for one in sites:
            limits.mark_signed(one, "hill")
        attack = [come("10.0.0.1") for _ in range(limits.most_per_address)]
        newcomer = come("10.0.0.1")
        assert attack[0] not in limits.connections
        assert {newcomer, *attack[1:], *sites} <= limits.connections
        assert refused == ["too many connections without a signed request, from 10.0.0.1"]
        elsewhere = [come(f"10.0.1.{number}") for number in range(200)]
        assert len([one for one in limits.connections if not one.site]) == limits.most_unsigned == 84
        assert set(sites) <= limits.connections
        assert elsewhere[-1] in limits.connections
        more = [come("10.0.0.1") for _ in range(3)]
        for one in more:
            limits.mark_signed(one, "hill")
        assert len([one for one in limits.connections if one.site == "hill"]) == connections.SITE_CONNECTIONS
        assert more[-1] in limits.connections
        assert come("2001:db8::1").address == come("2001:db8::ffff:2").address != come("2001:db8:0:1::1").address
        assert come("::ffff:10.0.0.9").address == "10.0.0.9"
        limits.close_old(time.monotonic() + 1e6)
        assert not limits.connections
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


async def outlives_a_flood(address: str, strangers: list[str], known: bool = False) -> bool:
    """Whether a new connection from `address` is still open after 300 from the strangers' addresses, as of a site that
    takes its time; `known`: a site has signed from there before."""
    limits = ConnectionLimits(3, 4096, lambda *_: None)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, ExitStack() as stack:
        serving = asyncio.create_task(limits.accept_forever(listener, lambda _: asyncio.Protocol(), None))

        async def come(source: str) -> socket.socket:
            before = limits.connections.copy()
            one = stack.enter_context(socket.create_connection(listener.getsockname(), 5, (source, 0)))
            while limits.connections == before:
                await asyncio.sleep(0)
            return one

        if known:
            await come(address)
            limits.mark_signed(next(iter(limits.connections)), "hill")
        for number in range(150):
            await come(strangers[number % len(strangers)])
        site = await come(address)
        for number in range(150):
            await come(strangers[number % len(strangers)])
        serving.cancel()
        return not closed(site)


@pytest.mark.skipif(sys.platform != "linux", reason="needs all addresses of 127.0.0.0/8")
def test_strangers_with_few_addresses_keep_no_site_out() -> None:
    """What an adversary did: 300 connections a second from three addresses cut whoever needed 0.4 s to sign."""
    few = [f"127.0.0.{number}" for number in (2, 3, 4)]
    assert asyncio.run(outlives_a_flood("127.0.0.9", few))
    many = [f"127.0.1.{number}" for number in range(1, 151)]
    assert asyncio.run(outlives_a_flood("127.0.0.9", many, known=True)), "an address from which a site has signed"
    assert not asyncio.run(outlives_a_flood("127.0.0.9", many)), "else this flood was too small to prove anything"


def test_an_address_counts_as_known_for_as_many_connections_as_its_sites_need() -> None:
    limits = ConnectionLimits(2, 4096, lambda *_: None)
    pairs = [socket.socketpair() for _ in range(120)]
    try:
        ends = iter(one for one, _ in pairs)
        for number in range(12):
            limits.mark_signed(limits._admit(next(ends), f"10.0.0.{number}"), "hill")
        assert len(limits.addresses["hill"]) == connections.SITE_ADDRESSES, "bounded, the last ones"
        few = [limits._admit(next(ends), "10.0.0.11") for _ in range(connections.SITE_CONNECTIONS)]
        others = [limits._admit(next(ends), f"10.0.1.{number}") for number in range(limits.most_unsigned - len(few))]
        limits._admit(next(ends), "10.0.2.1")
        assert {*few, *others[1:]} <= limits.connections
        assert others[0] not in limits.connections
        limits._admit(next(ends), "10.0.0.11")
        limits._admit(next(ends), "10.0.2.2")
        assert few[0] not in limits.connections, "of an address that has more than its site needs"
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def test_few_descriptors_leave_some_for_the_run() -> None:
    assert ConnectionLimits(3, 1024, lambda *_: None).most_unsigned == 76
    few = ConnectionLimits(50, 512, lambda *_: None)
    assert few.most_unsigned + 50 * connections.SITE_CONNECTIONS <= 512 - connections.SPARE_DESCRIPTORS


@contextmanager
def at_the_sites(kits: Path, folder: Path) -> Iterator[None]:
    """All sites at work in threads; each answers with what it gets."""
    with ExitStack() as stack:
        for site in SITES:
            config = SiteConfig.load(kits / "sites" / site / "site.yaml")
            assert config.key is not None
            (folder / site).mkdir()
            connection = SiteConnection(config.server, config.ca, config.key, folder / site, echo(site))
            stack.enter_context(at_work(connection, []))
        yield


def read_rounds(log: Path) -> list[tuple[float, float, float, float]]:
    """When each round ended, its seconds, the server's megabytes and its descriptors."""
    whole = log.read_text().rpartition("\n")[0].splitlines() if log.exists() else []
    return [(a, b, c, d) for a, b, c, d in (map(float, line.split()) for line in whole)]


@pytest.mark.heavy
@pytest.mark.parametrize(("count", "seconds", "limit"), [(5000, 120, 0), (1500, 30, 1024)])
def test_thousands_of_idle_connections(count: int, seconds: int, limit: int, tmp_path: Path) -> None:
    """`python -m pytest -m heavy tests/deploy/test_outsiders.py`, four minutes; loopback only.

    The server is a process of its own, once with `ulimit -n 1024`, and plays tiny rounds; the strangers are another
    process, which opens again what the server closes: 100 in a second.
    """
    kits = tmp_path / "kits"
    port = free_port()
    section = ServerSection(host="127.0.0.1", port=port)
    provision_federation(FederationConfig(federation="test", server=section, sites=SITES), kits)
    log, config = tmp_path / "rounds", kits / "server" / "server.yaml"
    command = [sys.executable, "-m", "tests.deploy.round_server", str(config), str(len(SITES)), str(log)]
    if limit:
        command = ["bash", "-c", 'ulimit -n "$0" && exec "$@"', str(limit), *command]
    attack = [
        sys.executable,
        "-m",
        "tests.deploy.outsider",
        f"{port}",
        "--count",
        f"{count}",
        "--seconds",
        f"{seconds}",
    ]
    with ChildProcess(command, tmp_path / "server.log") as serving, at_the_sites(kits, tmp_path):
        until(lambda: len(read_rounds(log)) > 20, "the first rounds", 60)
        spans: dict[str, tuple[float, float]] = {}
        time.sleep(seconds / 4)
        begun = time.time()
        spans["before"] = (begun - seconds / 4, begun)
        with ChildProcess(attack, tmp_path / "outsider.log") as outside:
            outside.process.wait(seconds + 60)
            spans["during"] = (begun, time.time())
            told = outside.read_log()
        time.sleep(15)
        spans["after"] = (time.time() - 10, time.time())
        time.sleep(seconds / 4)
        spans["later"] = (time.time() - seconds / 4, time.time())
        assert serving.process.poll() is None, serving.read_log()
    rounds = read_rounds(log)
    found: dict[str, Any] = {}
    for name, (start, end) in spans.items():
        rows = [row for row in rounds if start <= row[0] <= end]
        found[name] = {
            "rounds": len(rows),
            "median": statistics.median(row[1] for row in rows),
            "memory": max(row[2] for row in rows),
            "descriptors": rows[-1][3],
        }
    print(told, json.dumps(found, indent=1))
    quiet = statistics.mean(found[name]["median"] for name in ("before", "later"))
    assert found["during"]["median"] <= 1.10 * quiet + 0.002
    assert found["during"]["memory"] <= found["before"]["memory"] + 100
    assert found["after"]["descriptors"] <= found["before"]["descriptors"] + 5
