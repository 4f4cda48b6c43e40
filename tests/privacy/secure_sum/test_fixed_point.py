"""Fixed-point numbers: exact sums, a stated error, and refusals before anything wraps around."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.privacy.secure_sum import FixedPoint, SumRefusal
from wardround.privacy.secure_sum.fixed_point import PIECE


@given(
    st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=1, max_size=8),
    st.sampled_from([32, 64]),
    st.integers(-20, 0),
)
@settings(deadline=None)
def test_sums_are_the_exact_sums_of_rounded_numbers(rows: list[list[float]], bits: int, power: int) -> None:
    fixed = FixedPoint(2.0**power, bits)
    coded = [fixed.encode(np.array(row)) for row in rows]

    total = np.sum(coded, axis=0, dtype=coded[0].dtype)

    for column, found in enumerate(fixed.decode(total)):
        rounded = sum(round(Fraction(row[column]) / Fraction(fixed.step)) for row in rows)
        assert Fraction(found) == rounded * Fraction(fixed.step)
        assert abs(Fraction(found) - sum(Fraction(row[column]) for row in rows)) <= fixed.error(len(rows))


def test_numbers_are_rounded_half_to_even() -> None:
    halves = np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float32)

    assert FixedPoint(1.0).decode(FixedPoint(1.0).encode(halves)).tolist() == [0, 2, 2, 0, -2]


@pytest.mark.parametrize("bits", [32, 64])
def test_two_vectors_just_below_the_limit_add_without_wrapping(bits: int) -> None:
    fixed = FixedPoint(1.0, bits)
    most = np.full(5, np.nextafter(fixed.limit - 0.5, 0))

    for sign in (1, -1):
        total = 2 * fixed.encode(sign * most)
        assert np.allclose(fixed.decode(total), 2 * sign * most)
    if bits == 32:  # what would only be rounded to the limit is refused like the limit itself
        with pytest.raises(SumRefusal):
            fixed.encode(np.full(5, fixed.limit - 0.25))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("wrong", ["limit", "-limit", "nan", "inf", "-inf", "1e308"])
def test_values_equal_to_the_limit_or_not_finite_are_refused(bits: int, wrong: str) -> None:
    fixed = FixedPoint(2.0**-10, bits)
    figure = {"limit": fixed.limit, "-limit": -fixed.limit}.get(wrong) or float(wrong)
    values = np.zeros(PIECE + 3)
    values[-1] = figure

    with pytest.raises(SumRefusal, match=f"is {figure:g}.* below {fixed.limit:g}".replace("+", r"\+")):
        fixed.encode(values)
    with pytest.raises(SumRefusal):
        fixed.encode(np.full(4, figure))


def test_the_shape_stays_and_an_empty_one_too() -> None:
    fixed = FixedPoint(0.5)

    assert fixed.decode(fixed.encode(np.ones((2, 3), np.float32))).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert fixed.encode(np.zeros(0)).shape == (0,)


@pytest.mark.parametrize("make", [lambda: FixedPoint(0.0), lambda: FixedPoint(float("nan")), lambda: FixedPoint(1, 16), lambda: FixedPoint(1e300, 64).encode(np.zeros(1, int)), lambda: FixedPoint(1.0).decode(np.zeros(1))])  # fmt: skip
def test_what_cannot_be_summed_is_refused(make: object) -> None:
    with pytest.raises(SumRefusal):
        make()  # type: ignore[operator]
