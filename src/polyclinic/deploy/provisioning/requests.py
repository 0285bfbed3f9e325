"""A site's request to have its public key registered, signed by the private key that it made and keeps.

The signature shows that whoever made the request has the private key. Whether that is the site, two people compare by
telephone: both see the key's fingerprint.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from polyclinic.core import EngineError, Refused, SiteId, StoreError
from polyclinic.deploy.provisioning import certificates
from polyclinic.storage.files import explain_os_errors, write_atomically, write_json
from polyclinic.storage.signatures import PeerKeys, SiteSigner

PURPOSE = "key request"
FORMER = ".former"
"""The end of the name of a key that a new one has replaced."""


@dataclass(frozen=True)
class KeyRequest:
    """A public key that a site asks to register."""

    federation: str
    site: SiteId
    key: bytes
    """In OpenSSH's form, as a line."""

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` prints it."""
        return certificates.key_fingerprint(self.key)


def make_site_key(path: Path, new: bool = False) -> certificates.PrivateKey:
    """Make a site's private key, or read the one that is there. `new`: replace it, and keep the old one beside it."""
    if path.exists() and new:
        with explain_os_errors(path):
            os.replace(path, path.with_name(path.name + FORMER))
    if not path.exists():
        data = certificates.encode_private_key(certificates.generate_key(), openssh=True)
        write_atomically(path, data, mode=0o600, remedy="make room, then try again")
    return certificates.read_private_key(path)


def write_request(path: Path, federation: str, site: SiteId, key: certificates.PrivateKey) -> KeyRequest:
    """Write the request file for a site's key, and return what it holds."""
    request = KeyRequest(federation, site, certificates.encode_public_openssh(key.public_key()))
    fields = _fields(request)
    write_json(path, {**fields, "signature": SiteSigner(site, key).sign(PURPOSE, fields)})
    return request


def read_request(path: Path) -> KeyRequest:
    """Read a request file; raises `EngineError` unless its signature is that of the key that it names."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        request = KeyRequest(values["federation"], values["site"], values["key"].encode() + b"\n")
        key = load_ssh_public_key(request.key)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise EngineError(f"{path} {certificates.OTHER_KIND}")
        if certificates.encode_public_openssh(key) != request.key:
            raise ValueError
        PeerKeys({request.site: key}).verify(request.site, PURPOSE, _fields(request), values.get("signature"))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}; give the file that the site sent") from None
    except (ValueError, UnsupportedAlgorithm, KeyError, TypeError, AttributeError, Refused):
        raise EngineError(
            f"{path} is not a site's request, or was changed on the way; ask the site to send the file anew"
        ) from None
    return request


def _fields(request: KeyRequest) -> Mapping[str, str]:
    return {"federation": request.federation, "site": request.site, "key": request.key.decode().strip()}
