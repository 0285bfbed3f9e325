"""Shares of a secret, of which `threshold` recover it and fewer reveal nothing. Shamir: How to share a secret.
Communications of the ACM 22(11), 1979.

    (1)  f(x) = secret + Σ_i c_i·x^i  mod p,  i = 1 … threshold − 1,  c_i uniform         share of the point x: f(x)
    (2)  secret = f(0) = Σ_j f(x_j) · Π_(m≠j) x_m / (x_m − x_j)  mod p                    from any `threshold` points
"""

from collections.abc import Mapping, Sequence

from polyclinic.core import Refused

PRIME = 2**521 - 1
"""A Mersenne prime, well above the 256 bits of a key."""


def split_secret(secret: int, coefficients: Sequence[int], points: Sequence[int], prime: int = PRIME) -> list[int]:
    """Return the share of each point by (1).

    Args:
        secret: A number below `prime`.
        coefficients: Uniform random numbers below `prime`, one fewer than shares are needed to recover the secret.
        points: Different numbers from 1 on.
        prime: The size of the field.
    """
    if not 0 <= secret < prime or len(set(points)) < len(points) or not all(0 < x < prime for x in points):
        raise ValueError("a secret lies below the prime, and points are different numbers from 1 on")
    shares = []
    for x in points:
        value = 0
        for factor in (*reversed(coefficients), secret):
            value = (value * x + factor) % prime
        shares.append(value)
    return shares


def recover_secret(shares: Mapping[int, int], threshold: int, prime: int = PRIME) -> int:
    """Return the secret from its shares by point, by (2); raises `Refused` if there are fewer than `threshold`."""
    if len(shares) < threshold:
        raise Refused("shares", f"{len(shares)} shares where {threshold} are needed to recover a secret")
    chosen = sorted(shares)[:threshold]
    secret = 0
    for x in chosen:
        above = below = 1
        for other in chosen:
            if other != x:
                above, below = above * other % prime, below * (other - x) % prime
        secret = (secret + shares[x] * above * pow(below, -1, prime)) % prime
    return secret
