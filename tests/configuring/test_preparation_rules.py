from __future__ import annotations

from collections.abc import Callable

import pytest

from wardround.configuring.facts import ChannelFacts, Facts
from wardround.configuring.preparation_rules import choose_spacing, find_shape, find_spacing, plan_preparation

Make = Callable[..., Facts]


def settings(facts: Facts) -> dict[str, object]:
    return {choice.key.removeprefix("data.prepare."): choice.value for choice in plan_preparation(facts)}


def test_the_target_spacing_is_the_median(make_facts: Make) -> None:
    facts = make_facts(spacing=((0.5, 1.0, 2.0), (0.7, 0.8, 0.9), (1.0, 1.5, 3.0)))

    assert find_spacing(facts) == (1.0, 0.8, 1.5)
    assert find_shape(facts) == (160, 192, 160)


def test_thick_slices_take_the_10th_percentile_of_their_axis(make_facts: Make) -> None:
    facts = make_facts(shape=(256, 256, 12), spacing=(1.5, 1.5, (5.0, 10.0, 10.0)))

    assert find_spacing(facts) == (1.5, 1.5, 5.0)
    assert find_shape(facts) == (256, 256, 24)
    assert choose_spacing(facts).reason.endswith("; of thick slices the 10th percentile")


def test_thick_slices_do_not_become_finer_than_the_other_axes(make_facts: Make) -> None:
    facts = make_facts(shape=(256, 256, 12), spacing=(1.5, 1.5, (0.5, 10.0, 10.0)))

    assert find_spacing(facts) == (1.5, 1.5, 1.5)
    assert choose_spacing(facts).reason.endswith("; thick slices as the other axes")


def test_thick_slices_that_are_many_keep_their_median(make_facts: Make) -> None:
    facts = make_facts(shape=(256, 256, 100), spacing=(1.5, 1.5, (5.0, 10.0, 10.0)))

    assert find_spacing(facts) == (1.5, 1.5, 10.0)


def test_a_volume_of_1_mm_has_a_spacing(make_facts: Make) -> None:
    assert settings(make_facts())["spacing"] == [1.0, 1.0, 1.0]


def test_images_without_spacing_keep_their_size_where_sides_are_alike(make_facts: Make) -> None:
    found = settings(make_facts(has_spacing=False, shape=((200, 240, 400), 320)))

    assert (found["size"], found["spacing"]) == (None, None)
    assert "orientation" not in found


def test_images_without_spacing_are_resized_where_sides_differ_more_than_twice(make_facts: Make) -> None:
    assert settings(make_facts(has_spacing=False, shape=((199, 240, 400), 320)))["size"] == [240, 320]


@pytest.mark.parametrize(("kept", "expected"), [(0.76, "zscore"), (0.74, "zscore_nonzero")])
def test_intensities_are_taken_inside_where_a_quarter_is_empty(
    make_facts: Make, kept: float, expected: str
) -> None:
    assert settings(make_facts(kept=kept))["normalise"] == expected


def test_ct_is_normalised_by_the_joint_intensities_whatever_is_empty(make_facts: Make) -> None:
    ct, pet = (ChannelFacts(kind, kind, 40.0, 90.0, -150.0, 250.0) for kind in ("ct", "other"))  # type: ignore[arg-type]
    found = settings(make_facts(channels=(ct, pet), kept=0.5))

    assert found["normalise"] == "ct"
    assert found["intensities"] == [[-150.0, 250.0, 40.0, 90.0], None]


def test_colours_are_standardised_in_each_image(make_facts: Make) -> None:
    colours = tuple(ChannelFacts(name, "rgb", 90.0, 40.0, 0.0, 255.0) for name in ("red", "green", "blue"))

    assert settings(make_facts(channels=colours))["normalise"] == "zscore"
