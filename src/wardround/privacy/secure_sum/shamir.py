"""Shamir's secret sharing: any `threshold` shares give the secret, fewer say nothing about it.

Shamir, How to share a secret, CACM 1979. A secret is the value at 0 of a random polynomial of degree
threshold - 1 over the integers modulo a prime; share x is its value at x.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**256 + 297  # the first above 2^256, so that every key of 32 bytes has its number
SHARE_BYTES = 33


def split_secret(secret: int, threshold: int, count: int, prime: int = PRIME) -> list[int]:
    """Shares 1, 2, ... count."""
    polynomial = [secret, *(secrets.randbelow(prime) for _ in range(threshold - 1))]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * x + coefficient) % prime
        shares.append(value)
    return shares


def join_shares(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """The secret behind shares by number: Lagrange's polynomial at 0."""
    secret = 0
    for x, share in shares.items():
        above = below = 1
        for other in shares:
            if other != x:
                above = above * other % prime
                below = below * (other - x) % prime
        secret += share * above * pow(below, -1, prime)
    return secret % prime
