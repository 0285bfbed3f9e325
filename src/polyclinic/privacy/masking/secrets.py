"""The secrets of a site in a round of masked sums, all derived from its key of the run, so that a killed site has
them again: two X25519 key pairs, the seed of its own mask, and the coefficients by which both are shared.

    key of the round = HKDF(key of the run, run, round, attempt, …)                   RFC 5869, SHA-256
    seed of a pair   = HKDF(X25519(own mask key, the other's), cohort)                the same at both sites
    sealed shares    = ChaCha20-Poly1305 under HKDF(X25519(own cipher key, the other's), cohort, from, to)

The key that seals belongs to one direction, cohort and content, so its nonce may be constant.
"""

import json
from dataclasses import dataclass
from functools import cached_property

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyclinic.core import Refused, SiteId
from polyclinic.privacy.masking.shamir import PRIME

KEY, SHARE = 32, 66
"""Bytes of a key, and of a share: a number below 2⁵²¹."""
SPARE = 16
"""Bytes beyond a number's own that make its remainder uniform but for 2⁻¹²⁰."""


def derive_key(secret: bytes, *names: str | int, length: int = KEY) -> bytes:
    """Return `length` bytes derived from a secret for the purpose that `names` spell."""
    return HKDF(SHA256(), length, None, json.dumps(names).encode()).derive(secret)


@dataclass(frozen=True)
class RoundSecrets:
    """A site's secrets of one round; `key`: derived from the key of the run for this round and no other."""

    key: bytes

    @cached_property
    def mask_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(derive_key(self.key, "mask key"))

    @cached_property
    def cipher_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(derive_key(self.key, "cipher key"))

    def own_seed(self, cohort: str) -> bytes:
        """Return the seed of the mask that only this site adds; `cohort`: a hash of the cohort's keys."""
        return derive_key(self.key, "own mask", cohort)

    def shared_secrets(self, cohort: str) -> tuple[int, int]:
        """Return what is shared out: the private mask key, and the seed of the own mask."""
        return int.from_bytes(self.mask_key.private_bytes_raw()), int.from_bytes(self.own_seed(cohort))

    def coefficients(self, cohort: str, secret: str, threshold: int) -> list[int]:
        """Return the coefficients of the polynomial by which a secret is shared in this cohort."""
        size = SHARE + SPARE
        names = "coefficient", secret, cohort, threshold
        drawn = [derive_key(self.key, *names, number, length=size) for number in range(threshold - 1)]
        return [int.from_bytes(value) % PRIME for value in drawn]

    def pair_seed(self, other: bytes, cohort: str) -> bytes:
        """Return the seed of the mask that this site shares with the site of that public mask key."""
        return pair_seed(self.mask_key, other, cohort)

    def seal_shares(self, other: bytes, cohort: str, route: tuple[SiteId, SiteId], shares: tuple[int, int]) -> bytes:
        """Encrypt two shares for the site of that public cipher key; `route`: from whom, to whom."""
        return self._cipher(other, cohort, route).encrypt(bytes(12), b"".join(s.to_bytes(SHARE) for s in shares), None)

    def open_shares(
        self, other: bytes, cohort: str, route: tuple[SiteId, SiteId], sealed: bytes
    ) -> tuple[int, int] | None:
        """Decrypt two shares from the site of that public cipher key; None if they are not what it sealed."""
        try:
            plain = self._cipher(other, cohort, route).decrypt(bytes(12), sealed, None)
        except InvalidTag:
            return None
        if len(plain) != 2 * SHARE:
            return None
        return int.from_bytes(plain[:SHARE]), int.from_bytes(plain[SHARE:])

    def _cipher(self, other: bytes, cohort: str, route: tuple[SiteId, SiteId]) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(derive_key(_agree(self.cipher_key, other), "shares", cohort, *route))


def pair_seed(own: X25519PrivateKey, other: bytes, cohort: str) -> bytes:
    """Return the seed of a pair's mask from one private and one public mask key."""
    return derive_key(_agree(own, other), "pair", cohort)


def check_public_key(key: bytes) -> None:
    """Raise `Refused` unless a secret can be agreed on with the owner of this public key."""
    _agree(X25519PrivateKey.generate(), key)


def _agree(own: X25519PrivateKey, other: bytes) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise Refused("keys", "a public key of the cohort is not one of X25519") from None
