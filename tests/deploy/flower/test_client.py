"""A site's connection: what it says when it cannot be had, when a run is over, and that a full disk does not end it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

import httpx

from polyclinic.deploy.config import FederationConfig, ServerConfig, ServerSection
from polyclinic.deploy.flower.client import SiteConnection
from polyclinic.deploy.flower.request_headers import SENT, read_clock_skew
from polyclinic.deploy.processes import SiteRegistration, open_server, serve_site
from polyclinic.deploy.provisioning.provision import provision_federation
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.status import STATUS
from tests.deploy.memory_grid import SITES, at_work, echo, orders, said
from tests.deploy.real_processes import free_port, until


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
    config = ServerConfig.load(kits / "server" / "server.yaml")
    with open_server(config.model_copy(update={"folder": tmp_path / "server", "port": free_port()})) as found:
        yield found


@contextmanager
def told_by_hill(kits: Path, at: str, folder: Path, **settings: Any) -> Iterator[list[str]]:
    """What hill's process, here a thread, says."""
    config = SiteConfig.load(kits / "sites" / "hill" / "site.yaml")
    assert config.key is not None
    folder.mkdir(parents=True, exist_ok=True)
    told: list[str] = []
    options = {"authority": config.ca, "report": told.append, **settings}
    attendance = SiteConnection(at, key=config.key, folder=folder, answer=echo("hill"), **options)
    with at_work(attendance, told):
        yield told


def address(reception: SiteRegistration) -> str:
    return f"127.0.0.1:{reception.link.port}"


def test_the_end_of_a_run_is_no_failure(kits: Path, tmp_path: Path, reception: SiteRegistration) -> None:
    with told_by_hill(kits, address(reception), tmp_path / "hill", is_idle=lambda: True) as told:
        until(lambda: reception.link.connected_sites() == ["hill"], "hill's coming", 15)
        reception.link.__exit__()
        until(lambda: len(told) == 2, "a word on the server's end", 15)
        time.sleep(1.5)
    at = address(reception)
    assert told == [f"connected to {at}", f"{at} has closed; waiting for the next run"]


def test_a_site_that_is_done_waits_for_no_further_run(kits: Path, tmp_path: Path, reception: SiteRegistration) -> None:
    """As with `join --once`, after its run."""
    with told_by_hill(kits, address(reception), tmp_path / "hill", is_idle=lambda: True, is_done=lambda: True) as told:
        until(lambda: reception.link.connected_sites() == ["hill"], "hill's coming", 15)
        reception.link.__exit__()
        until(lambda: len(told) == 2, "a word on the server's end", 15)
    at = address(reception)
    assert told == [f"connected to {at}", f"{at} has closed; this site is done, and ends"]


def test_a_server_that_goes_in_the_middle_of_a_run_cannot_be_reached(
    kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    with told_by_hill(kits, address(reception), tmp_path / "hill") as told:
        until(lambda: reception.link.connected_sites() == ["hill"], "hill's coming", 15)
        reception.link.__exit__()
        until(lambda: any("cannot be reached" in sentence for sentence in told), "a word on the server's end", 15)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("test", "harbour"), "its key is that of the site hill, but `site` in site.yaml is 'harbour'"),
        (("baltic", "hill"), "its key is that of the federation test, but `federation` in site.yaml is 'baltic'"),
        (("test", "Ä/b"), "its key is that of the site hill, but `site` in site.yaml is 'Ä/b'"),
        (("test", "hill"), "connected to"),
    ],
)
def test_settings_of_another_kit_are_reported_when_the_site_connects(
    names: tuple[str, str], sentence: str, kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    with told_by_hill(kits, address(reception), tmp_path / "hill", names=names) as told:
        until(lambda: told, "a word", 15)
        assert sentence in told[0]
        assert [site for site, _ in reception.board.refusals] == ([] if "connected" in sentence else ["hill"])
        reception.link.gate.notify_site("hill")


def test_the_reasons_for_a_missing_connection_are_distinguished(
    kits: Path, tmp_path: Path, reception: SiteRegistration
) -> None:
    closed = f"127.0.0.1:{free_port()}"
    cases: list[tuple[str, dict[str, Any], str]] = [
        (address(reception), {"authority": None}, "if it speaks TLS, set insecure: false in site.yaml"),
        ("nowhere.invalid:9443", {}, "no such host is known here; check `server` in site.yaml, and DNS"),
        (closed, {"is_idle": lambda: True}, "is it running, and its port open?"),
    ]
    for number, (at, settings, sentence) in enumerate(cases):
        with told_by_hill(kits, at, tmp_path / str(number), **settings) as told:
            until(lambda told=told: told, "a word", 15)  # type: ignore[misc]
            assert sentence in told[0]


def test_a_full_disk_does_not_end_a_site(
    kits: Path, tmp_path: Path, reception: SiteRegistration, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither its status, nor its log, nor the number of its connection can be written, and it works on."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, a disk that is always full")
    found = SiteConfig.load(kits / "sites" / "hill" / "site.yaml")
    config = found.model_copy(update={"folder": tmp_path / "state", "server": address(reception)})
    for name in (STATUS, "node.json"):
        (config.folder / name / "in the way").mkdir(parents=True)
    (config.folder / "flower.log").symlink_to("/dev/full")
    replies: dict[str, Any] = {}
    told: list[str] = []

    def exchange() -> None:
        try:
            until(lambda: reception.link.connected_sites() == ["hill"], "hill's coming", 15)
            replies.update(said(reception.engine, {"hill": orders()["hill"]}))
        finally:
            if not over.is_set():  # or it would end the tests
                os.kill(os.getpid(), signal.SIGTERM)

    asking, over = threading.Thread(target=exchange), threading.Event()
    asking.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            serve_site(config, echo("hill"), told.append)
    finally:
        over.set()
        asking.join()
    assert replies == {"hill": echo("hill")(orders()["hill"])}
    assert told == [f"connected to {address(reception)}"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("sent", "date", "got", "skew"),
    [
        (100.0, 100, 100.1, 0.0),
        (100.0, 100, 110.0, 0.0),  # held open for 10 s by the server, which set the date at once, or at the end
        (100.0, 110, 110.2, 0.0),
        (110.0, 100, 110.2, 9.5),
        (100.0, 500, 100.2, -400.3),
        (110.0, 100, 120.0, 9.5),
    ],
)
def test_a_clock_is_wrong_only_if_the_way_there_and_back_does_not_explain_it(
    sent: float, date: int, got: float, skew: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = httpx.Request("POST", "https://x", extensions={SENT: sent})
    response = httpx.Response(401, headers={"date": formatdate(date, usegmt=True)}, request=request)
    monkeypatch.setattr("polyclinic.deploy.flower.request_headers.time", SimpleNamespace(time=lambda: got))
    found = read_clock_skew(response)
    assert found == pytest.approx(skew, abs=0.51)  # a date has full seconds
