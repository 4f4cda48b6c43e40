"""Contours enclose the pixels whose centres are inside, holes left open, and come back from a mask exactly."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from wardround.data.dicom.contours import fill, trace


def square(low: float, high: float) -> np.ndarray:
    return np.array([[low, low], [high, low], [high, high], [low, high]])


def test_a_square_encloses_the_centres_inside() -> None:
    found = fill([square(0.5, 3.5)], (6, 7))
    expected = np.zeros((6, 7), dtype=bool)
    expected[1:4, 1:4] = True
    assert np.array_equal(found, expected)


def test_a_ring_in_a_ring_is_a_hole_and_one_in_it_an_island() -> None:
    found = fill([square(-0.5, 8.5), square(1.5, 6.5), square(3.5, 4.5)], (9, 9))
    assert found[0, 0] and not found[2, 2] and found[4, 4] and found.sum() == 81 - 25 + 1


def test_what_lies_outside_the_picture_is_cut_off() -> None:
    assert fill([square(-5, 20)], (3, 4)).all()
    assert not fill([square(10, 20)], (3, 4)).any()


@pytest.mark.parametrize("seed", range(40))
def test_contours_of_a_mask_enclose_the_mask(seed: int) -> None:
    draw = np.random.default_rng(seed)
    mask = draw.random((int(draw.integers(1, 30)), int(draw.integers(1, 30)))) > 0.5
    if seed % 2:
        mask = gaussian_filter(draw.normal(size=(40, 50)), 2) > 0
    assert np.array_equal(fill(trace(mask), mask.shape), mask)


def test_a_hole_is_joined_to_its_outline_by_a_channel() -> None:
    mask = np.ones((9, 9), dtype=bool)
    mask[3:6, 3:6] = False
    (ring,) = trace(mask)
    assert np.array_equal(fill([ring], mask.shape), mask)
    assert trace(np.zeros((4, 4), dtype=bool)) == []
