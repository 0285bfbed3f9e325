"""What a site commits to when it deals out shares of its secrets, so that a false share is found, and whose it is.

    dealer    sends with its encrypted shares the SHA-256 of each share, and of the seed of its own mask
    holder    opens its shares when it trains, and says whose it cannot open, or whose have another hash
    server    leaves out of the next attempt a dealer about whom more holders complain than can lie
    holder    reveals shares that have the dealer's hash, and no others
    server    takes shares that have the dealer's hash, and compares the secret that they give with the hash of the
              seed, or the mask key with the public one

A revealed share of another hash is its holder's lie, who could have complained instead. If all shares are as dealt, and
do not give the secret, the dealer lied. So an honest site is never named, as long as the server itself is honest.

A dishonest server learns no more by this than before:

- Secrets have 256 bits from HKDF. A share is a number below 2⁵²¹, uniform to whoever holds fewer than the threshold of
  a secret's shares, as the server and its colluders do. All that a hash gives them is a way to test a guess of 256
  bits. A hash names its cohort, dealer, holder and part, so that equal values are not seen to be equal.
- A complaint says whether a text opens, under keys that the server does not have, to shares of the hash that the server
  passed on. If it passed on another text or hash, it learns that this is not what was dealt. Images play no part in it.
- A holder that is passed false hashes reveals fewer shares, never others.
- Whom to leave out was always the server's choice, within the threshold. The next attempt has other keys and masks, and
  a site signs one list of survivors in all attempts of a round, so there are never two sums to be compared. No share of
  an attempt is revealed before its list is signed.

What remains: a dealer whose shares are all as dealt, but of no secret or of another one, is found and named after the
list was signed. That round ends, and its sites have to be let play it again by their people.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from polyclinic.core import Refused, SiteId
from polyclinic.federation.secure_aggregation.cohort import read_texts
from polyclinic.privacy.masking.secrets import SHARE
from polyclinic.privacy.transforms.mask import Mask
from polyclinic.storage.messages import Fields

PARTS = ("lost", "own")
"""What is revealed of a secret's shares: of the mask key of a lost site, of the own mask of a survivor."""


@dataclass(frozen=True)
class DealtShares:
    """What the server has been sent in the exchange `shares`, by dealer. `check_dealt` has accepted it."""

    replies: Mapping[SiteId, Fields]

    def for_holder(self, holder: SiteId) -> Fields:
        """Return what a holder is passed on: its encrypted shares and their hashes, by dealer."""
        mine = {dealer: found for dealer, found in self.replies.items() if holder in found["sealed"]}
        return {name: {dealer: found[name][holder] for dealer, found in mine.items()} for name in ("sealed", "hashes")}

    def check_share(self, cohort: str, dealer: SiteId, holder: SiteId, part: str, share: int) -> None:
        """Raise `Refused`, which names the holder, unless a revealed share is the one that was dealt to it."""
        dealt = self.replies[dealer]["hashes"].get(holder, "") if dealer in self.replies else ""
        if dealt.split(" ")[PARTS.index(part) :][:1] != [_hash_share(cohort, dealer, holder, part, share)]:
            raise Refused("shares", f"{holder} has revealed another share of a secret than was dealt to it")

    def has_seed(self, cohort: str, dealer: SiteId, seed: bytes) -> bool:
        """Whether this is the seed of its own mask that a dealer has committed to."""
        return bool(self.replies[dealer]["seed"] == hash_seed(cohort, dealer, seed))


def check_dealt(dealer: SiteId, holders: list[SiteId], found: Fields) -> None:
    """Raise `Refused` unless a dealer has sent a share and a hash for each of its holders; it holds a share, too."""
    sealed, hashes = read_texts(found.get("sealed")), read_texts(found.get("hashes"))
    if sorted(sealed) != holders or sorted(hashes) != sorted([*holders, dealer]):
        raise Refused("shares", f"{dealer} has not shared its secrets with the sites that it should")
    if not isinstance(found.get("seed"), str):
        raise Refused("shares", f"{dealer} has not committed to the seed of its mask")


def find_false_dealers(options: Mask, complaints: Mapping[SiteId, list[SiteId]]) -> list[SiteId]:
    """Return the dealers about whom more holders complain than can lie; `complaints`: by holder, of which dealers."""
    about = [dealer for found in complaints.values() for dealer in found]
    return sorted({dealer for dealer in about if about.count(dealer) > max(1, options.colluders)})


def hash_shares(cohort: str, dealer: SiteId, holder: SiteId, shares: tuple[int, int]) -> str:
    """Return the hashes of a holder's shares of the mask key and of the seed of the own mask of a dealer."""
    return " ".join(_hash_share(cohort, dealer, holder, part, share) for part, share in zip(PARTS, shares, strict=True))


def hash_seed(cohort: str, dealer: SiteId, seed: bytes) -> str:
    """Return the hash of the seed of a site's own mask."""
    return _hash(seed, "seed", cohort, dealer)


def _hash_share(cohort: str, dealer: SiteId, holder: SiteId, part: str, share: int) -> str:
    return _hash(share.to_bytes(SHARE), "share", part, cohort, dealer, holder)


def _hash(secret: bytes, *names: str) -> str:
    return hashlib.sha256(json.dumps(names).encode() + secret).hexdigest()
