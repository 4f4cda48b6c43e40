"""Shamir's shares against interpolation over the rationals, and what fewer shares say."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.privacy.secure_sum.shamir import PRIME, SHARE_BYTES, join_shares, split_secret


@given(st.integers(0, 2**256 - 1), st.integers(2, 8), st.integers(0, 6), st.randoms())
@settings(deadline=None)
def test_any_threshold_of_shares_gives_the_secret(
    secret: int, threshold: int, more: int, draw: object
) -> None:
    shares = split_secret(secret, threshold, threshold + more)
    chosen = draw.sample(range(threshold + more), threshold)  # type: ignore[attr-defined]

    assert join_shares({number + 1: shares[number] for number in chosen}) == secret
    assert all(0 <= share < PRIME and share.bit_length() <= 8 * SHARE_BYTES for share in shares)


def test_interpolation_is_that_over_the_rationals() -> None:
    def polynomial(x: int) -> int:
        return 1234 + 56 * x + 7 * x**2 + 3 * x**3

    for chosen in combinations(range(1, 8), 4):
        at_zero = Fraction(0)
        for x in chosen:
            term = Fraction(polynomial(x))
            for other in chosen:
                if other != x:
                    term *= Fraction(0 - other, x - other)
            at_zero += term
        assert at_zero == join_shares({x: polynomial(x) for x in chosen}) == 1234


def test_one_share_fewer_fits_every_secret_equally_well() -> None:
    prime, threshold = 11, 3
    counts: Counter[tuple[int, int]] = Counter()
    for secret in range(prime):
        for a in range(prime):
            for b in range(prime):
                counts[((secret + a + b) % prime, (secret + 2 * a + 4 * b) % prime)] += 1
        assert set(counts.values()) == {secret + 1}  # each pair of shares once more, whatever the secret
    shares = split_secret(7, threshold, 5, prime)
    assert all(join_shares({x: shares[x - 1] for x in c}, prime) == 7 for c in combinations(range(1, 6), 3))


def test_shares_of_one_secret_are_different_each_time() -> None:
    assert split_secret(5, 2, 3) != split_secret(5, 2, 3)


def test_the_modulus_is_the_first_prime_above_all_keys() -> None:
    def is_prime(number: int) -> bool:
        """Miller and Rabin."""
        odd, twos = number - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41):
            x = pow(base, odd, number)
            if x in (1, number - 1):
                continue
            for _ in range(twos - 1):
                x = x * x % number
                if x == number - 1:
                    break
            else:
                return False
        return True

    assert [k for k in range(1, 300, 2) if is_prime(2**256 + k)] == [PRIME - 2**256]
