"""Creates the kits of a federation, and later renews, revokes or adds single keys (`polyclinic provision`).

    KITS/federation.yaml   the sites that take part now
    KITS/ca/               the federation's authority; its key is in no kit
    KITS/server/           the server's kit
    KITS/sites/NAME/       a site's kit, and the same as NAME.zip

Creation is all or nothing: everything is written beside KITS and then renamed. A later change replaces file by file,
each atomically; if it is killed half-way, `inspect.py` reports the files that do not match, and repeating the command
repairs them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

from polyclinic.core import DataError, EngineError, RecipeError, SiteId, StoreError, __version__
from polyclinic.deploy.config import FederationConfig, site_folder_name
from polyclinic.deploy.provisioning import certificates
from polyclinic.deploy.provisioning.kit import (
    SECRET,
    Files,
    KitFile,
    Wheel,
    build_server_kit,
    build_site_kit,
    public_key_path,
    render_federation_yaml,
    render_revoked_yaml,
    render_server_yaml,
    zip_files,
)
from polyclinic.storage.files import explain_os_errors, lock_folder, make_folder, write_atomically

OTHER = "make room or choose another folder, then try again"


def read_wheel(path: Path) -> Wheel:
    if not re.fullmatch(rf"polyclinic-{re.escape(__version__)}-[\w.]+-[\w.]+-[\w.]+\.whl", path.name):
        raise RecipeError(
            f"{path.name} is not a wheel of polyclinic {__version__}, which runs here; build one with "
            "`pip wheel . --no-deps`"
        )
    with explain_os_errors(path, "read", "give the path of a wheel"):
        return Wheel(path.name, path.read_bytes())


def provision_federation(
    federation: FederationConfig, out: Path, wheel: Wheel | None = None, now: datetime | None = None
) -> None:
    """Create all keys, certificates and kits in the new folder `out`.

    Args:
        federation: federation.yaml.
        out: The folder of the kits; it must not exist or be empty.
        wheel: Is put into every kit, for sites without access to a package index.
        now: The start of validity of the certificates.
    """
    if not federation.sites:
        raise RecipeError("a federation needs sites; add their names to federation.yaml: sites: [harbour, hill]")
    _check_vacant(out)
    now = now or certificates.current_time()
    ca_key, server_key = certificates.generate_key(), certificates.generate_key()
    ca = certificates.create_authority(federation.federation, ca_key, now)
    shown = certificates.create_server_certificate(
        federation.server.host, server_key.public_key(), (ca, ca_key), now, federation.days
    )
    authority = certificates.encode_certificate(ca)
    keys = {site: certificates.generate_key() for site in federation.sites}
    server = build_server_kit(
        federation,
        authority,
        certificates.encode_certificate(shown),
        certificates.encode_private_key(server_key),
        {site: certificates.encode_public_openssh(key.public_key()) for site, key in keys.items()},
        wheel,
    )
    files = {
        "federation.yaml": render_federation_yaml(federation),
        "ca/ca.crt": KitFile(authority),
        "ca/ca.key": KitFile(certificates.encode_private_key(ca_key), SECRET),
        **{f"server/{name}": file for name, file in server.items()},
    }
    for site, key in keys.items():
        files |= _site_files(
            site, build_site_kit(federation, site, authority, certificates.encode_private_key(key, openssh=True), wheel)
        )
    with _atomic_folder(out) as folder:
        for name, file in files.items():
            _write_file(folder / name, file)


def _check_vacant(out: Path) -> None:
    if (out / "federation.yaml").exists():
        raise StoreError(
            f"there are kits in {out} already, and new ones would lock out every site; renew keys with `polyclinic "
            f"provision rotate {out} NAME`, add a site with `polyclinic provision add {out} NAME`, or choose another "
            "--out"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(f"{out} is there already and is not an empty folder; choose another --out")


def zip_path(folder: Path, site: SiteId) -> Path:
    return folder / "sites" / f"{site_folder_name(site)}.zip"


def _site_files(site: SiteId, files: Files) -> dict[str, KitFile]:
    folder = site_folder_name(site)
    listed = {f"sites/{folder}/{name}": file for name, file in files.items()}
    return listed | {f"sites/{folder}.zip": KitFile(zip_files(folder, files), SECRET)}


@contextmanager
def _atomic_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `out` at the end, and deleted if anything fails."""
    out = out.absolute()
    building = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with explain_os_errors(out, remedy=OTHER):
        out.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir(mode=0o700)
        try:
            yield building
            os.rename(building, out)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


def _write_file(path: Path, file: KitFile) -> None:
    """Write a file atomically; a secret is never readable by others, not even for a moment."""
    make_folder(path.parent, 0o700)
    write_atomically(path, file.data, mode=file.mode, remedy=OTHER)


@dataclass(frozen=True)
class KitFolder:
    """The existing kits of a federation, which only one process may change at a time."""

    folder: Path
    federation: FederationConfig

    @classmethod
    def open(cls, folder: Path) -> KitFolder:
        if not (folder / "federation.yaml").is_file() or not (folder / "server").is_dir():
            raise StoreError(f"there are no kits in {folder}; give the folder that `polyclinic provision … --out` made")
        return cls(folder, FederationConfig.load(folder / "federation.yaml"))

    def site_folder(self, site: SiteId) -> Path:
        return self.folder / "sites" / site_folder_name(site)

    def public_key(self, site: SiteId) -> Path:
        return self.folder / "server" / public_key_path(site)

    @property
    def revoked(self) -> list[dict[str, str]]:
        path = self.folder / "server" / "revoked.yaml"
        with explain_os_errors(path, "read", "put it back"):
            text = path.read_text(encoding="utf-8")
        try:
            return [{str(key): str(value) for key, value in row.items()} for row in yaml.safe_load(text)["revoked"]]
        except (yaml.YAMLError, TypeError, KeyError, AttributeError):
            raise StoreError(f"{path} is damaged; put it back as it was") from None

    def check_known(self, site: SiteId) -> None:
        if site not in self.federation.sites:
            raise DataError(
                f"there is no site {site!r} in {self.folder}; there are: {', '.join(self.federation.sites) or 'none'}"
            )


def rotate_site(folder: Path, site: SiteId, now: datetime | None = None) -> None:
    """Give a site a new key pair and revoke its old public key."""
    with lock_kits(folder) as kits:
        kits.check_known(site)
        _renew_site_key(kits, site, now or certificates.current_time())


def rotate_server(folder: Path, now: datetime | None = None) -> None:
    """Give the server a new key and certificate from the same authority; the sites need nothing new."""
    with lock_kits(folder) as kits:
        now = now or certificates.current_time()
        path, key_path = kits.folder / "ca" / "ca.crt", kits.folder / "ca" / "ca.key"
        if not key_path.exists():
            raise EngineError(f"{key_path} is not there; put it back for as long as this takes, or rotate --all")
        ca, key = certificates.read_certificate(path), certificates.read_private_key(key_path)
        certificates.check_authority(path, ca, now)
        if ca.public_key() != key.public_key():
            raise EngineError(f"ca.key is not the key of {path}; put the right one back, or rotate --all")
        _certify_server(kits, (ca, key), now)


def rotate_all(folder: Path, now: datetime | None = None) -> None:
    """Create a new authority, certificate and keys; every site needs its new kit."""
    with lock_kits(folder) as kits:
        now, key = now or certificates.current_time(), certificates.generate_key()
        ca = certificates.create_authority(kits.federation.federation, key, now)
        _write_file(kits.folder / "ca" / "ca.key", KitFile(certificates.encode_private_key(key), SECRET))
        for place in ("ca", "server", *(f"sites/{site_folder_name(site)}" for site in kits.federation.sites)):
            _write_file(kits.folder / place / "ca.crt", KitFile(certificates.encode_certificate(ca)))
        _certify_server(kits, (ca, key), now)
        for site in kits.federation.sites:
            _renew_site_key(kits, site, now)


def revoke_site(folder: Path, site: SiteId, now: datetime | None = None) -> None:
    """Remove a site's key from the server, and delete the site's kit and zip."""
    with lock_kits(folder) as kits:
        kits.check_known(site)
        _list_revoked(kits, site, "revoked", now or certificates.current_time())
        _register_sites(kits, tuple(name for name in kits.federation.sites if name != site))
        kits.public_key(site).unlink(missing_ok=True)
        zip_path(kits.folder, site).unlink(missing_ok=True)
        (kits.site_folder(site) / "site.key").unlink(missing_ok=True)


def add_site(folder: Path, site: SiteId) -> None:
    """Create a kit with a new key, for a new site or one that was revoked."""
    with lock_kits(folder) as kits:
        if site in kits.federation.sites:
            raise DataError(f"{site} has a kit already; for a new key: polyclinic provision rotate {folder} {site}")
        grown = kits.federation.with_site(site)
        authority = kits.folder / "ca" / "ca.crt"
        certificates.check_authority(authority, certificates.read_certificate(authority), certificates.current_time())
        wheels = [read_wheel(path) for path in kits.folder.glob("server/*.whl")]
        key = certificates.generate_key()
        files = build_site_kit(
            grown,
            site,
            authority.read_bytes(),
            certificates.encode_private_key(key, openssh=True),
            wheels[0] if wheels else None,
        )
        for name, file in _site_files(site, files).items():
            _write_file(kits.folder / name, file)
        _write_file(kits.public_key(site), KitFile(certificates.encode_public_openssh(key.public_key())))
        _register_sites(kits, grown.sites)


@contextmanager
def lock_kits(folder: Path) -> Iterator[KitFolder]:
    KitFolder.open(folder)
    with lock_folder(folder):
        yield KitFolder.open(folder)


def _certify_server(kits: KitFolder, signer: certificates.Signer, now: datetime) -> None:
    key, federation = certificates.generate_key(), kits.federation
    shown = certificates.create_server_certificate(
        federation.server.host, key.public_key(), signer, now, federation.days
    )
    _write_file(kits.folder / "server" / "server.key", KitFile(certificates.encode_private_key(key), SECRET))
    _write_file(kits.folder / "server" / "server.crt", KitFile(certificates.encode_certificate(shown)))


def _renew_site_key(kits: KitFolder, site: SiteId, now: datetime) -> None:
    """Replace a site's key. The old key is revoked first, so that it stays revoked whatever fails next."""
    _list_revoked(kits, site, "rotated", now)
    key = certificates.generate_key()
    _write_file(kits.public_key(site), KitFile(certificates.encode_public_openssh(key.public_key())))
    _write_file(
        kits.site_folder(site) / "site.key", KitFile(certificates.encode_private_key(key, openssh=True), SECRET)
    )
    zipped = zip_files(site_folder_name(site), _read_kit_files(kits, site))
    _write_file(zip_path(kits.folder, site), KitFile(zipped, SECRET))


def _read_kit_files(kits: KitFolder, site: SiteId) -> dict[str, KitFile]:
    """A site's kit with its present settings, without files that a rehearsal in its folder has left."""
    wheels = [Wheel(path.name, path.read_bytes()) for path in kits.site_folder(site).glob("polyclinic-*.whl")]
    listed = build_site_kit(kits.federation, site, b"", b"", wheels[0] if wheels else None)
    there = {name: kits.site_folder(site) / name for name in listed}
    return {name: KitFile(path.read_bytes(), listed[name].mode) for name, path in there.items() if path.is_file()}


def _list_revoked(kits: KitFolder, site: SiteId, why: str, now: datetime) -> None:
    path = kits.public_key(site)
    if not path.exists():
        return
    line, mark = path.read_bytes().decode(errors="replace").strip(), "unreadable"
    with suppress(EngineError):  # a damaged key can be revoked too
        mark = certificates.key_file_fingerprint(path)
    row = {"site": site, "date": f"{now:%Y-%m-%d}", "why": why, "fingerprint": mark, "key": line}
    rows = [kept for kept in kits.revoked if kept.get("key") != line]
    _write_file(kits.folder / "server" / "revoked.yaml", render_revoked_yaml([*rows, row]))


def _register_sites(kits: KitFolder, sites: tuple[SiteId, ...]) -> None:
    """Write the list of sites; the server's first, since a revoked key does harm there."""
    federation = kits.federation.model_copy(update={"sites": sites})
    path = kits.folder / "server" / "server.yaml"
    settings = yaml.safe_load(path.read_bytes()) if path.exists() else None
    _write_file(path, render_server_yaml(federation, settings if isinstance(settings, dict) else None))
    _write_file(kits.folder / "federation.yaml", render_federation_yaml(federation))
