"""The server's entrance, and sites that join it over TLS with signed requests: threads of one process."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

import httpx
from flwr.proto.fleet_pb2 import DeactivateNodeRequest

from polyclinic.core import PROTOCOL, __version__
from polyclinic.core.errors import EngineError
from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.deploy.config import FederationConfig, ServerConfig, ServerSection
from polyclinic.deploy.flower import gateway, message_queue
from polyclinic.deploy.flower.client import SiteConnection
from polyclinic.deploy.flower.gateway import MESSAGE_NAME, REPLY
from polyclinic.deploy.flower.server import SuperLink
from polyclinic.deploy.processes import SiteRegistration, open_server
from polyclinic.deploy.provisioning.provision import provision_federation, rotate_site
from polyclinic.deploy.site.config import SiteConfig
from tests.deploy.memory_grid import SITES, at_work, echo, orders, said
from tests.deploy.real_processes import free_port

AGAIN = "; this site tries again by itself, every 5 min at the latest"


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("federation") / "kits"
    provision_federation(
        FederationConfig(federation="test", server=ServerSection(host="127.0.0.1", port=free_port()), sites=SITES),
        folder,
    )
    return folder


def server(kits: Path, tmp_path: Path) -> ServerConfig:
    config = ServerConfig.load(kits / "server" / "server.yaml")
    return config.model_copy(update={"folder": tmp_path / "server", "port": free_port()})


def trusting(kits: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(kits / "server" / "ca.crt"))


@contextmanager
def attending(
    kits: Path, reception: SiteRegistration, site: SiteId, folder: Path, answer: Callable[[bytes], bytes] | None = None
) -> Iterator[list[str]]:
    """A site at work in a thread; yields what it says."""
    config = SiteConfig.load(kits / "sites" / site / "site.yaml")
    assert config.ca is not None
    assert config.key is not None
    folder.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    at = f"127.0.0.1:{reception.link.port}"
    attendance = SiteConnection(at, config.ca, config.key, folder, answer or echo(site), said.append)
    with at_work(attendance, said, lambda: reception.link.gate.notify_site(site)):
        yield said


def one_said(kits: Path, reception: SiteRegistration, folder: Path, site: SiteId = "hill") -> str:
    """What a site says once while it tries again and again."""
    with attending(kits, reception, site, folder) as told:
        until(lambda: told)
        (sentence,) = told
    assert sentence.endswith(AGAIN)
    return sentence.removeprefix(f"127.0.0.1:{reception.link.port}").removesuffix(AGAIN).strip(": ")


def until(found: Callable[[], object], seconds: float = 15) -> None:
    begun = time.monotonic()
    while not found():
        assert time.monotonic() - begun < seconds, "it did not happen in time"
        time.sleep(0.02)


def test_over_tls_replies_come_back_bit_for_bit_and_soon(kits: Path, tmp_path: Path) -> None:
    with open_server(server(kits, tmp_path)) as reception:
        with attending(kits, reception, "harbour", tmp_path / "a"), attending(kits, reception, "hill", tmp_path / "b"):
            until(lambda: len(reception.link.connected_sites()) == 2)
            sent = {site: data for site, data in orders(size=1_500_000).items() if site != "lake"}
            for _ in range(3):
                begun = time.monotonic()
                found = said(reception.engine, sent)
                assert {site: reply == echo(site)(sent[site]) for site, reply in found.items()} == dict.fromkeys(
                    sent, True
                )
            assert time.monotonic() - begun < 3, "Flower's own polling alone would take that long"
            assert not reception.board.refusals, "a site needs no more than is open, and no application of a server's"
            assert not reception.link.messages.messages, "nothing may pile up in the server"
        until(lambda: reception.link.connected_sites() == [])


def test_a_rehearsal_on_this_machine_needs_no_tls_but_keys(kits: Path, tmp_path: Path) -> None:
    config = SiteConfig.load(kits / "sites" / "hill" / "site.yaml")
    assert config.key is not None
    with open_server(server(kits, tmp_path).model_copy(update={"insecure": True})) as reception:
        attendance = SiteConnection(f"127.0.0.1:{reception.link.port}", None, config.key, tmp_path, echo("hill"))
        threading.Thread(target=attendance.serve_forever, daemon=True).start()
        until(lambda: reception.link.connected_sites() == ["hill"])
        assert said(reception.engine, {"hill": orders()["hill"]}) == {"hill": echo("hill")(orders()["hill"])}
        attendance.stop.set()
        reception.link.gate.notify_site("hill")
        until(lambda: reception.link.connected_sites() == [])


def test_a_site_with_another_key_is_refused_with_the_reason(kits: Path, tmp_path: Path) -> None:
    other = tmp_path / "kits"
    shutil.copytree(kits, other)
    rotate_site(other, "hill")
    with open_server(server(kits, tmp_path)) as reception, attending(other, reception, "hill", tmp_path / "b") as told:
        until(lambda: told)
        assert told == [
            f"127.0.0.1:{reception.link.port} refuses this site: its key is not registered, or was revoked; send "
            f"request.json to the coordinator, who accepts it or says why not{AGAIN}"
        ]
        assert reception.board.refusals == {("", "a key that is not registered, from 127.0.0.1"): 1}
        assert reception.link.connected_sites() == []


def test_what_is_not_for_sites_is_closed(kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own SuperLink would let anybody register a key, or start a run, on the same port."""
    monkeypatch.setattr(gateway, "STRANGER_SECONDS", 0.01)
    with open_server(server(kits, tmp_path)) as reception:
        at = f"https://127.0.0.1:{reception.link.port}"
        with httpx.Client(verify=trusting(kits)) as anybody:
            for path in ("control/register-node", "control/start-run", "runtime/acquire-task", "fleet/register-node"):
                assert anybody.post(f"{at}/v1/{path}", content=b"").status_code == 404
            for path in ("/docs", "/health", "/openapi.json", "/v1/fleet/pull-messages/", "//v1/control/list-runs"):
                assert anybody.get(f"{at}{path}").status_code == 404
            for path in ("/v1/fleet/pull-messages", "/v1/fleet/push-object", "/v1/fleet/get-run"):
                assert anybody.post(f"{at}{path}", content=b"").status_code == 404
            assert anybody.post(f"{at}/v1/messages/next", content=b"").status_code == 403
        assert sum(reception.board.refusals.values()) == 13


def test_a_site_that_speaks_for_another_is_refused_and_the_round_goes_on(kits: Path, tmp_path: Path) -> None:
    """S2: harbour knows, by whatever means, the very name of hill's message."""
    with open_server(server(kits, tmp_path), patience=5) as reception:
        queue = reception.link.messages
        posing_as_harbour = connecting(kits, reception, "harbour", tmp_path)
        hill = attending(kits, reception, "hill", tmp_path / "b", slowly(echo("hill"), 1.5))
        with posing_as_harbour as posing, hill:
            until(lambda: reception.link.connected_sites() == ["hill"])
            found: dict[SiteId, Any] = {}
            ask = {"hill": orders()["hill"]}
            asking = threading.Thread(target=lambda: found.update(said(reception.engine, ask)))
            asking.start()
            until(lambda: any(message.collected for message in queue.messages.values()))
            (name,) = queue.messages
            assert send_reply(posing, name, b"poison") == send_reply(posing, "made-up", b"poison") == 410
            with pytest.raises(httpx.HTTPStatusError, match="401"):
                posing.client.DeactivateNode(DeactivateNodeRequest(node_id=reception.link.nodes["hill"]))
            asking.join(timeout=20)
        assert found["hill"] == echo("hill")(orders()["hill"])


@contextmanager
def connecting(kits: Path, reception: SiteRegistration, site: SiteId, folder: Path) -> Iterator[SiteConnection]:
    """A site that does only what a test has it do."""
    config = SiteConfig.load(kits / "sites" / site / "site.yaml")
    assert config.key is not None
    connection = SiteConnection(f"127.0.0.1:{reception.link.port}", config.ca, config.key, folder, echo(site))
    with connection.client:
        yield connection


def send_reply(connection: SiteConnection, name: str, reply: bytes) -> int:
    """The status that the server answers with."""
    with connection._send_request(REPLY, [reply], len(reply), {MESSAGE_NAME: name}, range(600)) as response:
        return response.status_code


def slowly(answer: Callable[[bytes], bytes], seconds: float) -> Callable[[bytes], bytes]:
    def slow(data: bytes) -> bytes:
        time.sleep(seconds)
        return answer(data)

    return slow


def test_a_server_of_another_authority_is_not_trusted(kits: Path, tmp_path: Path) -> None:
    other = tmp_path / "kits"
    provision_federation(
        FederationConfig(federation="other", server=ServerSection(host="127.0.0.1"), sites=SITES), other
    )
    with open_server(server(kits, tmp_path)) as reception:
        sentence = one_said(other, reception, tmp_path / "b")
        assert (
            sentence
            == "the server's certificate is not of the CA in this kit; ask the coordinator for the right ca.crt"
        )
        assert reception.link.connected_sites() == []


def test_an_expired_certificate_is_not_trusted_and_does_not_even_serve(kits: Path, tmp_path: Path) -> None:
    other = tmp_path / "kits"
    past = datetime.now(UTC) - timedelta(days=40)
    federation = FederationConfig(federation="other", server=ServerSection(host="127.0.0.1"), days=10, sites=SITES)
    provision_federation(federation, other, now=past)
    with pytest.raises(EngineError, match="expired on"), open_server(server(other, tmp_path)):
        pass
    config = server(other, tmp_path)
    with SuperLink(config.sites, "127.0.0.1", config.port, (config.certificate, config.key)) as link:
        reception = SiteRegistration(link, cast(Any, None), cast(Any, None))
        assert one_said(other, reception, tmp_path / "b").startswith("the server's certificate has expired; ask")


def test_another_protocol_is_refused_on_both_sides_by_number(kits: Path, tmp_path: Path) -> None:
    with open_server(server(kits, tmp_path)) as reception:
        reception.link.gate.protocol = 77
        sentence = one_said(kits, reception, tmp_path / "b")
        assert sentence == (
            f"refuses this site: the server runs polyclinic {__version__} with protocol 77, this site {__version__} "
            f"with protocol {PROTOCOL}; install the server's version"
        )
        refused = ("hill", f"it speaks 'protocol {PROTOCOL}' (polyclinic '{__version__}'), not 77")
        assert list(reception.board.refusals) == [refused]


def test_a_port_in_use_is_reported(kits: Path, tmp_path: Path) -> None:
    config = server(kits, tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", config.port))
        other.listen()
        sentence = f"cannot listen on 127.0.0.1:{config.port} .*another server"
        with pytest.raises(EngineError, match=sentence), open_server(config):
            pass


def test_an_address_that_this_machine_does_not_have_is_reported(kits: Path, tmp_path: Path) -> None:
    """192.0.2.1 is for documentation (RFC 5737)."""
    config = server(kits, tmp_path)
    elsewhere = config.model_copy(update={"listen": f"192.0.2.1:{config.port}"})
    with pytest.raises(EngineError, match="this machine has no such address: correct `listen`"), open_server(elsewhere):
        pass


def test_a_site_finds_a_restarted_server_again(kits: Path, tmp_path: Path) -> None:
    config = server(kits, tmp_path)
    sent = {"hill": orders()["hill"]}
    with open_server(config) as reception:
        with attending(kits, reception, "hill", tmp_path / "b") as told:
            until(lambda: reception.link.connected_sites() == ["hill"])
            said(reception.engine, sent)
            reception.link.__exit__()
            with open_server(config.model_copy(update={"folder": tmp_path / "again"})) as anew:
                until(lambda: anew.link.connected_sites() == ["hill"])
                assert said(anew.engine, sent) == {"hill": echo("hill")(sent["hill"])}
        assert [sentence.split()[0] for sentence in told[:1]] == ["connected"]


def test_a_silent_or_huge_sender_keeps_nobody_waiting(
    kits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3: harbour begins a reply and never ends it, and floods the door; hill's round is as ever."""
    monkeypatch.setattr(message_queue, "MIN_REPLY_BYTES", 1 << 20)
    with open_server(server(kits, tmp_path)) as reception:
        harbour, hill = (
            connecting(kits, reception, "harbour", tmp_path),
            attending(kits, reception, "hill", tmp_path / "b"),
        )
        with harbour as bad, hill:
            bad._activate_node()
            until(lambda: len(reception.link.connected_sites()) == 2)
            sent = {site: data for site, data in orders().items() if site != "lake"}
            arrived: dict[SiteId, float] = {}
            begun = time.monotonic()

            def ask() -> None:
                for site, answer in reception.engine.exchange(1, sent, 3):
                    arrived[site] = time.monotonic() - begun
                    assert isinstance(answer, bytes) == (site == "hill")

            asking = threading.Thread(target=ask)
            asking.start()
            found = bad._pull_message()
            assert found is not None
            assert send_reply(bad, found[0], bytes(80 << 20)) == 413
            stalled = threading.Thread(target=stall, args=(bad, found[0]), daemon=True)
            stalled.start()
            asking.join(timeout=20)
            stalled.join(timeout=20)
        assert arrived["hill"] < 1.5
        assert 3 <= arrived["harbour"] < 5
        assert ("harbour", "a request that is too large") in reception.board.refusals
        assert not reception.link.messages.messages


def stall(connection: SiteConnection, name: str) -> None:
    """Begin a reply of a megabyte, and send no more than half of it."""

    def pieces() -> Iterator[bytes]:
        yield bytes(1 << 19)
        time.sleep(4)

    with suppress(Exception), connection._send_request(REPLY, pieces(), 1 << 20, {MESSAGE_NAME: name}):
        pass


def test_a_reply_that_was_cut_off_can_be_sent_again_and_two_at_once_cannot(kits: Path, tmp_path: Path) -> None:
    with open_server(server(kits, tmp_path)) as reception, connecting(kits, reception, "harbour", tmp_path) as site:
        site._activate_node()
        queue = reception.link.messages
        name = queue.put("harbour", (b"head", b"body"))
        assert site._pull_message() == (name, b"headbody")
        assert not queue.messages[name].answering
        first = queue.begin_reply(name, "harbour")
        assert first is not None
        assert send_reply(site, name, b"a second one") == 410
        queue.drop_reply(first)
        large = bytes(range(256)) * (3 << 12)
        assert send_reply(site, name, large) == 204
        assert queue.wait_for_reply(5) == (name, large)
        assert send_reply(site, name, b"once more") == 410
        queue.withdraw(name)


def test_a_site_that_vanishes_leaves_nothing_behind_in_the_server(kits: Path, tmp_path: Path) -> None:
    with open_server(server(kits, tmp_path), patience=0.5) as reception:
        with connecting(kits, reception, "harbour", tmp_path) as gone:
            node = gone._activate_node()
        link = reception.link

        def vanish() -> None:
            until(lambda: link.messages.messages)
            link.state.nodes[node.node_id].online_until = 1.0

        threading.Thread(target=vanish).start()
        found = said(reception.engine, {"harbour": orders()["harbour"]}, deadline=None)
        assert found["harbour"].kind == "dead"
        assert not link.messages.messages


def test_a_message_that_is_larger_than_a_site_takes_is_refused_there(kits: Path, tmp_path: Path) -> None:
    with open_server(server(kits, tmp_path)) as reception, connecting(kits, reception, "hill", tmp_path) as site:
        told: list[str] = []
        site.report, site.largest_message = told.append, lambda: 1 << 20
        site._activate_node()
        found: dict[SiteId, Any] = {}
        asking = threading.Thread(
            target=lambda: found.update(said(reception.engine, {"hill": orders(size=400_000)["hill"]}))
        )
        asking.start()
        site._answer_next_message()
        asking.join(timeout=20)
        sentence = "a message of more than 1 MB, the most that this site takes now"
        assert told == [f"refused: {sentence}"]
        assert found == {"hill": Failure("refused", sentence)}
