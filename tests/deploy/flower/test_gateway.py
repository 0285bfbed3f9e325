"""Flower's SuperLink behind our gate, and sites that join it over TLS with signed requests: threads of one process."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

import httpx
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf

from polyclinic.core import PROTOCOL, __version__
from polyclinic.core.errors import EngineError
from polyclinic.core.jobs import Failure
from polyclinic.core.types import SiteId
from polyclinic.deploy.config import FederationConfig, ServerConfig, ServerSection
from polyclinic.deploy.flower.client import SiteConnection
from polyclinic.deploy.flower.server import SuperLink, build_message
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
            store = reception.link.state
            assert not reception.board.refusals, "a site needs no more than is open, and no application of a server's"
            assert store.num_message_ins() == store.num_message_res() == 0
            assert not cast(Any, store.object_store).store, "nothing may pile up in the server"
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
            f"127.0.0.1:{reception.link.port} refuses this site: its key is not registered, or was revoked; ask for a "
            f"new kit{AGAIN}"
        ]
        assert set(reception.board.refusals) == {("", "a key that is not registered")}
        assert reception.link.connected_sites() == []


def test_what_is_not_for_sites_is_closed(kits: Path, tmp_path: Path) -> None:
    """Flower's own SuperLink would let anybody register a key, or start a run, on the same port."""
    with open_server(server(kits, tmp_path)) as reception:
        at = f"https://127.0.0.1:{reception.link.port}"
        with httpx.Client(verify=trusting(kits)) as anybody:
            for path in ("control/register-node", "control/start-run", "runtime/acquire-task", "fleet/register-node"):
                assert anybody.post(f"{at}/v1/{path}", content=b"").status_code == 404
            for path in ("/docs", "/health", "/openapi.json", "/v1/fleet/pull-messages/", "//v1/control/list-runs"):
                assert anybody.get(f"{at}{path}").status_code == 404
            assert anybody.post(f"{at}/v1/fleet/pull-messages", content=b"").status_code == 403
        assert sum(reception.board.refusals.values()) == 10


def test_a_site_that_speaks_for_another_is_refused_and_the_round_goes_on(kits: Path, tmp_path: Path) -> None:
    """S2: harbour knows, by whatever means, the very name of hill's message; Flower alone would take its reply."""
    config = SiteConfig.load(kits / "sites" / "harbour" / "site.yaml")
    assert config.key is not None
    with open_server(server(kits, tmp_path), patience=5) as reception:
        link = reception.link
        at = f"127.0.0.1:{link.port}"
        posing = SiteConnection(at, config.ca, config.key, tmp_path, echo("harbour"))
        with posing.client, attending(kits, reception, "hill", tmp_path / "b", slowly(echo("hill"), 1.5)):
            own = posing._activate_node()
            until(lambda: len(reception.link.connected_sites()) == 2)
            found: dict[SiteId, Any] = {}
            asking = threading.Thread(target=lambda: found.update(said(reception.engine, {"hill": orders()["hill"]})))
            asking.start()
            until(lambda: link.state.message_ins_store)
            (theirs,) = link.state.message_ins_store.values()
            reply = Message(build_message(b"poison", 1).content, reply_to=theirs)
            assert reply.metadata.src_node_id == link.nodes["hill"]
            reply.metadata.__dict__["_message_id"] = reply.object_id
            for node in (own, Node(node_id=link.nodes["hill"])):
                request = PushMessagesRequest(
                    node=node,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                )
                with pytest.raises(httpx.HTTPStatusError, match="403"):
                    posing.client.PushMessages(request)
            with pytest.raises(httpx.HTTPStatusError, match="403"):
                posing.client.PullMessages(PullMessagesRequest(node=Node(node_id=link.nodes["hill"])))
            asking.join(timeout=20)
        assert found["hill"] == echo("hill")(orders()["hill"])
        assert reception.board.refusals == {("harbour", "a request in the name of another site"): 3}


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


def test_a_slow_or_huge_sender_keeps_nobody_waiting(kits: Path, tmp_path: Path) -> None:
    """S3: harbour announces a reply and never sends its pieces, and floods the door; hill's round is as ever."""
    config = SiteConfig.load(kits / "sites" / "harbour" / "site.yaml")
    assert config.key is not None
    with open_server(server(kits, tmp_path)) as reception:
        bad = SiteConnection(f"127.0.0.1:{reception.link.port}", config.ca, config.key, tmp_path, echo("harbour"))
        with bad.client, attending(kits, reception, "hill", tmp_path / "b"):
            node = bad._activate_node()
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
            order_of_harbour = bad._pull_message(node)
            assert order_of_harbour is not None
            announced = Message(order_of_harbour.content, reply_to=order_of_harbour)
            announced.metadata.__dict__["_message_id"] = announced.object_id
            bad.client.PushMessages(
                PushMessagesRequest(
                    node=node,
                    messages_list=[message_to_proto(remove_content_from_message(announced))],
                    message_object_trees=[get_object_tree(announced)],
                )
            )
            with pytest.raises(httpx.HTTPError):
                bad.client._client.post(
                    f"{bad.client._base_url}/v1/fleet/push-object",
                    content=(bytes(1 << 20) for _ in range(80)),
                    headers={"flwr-public-key": b64encode(bad.public).decode(), "polyclinic-protocol": str(PROTOCOL)},
                ).raise_for_status()
            asking.join(timeout=20)
        assert arrived["hill"] < 1.5
        assert 3 <= arrived["harbour"] < 5
        assert ("harbour", "a request that is too large") in reception.board.refusals
        assert not reception.link.state.message_ins_store
        assert not cast(Any, reception.link.state.object_store).store


def test_a_reply_that_cannot_be_put_together_is_refused_and_takes_no_room(kits: Path, tmp_path: Path) -> None:
    """Pieces that are in order each, but say of themselves that they belong to others that never come."""
    config = SiteConfig.load(kits / "sites" / "harbour" / "site.yaml")
    assert config.key is not None
    with open_server(server(kits, tmp_path)) as reception:
        bad = SiteConnection(f"127.0.0.1:{reception.link.port}", config.ca, config.key, tmp_path, echo("harbour"))
        with bad.client:
            node = bad._activate_node()
            found: dict[SiteId, Any] = {}
            ask = {"harbour": orders()["harbour"]}
            asking = threading.Thread(target=lambda: found.update(said(reception.engine, ask)))
            asking.start()
            message = bad._pull_message(node)
            assert message is not None
            reply = Message(message.content, reply_to=message)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree = get_object_tree(reply)
            del tree.children[:]
            request = PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[tree],
            )
            asked = bad.client.PushMessages(request)
            push = make_push_object_fn_protobuf(bad.client.PushObject, node, reply.metadata.run_id, asked.session_id)
            push(reply.object_id, reply.deflate())
            asking.join(timeout=20)
        assert found == {"harbour": Failure("refused", "its reply could not be read (KeyError)")}
        assert not cast(Any, reception.link.state.object_store).store


def test_a_site_that_vanishes_leaves_nothing_behind_in_the_server(kits: Path, tmp_path: Path) -> None:
    config = SiteConfig.load(kits / "sites" / "harbour" / "site.yaml")
    assert config.key is not None
    with open_server(server(kits, tmp_path), patience=0.5) as reception:
        gone = SiteConnection(f"127.0.0.1:{reception.link.port}", config.ca, config.key, tmp_path, echo("harbour"))
        with gone.client:
            node = gone._activate_node()
        state = reception.link.state

        def vanish() -> None:
            until(lambda: state.message_ins_store)
            state.nodes[node.node_id].online_until = 1.0

        threading.Thread(target=vanish).start()
        found = said(reception.engine, {"harbour": orders()["harbour"]}, deadline=None)
        assert found["harbour"].kind == "dead"
        assert not state.message_ins_store
        assert not cast(Any, state.object_store).store
