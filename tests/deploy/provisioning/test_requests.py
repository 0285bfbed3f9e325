"""Keys that sites make themselves: no private key at the coordinator, and only who has the key can ask for it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyclinic.cli.provision import provision_app
from polyclinic.cli.site import site_app
from polyclinic.core.errors import DataError, EngineError, PolyclinicError
from polyclinic.deploy.config import ServerConfig
from polyclinic.deploy.provisioning import certificates
from polyclinic.deploy.provisioning.inspect import WAITING, inspect_kits
from polyclinic.deploy.provisioning.kit_folder import KitFolder
from polyclinic.deploy.provisioning.provision import (
    accept_requests,
    provision_federation,
    rotate_all,
    rotate_site,
)
from polyclinic.deploy.provisioning.requests import read_request
from tests.deploy.kits import NORTH, SITES, mode, revoked, site_of, tree


@pytest.fixture
def open_kits(tmp_path: Path) -> Path:
    """Kits as `polyclinic provision` makes them: without sites' keys."""
    provision_federation(NORTH, tmp_path / "kits", site_keys=False)
    return tmp_path / "kits"


def ask(kits: Path, site: str, *words: str) -> Path:
    """What a site's people do: make a key by the command; returns their request."""
    result = CliRunner().invoke(site_app, ["key", str(site_of(kits, site) / "site.yaml"), *words])
    assert result.exit_code == 0, result.output
    (told,) = re.findall("SHA256:[^ \n]+", result.stdout)
    path = site_of(kits, site) / "request.json"
    assert read_request(path).fingerprint == told
    return path


def changed(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


def test_the_coordinator_has_no_private_key_of_any_site(open_kits: Path) -> None:
    secret = {name for name, data in tree(open_kits).items() if b"PRIVATE KEY" in data}
    assert secret == {"ca/ca.key", "server/server.key"}
    assert ServerConfig.load(open_kits / "server" / "server.yaml").sites == {}
    found = inspect_kits(open_kits)
    assert [row.fingerprint for row in found.rows[2:]] == [WAITING] * len(SITES)
    assert found.problems == ()


def test_a_site_makes_its_key_and_the_coordinator_registers_it(open_kits: Path) -> None:
    paths = [ask(open_kits, site) for site in SITES]
    key = site_of(open_kits, "hill") / "site.key"
    assert mode(key) == 0o600
    mark = subprocess.run(["ssh-keygen", "-lf", str(key)], capture_output=True, text=True, check=False)
    if mark.returncode == 0:
        assert read_request(paths[1]).fingerprint in mark.stdout, "as another program tells it"
    run = CliRunner()
    refused = run.invoke(provision_app, ["accept", str(open_kits), *map(str, paths)], input="n\n")
    assert refused.exit_code == 1
    assert refused.output.endswith("nothing was registered\n")
    assert ServerConfig.load(open_kits / "server" / "server.yaml").sites == {}
    taken = run.invoke(provision_app, ["accept", str(open_kits), *map(str, paths)], input="y\n")
    assert taken.exit_code == 0, taken.output
    registered = ServerConfig.load(open_kits / "server" / "server.yaml").sites
    assert tuple(registered) == SITES
    for site, path in zip(SITES, paths, strict=True):
        assert read_request(path).fingerprint in taken.stdout
        assert certificates.key_file_fingerprint(registered[site]) == read_request(path).fingerprint
    listed = json.loads((site_of(open_kits, "hill") / "peers.json").read_text())
    assert tuple(sorted(listed["sites"])) == tuple(sorted(SITES))


def test_making_a_key_again_keeps_it_unless_a_new_one_is_wanted(open_kits: Path) -> None:
    first = read_request(ask(open_kits, "hill"))
    assert read_request(ask(open_kits, "hill")) == first
    accept_requests(open_kits, [first])
    second = read_request(ask(open_kits, "hill", "--new"))
    assert second.key != first.key
    assert (site_of(open_kits, "hill") / "site.key.former").exists()
    accept_requests(open_kits, [second])
    assert [(row["site"], row["why"], row["fingerprint"]) for row in revoked(open_kits)] == [
        ("hill", "rotated", first.fingerprint)
    ]
    with pytest.raises(DataError, match="a key that was revoked"):
        accept_requests(open_kits, [first])
    version = json.loads((open_kits / "server" / "peers.json").read_text())["version"]
    accept_requests(open_kits, [second])
    assert json.loads((open_kits / "server" / "peers.json").read_text())["version"] == version + 1
    assert len(revoked(open_kits)) == 1, "accepting twice revokes nothing"


def test_only_who_made_a_key_renews_it(open_kits: Path) -> None:
    accept_requests(open_kits, [read_request(ask(open_kits, "hill"))])
    (site_of(open_kits, "hill") / "site.key").rename(open_kits.parent / "at the site")
    with pytest.raises(DataError, match="was made at the site"):
        rotate_site(open_kits, "hill")
    before = certificates.key_file_fingerprint(open_kits / "server" / "sites" / "hill.pub")
    rotate_all(open_kits)
    assert certificates.key_file_fingerprint(open_kits / "server" / "sites" / "hill.pub") == before
    assert inspect_kits(open_kits).problems == ()


def foreign_key(path: Path, kits: Path) -> None:
    """Somebody asks for a key that they do not have."""
    changed(path, key=json.loads(ask(kits, "harbour").read_text())["key"])


def other_name(path: Path, kits: Path) -> None:
    changed(path, site="harbour")


def bent_signature(path: Path, kits: Path) -> None:
    changed(path, signature="AAAA")


def no_signature(path: Path, kits: Path) -> None:
    changed(path, signature=None)


def a_comment(path: Path, kits: Path) -> None:
    changed(path, key=json.loads(path.read_text())["key"] + " harbour")


def no_json(path: Path, kits: Path) -> None:
    path.write_text("{")


@pytest.mark.parametrize("spoil", [foreign_key, other_name, bent_signature, no_signature, a_comment, no_json])
def test_a_request_that_was_changed_is_refused(open_kits: Path, spoil: Callable[[Path, Path], None]) -> None:
    path = ask(open_kits, "hill")
    read_request(path)
    spoil(path, open_kits)
    with pytest.raises(PolyclinicError, match="is not a site's request, or was changed") as caught:
        read_request(path)
    assert "\n" not in str(caught.value)


def test_requests_of_others_are_refused_before_anything_changes(open_kits: Path, tmp_path: Path) -> None:
    provision_federation(NORTH.model_copy(update={"federation": "south-sea"}), tmp_path / "south", site_keys=False)
    foreign = read_request(ask(tmp_path / "south", "hill"))
    honest = read_request(ask(open_kits, "harbour"))
    before = tree(open_kits)
    with pytest.raises(DataError, match="federation 'south-sea'"):
        accept_requests(open_kits, [honest, foreign])
    twice = type(honest)(honest.federation, "hill", honest.key)
    assert {name: data for name, data in tree(open_kits).items() if name != ".lock"} == before
    accept_requests(open_kits, [honest])
    with pytest.raises(DataError, match="asks for the key of harbour"):
        accept_requests(open_kits, [twice])
    with pytest.raises(DataError, match="there is no site 'dune'"):
        accept_requests(open_kits, [type(honest)(honest.federation, "dune", honest.key)])


def test_a_key_of_another_curve_is_no_request(open_kits: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    from polyclinic.deploy.provisioning.requests import write_request

    path = open_kits.parent / "small.json"
    write_request(path, "north-sea", "hill", ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(EngineError, match="ECDSA"):
        read_request(path)


def test_the_kits_of_an_interrupted_acceptance_are_mended_by_repeating_it(
    open_kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyclinic.deploy.provisioning import provision

    request = read_request(ask(open_kits, "hill"))
    with monkeypatch.context() as only:
        only.setattr(provision, "_sign_kits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            accept_requests(open_kits, [request])
    accept_requests(open_kits, [request])
    assert inspect_kits(open_kits).problems == ()
    assert KitFolder.open(open_kits).registered == {"hill": request.key}
