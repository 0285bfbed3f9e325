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

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import yaml

from polyclinic.core import DataError, EngineError, RecipeError, SiteId, StoreError
from polyclinic.deploy.config import FederationConfig, site_folder_name
from polyclinic.deploy.provisioning import certificates
from polyclinic.deploy.provisioning.kit import (
    SECRET,
    Files,
    KitFile,
    build_server_kit,
    build_site_kit,
    public_key_path,
    render_federation_yaml,
    render_revoked_yaml,
    render_server_yaml,
    sign_files,
    zip_files,
)
from polyclinic.deploy.provisioning.kit_folder import OTHER, KitFolder, lock_kits, write_file
from polyclinic.deploy.provisioning.manifest import DELIVERED, MANIFEST, SIGNATURE, sign_kit
from polyclinic.deploy.provisioning.peer_list import PEERS, PeerList, encode_peers
from polyclinic.deploy.provisioning.requests import KeyRequest
from polyclinic.deploy.provisioning.software import Software, build_wheel
from polyclinic.storage.files import erase_file, explain_os_errors


def provision_federation(
    federation: FederationConfig,
    out: Path,
    software: Software | None = None,
    now: datetime | None = None,
    site_keys: bool = True,
) -> None:
    """Create all keys, certificates and kits in the new folder `out`.

    Args:
        federation: federation.yaml.
        out: The folder of the kits; it must not exist or be empty.
        software: What the kits install; None: a wheel of this polyclinic, without hashes of other packages.
        now: The start of validity of the certificates.
        site_keys: Whether sites' private keys are made here, for rehearsals; else each site makes its own.
    """
    if not federation.sites:
        raise RecipeError("a federation needs sites; add their names to federation.yaml: sites: [harbour, hill]")
    check_vacant(out)
    now, software = now or certificates.current_time(), software or Software(build_wheel())
    ca_key, server_key = certificates.generate_key(), certificates.generate_key()
    ca = certificates.create_authority(federation.federation, ca_key, now)
    shown = certificates.create_server_certificate(
        federation.server.host, server_key.public_key(), (ca, ca_key), now, federation.days
    )
    authority = certificates.encode_certificate(ca)
    keys = {site: certificates.generate_key() for site in federation.sites if site_keys}
    public = {site: certificates.encode_public_openssh(key.public_key()) for site, key in keys.items()}
    peers = encode_peers(list_peers(federation.federation, 1, public), ca_key)
    server = build_server_kit(
        federation,
        authority,
        certificates.encode_certificate(shown),
        certificates.encode_private_key(server_key),
        public,
        software,
        peers,
    )
    files = {
        "federation.yaml": render_federation_yaml(federation),
        "ca/ca.crt": KitFile(authority),
        "ca/ca.key": KitFile(certificates.encode_private_key(ca_key), SECRET),
        **{f"server/{name}": file for name, file in sign_files(server, ca_key).items()},
    }
    for site in federation.sites:
        own = certificates.encode_private_key(keys[site], openssh=True) if site in keys else None
        kit = build_site_kit(federation, site, authority, own, software, peers)
        files |= _site_files(site, sign_files(kit, ca_key))
    with _atomic_folder(out) as folder:
        for name, file in files.items():
            write_file(folder / name, file)


def list_peers(federation: str, version: int, public: Mapping[SiteId, bytes]) -> PeerList:
    """The list of sites with their public keys in OpenSSH's form; one whose key is damaged is left out."""
    found: dict[SiteId, str] = {}
    for site, line in public.items():
        with suppress(ValueError, EngineError):
            certificates.parse_public_key(line, Path(public_key_path(site)))
            found[site] = line.decode().strip()
    return PeerList(federation, version, found)


def check_vacant(out: Path) -> None:
    """Raise `StoreError` unless kits can be made in this folder: it is missing, or empty."""
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


def rotate_site(folder: Path, site: SiteId, now: datetime | None = None) -> None:
    """Give a site whose key was made here a new key pair, and revoke its old public key."""
    with lock_kits(folder) as kits:
        kits.check_known(site)
        now = now or certificates.current_time()
        _, signer = kits.read_authority(now)
        if not (kits.site_folder(site) / "site.key").exists():
            raise DataError(
                f"the key of {site} was made at the site; have it run `sh start.sh key --new`, and give the request "
                f"that it sends to `polyclinic provision accept {folder} REQUEST`"
            )
        _renew_site_key(kits, site, now)
        _sign_kits(kits, signer)


def accept_requests(folder: Path, requests: Sequence[KeyRequest], now: datetime | None = None) -> None:
    """Register the keys that sites have made; a site's former key is revoked."""
    with lock_kits(folder) as kits:
        now = now or certificates.current_time()
        _, signer = kits.read_authority(now)
        for request in requests:
            check_request(kits, request)
        for request in requests:
            if kits.registered.get(request.site) != request.key:
                _list_revoked(kits, request.site, "rotated", now)
                write_file(kits.public_key(request.site), KitFile(request.key))
                _erase_other_key(kits.site_folder(request.site) / "site.key", request)
        _register_sites(kits, kits.federation.sites)
        _sign_kits(kits, signer)


def _erase_other_key(path: Path, request: KeyRequest) -> None:
    """Erase a private key that was made here for the site, and that its new key replaces."""
    with suppress(EngineError):
        own = certificates.encode_public_openssh(certificates.read_private_key(path).public_key())
        if own != request.key:
            erase_file(path)


def check_request(kits: KitFolder, request: KeyRequest) -> None:
    """Raise an error unless a request is for a site of this federation and its key is nobody else's, nor revoked."""
    if request.federation != kits.federation.federation:
        raise DataError(
            f"the request of {request.site} is for the federation {request.federation!r:.100}, these are the kits of "
            f"{kits.federation.federation!r}; ask for the right file"
        )
    kits.check_known(request.site)
    if request.key.decode().strip() in {row.get("key") for row in kits.revoked}:
        raise DataError(f"{request.site} asks for a key that was revoked; have it run `sh start.sh key --new`")
    for site, key in kits.registered.items():
        if site != request.site and key == request.key:
            raise DataError(f"{request.site} asks for the key of {site}; have it run `sh start.sh key --new`")


def rotate_server(folder: Path, now: datetime | None = None) -> None:
    """Give the server a new key and certificate from the same authority; the sites need nothing new."""
    with lock_kits(folder) as kits:
        now = now or certificates.current_time()
        ca, signer = kits.read_authority(now)
        _certify_server(kits, (ca, signer), now)
        _sign_server_kit(kits, signer)


def rotate_all(folder: Path, now: datetime | None = None) -> None:
    """Create a new authority and server certificate, and new keys for sites whose keys were made here.

    Every site needs its new kit.
    """
    with lock_kits(folder) as kits:
        now, key = now or certificates.current_time(), certificates.generate_key()
        ca = certificates.create_authority(kits.federation.federation, key, now)
        write_file(kits.folder / "ca" / "ca.key", KitFile(certificates.encode_private_key(key), SECRET))
        for place in ("ca", "server", *(f"sites/{site_folder_name(site)}" for site in kits.federation.sites)):
            write_file(kits.folder / place / "ca.crt", KitFile(certificates.encode_certificate(ca)))
        _certify_server(kits, (ca, key), now)
        for site in kits.federation.sites:
            if (kits.site_folder(site) / "site.key").exists():
                _renew_site_key(kits, site, now)
        _sign_kits(kits, key)


def revoke_site(folder: Path, site: SiteId, now: datetime | None = None) -> None:
    """Remove a site's key from the server and from the list of sites, and delete the site's kit and zip."""
    with lock_kits(folder) as kits:
        kits.check_known(site)
        now = now or certificates.current_time()
        _, signer = kits.read_authority(now)
        _list_revoked(kits, site, "revoked", now)
        left = _register_sites(kits, tuple(name for name in kits.federation.sites if name != site))
        kits.public_key(site).unlink(missing_ok=True)
        zip_path(kits.folder, site).unlink(missing_ok=True)
        (kits.site_folder(site) / "site.key").unlink(missing_ok=True)
        _sign_kits(left, signer)


def add_site(folder: Path, site: SiteId, site_keys: bool = True) -> None:
    """Create a kit for a new site or one that was revoked. `site_keys`: with a private key made here."""
    with lock_kits(folder) as kits:
        if site in kits.federation.sites:
            raise DataError(f"{site} has a kit already; for a new key: polyclinic provision rotate {folder} {site}")
        _, signer = kits.read_authority(certificates.current_time())
        grown = replace(kits, federation=kits.federation.with_site(site))
        shutil.rmtree(grown.site_folder(site), ignore_errors=True)
        key = certificates.generate_key() if site_keys else None
        own = None if key is None else certificates.encode_private_key(key, openssh=True)
        authority = (kits.folder / "ca" / "ca.crt").read_bytes()
        for name, file in build_site_kit(grown.federation, site, authority, own, kits.software).items():
            write_file(grown.site_folder(site) / name, file)
        if key is not None:
            write_file(grown.public_key(site), KitFile(certificates.encode_public_openssh(key.public_key())))
        _sign_kits(_register_sites(grown, grown.federation.sites), signer)


def _certify_server(kits: KitFolder, signer: certificates.Signer, now: datetime) -> None:
    key, federation = certificates.generate_key(), kits.federation
    shown = certificates.create_server_certificate(
        federation.server.host, key.public_key(), signer, now, federation.days
    )
    write_file(kits.folder / "server" / "server.key", KitFile(certificates.encode_private_key(key), SECRET))
    write_file(kits.folder / "server" / "server.crt", KitFile(certificates.encode_certificate(shown)))


def _renew_site_key(kits: KitFolder, site: SiteId, now: datetime) -> None:
    """Replace a site's key. The old key is revoked first, so that it stays revoked whatever fails next."""
    _list_revoked(kits, site, "rotated", now)
    key = certificates.generate_key()
    write_file(kits.public_key(site), KitFile(certificates.encode_public_openssh(key.public_key())))
    write_file(kits.site_folder(site) / "site.key", KitFile(certificates.encode_private_key(key, openssh=True), SECRET))


def _sign_kits(kits: KitFolder, signer: certificates.PrivateKey) -> None:
    """Write the list of sites into all kits, with a higher number, and sign the kits anew."""
    path = kits.folder / "server" / PEERS
    try:
        former = int(json.loads(path.read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        former = int(certificates.current_time().timestamp())  # lost: no number that was given out is higher
    peers = encode_peers(list_peers(kits.federation.federation, former + 1, kits.registered), signer)
    for place in (path, *(kits.site_folder(site) / PEERS for site in kits.federation.sites)):
        write_file(place, KitFile(peers))
    _sign_server_kit(kits, signer)
    for site in kits.federation.sites:
        folder, files = kits.site_folder(site), sign_files(_read_kit_files(kits, site), signer)
        for name in (DELIVERED, MANIFEST, SIGNATURE):
            write_file(folder / name, files[name])
        write_file(zip_path(kits.folder, site), KitFile(zip_files(folder.name, files), SECRET))


def _sign_server_kit(kits: KitFolder, signer: certificates.PrivateKey) -> None:
    folder = kits.folder / "server"
    listed = build_server_kit(kits.federation, b"", b"", b"", kits.registered, kits.software)
    files = {name: (folder / name).read_bytes() for name in listed if (folder / name).is_file()}
    for name, data in sign_kit(files, signer).items():
        write_file(folder / name, KitFile(data))


def _read_kit_files(kits: KitFolder, site: SiteId) -> dict[str, KitFile]:
    """A site's kit with its present settings, without files that a rehearsal in its folder has left."""
    listed = build_site_kit(kits.federation, site, b"", b"", kits.software)
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
    write_file(kits.folder / "server" / "revoked.yaml", render_revoked_yaml([*rows, row]))


def _register_sites(kits: KitFolder, sites: tuple[SiteId, ...]) -> KitFolder:
    """Write the list of sites, the server's first, since a revoked key does harm there. Returns the kits of `sites`."""
    changed = replace(kits, federation=kits.federation.model_copy(update={"sites": sites}))
    path = kits.folder / "server" / "server.yaml"
    settings = yaml.safe_load(path.read_bytes()) if path.exists() else None
    former = settings if isinstance(settings, dict) else None
    write_file(path, render_server_yaml(changed.federation, changed.registered, former))
    write_file(kits.folder / "federation.yaml", render_federation_yaml(changed.federation))
    return changed
