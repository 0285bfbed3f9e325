"""Masks: pseudo-random integers that are added to an update, and cancel in the sum over the sites of a round.
Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth: Practical secure aggregation for
privacy-preserving machine learning. CCS 2017. With `neighbours`: Bell, Bonawitz, Gascón, Lepoint, Raykova: Secure
single-server aggregation with (poly)logarithmic overhead. CCS 2020.

    (1)  y_u = q_u + G(b_u) + Σ_(v > u) G(s_uv) − Σ_(v < u) G(s_uv)        mod 2^bits, v: the neighbours of u
    (2)  Σ_u q_u = Σ_u y_u − Σ_u G(b_u) − what the masks with lost sites left

G: the key stream of ChaCha20; b_u: the seed of a site's own mask; s_uv: the seed that two sites agree on.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from polyclinic.core import SiteId
from polyclinic.privacy.masking.fixed_point import Words

CHUNK = 1 << 20
"""Bytes of a mask that are made at a time, so that they stay in the processor's cache."""
ZEROS = bytes(CHUNK)


def add_mask(vectors: Mapping[str, Words], seed: bytes, sign: int) -> None:
    """Add G(seed), or subtract it with a `sign` of −1, in place; kinds take the key stream in the order of names."""
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), None).encryptor()
    for kind in sorted(vectors):
        vector = vectors[kind]
        step = CHUNK // vector.itemsize
        for start in range(0, len(vector), step):
            part = vector[start : start + step]
            mask = np.frombuffer(stream.update(ZEROS[: part.nbytes]), vector.dtype)
            (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def pair_sign(site: SiteId, other: SiteId) -> int:
    """Return the sign with which a site adds the mask that it shares with another; the other has the opposite one."""
    return 1 if site < other else -1


def neighbours_of(site: SiteId, members: Sequence[SiteId], count: int | None, cohort: str) -> list[SiteId]:
    """Return the sites with which a site shares masks and secrets: all others, or `count` of a random circle.

    The order on the circle follows from `cohort`, a hash of all sites' keys, which nobody knows before all have theirs.
    """
    others = sorted(member for member in members if member != site)
    if count is None or count >= len(others):
        return others
    circle = sorted(members, key=lambda member: hashlib.sha256(f"{cohort}|{member}".encode()).digest())
    place, reach = circle.index(site), count // 2
    near = {circle[(place + step) % len(circle)] for step in range(-reach, reach + 1)}
    return sorted(near - {site})
