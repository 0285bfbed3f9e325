"""Months of operation in seconds: what others must mend ends no site, and what changes at the server ends no run."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="needs the extra polyclinic[flower]")

from polyclinic.cli.site import NO_RUN
from polyclinic.core.types import SiteId
from polyclinic.deploy.provisioning import certificates
from polyclinic.deploy.provisioning.provision import rotate_server, rotate_site
from polyclinic.storage.run_folder import RunFolder
from tests.deploy.example_sites import SITES, approve, recipe, simulation
from tests.deploy.real_processes import Process, Ward, furnish
from tests.driving import Ask

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks processes")


@pytest.fixture
def ward(ask: Ask, tmp_path: Path) -> Iterator[Ward]:
    """Three hospitals whose kits have been copied to them, as by a messenger, and a folder for recipes."""
    with Ward(tmp_path, ask) as found:
        furnish(tmp_path)
        for site in SITES:
            shutil.copytree(tmp_path / "k" / "sites" / site, tmp_path / "at" / site)
            file = tmp_path / "at" / site / "site.yaml"
            values = yaml.safe_load(file.read_text())
            notice = ["sh", "-c", f'echo "$@" >> {tmp_path}/{site}.notices', "notice"]
            file.write_text(yaml.safe_dump({**values, "retry": 1, "notify": notice}))
        (tmp_path / "recipes").mkdir()
        yield found


def test_whatever_others_mend_a_site_comes_back_by_itself(ward: Ward) -> None:
    """A server of another version, an expired certificate, wrong clocks and a key rotated in the middle of a run: sites
    that were started once play it to its end, in the bits of the simulation."""
    folder, found = ward.folder, recipe(rounds=12)
    (folder / "recipes" / "run.yaml").write_text(found.to_yaml())
    for site in SITES:
        approve(folder / "at" / site / "state", found)
    (folder / "recipes" / "0.yaml").write_text("name: broken\nrounds: none\n")
    server = serve(ward, protocol=77)
    join(ward, "harbour", ahead=10.0)
    join(ward, "hill")
    await_words(ward, ("harbour", "hill"), "with protocol 77", "tries again by itself")
    server.stop()
    server = serve(ward)
    await_words(ward, ("harbour", "hill"), "mended after", "connected to")
    await_words(ward, ("harbour",), "s ahead of the server's; signatures are corrected for that")
    end = datetime.now(UTC) + timedelta(seconds=6)
    certify(folder / "k", end)
    ward.until(lambda: "shows its new certificate" in server.log.read_text(), "the new certificate")
    ward.until(lambda: datetime.now(UTC) > end, "its end")
    join(ward, "lake", ahead=-400.0)
    await_words(ward, ("lake",), "the server's certificate has expired", "tries again by itself")
    rotate_server(folder / "k")
    await_words(ward, ("lake",), "mended after", "s behind the server's; signatures are corrected for that")
    ward.until(lambda: "round 2" in server.log.read_text(), "the second round")
    os.kill(ward.sites["harbour"].pid, signal.SIGSTOP)  # the round waits for it
    rotate_site(folder / "k", "hill")
    await_words(ward, ("hill",), "its key is not registered, or was revoked")
    shutil.copy2(folder / "k" / "sites" / "hill" / "site.key", folder / "at" / "hill" / "site.key")
    ward.until(lambda: ward.sites["hill"].log.read_text().count("mended after") == 2, "hill's return")
    assert ward.pids().keys() == set(SITES)
    os.kill(ward.sites["harbour"].pid, signal.SIGCONT)
    for site in SITES:
        ward.until(lambda site=site: ward.sites[site].code() is not None, f"{site}'s end")  # type: ignore[misc]
    assert [ward.sites[site].code() for site in SITES] == [0, 0, 0], ward.said()
    assert RunFolder(folder / "runs" / "run").read_summary().sha256 == simulation(found, folder).run().summary.sha256
    said = server.log.read_text()
    assert "warning: the certificate of the server ends on" in said
    assert "hill has a new key" in said
    assert said.count("the server shows its new certificate") == 2
    assert "gone away" not in said.partition("all recipes in")[2]
    assert (folder / "lake.notices").read_text().count("attention ") == 1
    assert "error: 0.yaml: " in said
    assert server.code() is None, "the server waits for the next recipe"
    join(ward, "lake", "--wait", "1")
    ward.until(lambda: ward.sites["lake"].code() is not None, "the end of a vain wait")
    assert ward.sites["lake"].code() == NO_RUN
    assert server.stop() == 130


def serve(ward: Ward, protocol: int = 0) -> Process:
    words = ("serve", ward.folder / "k" / "server" / "server.yaml", ward.folder / "recipes")
    return ward.command(*words, "--out", ward.folder / "runs", role="server", alter={"protocol": protocol})


def certify(kits: Path, end: datetime) -> None:
    """A certificate for the server's present key that is valid until `end`."""
    key = certificates.read_private_key(kits / "server" / "server.key").public_key()
    ca = certificates.read_certificate(kits / "ca" / "ca.crt")
    signer = ca, certificates.read_private_key(kits / "ca" / "ca.key")
    shown = certificates.create_server_certificate("127.0.0.1", key, signer, end - timedelta(days=1), 1)
    (kits / "server" / "server.crt").write_bytes(certificates.encode_certificate(shown))


def join(ward: Ward, site: SiteId, *words: str, ahead: float = 0.0) -> None:
    file = ward.folder / "at" / site / "site.yaml"
    ward.sites[site] = ward.command("join", file, "--once", *words, role=site, alter={"ahead": ahead})


def await_words(ward: Ward, sites: Sequence[SiteId], *words: str) -> None:
    """Wait until the terminal of each of these sites has said all of the words."""
    for site in sites:
        log = ward.sites[site].log
        for word in words:
            ward.until(lambda log=log, word=word: log.exists() and word in log.read_text(), f"{site}: {word}")  # type: ignore[misc]
