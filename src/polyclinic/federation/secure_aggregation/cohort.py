"""What the sites of a masked round sign and verify, and how it travels in the field `masks` of a message.

Every statement names the run and the round. A site signs

    keys        the hashes of the weights it will receive, its weight in the mean, and two public keys
    masked      the sites with which it has masked its update
    survivors   the sites whose updates are added up
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from polyclinic.core import Bundle, Refused, SiteId
from polyclinic.federation.update_check import is_number
from polyclinic.privacy.masking.secrets import KEY
from polyclinic.privacy.transforms.mask import Mask
from polyclinic.storage.messages import Fields, hash_tensors
from polyclinic.storage.signatures import PeerKeys

MASKS = "masks"
"""The field of a message that holds what masks need."""
PHASES = ("keys", "shares", "agree", "unmask")
"""The purposes of messages that secure aggregation adds to `train`."""
MOST_SITES = 1000
_VERIFIED: WeakKeyDictionary[PeerKeys, tuple[str, ...]] = WeakKeyDictionary()
"""By the keys with which they were verified, the hashes of the last cohorts that were found to be good."""


@dataclass(frozen=True)
class RoundKeys:
    """A site's signed statement of the purpose `keys`."""

    received: Mapping[str, str]
    """The hash of each kind of tensors that it receives."""
    attempt: int
    """How often the round was given up before; every attempt has masks of its own."""
    weight: float
    mask_key: bytes
    cipher_key: bytes
    signature: str = ""

    def statement(self, run: str, round: int, site: SiteId) -> Fields:
        """Return the fields that the site signs."""
        return {"run": run, "round": round, "site": site, **self._own_fields()}

    def _own_fields(self) -> Fields:
        keys = {"mask_key": encode_bytes(self.mask_key), "cipher_key": encode_bytes(self.cipher_key)}
        return {"received": dict(self.received), "attempt": self.attempt, "weight": self.weight, **keys}

    def to_json(self) -> Fields:
        return {**self._own_fields(), "signature": self.signature}

    @staticmethod
    def from_json(values: Any) -> "RoundKeys":
        """Read a statement from another machine; raises `Refused`."""
        if not isinstance(values, dict):
            raise Refused("masks", "the keys of a site are not an object")
        received, weight = values.get("received"), values.get("weight")
        if not isinstance(received, dict) or not all(isinstance(v, str) for v in received.values()):
            raise Refused("masks", "the hashes of the weights are not texts")
        if not is_number(weight) or not 0 < weight <= 1e12:
            raise Refused("masks", "a site's weight is not a number above 0")
        attempt = read_attempt(values)
        mask_key, cipher_key = (decode_bytes(values.get(name), KEY) for name in ("mask_key", "cipher_key"))
        return RoundKeys(received, attempt, float(weight), mask_key, cipher_key, str(values.get("signature"))[:400])


@dataclass(frozen=True)
class Cohort:
    """The sites of a masked round, with the keys that they have signed."""

    run: str
    round: int
    keys: Mapping[SiteId, RoundKeys]

    @staticmethod
    def from_json(run: str, round: int, values: Any) -> "Cohort":
        """Read the keys of all sites from another machine; raises `Refused`. `check` comes next."""
        if not isinstance(values, dict) or len(values) > MOST_SITES:
            raise Refused("masks", f"the keys of the sites are not an object of at most {MOST_SITES}")
        return Cohort(run, round, {site: RoundKeys.from_json(values[site]) for site in sorted(values)})

    def to_json(self) -> Fields:
        return {site: keys.to_json() for site, keys in self.keys.items()}

    @cached_property
    def digest(self) -> str:
        """A hash of all statements, without their signatures: the same at every site."""
        statements = [keys.statement(self.run, self.round, site) for site, keys in sorted(self.keys.items())]
        return hashlib.sha256(json.dumps(statements, sort_keys=True).encode()).hexdigest()

    @cached_property
    def sites(self) -> list[SiteId]:
        return sorted(self.keys)

    @cached_property
    def largest_weight(self) -> float:
        return max(keys.weight for keys in self.keys.values())

    def point_of(self, site: SiteId) -> int:
        """Return the point at which a site holds the shares of others."""
        return self.sites.index(site) + 1

    def check(self, options: Mask, peers: PeerKeys, least_sites: int) -> None:
        """Raise `Refused` unless every signature is good, all received the same weights, and masks can protect them."""
        check_size(options, len(self.keys), least_sites)
        if (seen := self._signed_content) in _VERIFIED.get(peers, ()):
            return  # a site sees the same keys in every exchange of a round
        agreed: dict[str, str] = {}
        if len({keys.attempt for keys in self.keys.values()}) > 1:
            raise Refused("cohort", "the sites have signed keys of different attempts")
        for site, keys in self.keys.items():
            peers.verify(site, "keys", keys.statement(self.run, self.round, site), keys.signature)
            for kind, found in keys.received.items():
                if agreed.setdefault(kind, found) != found:
                    raise Refused("cohort", f"{site} was sent other weights ({kind[:60]}) than the other sites")
        _VERIFIED[peers] = (*_VERIFIED.get(peers, ())[-3:], seen)

    @property
    def _signed_content(self) -> str:
        signatures = sorted((site, keys.signature) for site, keys in self.keys.items())
        return hashlib.sha256(json.dumps([self.digest, signatures]).encode()).hexdigest()

    def masked_statement(self, site: SiteId, masked_with: list[SiteId]) -> Fields:
        """Return what a site signs with its masked update."""
        return {"run": self.run, "round": self.round, "site": site, "keys": self.digest, "sites": masked_with}

    def survivors_statement(self, masked_with: list[SiteId], survivors: list[SiteId]) -> Fields:
        """Return what every survivor signs before anything is unmasked."""
        common = {"run": self.run, "round": self.round, "keys": self.digest, "sites": masked_with}
        return {**common, "survivors": survivors}


def check_size(options: Mask, sites: int, least_sites: int) -> None:
    """Raise `Refused` if masks cannot protect so few sites of a round, or a site's policy asks for more."""
    if sites < (least := max(least_sites, options.threshold_of(sites))):
        raise Refused("cohort", f"{sites} sites take part, where {least} are needed")
    if problem := options.problem_with(sites):
        raise Refused("cohort", problem)


def hash_kinds(bundle: Bundle) -> dict[str, str]:
    """Return the hash of each kind of tensors that is not empty."""
    return {kind: hash_tensors({kind: group}) for kind, group in bundle.items() if group}


def read_attempt(values: Fields) -> int:
    """Return how often a round was given up before, from another machine; raises `Refused`."""
    attempt = values.get("attempt")
    if type(attempt) is not int or not 0 <= attempt < 1 << 31:
        raise Refused("masks", "the number of the attempt is not a whole number")
    return attempt


def read_sites(values: Any, known: Mapping[SiteId, object]) -> list[SiteId]:
    """Return a sorted list of sites from another machine; raises `Refused` unless all are known and named once."""
    if not isinstance(values, list) or not all(isinstance(site, str) and site in known for site in values):
        raise Refused("masks", "a list of sites names one that has no keys in this round")
    if values != sorted(set(values)):
        raise Refused("masks", "a list of sites is not sorted, or names a site twice")
    return values


def read_texts(values: Any) -> dict[str, str]:
    """Return a mapping of texts from another machine; raises `Refused`."""
    if not isinstance(values, dict) or len(values) > MOST_SITES:
        raise Refused("masks", "what masks need is not an object of texts")
    if not all(isinstance(text, str) and len(text) <= 1000 for text in values.values()):
        raise Refused("masks", "what masks need is not an object of texts")
    return values


def encode_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode_bytes(text: Any, size: int | None = None) -> bytes:
    """Return the bytes of a text in base64 from another machine; raises `Refused`."""
    try:
        if not isinstance(text, str) or len(text) > 1000:
            raise ValueError
        data = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise Refused("masks", "a key or share is not written in base64") from None
    if size is not None and len(data) != size:
        raise Refused("masks", f"a key or share has {len(data)} bytes, not {size}")
    return data
