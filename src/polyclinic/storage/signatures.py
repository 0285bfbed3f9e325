"""Signatures of sites over statements: ECDSA on P-384 with the keys by which sites are known to each other.

    signature = ECDSA-SHA-384(key, JSON [purpose, fields])

A statement names its purpose, so that a signature for one purpose is none for another.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384

from polyclinic.core import Refused, SiteId, Stream
from polyclinic.storage.messages import Fields

ALGORITHM = ec.ECDSA(SHA384(), deterministic_signing=True)
"""As in RFC 6979: signing a statement twice gives the same bytes, so that a repeated message is the same message."""


@dataclass(frozen=True)
class SiteSigner:
    """A site and its private key."""

    site: SiteId
    key: ec.EllipticCurvePrivateKey

    def sign(self, purpose: str, fields: Fields) -> str:
        """Return the signature of a statement, in base64."""
        return base64.b64encode(self.key.sign(_statement(purpose, fields), ALGORITHM)).decode()


@dataclass(frozen=True, eq=False)
class PeerKeys:
    """The public keys of the sites of a federation, from a source that the server cannot change."""

    keys: Mapping[SiteId, ec.EllipticCurvePublicKey]

    def verify(self, site: SiteId, purpose: str, fields: Fields, signature: object) -> None:
        """Raise `Refused` unless the signature is that of `site` over this statement."""
        if site not in self.keys:
            raise Refused("signature", f"{site[:60]!r} is no site whose key is known here")
        try:
            if not isinstance(signature, str) or len(signature) > 400:
                raise ValueError
            self.keys[site].verify(base64.b64decode(signature, validate=True), _statement(purpose, fields), ALGORITHM)
        except (InvalidSignature, ValueError, binascii.Error):
            raise Refused(
                "signature", f"a statement ({purpose}) in the name of {site} has no valid signature"
            ) from None


class Keyring(Protocol):
    """What a site needs to sign, and to verify what others have signed."""

    @property
    def signer(self) -> SiteSigner: ...

    @property
    def keys(self) -> PeerKeys:
        """The public keys of all sites."""
        ...


def make_signers(sites: list[SiteId], stream: Stream | None = None) -> tuple[dict[SiteId, SiteSigner], PeerKeys]:
    """Return keys for the sites of a simulation, and what each of them knows of the others.

    With a `stream` the keys follow from it, so that several processes of one simulation have the same.
    """
    curve = ec.SECP384R1()
    signers = {
        site: SiteSigner(
            site,
            ec.generate_private_key(curve)
            if stream is None
            else ec.derive_private_key(int.from_bytes(stream.child(site).key()), curve),
        )
        for site in sites
    }
    return signers, PeerKeys({site: signer.key.public_key() for site, signer in signers.items()})


def _statement(purpose: str, fields: Fields) -> bytes:
    return json.dumps([purpose, dict(fields)], sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
