"""Splits of cases that stack, and of cases that do not."""

import torch
from pytest import raises

from wardround.data.cases import Case, JoinedSplit, TensorSplit, as_stack
from wardround.data.serving.resident import join_splits
from wardround.errors import DataError
from wardround.training.workbench import read_in_order


def split(prefix: str, count: int, side: int) -> TensorSplit:
    return TensorSplit.of(
        [
            Case(f"{prefix}{n}", torch.full((1, side, side), float(n)), torch.ones(side, side), (1.0, side))
            for n in range(count)
        ]
    )


def test_splits_of_one_shape_stack_again() -> None:
    joined = join_splits([split("a", 2, 4), TensorSplit.of([]), split("b", 3, 4)])

    assert isinstance(joined, TensorSplit) and joined.names == ["a0", "a1", "b0", "b1", "b2"]


def test_splits_of_several_shapes_are_judged_one_case_at_a_time() -> None:
    joined = join_splits([split("a", 2, 4), split("b", 1, 6)])

    assert isinstance(joined, JoinedSplit) and len(joined) == 3 and not joined.one_shape
    assert [tuple(batch.image.shape) for batch in read_in_order(joined, 8)] == [(1, 1, 4, 4)] * 2 + [
        (1, 1, 6, 6)
    ]
    assert joined.spacing(2) == (1.0, 6)
    assert torch.equal(joined.to(torch.device("cpu")).batch([1]).image, torch.ones(1, 1, 4, 4))


def test_who_needs_one_size_says_so() -> None:
    with raises(DataError, match="FedMix needs images of one size"):
        as_stack(join_splits([split("a", 2, 4), split("b", 1, 6)]), "FedMix")
