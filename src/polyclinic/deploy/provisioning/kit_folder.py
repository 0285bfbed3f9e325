"""The folder of a federation's kits as the coordinator keeps it: who is in it, and one change at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

from polyclinic.core import DataError, EngineError, SiteId, StoreError
from polyclinic.deploy.config import FederationConfig, site_folder_name
from polyclinic.deploy.provisioning import certificates
from polyclinic.deploy.provisioning.kit import KitFile, public_key_path
from polyclinic.deploy.provisioning.software import HASHED, Software, build_wheel, read_requirements, read_wheel
from polyclinic.storage.files import explain_os_errors, lock_folder, make_folder, write_atomically

OTHER = "make room or choose another folder, then try again"


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
    def registered(self) -> dict[SiteId, bytes]:
        """The public key of each site that has one, in OpenSSH's form."""
        paths = {site: self.public_key(site) for site in self.federation.sites}
        return {site: path.read_bytes() for site, path in paths.items() if path.exists()}

    @property
    def software(self) -> Software:
        """What the kits install, read back from the server's kit."""
        wheels = [read_wheel(path) for path in (self.folder / "server").glob("polyclinic-*.whl")]
        requirements = self.folder / "server" / "requirements.txt"
        hashed = requirements.is_file() and HASHED in requirements.read_text(encoding="utf-8")
        return Software(wheels[0] if wheels else build_wheel(), read_requirements(requirements) if hashed else "")

    def read_authority(self, now: datetime) -> certificates.Signer:
        """The authority's certificate and private key; raises `EngineError` if they cannot sign now."""
        path, key_path = self.folder / "ca" / "ca.crt", self.folder / "ca" / "ca.key"
        if not key_path.exists():
            raise EngineError(f"{key_path} is not there; put it back for as long as this takes, or rotate --all")
        ca, key = certificates.read_certificate(path), certificates.read_private_key(key_path)
        certificates.check_authority(path, ca, now)
        if ca.public_key() != key.public_key():
            raise EngineError(f"ca.key is not the key of {path}; put the right one back, or rotate --all")
        return ca, key

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


@contextmanager
def lock_kits(folder: Path) -> Iterator[KitFolder]:
    KitFolder.open(folder)
    with lock_folder(folder):
        yield KitFolder.open(folder)


def write_file(path: Path, file: KitFile) -> None:
    """Write a file atomically; a secret is never readable by others, not even for a moment."""
    make_folder(path.parent, 0o700)
    write_atomically(path, file.data, mode=file.mode, remedy=OTHER)
