"""Cases are scored on their device and in threads, with the numbers of the plain functions, in order."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import mark, raises
from torch import Tensor

from wardround.config import EvaluateSettings
from wardround.data.cases import Batch, Case, ClientData, TensorSplit
from wardround.engine.judging.evaluation import Turns, score_cases
from wardround.engine.judging.postprocessing import largest_components
from wardround.errors import DataError
from wardround.metrics import METRICS, measure
from wardround.training.workbench import read_in_order

REGIONS = {"disc": [1, 2], "cup": [2], "absent": [7], "nothing": [], "background": [0]}
SPACINGS = [(1.0, 1.5), (0.5, 2.0)]


class Predicted:
    """An objective whose logits are label maps already; a case's loss is the mean of its map."""

    def predict(self, logits: Tensor) -> Tensor:
        return logits[:, 0].to(torch.uint8)

    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        return logits.flatten(1).mean(dim=1)


def cases() -> list[tuple[Tensor, Tensor]]:
    """Predicted and true maps: random, nothing predicted, nothing there, both empty, all of one class."""
    draw = torch.Generator().manual_seed(3)
    some = [torch.randint(0, 4, (9, 8), generator=draw) for _ in range(6)]
    none, cup = torch.zeros(9, 8, dtype=torch.long), torch.full((9, 8), 2)
    return [*zip(some[:3], some[3:], strict=True), (none, some[0]), (some[0], none), (none, none), (cup, cup)]


def split() -> TensorSplit:
    """The predicted map travels as the image."""
    return TensorSplit.of(
        [
            Case(f"case {k}", predicted[None].float(), truth, SPACINGS[k % 2])
            for k, (predicted, truth) in enumerate(cases())
        ]
    )


def client(batch_size: int) -> Any:
    def predictions(given: TensorSplit, params: Any) -> Iterator[tuple[Tensor, Batch]]:
        for batch in read_in_order(given, batch_size):
            yield batch.image, batch

    none = TensorSplit.of([])
    data = ClientData(none, none, none)
    return SimpleNamespace(
        device=torch.device("cpu"), model=None, data=data, predictions=predictions, mirror_axes=None
    )


def rows(batch_size: int = 3, metrics: Any = tuple(METRICS), **settings: Any) -> list[dict[str, Any]]:
    chosen = EvaluateSettings(**settings)
    return score_cases(client(batch_size), None, split(), Predicted(), REGIONS, metrics, chosen)  # type: ignore[arg-type]


def plain_rows(**settings: Any) -> list[dict[str, Any]]:
    """The same, one case after the other, from masks alone."""
    chosen, found = EvaluateSettings(**settings), []
    for k, (predicted, truth) in enumerate(cases()):
        labels = predicted.to(torch.uint8).numpy()
        if chosen.postprocess == "largest_component":
            labels = largest_components(labels)
        scores = measure(
            labels,
            truth.numpy(),
            REGIONS,
            tuple(METRICS),
            SPACINGS[k % 2],
            tolerance=chosen.tolerance,
            empty_policy=chosen.empty_policy,
            surface_penalty=chosen.surface_penalty,
        )
        found.append({"case": f"case {k}", "loss": float(predicted.float().mean()), "regions": scores})
    return found


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, NaN included."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@mark.usefixtures("threads")
@mark.parametrize("empty_policy", ["defined", "nan", "smooth"])
@mark.parametrize("postprocess", ["none", "largest_component"])
def test_every_metric_is_the_same_number_as_from_masks(empty_policy: str, postprocess: str) -> None:
    settings = {"empty_policy": empty_policy, "postprocess": postprocess, "surface_penalty": "diagonal"}

    found, expected = rows(**settings), plain_rows(**settings)

    assert len(found) == len(expected)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@mark.parametrize("batch_size", [1, 2, 100])
def test_the_batch_size_changes_no_number(batch_size: int) -> None:
    assert all(same(a, b) for a, b in zip(rows(batch_size), plain_rows(), strict=True))


def test_overlap_alone_needs_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("masks were made")

    monkeypatch.setattr("wardround.metrics.registry._join", refuse)

    assert [row["case"] for row in rows(metrics=["dice", "iou"])] == [f"case {k}" for k in range(7)]


@mark.usefixtures("threads")
def test_a_mistake_in_a_job_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorSplit, "spacing", lambda self, index: (1.0, 1.0, 1.0))

    with raises(DataError, match="spacing .* has 3 values; the mask has 2 axes"):
        rows(metrics=["hd95"])


@mark.usefixtures("threads")
@mark.parametrize("device", ["cpu", "cuda"])
def test_results_come_in_the_order_of_the_jobs(device: str) -> None:
    with Turns(torch.device(device), inline=False) as turns:
        for batch in range(20):
            for number in range(5):
                turns.take(lambda number=5 * batch + number: {"number": number})  # type: ignore[misc]
            turns.end_batch()
        found = turns.results()

    assert [row["number"] for row in found] == list(range(100))


def test_an_empty_split_has_no_rows() -> None:
    empty = TensorSplit.of([])
    settings = EvaluateSettings()

    assert score_cases(client(2), None, empty, Predicted(), REGIONS, ["dice", "hd95"], settings) == []  # type: ignore[arg-type]
