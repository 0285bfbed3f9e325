"""A kit that was changed on the way starts nothing: by its own script, by the README's commands, by `join`.

`openssl`, `sha256sum` and `sh` are the machine's own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from polyclinic.core.errors import EngineError
from polyclinic.deploy.provisioning.certificates import certificate_fingerprint, read_certificate
from polyclinic.deploy.provisioning.inspect import inspect_kits
from polyclinic.deploy.provisioning.manifest import check_kit
from polyclinic.deploy.provisioning.provision import add_site, revoke_site, rotate_all, rotate_server, rotate_site
from polyclinic.deploy.site.config import SiteConfig
from polyclinic.deploy.site.peers import check_own_kit
from tests.deploy.kits import SITES, site_of

OUTSIDERS = """
openssl x509 -in ca.crt -noout -pubkey > /dev/shm/ca.$$.pub || exit 3
openssl dgst -sha384 -verify /dev/shm/ca.$$.pub -signature MANIFEST.sig MANIFEST || exit 4
sha256sum --check --strict MANIFEST || exit 5
rm -f /dev/shm/ca.$$.pub
"""
"""What a site's people can type, without a line of ours."""


def started(folder: Path, *words: str) -> tuple[int, str]:
    """How start.sh ends, and what it says, where Python is one that does nothing but say so."""
    python = folder.parent / "python-that-says-so"
    python.write_text('#!/bin/sh\necho "would install"\nexit 9\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python)}
    done = subprocess.run(
        ["sh", "start.sh", *words], cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    return done.returncode, done.stdout + done.stderr


def alter_program(folder: Path) -> None:
    path = folder / "requirements.txt"
    path.write_text(path.read_text() + "helpful-package\n")


def alter_wheel(folder: Path) -> None:
    (path,) = folder.glob("*.whl")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


def alter_peers(folder: Path) -> None:
    path = folder / "peers.json"
    path.write_text(path.read_text().replace("harbour", "harbor"))


def drop_a_file(folder: Path) -> None:
    (folder / "peers.json").unlink()


def alter_and_list_anew(folder: Path) -> None:
    """What somebody does who knows sha256sum, but has not the authority's key."""
    alter_program(folder)
    names = [line.split("  ")[1] for line in (folder / "MANIFEST").read_text().splitlines()]
    listed = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, text=True, check=True).stdout
    (folder / "MANIFEST").write_text(listed)


def drop_the_signature(folder: Path) -> None:
    (folder / "MANIFEST.sig").unlink()


ALTERATIONS: tuple[Callable[[Path], None], ...] = (
    alter_program,
    alter_wheel,
    alter_peers,
    drop_a_file,
    alter_and_list_anew,
    drop_the_signature,
)


def test_an_untouched_kit_passes_every_check(kits: Path) -> None:
    for folder in (kits / "server", *(site_of(kits, name) for name in SITES)):
        check_kit(folder)
        assert subprocess.run(["sh", "-c", OUTSIDERS], cwd=folder, capture_output=True).returncode == 0
        code, said = started(folder, "--install", "--without-hashes")
        assert (code, "would install" in said) == (9, True), said
        authority = certificate_fingerprint(read_certificate(kits / "ca" / "ca.crt"))
        assert authority in said, "to be compared by telephone"


@pytest.mark.parametrize("alter", ALTERATIONS, ids=lambda alter: alter.__name__)
def test_an_altered_kit_is_refused_by_everybody(kits: Path, alter: Callable[[Path], None]) -> None:
    for folder in (site_of(kits, "hill"), kits / "server"):
        alter(folder)
        with pytest.raises(EngineError) as caught:
            check_kit(folder)
        assert "\n" not in str(caught.value)
        assert "ask the coordinator" in str(caught.value)
        assert subprocess.run(["sh", "-c", OUTSIDERS], cwd=folder, capture_output=True).returncode in (4, 5)
        code, said = started(folder, "--install", "--without-hashes")
        assert code == 1
        assert "would install" not in said
        assert "ask the coordinator" in said
    assert len(inspect_kits(kits).problems) == 2
    with pytest.raises(EngineError):
        list(check_own_kit(SiteConfig.load(site_of(kits, "hill") / "site.yaml")))


def test_a_whole_kit_of_another_authority_has_another_fingerprint(kits: Path) -> None:
    """Somebody who replaces all files can sign them, but not with the key of the fingerprint that was told."""
    told = certificate_fingerprint(read_certificate(kits / "ca" / "ca.crt"))
    _, said = started(site_of(kits.with_name("others"), "hill"), "--install", "--without-hashes")
    assert "fingerprint" in said.lower()
    assert told not in said
    with pytest.raises(EngineError, match="not signed by the authority"):
        check_kit(site_of(kits.with_name("others"), "hill"), kits / "ca" / "ca.crt")


def test_settings_and_keys_may_be_changed(kits: Path) -> None:
    folder = site_of(kits, "hill")
    (folder / "site.yaml").write_text((folder / "site.yaml").read_text() + "# ours\n")
    (folder / "site.key").unlink()
    (folder / "state").mkdir()
    check_kit(folder)
    code, said = started(folder, "--install", "--without-hashes")
    assert (code, "would install" in said) == (9, True), said


def test_without_hashes_nothing_is_installed_unless_told(kits: Path) -> None:
    code, said = started(site_of(kits, "hill"))
    assert code == 1
    assert "no hashes" in said
    assert "--without-hashes" in said
    assert "would install" not in said


def test_kits_are_signed_again_after_every_change(kits: Path) -> None:
    changes: list[Callable[[], None]] = [
        lambda: rotate_site(kits, "hill"),
        lambda: rotate_server(kits),
        lambda: add_site(kits, "lake"),
        lambda: revoke_site(kits, "harbour"),
        lambda: rotate_all(kits),
    ]
    for change in changes:
        change()
        assert inspect_kits(kits).problems == ()
    for name in ("hill", "lake"):
        check_kit(site_of(kits, name), kits / "ca" / "ca.crt")


def test_compose_files_build_the_kit_and_leave_secrets_outside(kits: Path) -> None:
    for folder, role in ((kits / "server", "server"), (site_of(kits, "hill"), "site")):
        ((name, service),) = yaml.safe_load((folder / "compose.yaml").read_text())["services"].items()
        assert name == role
        assert service["build"] == "."
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert ".:/kit" in service["volumes"]
        assert service.get("ports", []) == (["9443:9443"] if role == "server" else [])
        ignored = (folder / ".dockerignore").read_text().splitlines()
        steps = [line.split() for line in (folder / "Dockerfile").read_text().splitlines() if line[:1] not in ("#", "")]
        (copied,) = [step[1:-1] for step in steps if step[0] == "COPY"]
        assert ignored == ["*", *(f"!{name}" for name in copied)], "nothing else reaches the image, no key among it"
        assert all((folder / name).is_file() for name in copied)
        assert not any("key" in name for name in copied)
        entry = [" ".join(step) for step in steps if step[0] in ("ENTRYPOINT", "CMD")]
        assert entry[0] == 'ENTRYPOINT ["polyclinic"]'
        assert ("join" if role == "site" else "serve") in entry[1]
