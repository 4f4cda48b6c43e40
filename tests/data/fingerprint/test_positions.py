"""Positions: which of two classes lies first is told, and no count is of a few patients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from wardround.data.fingerprint.case import measure_case
from wardround.data.fingerprint.positions import (
    MOST_PAIRS,
    PairPosition,
    Span,
    find_side,
    find_spans,
    join_positions,
    list_pairs,
    summarise_positions,
)
from wardround.data.listing import Entry
from wardround.data.readers.image_files import Volume

LEFT, MIDDLE, RIGHT = -1, 0, 1


def place(*sides: int) -> dict[str, tuple[Span, ...]]:
    """A case: along each axis, where class `a` lies to class `b`."""
    own = tuple(Span(50 + 20 * side, 60 + 20 * side, 55.0 + 20 * side) for side in sides)
    return {"a": own, "b": tuple(Span(50, 60, 55.0) for _ in sides)}


def told(sides: Sequence[int], behind: int = 1, lacking: int = 0, minimum: int = 1) -> list[PairPosition]:
    """What a client tells whose patients have such positions along the first of two axes."""
    cases = [*(place(side, MIDDLE) for side in sides), *[{"a": place(0, 0)["a"]}] * lacking]
    return list(summarise_positions(cases, range(len(cases)), ["a", "b"], minimum, behind))


def test_centres_of_a_label_are_those_of_its_voxels() -> None:
    label = np.zeros((6, 8), dtype=np.int64)
    label[1:3, 2:6] = 1
    label[4, 7] = 2
    label[5, 0] = 9  # of no class
    found = find_spans(label, {"organ": (1,), "tumour": (2, 3), "vessel": (4,)})

    assert found == {
        "organ": (Span(1, 3, 2.0), Span(2, 6, 4.0)),
        "tumour": (Span(4, 5, 4.5), Span(7, 8, 7.5)),
    }


@pytest.mark.parametrize(
    ("first", "second", "side"),
    [
        ((0, 10, 5), (20, 30, 25), -1),
        ((20, 30, 25), (0, 10, 5), 1),
        ((40, 60, 50), (0, 100, 53), 0),  # nested, a little off the middle
        ((40, 60, 50), (0, 100, 61), -1),
        ((1, 2, 1.5), (2, 3, 2.5), 0),  # a voxel apart
    ],
)
def test_centres_close_to_each_other_are_level(
    first: tuple[float, ...], second: tuple[float, ...], side: int
) -> None:
    assert find_side(Span(*first), Span(*second)) == side


def test_positions_are_counted_along_prepared_axes() -> None:
    label = np.zeros((1, 12, 4, 4), dtype=np.int64)
    label[0, :3, 1], label[0, 9:, 1] = 1, 2
    image = Volume(np.ones((1, 12, 4, 4), dtype=np.float32), np.diag([-1.0, 1, 1, 1]), (1.0, 1.0, 1.0))
    entry = Entry("north", "p", (Path("i"),), Path("l"), "p")
    case = measure_case(entry, image, Volume(label, image.affine, image.spacing), {"a": (1,), "b": (2,)})
    (found,) = summarise_positions([case.spans], ["p"], ["a", "b"], 1, 1)

    assert (found.before, found.after) == ((0, 0, 0), (1, 0, 0)), "the file's first axis goes to the left"


def test_every_patient_counts_once() -> None:
    cases = [place(LEFT, 0), place(LEFT, 0), place(LEFT, 0), place(RIGHT, 0), place(RIGHT, 0)]
    (found,) = summarise_positions(cases, ["p", "p", "q", "q", "r"], ["a", "b"], 1, 1)

    assert (found.patients, found.before, found.after) == (3, (1, 0), (1, 0)), "q's cases differ"


def test_few_patients_on_a_side_count_with_the_most() -> None:
    (found,) = told([LEFT] * 17 + [RIGHT] * 2 + [MIDDLE], behind=3, lacking=2)

    assert (found.patients, found.before[0], found.after[0]) == (22, 22, 0)
    assert min(found.count_patients()) >= 3


@pytest.mark.parametrize("behind", [2, 3, 5])
def test_no_count_is_of_fewer_patients_than_the_minimum(behind: int) -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        sides = draw.integers(-1, 2, draw.integers(1, 60)).tolist()
        lacking = int(draw.integers(0, 8))
        for found in told(sides, behind, lacking, minimum=5):
            assert min(found.count_patients()) >= behind
            rest = len(sides) + lacking - found.patients  # those who lack a class
            assert rest == 0 or rest >= behind


def test_a_pair_of_few_patients_is_not_told() -> None:
    assert told([LEFT] * 9, behind=3, minimum=5) == []
    assert len(told([LEFT] * 10, behind=3, minimum=5)) == 1
    assert told([LEFT] * 4, minimum=5) == []


def test_of_many_classes_neighbours_are_told() -> None:
    names = [str(number) for number in range(100)]
    pairs = list_pairs(names)

    assert len(pairs) == MOST_PAIRS
    assert set(itertools.pairwise(names)) <= set(pairs)
    assert len(list_pairs(names[:32])) == 32 * 31 / 2 <= MOST_PAIRS


def test_clients_join_whatever_the_order_of_their_classes() -> None:
    one = told([LEFT] * 6 + [RIGHT] * 4)
    other = [one[0].swap()]
    strange = [one[0].model_copy(update={"classes": ("a", "z")})]
    (found,) = join_positions([one, other, strange], ["a", "b"])

    assert (found.classes, found.patients) == (("a", "b"), 20)
    assert (found.before, found.after) == ((12, 0), (8, 0))
