"""What is wrong with keys and certificates is told in a sentence, and mended by a command."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyclinic.cli.provision import provision_app as app
from polyclinic.core.errors import EngineError
from polyclinic.deploy.config import ServerSection
from polyclinic.deploy.provisioning import certificates
from polyclinic.deploy.provisioning.inspect import inspect_kits
from polyclinic.deploy.provisioning.provision import provision_federation, rotate_all, rotate_server, rotate_site
from tests.deploy.kits import HELLO, NORTH, SITES, YEARS, handshake, revoked, site_of

pytest.importorskip("cryptography", reason="the extra polyclinic[flower] is not installed")


def test_a_site_accepts_the_server_of_its_kit_by_every_name_of_this_machine(kits: Path) -> None:
    for name in SITES:
        assert handshake(kits / "server", site_of(kits, name) / "ca.crt") == HELLO
    assert handshake(kits / "server", site_of(kits, "hill") / "ca.crt", "localhost") == HELLO


def test_another_authority_is_refused(kits: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        handshake(kits / "server", kits.with_name("others") / "ca" / "ca.crt")


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    provision_federation(NORTH, tmp_path / "old", now=certificates.current_time() - YEARS)
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        handshake(tmp_path / "old" / "server", tmp_path / "old" / "ca" / "ca.crt")
    rotate_server(tmp_path / "old")
    assert handshake(tmp_path / "old" / "server", tmp_path / "old" / "ca" / "ca.crt") == HELLO


def test_a_server_elsewhere_is_not_called_localhost(tmp_path: Path) -> None:
    there = NORTH.model_copy(update={"server": ServerSection(host="fl.example.org", port=9443)})
    provision_federation(there, tmp_path / "kits")
    ca = tmp_path / "kits" / "ca" / "ca.crt"
    assert handshake(tmp_path / "kits" / "server", ca, "fl.example.org") == HELLO
    for host in ("localhost", "127.0.0.1", "sub.fl.example.org"):
        with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|doesn't match"):
            handshake(tmp_path / "kits" / "server", ca, host)


def test_clocks_may_be_a_few_minutes_late(kits: Path) -> None:
    server = kits / "server"
    files = (server / "server.crt", server / "server.key", server / "ca.crt")
    certificates.check_server_files(*files, "127.0.0.1", certificates.current_time() - timedelta(minutes=5))
    with pytest.raises(EngineError, match="set the clock"):
        certificates.check_server_files(*files, "127.0.0.1", certificates.current_time() - timedelta(hours=1))


def test_show_warns_within_thirty_days(kits: Path) -> None:
    now = certificates.current_time()
    assert inspect_kits(kits, now + timedelta(days=59)).warnings == ()
    (warning,) = inspect_kits(kits, now + timedelta(days=60)).warnings
    assert "server" in warning
    assert "rotate" in warning
    found = inspect_kits(kits, now + timedelta(days=91))
    assert found.warnings == ()
    assert "expired" in found.problems[0]


def test_show_names_everybody_with_a_fingerprint(kits: Path) -> None:
    rotate_site(kits, "hill")
    found = inspect_kits(kits)
    assert [row.name for row in found.rows] == ["authority", "server", *SITES]
    assert len({row.fingerprint for row in found.rows}) == 2 + len(SITES)
    result = CliRunner().invoke(app, ["show", str(kits)])
    assert result.exit_code == 0
    for row in found.rows:
        assert row.name in result.stdout
        assert f"{row.name}: {row.fingerprint}" in result.stdout, "the whole of it on one line"
    assert revoked(kits)[0]["fingerprint"] in result.stdout


def foreign_key(kits: Path) -> None:
    (kits / "sites" / "hill" / "site.key").write_bytes((kits / "sites" / "harbour" / "site.key").read_bytes())


def foreign_authority(kits: Path) -> None:
    (kits / "sites" / "hill" / "ca.crt").write_bytes((kits.with_name("others") / "ca" / "ca.crt").read_bytes())


def foreign_certificate(kits: Path) -> None:
    for name in ("server.crt", "server.key"):
        (kits / "server" / name).write_bytes((kits.with_name("others") / "server" / name).read_bytes())


def mismatched_key(kits: Path) -> None:
    (kits / "server" / "server.key").write_bytes((kits.with_name("others") / "server" / "server.key").read_bytes())


def certificate_for_another_host(kits: Path) -> None:
    path = kits / "federation.yaml"
    path.write_text(path.read_text().replace("127.0.0.1", "fl.example.org"))


def leaf_for_authority(kits: Path) -> None:
    for place in (kits / "ca", kits / "server", *(site_of(kits, name) for name in SITES)):
        (place / "ca.crt").write_bytes((kits / "server" / "server.crt").read_bytes())


def readable_key(kits: Path) -> None:
    (kits / "sites" / "hill" / "site.key").chmod(0o644)


def damaged_key(kits: Path) -> None:
    (kits / "sites" / "hill" / "site.key").write_bytes(b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n")


def pem_key(kits: Path) -> None:
    (kits / "sites" / "hill" / "site.key").write_bytes((kits / "server" / "server.key").read_bytes())


def damaged_certificate(kits: Path) -> None:
    (kits / "server" / "server.crt").write_bytes(b"-----BEGIN CERTIFICATE-----\n")


def missing_key(kits: Path) -> None:
    (kits / "server" / "server.key").unlink()


def still_taken(kits: Path) -> None:
    line = (kits / "server" / "sites" / "hill.pub").read_bytes()
    rotate_site(kits, "hill")
    (kits / "server" / "sites" / "hill.pub").write_bytes(line)


def ed25519_key(kits: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    other = Ed25519PrivateKey.generate().public_key()
    line = other.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (kits / "server" / "sites" / "hill.pub").write_bytes(line)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (foreign_key, "is not the one that the server knows"),
        (foreign_authority, "is another authority than"),
        (foreign_certificate, "was not signed by"),
        (mismatched_key, "is not the key of"),
        (certificate_for_another_host, "is not for fl.example.org"),
        (leaf_for_authority, "is not the certificate of an authority"),
        (readable_key, "chmod 600"),
        (damaged_key, "is not a private key"),
        (pem_key, "is not in OpenSSH's form"),
        (damaged_certificate, "is not a certificate"),
        (missing_key, "put it back"),
        (still_taken, "is not the one that the server knows"),
        (ed25519_key, "is not an ECDSA key"),
    ],
)
def test_files_that_do_not_match_are_reported_in_a_sentence(
    kits: Path, spoil: Callable[[Path], None], sentence: str
) -> None:
    spoil(kits)
    problems = inspect_kits(kits).problems
    assert any(sentence in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)
    result = CliRunner().invoke(app, ["show", str(kits)])
    assert result.exit_code == 1
    assert sentence.split()[-1] in result.stderr


def test_files_that_do_not_fit_are_mended_by_the_same_command(kits: Path) -> None:
    for spoil in (foreign_key, damaged_key, still_taken, ed25519_key):
        spoil(kits)
        rotate_site(kits, "hill")
        assert inspect_kits(kits).problems == ()
    for spoil in (mismatched_key, damaged_certificate, missing_key):
        spoil(kits)
        rotate_server(kits)
        assert inspect_kits(kits).problems == ()
    foreign_authority(kits)
    rotate_all(kits)
    assert inspect_kits(kits).problems == ()
