"""The list of a federation's sites and their public keys, signed by its authority (`peers.json`).

It is in every kit, and the server sends it with the announcement of a run. A list has a number that only goes up, so
that nobody can bring back an older one, with a key that was revoked.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from polyclinic.core import EngineError, Refused, SiteId
from polyclinic.deploy.provisioning.certificates import Certificate, PrivateKey, read_certificate
from polyclinic.storage.messages import Fields
from polyclinic.storage.signatures import PeerKeys, SiteSigner

PEERS = "peers.json"
AUTHORITY, PURPOSE = "the authority", "peers"


@dataclass(frozen=True)
class PeerList:
    """The sites of a federation and their public keys in OpenSSH's form."""

    federation: str
    version: int
    sites: Mapping[SiteId, str]

    def sign(self, key: PrivateKey) -> dict[str, object]:
        """Return the content of peers.json, signed by the authority's key."""
        fields = self._fields()
        return {**fields, "signature": SiteSigner(AUTHORITY, key).sign(PURPOSE, fields)}

    def public_keys(self) -> dict[SiteId, ec.EllipticCurvePublicKey]:
        """The keys by site."""
        found = {site: load_ssh_public_key(line.encode()) for site, line in self.sites.items()}
        return {site: key for site, key in found.items() if isinstance(key, ec.EllipticCurvePublicKey)}

    def _fields(self) -> dict[str, object]:
        return {"federation": self.federation, "version": self.version, "sites": dict(self.sites)}


def encode_peers(peers: PeerList, key: PrivateKey) -> bytes:
    """The bytes of peers.json."""
    return (json.dumps(peers.sign(key), indent=1, sort_keys=True) + "\n").encode()


def read_peers(path: Path, authority: Path, federation: str) -> dict[str, object]:
    """Read the server's peers.json; raises `EngineError` unless the authority signed it for this federation."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        verify_peers(values, read_certificate(authority), federation)
    except (OSError, ValueError, Refused) as error:
        raise EngineError(f"{path} cannot be used ({error}); copy the whole server kit anew") from None
    return dict(values)


def peer_keys(values: Fields) -> PeerKeys:
    """The sites' public keys in the content of a peers.json that was verified."""
    return PeerKeys(PeerList(values["federation"], values["version"], values["sites"]).public_keys())


def verify_peers(values: object, authority: Certificate, federation: str) -> PeerList:
    """Read the content of a peers.json; raises `Refused` unless the authority signed it for this federation."""
    wrong = Refused("peers", "the list of sites (peers.json) is not what a coordinator makes")
    if not isinstance(values, dict) or not isinstance(values.get("sites"), dict):
        raise wrong
    version, sites, key = values.get("version"), values["sites"], authority.public_key()
    if type(version) is not int or not all(isinstance(text, str) for pair in sites.items() for text in pair):
        raise wrong
    found = PeerList(str(values.get("federation")), version, sites)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise wrong
    try:
        PeerKeys({AUTHORITY: key}).verify(AUTHORITY, PURPOSE, found._fields(), values.get("signature"))
    except Refused:
        raise Refused("peers", "the list of sites (peers.json) is not signed by the federation's authority") from None
    if found.federation != federation:
        raise Refused("peers", f"the list of sites is that of the federation {found.federation!r:.100}")
    try:
        found.public_keys()
    except (ValueError, UnsupportedAlgorithm):
        raise wrong from None
    return found
