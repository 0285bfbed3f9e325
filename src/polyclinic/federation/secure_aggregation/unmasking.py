"""Sums of masked updates, and the removal of the masks that are left in them."""

from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyclinic.core import Bundle, Refused, SiteId
from polyclinic.federation.secure_aggregation.cohort import Cohort
from polyclinic.federation.secure_aggregation.commitments import DealtShares
from polyclinic.privacy.masking.fixed_point import Words, as_words, grid_of
from polyclinic.privacy.masking.masks import add_mask, neighbours_of, pair_sign
from polyclinic.privacy.masking.secrets import KEY, pair_seed
from polyclinic.privacy.masking.shamir import PRIME, recover_secret
from polyclinic.privacy.transforms.mask import SUM, Mask
from polyclinic.storage.messages import Fields


class FalseSecret(Refused):
    """Shares that are all as a site dealt them do not give the secret that it committed to; `dealer`: that site."""

    def __init__(self, dealer: SiteId) -> None:
        super().__init__("shares", f"the shares that {dealer} has dealt do not give the secret that it committed to")
        self.dealer = dealer


Revealed = Mapping[SiteId, Fields]
"""By site what it reveals: shares of survivors' `own` masks, and of `lost` sites' mask keys."""


def add_up(total: dict[str, Words], tensors: Bundle) -> None:
    """Add a masked update to the sum, which wraps around."""
    for kind, group in tensors.items():
        if SUM in group:
            words = as_words(group[SUM])
            if kind in total:
                np.add(total[kind], words, out=total[kind])
            else:
                total[kind] = words.astype(grid_of(kind).words, copy=True)


def remove_masks(
    total: dict[str, Words],
    options: Mask,
    cohort: Cohort,
    sites: tuple[Sequence[SiteId], Sequence[SiteId]],
    revealed: Revealed,
    dealt: DealtShares,
) -> None:
    """Take the survivors' own masks, and those that they share with lost sites, out of the sum, in place.

    Raises `Refused` without enough shares, and `FalseSecret` if the dealer of shares lied.

    Args:
        total: The sum of the masked updates by kind.
        options: The stage `mask` of the recipe.
        cohort: The sites of the round.
        sites: Those that masked their updates, and the survivors among them.
        revealed: What the survivors reveal, of which each share is as it was dealt.
        dealt: What the dealers committed to.
    """
    masked_with, survivors = sites
    for site in masked_with:
        lost = site not in survivors
        secret = _recover(options, cohort, site, "lost" if lost else "own", revealed, dealt)
        if not options.masks:
            continue
        if not lost:
            add_mask(total, secret, -1)
            continue
        key = X25519PrivateKey.from_private_bytes(secret)
        near = neighbours_of(site, cohort.sites, options.neighbours, cohort.digest)
        for other in set(near) & set(survivors):
            add_mask(total, pair_seed(key, cohort.keys[other].mask_key, cohort.digest), -pair_sign(other, site))


def read_share(text: str) -> int:
    """Return a share of a secret from another machine; raises `Refused`."""
    try:
        value = int(text, 16)
    except ValueError:
        value = -1
    if not 0 <= value < PRIME:
        raise Refused("shares", "a share is not a number of the field")
    return value


def _recover(options: Mask, cohort: Cohort, site: SiteId, part: str, revealed: Revealed, dealt: DealtShares) -> bytes:
    """Return a secret of a site from the shares that survivors have revealed of it."""
    shares = {
        cohort.point_of(holder): read_share(found[part][site])
        for holder, found in revealed.items()
        if site in found[part]
    }
    threshold = options.share_threshold(len(cohort.keys))
    if len(shares) < threshold:
        raise Refused("shares", f"of {site} {len(shares)} shares came, where {threshold} are needed")
    for without in (0, *shares):  # if the dealer has dealt one false share, the others give its secret
        left = {point: share for point, share in shares.items() if point != without}
        if len(left) >= threshold and (secret := recover_secret(left, threshold)) < 1 << 8 * KEY:
            found = secret.to_bytes(KEY)
            if dealt.has_seed(cohort.digest, site, found) if part == "own" else _is_mask_key(cohort, site, found):
                return found
    raise FalseSecret(site)


def _is_mask_key(cohort: Cohort, site: SiteId, secret: bytes) -> bool:
    public = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
    return public == cohort.keys[site].mask_key
