"""Kits: what is in them, who can read it, and whether TLS takes what was made."""

from __future__ import annotations

import hashlib
import io
import os
import ssl
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from polyclinic.cli.provision import provision_app as app
from polyclinic.core import __version__
from polyclinic.core.errors import DataError, EngineError, RecipeError, StoreError
from polyclinic.deploy.config import FederationConfig, ServerConfig, validate_config
from polyclinic.deploy.provisioning import certificates, provision as kits_of
from polyclinic.deploy.provisioning.inspect import inspect_kits
from polyclinic.deploy.provisioning.kit import KitFile, zip_files
from polyclinic.deploy.provisioning.provision import (
    add_site,
    provision_federation,
    revoke_site,
    rotate_all,
    rotate_server,
    rotate_site,
)
from polyclinic.deploy.provisioning.software import Software, build_wheel, read_wheel
from polyclinic.deploy.site.config import SiteConfig
from tests.deploy.kits import GOOD, HELLO, NORTH, SITES, handshake, mode, revoked, site_of, tree

WHEEL = f"polyclinic-{__version__}-py3-none-any.whl"
SIGNED = {"MANIFEST", "MANIFEST.sig", "peers.json"}
"""What every change signs anew in every kit."""
pytest.importorskip("cryptography", reason="the extra polyclinic[flower] is not installed")


def test_secrets_are_their_owners_and_the_authoritys_key_is_in_no_kit(kits: Path) -> None:
    secrets = {kits / "ca" / "ca.key", kits / "server" / "server.key"}
    secrets |= {site_of(kits, name) / "site.key" for name in SITES}
    secrets |= {kits_of.zip_path(kits, name) for name in SITES}
    for path in kits.rglob("*"):
        if path.is_file():
            assert (mode(path) == 0o600) == (path in secrets), path
            private = b"PRIVATE KEY" in path.read_bytes()
            assert private == (path in secrets), path
    authority = (kits / "ca" / "ca.key").read_bytes()
    held = [path for path in kits.rglob("*") if path.is_file() and authority in path.read_bytes()]
    assert held == [kits / "ca" / "ca.key"]


def test_no_kit_holds_the_key_of_another_site(kits: Path) -> None:
    keys = {name: (site_of(kits, name) / "site.key").read_bytes() for name in SITES}
    assert len(set(keys.values())) == len(SITES)
    for name in SITES:
        everything = b"".join(tree(site_of(kits, name)).values()) + kits_of.zip_path(kits, name).read_bytes()
        assert [other for other in SITES if keys[other] in everything] == [name]
    assert not any(key in b"".join(tree(kits / "server").values()) for key in keys.values())


def test_flower_reads_the_keys(kits: Path) -> None:
    register = pytest.importorskip("flwr.cli.supernode.register", reason="flwr is not installed")
    supernode = pytest.importorskip("flwr.supernode.cli.flower_supernode", reason="flwr is not installed")
    asymmetric = pytest.importorskip("flwr.supercore.primitives.asymmetric", reason="flwr is not installed")
    for name, path in ServerConfig.load(kits / "server" / "server.yaml").sites.items():
        arguments = type("Arguments", (), {"auth_supernode_private_key": str(site_of(kits, name) / "site.key")})()
        arguments.auth_supernode_public_key = None
        _, public = supernode._try_setup_client_authentication(arguments)
        assert asymmetric.public_key_to_bytes(public) == register.try_load_public_key(path)


def test_a_zip_holds_the_kit_with_its_modes(kits: Path) -> None:
    for name in SITES:
        with zipfile.ZipFile(kits_of.zip_path(kits, name)) as archive:
            held = {entry.filename: archive.read(entry) for entry in archive.infolist()}
            modes = {entry.filename: stat.S_IMODE(entry.external_attr >> 16) for entry in archive.infolist()}
        folder = site_of(kits, name)
        assert held == {f"{folder.name}/{path}": data for path, data in tree(folder).items()}
        assert modes == {f"{folder.name}/{path}": mode(folder / path) for path in tree(folder)}


def test_the_same_files_give_the_same_zip_in_any_order() -> None:
    files = {"b": KitFile(b"2"), "a": KitFile(b"1", 0o600)}
    assert zip_files("kit", files) == zip_files("kit", dict(reversed(files.items())))
    assert zip_files("kit", files) != zip_files("kit", {**files, "a": KitFile(b"1")})
    assert zipfile.ZipFile(io.BytesIO(zip_files("kit", files))).testzip() is None


def test_everything_but_keys_is_the_same_every_time(kits: Path) -> None:
    first, second = tree(kits), tree(kits.with_name("others"))
    differ = {Path(name).suffix for name in first if first[name] != second[name]}
    assert first.keys() == second.keys()
    assert differ == {".crt", ".key", ".pub", ".zip", ".json", "", ".sig"}, "of keys, lists of keys, and signatures"
    assert {Path(name).name for name in first if not Path(name).suffix and first[name] != second[name]} == {"MANIFEST"}


def test_site_yaml_is_what_a_site_reads(kits: Path) -> None:
    for name in SITES:
        folder = site_of(kits, name)
        config = SiteConfig.load(folder / "site.yaml")
        assert (config.site, config.federation, config.server) == (name, "north-sea", "127.0.0.1:9443")
        assert (config.ca, config.key) == (folder / "ca.crt", folder / "site.key")
        assert (config.insecure, config.data, config.budget) == (False, {}, None)
        assert config.allow.algorithms == ("fedavg",)
        certificates.check_site_files(folder / "ca.crt", folder / "site.key")


def test_server_yaml_is_what_a_server_reads(kits: Path) -> None:
    config = ServerConfig.load(kits / "server" / "server.yaml")
    assert tuple(config.sites) == SITES
    assert (config.host, config.port, config.insecure) == ("127.0.0.1", 9443, False)
    certificates.check_server_files(config.certificate, config.key, config.ca, config.host)


def test_installs_are_pinned_and_polyclinic_is_asked_of_no_index(kits: Path) -> None:
    for folder in (kits / "server", site_of(kits, "hill")):
        required = (folder / "requirements.txt").read_text().splitlines()
        assert required == [f"./{WHEEL}[flower]", "flwr==1.41.0", "-c constraints.txt"]
        pinned = [line for line in (folder / "constraints.txt").read_text().splitlines() if line[0] != "#"]
        assert all(line.count("==") == 1 and "+" not in line for line in pinned)
        assert {"torch", "numpy", "cryptography"} <= {line.split("==")[0] for line in pinned}
        installs = [line for line in (folder / "start.sh").read_text().splitlines() if "pip install" in line]
        assert len(installs) == 1
        assert installs[0].endswith("--only-binary :all: $hashes -r requirements.txt")
        assert (folder / WHEEL).read_bytes() == build_wheel().data


def test_another_wheel_and_hashes_travel_with_the_kits_and_with_later_ones(tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL
    wheel.write_bytes(b"the package")
    packages = f"numpy==2.0.0 --hash=sha256:{'a' * 64}\n"
    provision_federation(NORTH, tmp_path / "kits", Software(read_wheel(wheel), packages))
    add_site(tmp_path / "kits", "lake")
    ours = f"./{WHEEL}[flower] --hash=sha256:{hashlib.sha256(b'the package').hexdigest()}\n"
    for folder in (tmp_path / "kits" / "server", *(site_of(tmp_path / "kits", name) for name in (*SITES, "lake"))):
        assert (folder / wheel.name).read_bytes() == b"the package"
        assert (folder / "requirements.txt").read_text() == ours + packages
        assert not (folder / "constraints.txt").exists()
    with pytest.raises(RecipeError, match="is not a wheel of polyclinic"):
        read_wheel(tmp_path / "polyclinic-0.0.1-py3-none-any.whl")


def test_no_blank_is_left_in_a_text(kits: Path) -> None:
    for name, data in tree(kits).items():
        assert b"@{" not in data or name.endswith((".whl", ".zip")), name


def test_kits_are_not_overwritten(kits: Path, tmp_path: Path) -> None:
    before = tree(kits)
    with pytest.raises(StoreError, match="rotate"):
        provision_federation(NORTH, kits)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(StoreError, match="not an empty folder"):
        provision_federation(NORTH, tmp_path / "mine")
    assert tree(kits) == before
    assert tree(tmp_path / "mine") == {"thesis.txt": b"precious"}


def test_what_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match="the disk is full"):
        provision_federation(NORTH, tmp_path / "kits")
    assert list(tmp_path.iterdir()) == []


def test_a_site_gets_a_new_key_and_the_old_one_is_listed(kits: Path) -> None:
    before, old = tree(kits), certificates.key_file_fingerprint(kits / "server" / "sites" / "hill.pub")
    (site_of(kits, "hill") / "site.yaml").write_text("edited: true\n")
    (site_of(kits, "hill") / "labels.csv").write_text("left by a rehearsal\n")
    rotate_site(kits, "hill")
    with zipfile.ZipFile(kits_of.zip_path(kits, "hill")) as archive:
        assert "hill/labels.csv" not in archive.namelist()
        assert archive.read("hill/site.yaml") == b"edited: true\n"
    changed = {name for name, data in tree(kits).items() if before.get(name) != data}
    held = {"sites/hill/site.key", "sites/hill/site.yaml", "sites/hill/labels.csv", "sites/hill/DELIVERED"}
    own = {name for name in changed if Path(name).name not in SIGNED and Path(name).suffix != ".zip"}
    assert own == {"server/sites/hill.pub", "server/revoked.yaml", ".lock", *held}
    assert (site_of(kits, "hill") / "site.yaml").read_text() == "edited: true\n"
    assert mode(site_of(kits, "hill") / "site.key") == 0o600
    assert [(row["site"], row["why"], row["fingerprint"]) for row in revoked(kits)] == [("hill", "rotated", old)]
    assert old != certificates.key_file_fingerprint(kits / "server" / "sites" / "hill.pub")
    assert inspect_kits(kits).problems == ()


def test_the_server_gets_a_new_certificate_and_sites_need_nothing(kits: Path) -> None:
    before = tree(kits)
    rotate_server(kits)
    changed = {name for name, data in tree(kits).items() if before.get(name) != data}
    signed = {"server/MANIFEST", "server/MANIFEST.sig"}
    assert changed == {"server/server.crt", "server/server.key", ".lock", *signed}
    assert handshake(kits / "server", site_of(kits, "harbour") / "ca.crt") == HELLO


def test_without_the_authoritys_key_nothing_is_changed(kits: Path) -> None:
    (kits / "ca" / "ca.key").unlink()
    before = tree(kits)
    changes: list[Callable[[], None]] = [
        lambda: rotate_server(kits),
        lambda: rotate_site(kits, "hill"),
        lambda: revoke_site(kits, "hill"),
        lambda: add_site(kits, "lake"),
    ]
    for change in changes:
        with pytest.raises(EngineError, match="put it back"):
            change()
    assert {name: data for name, data in tree(kits).items() if name != ".lock"} == before


def test_everything_is_renewed(kits: Path) -> None:
    old_authority, before = kits.with_name("old.crt"), tree(kits)
    old_authority.write_bytes((kits / "ca" / "ca.crt").read_bytes())
    rotate_all(kits)
    same = {name for name, data in tree(kits).items() if before.get(name) == data}
    assert not {Path(name).suffix for name in same} & {".crt", ".key", ".pub", ".zip"}
    assert len(revoked(kits)) == len(SITES)
    assert inspect_kits(kits).problems == ()
    assert handshake(kits / "server", site_of(kits, "hill") / "ca.crt") == HELLO
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(kits / "server", old_authority)


def test_a_revoked_site_is_forgotten_and_comes_back_only_with_a_new_key(kits: Path) -> None:
    old = certificates.key_file_fingerprint(kits / "server" / "sites" / "hill.pub")
    revoke_site(kits, "hill", certificates.current_time())
    assert "hill" not in ServerConfig.load(kits / "server" / "server.yaml").sites
    assert not (kits / "server" / "sites" / "hill.pub").exists()
    assert not kits_of.zip_path(kits, "hill").exists()
    assert revoked(kits)[0]["why"] == "revoked"
    assert revoked(kits)[0]["date"] == f"{certificates.current_time():%Y-%m-%d}"
    rotate_all(kits)
    assert not (kits / "server" / "sites" / "hill.pub").exists()
    with pytest.raises(DataError, match="there is no site 'hill'"):
        rotate_site(kits, "hill")
    add_site(kits, "hill")
    assert certificates.key_file_fingerprint(kits / "server" / "sites" / "hill.pub") != old
    assert old in {row["fingerprint"] for row in revoked(kits)}
    assert inspect_kits(kits).problems == ()


def test_all_sites_can_be_revoked_and_damage_does_not_prevent_it(kits: Path) -> None:
    (kits / "server" / "sites" / "hill.pub").write_bytes(b"\xff damaged")
    for name in SITES:
        revoke_site(kits, name)
    assert yaml.safe_load((kits / "server" / "server.yaml").read_text())["sites"] == {}
    assert len(revoked(kits)) == len(SITES)
    add_site(kits, "lake")
    assert tuple(ServerConfig.load(kits / "server" / "server.yaml").sites) == ("lake",)


def test_what_the_coordinator_set_in_server_yaml_stays(kits: Path) -> None:
    path = kits / "server" / "server.yaml"
    path.write_text(path.read_text().replace("folder: state", "folder: /var/lib/polyclinic"))
    revoke_site(kits, "hill")
    assert ServerConfig.load(path).folder == Path("/var/lib/polyclinic")


def test_where_the_server_listens_and_bounds_of_sites_that_are_gone(tmp_path: Path) -> None:
    server = NORTH.server.model_copy(update={"listen": "127.0.0.1:19443"})
    provision_federation(NORTH.model_copy(update={"server": server}), tmp_path / "kits")
    path = tmp_path / "kits" / "server" / "server.yaml"
    assert ServerConfig.load(path).listen_address == ("127.0.0.1", 19443)
    compose = yaml.safe_load((path.parent / "compose.yaml").read_text())
    assert compose["services"]["server"]["ports"] == ["9443:19443"]
    path.write_text(path.read_text() + "images: {harbour: 100, hill: 200}\n")
    revoke_site(tmp_path / "kits", "hill")
    assert yaml.safe_load(path.read_text())["images"] == {"harbour": 100}
    with pytest.raises(RecipeError, match="HOST:PORT"):
        validate_config(FederationConfig, "f", {**GOOD, "server": {"host": "a.org", "listen": "9443"}})


def test_a_federation_without_sites_gets_no_kits(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="needs sites"):
        provision_federation(NORTH.model_copy(update={"sites": ()}), tmp_path / "kits")


def test_the_commands_say_what_goes_where(tmp_path: Path) -> None:
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(GOOD))
    kits = str(tmp_path / "kits")
    run = CliRunner()
    result = run.invoke(app, ["--out", kits, "--without-hashes", "--with-keys", str(tmp_path / "federation.yaml")])
    assert result.exit_code == 0, result.output
    assert "to nobody" in result.stdout
    assert "no hashes of other packages" in result.stderr
    for arguments in (["rotate", kits, "hill"], ["rotate", kits, "server"], ["rotate", kits, "--all"]):
        result = run.invoke(app, arguments)
        assert (result.exit_code, "to the server" in result.stdout) == (0, True), result.output
    assert run.invoke(app, ["revoke", kits, "hill"]).exit_code == 0
    assert run.invoke(app, ["add", kits, "lake"]).exit_code == 0
    for arguments in (["rotate", kits], ["rotate", kits, "lake", "--all"]):
        assert run.invoke(app, arguments).exit_code == 2
    shown = run.invoke(app, ["show", kits, "--json"])
    assert [row["name"] for row in yaml.safe_load(shown.stdout)["rows"]] == ["authority", "server", "harbour", "lake"]


def test_kits_that_are_there_are_refused_before_the_package_index_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(GOOD))
    (tmp_path / "kits").mkdir()
    (tmp_path / "kits" / "federation.yaml").write_text("")
    monkeypatch.setattr("polyclinic.deploy.provisioning.software.lock_requirements", lambda _: pytest.fail("asked"))
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "kits"), str(tmp_path / "federation.yaml")])
    assert isinstance(result.exception, StoreError)
    assert "there are kits in" in str(result.exception)
    assert "asking" not in result.output
