"""The signature of a kit: MANIFEST lists the SHA-256 of every file, MANIFEST.sig is the authority's signature over it.

Both can be checked without anything of ours, before anything is installed:

    openssl x509 -in ca.crt -noout -pubkey > ca.pub
    openssl dgst -sha384 -verify ca.pub -signature MANIFEST.sig MANIFEST
    sha256sum --check MANIFEST

Keys and the file of settings, which people edit, are not listed; `DELIVERED` is a copy of the settings as they were
made. `start.sh` refuses names that are neither listed nor its own.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384

from polyclinic.core import EngineError
from polyclinic.deploy.provisioning.certificates import PrivateKey, read_certificate
from polyclinic.storage.files import file_sha256

MANIFEST, SIGNATURE, DELIVERED = "MANIFEST", "MANIFEST.sig", "DELIVERED"
EDITED = ("site.yaml", "server.yaml")
"""Settings, which the people of a site or server change."""
UNLISTED = {*EDITED, MANIFEST, SIGNATURE, "site.key", "server.key"}
AGAIN = "copy the whole kit again, or ask the coordinator for it"


def sign_kit(files: Mapping[str, bytes], key: PrivateKey) -> dict[str, bytes]:
    """Return MANIFEST, MANIFEST.sig and DELIVERED for the files of a kit. `key`: the authority's private key."""
    delivered = b"".join(files[name] for name in EDITED if name in files)
    listed = {name: data for name, data in files.items() if name not in UNLISTED} | {DELIVERED: delivered}
    manifest = _list_hashes(listed)
    return {DELIVERED: delivered, MANIFEST: manifest, SIGNATURE: key.sign(manifest, ec.ECDSA(SHA384()))}


def check_kit(folder: Path, ca: Path | None = None) -> None:
    """Raise `EngineError` unless the kit in `folder` is as its authority signed it.

    `ca`: the authority's certificate, if it is not that in the kit.
    """
    key = read_certificate(ca or folder / "ca.crt").public_key()
    try:
        manifest, signature = (folder / MANIFEST).read_bytes(), (folder / SIGNATURE).read_bytes()
    except OSError as error:
        raise EngineError(f"{error.filename} cannot be read ({error.strerror}); {AGAIN}") from None
    try:
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise InvalidSignature
        key.verify(signature, manifest, ec.ECDSA(SHA384()))
    except InvalidSignature:
        raise EngineError(f"{folder / MANIFEST} is not signed by the authority of ca.crt; {AGAIN}") from None
    for line in manifest.decode().splitlines():
        digest, name = line.split("  ", 1)
        path = folder / name
        if not path.is_file():
            raise EngineError(f"{path} is missing from the kit; {AGAIN}")
        if file_sha256(path) != digest:
            raise EngineError(f"{path} is not as the coordinator signed it; put it back, or {AGAIN}")


def _list_hashes(files: Mapping[str, bytes]) -> bytes:
    """The hashes of files in the form that `sha256sum --check` reads."""
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)).encode()
