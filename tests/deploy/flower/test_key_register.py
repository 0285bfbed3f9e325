"""Keys that change while a server and its sites are at work: who is cut off, who comes in, and what goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic.core.types import SiteId
from polyclinic.deploy.config import FederationConfig, ServerConfig, ServerSection
from polyclinic.deploy.flower.client import SiteConnection
from polyclinic.deploy.processes import SiteRegistration, open_server
from polyclinic.deploy.provisioning.provision import add_site, provision_federation, revoke_site, rotate_site
from tests.deploy.memory_grid import SITES, at_work, echo, orders, said
from tests.deploy.real_processes import free_port, until


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    server = ServerSection(host="127.0.0.1", port=free_port())
    provision_federation(FederationConfig(federation="test", server=server, sites=SITES), tmp_path / "kits")
    return tmp_path / "kits"


@pytest.fixture
def reception(kits: Path) -> Iterator[SiteRegistration]:
    file = kits / "server" / "server.yaml"
    with open_server(ServerConfig.load(file), file=file, patience=0.5) as found:
        yield found


def connection(kits: Path, site: SiteId, home: Path, told: list[str]) -> SiteConnection:
    """A site whose kit was copied to `home`, once."""
    if not home.exists():
        shutil.copytree(kits / "sites" / site, home)
    port = ServerConfig.load(kits / "server" / "server.yaml").port
    return SiteConnection(
        f"127.0.0.1:{port}", home / "ca.crt", home / "site.key", home, echo(site), told.append, retry=1.0
    )


@contextmanager
def attending(kits: Path, site: SiteId, home: Path, reception: SiteRegistration) -> Iterator[list[str]]:
    told: list[str] = []
    with at_work(connection(kits, site, home, told), told, lambda: reception.link.gate.notify_site(site)):
        yield told


def test_a_revoked_site_is_cut_off_and_the_others_work_on(
    kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    with attending(kits, "hill", tmp_path / "hill", reception) as told, ExitStack() as others:
        for site in ("harbour", "lake"):
            others.enter_context(attending(kits, site, tmp_path / site, reception))
        until(lambda: len(reception.link.connected_sites()) == 3, "all sites' coming", 20)
        revoke_site(kits, "hill")
        until(lambda: "hill" not in reception.link.connected_sites(), "hill's leaving", 10)
        until(lambda: any("was revoked" in sentence for sentence in told), "a word to hill", 10)
        found = said(reception.engine, orders())
        assert found["hill"].kind == "dead"
        assert found["harbour"] == echo("harbour")(orders()["harbour"])
        assert found["lake"] == echo("lake")(orders()["lake"])
        assert reception.link.registered_sites() == ["harbour", "lake"]
        assert any(why.startswith("the key of hill that was revoked") for _, why in reception.board.refusals)


def test_a_revoked_key_gets_nothing_out_of_a_request_that_was_held_open(
    kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    """The request was signed and accepted before the key was revoked, and the message comes after."""
    held = connection(kits, "hill", tmp_path / "hill", [])
    with held.client:
        held._activate_node()
        results: list[Any] = []

        def pull() -> None:
            try:
                results.append(held._pull_message())
            except httpx.HTTPStatusError as error:
                results.append(error.response.status_code)

        pulling = threading.Thread(target=pull)
        pulling.start()
        until(lambda: reception.link.gate._held, "the request", 10)
        reception.link.messages.announce = lambda _: None  # so that the message comes just before the key is revoked
        reception.link.send_message("hill", (b"a secret of the others",))
        revoke_site(kits, "hill")
        pulling.join(timeout=15)
    assert results == [403]


def test_a_rotated_key_is_taken_and_the_message_that_waits_is_answered(
    kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    home = tmp_path / "hill"
    with attending(kits, "hill", home, reception) as told:
        until(lambda: reception.link.connected_sites() == ["hill"], "hill's coming", 20)
        rotate_site(kits, "hill")
        until(lambda: any("was revoked" in sentence for sentence in told), "a word to hill", 15)
        found: dict[SiteId, Any] = {}
        reception.engine.patience = 60
        asking = threading.Thread(target=lambda: found.update(said(reception.engine, {"hill": orders()["hill"]})))
        asking.start()
        shutil.copy2(kits / "sites" / "hill" / "site.key", home / "site.key")
        asking.join(timeout=20)
        assert found == {"hill": echo("hill")(orders()["hill"])}
        assert any(sentence.startswith("mended after") for sentence in told)


def test_a_site_that_is_added_while_the_server_runs_may_come_in(
    kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    add_site(kits, "dune")
    until(lambda: "dune" in reception.link.registered_sites(), "dune's key", 10)
    with attending(kits, "dune", tmp_path / "dune", reception):
        until(lambda: reception.link.connected_sites() == ["dune"], "dune's coming", 20)
        assert said(reception.engine, {"dune": orders()["hill"]}) == {"dune": echo("dune")(orders()["hill"])}


def test_a_key_file_that_is_missing_for_a_while_ends_no_site(
    kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    home = tmp_path / "hill"
    with attending(kits, "hill", home, reception) as told:
        until(lambda: reception.link.connected_sites() == ["hill"], "hill's coming", 20)
        key = (home / "site.key").read_bytes()
        (home / "site.key").unlink()
        registered, reception.link.gate.keys = reception.link.gate.keys, {}  # so that it has to connect anew
        reception.link.gate.notify_site("hill")
        until(lambda: any("is not there yet" in sentence for sentence in told), "a word on the key", 60)
        reception.link.gate.keys = registered
        (home / "site.key").write_bytes(key)
        (home / "site.key").chmod(0o600)
        until(lambda: told[-1].startswith("mended after"), "hill's return", 60)
