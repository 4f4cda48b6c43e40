"""Means of groups: who is in them, what they hold, and what must not leave a client."""

import doctest

import pytest
import torch

from wardround.data.cases import Batch, TensorSplit
from wardround.errors import ClientError, DataError
from wardround.methods import means
from wardround.methods.means import (
    deal_into_groups,
    draw_means,
    group_by_grid,
    group_means,
    require_one_grid,
    share_evenly,
)


def split(images: torch.Tensor, labels: torch.Tensor) -> TensorSplit:
    count = len(images)
    return TensorSplit([str(i) for i in range(count)], images, labels.long(), [(1.0, 1.0)] * count)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_examples_run() -> None:
    result = doctest.testmod(means)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(0, []), (4, []), (5, [5]), (9, [9]), (10, [5, 5]), (13, [5, 8]), (15, [5, 5, 5]), (24, [5, 5, 5, 9])],
)
def test_groups_are_disjoint_cover_all_cases_and_the_rest_joins_the_last(
    count: int, sizes: list[int]
) -> None:
    groups = deal_into_groups(count, 5, draw())

    assert [len(group) for group in groups] == sizes
    members = [int(index) for group in groups for index in group]
    assert sorted(members) == (list(range(count)) if sizes else [])


def test_groups_are_drawn_by_the_generator_alone() -> None:
    same = [torch.cat(deal_into_groups(20, 5, draw(seed))).tolist() for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


def test_means_are_those_of_plain_loops() -> None:
    images = torch.randn(12, 2, 3, 4, generator=draw())
    labels = torch.randint(3, (12, 3, 4), generator=draw())
    groups = deal_into_groups(12, 5, draw())

    found = group_means(split(images, labels), groups, num_outputs=3)

    assert found["image"].shape == (2, 2, 3, 4) and found["label"].shape == (2, 3, 3, 4)
    assert {found[name].dtype for name in found} == {torch.float16}
    for place, group in enumerate(groups):
        image = sum(images[int(i)].double() for i in group) / len(group)
        assert torch.equal(found["image"][place], image.half())  # type: ignore[union-attr]
        for label in range(3):
            share = sum((labels[int(i)] == label).double() for i in group) / len(group)
            assert torch.equal(found["label"][place, label], share.half())  # type: ignore[union-attr]


def test_one_output_holds_the_share_of_foreground_and_an_empty_mask_gives_zeros() -> None:
    labels = torch.zeros(5, 2, 2)
    labels[:2, 0, 0] = 1
    mask = group_means(split(torch.zeros(5, 1, 2, 2), labels), [torch.arange(5)], num_outputs=1)["label"]

    assert mask.shape == (1, 1, 2, 2)
    assert mask[0, 0].tolist() == [[pytest.approx(0.4, abs=1e-3), 0.0], [0.0, 0.0]]


def test_no_groups_no_tensors() -> None:
    assert len(group_means(split(torch.zeros(3, 1, 2, 2), torch.zeros(3, 2, 2)), [], 1)) == 0


def test_a_mean_of_four_cases_never_leaves() -> None:
    with pytest.raises(ValueError, match="fewer than 5 cases must not leave"):
        group_means(split(torch.zeros(9, 1, 2, 2), torch.zeros(9, 2, 2)), [torch.arange(4)], 1)


def test_intensities_beyond_float16_are_refused_in_a_sentence() -> None:
    with pytest.raises(ClientError, match="intensity of 7e\\+04.*Normalise"):
        group_means(split(torch.full((5, 1, 2, 2), 7e4), torch.zeros(5, 2, 2)), [torch.arange(5)], 1)


def bank(**sides: int) -> dict[str, torch.Tensor]:
    """Two means of every giver, on a square of its own side."""
    shapes = {giver: (2, 1, side, side) for giver, side in sides.items()}
    return {f"{giver}/{key}": torch.zeros(shapes[giver]) for giver in sides for key in ("image", "label")}


def test_means_of_one_grid_are_stacked_and_of_two_kept_apart() -> None:
    assert [tuple(pool.image.shape) for pool in group_by_grid(bank(north=4, east=4))] == [(4, 1, 4, 4)]
    assert [len(pool) for pool in group_by_grid(bank(north=4, east=8, south=4))] == [4, 2]
    assert group_by_grid({}) == []


def test_a_draw_is_float32_of_one_grid_and_without_repeats() -> None:
    pools = [
        Batch(torch.arange(6.0).half().reshape(6, 1, 1, 1), torch.zeros(6, 1, 1, 1)),
        Batch(torch.ones(2, 1, 2, 2), torch.ones(2, 1, 2, 2)),
    ]
    generator, leads = draw(), [0, 0]
    for _ in range(400):
        found = draw_means(pools, 4, generator)
        assert found.image.dtype == found.label.dtype == torch.float32
        small = found.image.shape[-1] == 1
        leads[0 if small else 1] += 1
        assert len(found) == (4 if small else 2)
        assert len(set(found.image.flatten(1)[:, 0].tolist())) == (4 if small else 1)
    assert leads[0] == pytest.approx(300, abs=40)  # six of eight


def test_unlike_grids_are_refused_in_a_sentence() -> None:
    require_one_grid("fedmix", {})
    require_one_grid("fedmix", {"north": (1, 16, 16), "east": [1, 16, 16]})
    with pytest.raises(DataError, match="'fedmix'.*'north' are 16x16 and those of 'east' 24x16"):
        require_one_grid("fedmix", {"north": (1, 16, 16), "east": (1, 24, 16)})


def test_shares_are_even_and_within_what_each_can_give() -> None:
    assert share_evenly({"a": 9, "b": 9, "c": 9, "d": 9}, 32) == {"a": 8, "b": 8, "c": 8, "d": 8}
    assert share_evenly({"a": 2, "b": 0, "c": 99}, 32) == {"a": 2, "b": 0, "c": 30}
    assert share_evenly({"a": 1, "b": 1}, 32) == {"a": 1, "b": 1}
    assert share_evenly({}, 32) == {}
