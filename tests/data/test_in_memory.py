"""Cases handed over in Python: arrays, tensors, dictionaries and PyTorch data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import settings
from torch import Tensor
from torch.utils.data import Dataset

import wardround as wr
from wardround.data.in_memory import open_in_memory
from wardround.errors import ConfigError, DataError


def pair(number: int, size: int = 16) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A bright square on noise, and its mask."""
    draw = np.random.default_rng(number)
    label = np.zeros((size, size), dtype=np.uint8)
    label[4:10, 3 + number % 4 : 9 + number % 4] = 1
    return (draw.normal(size=(size, size)) + 3 * label).astype(np.float32), label


class Squares(Dataset[dict[str, Tensor]]):
    """As MONAI's data sets give them."""

    def __init__(self, first: int, count: int) -> None:
        self.numbers = range(first, first + count)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, label = pair(self.numbers[index])
        return {"image": torch.as_tensor(image)[None], "label": torch.as_tensor(label)[None]}


def given() -> dict[str, Any]:
    return {"north": [pair(number) for number in range(10)], "south": Squares(100, 8)}


def run_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    asked = settings(folder, **changes)
    del asked["data"]
    return asked


def test_arrays_and_a_dataset_train_together_and_twice_the_same(tmp_path: Path) -> None:
    first = wr.run(run_settings(tmp_path / "a", rounds=6), data=given())
    second = wr.run(run_settings(tmp_path / "b", rounds=6), data=given())

    assert first.params_sha256 == second.params_sha256
    assert [row[0] for row in first.table.rows][:2] == ["north", "south"]
    assert first.test is not None and first.test.value("dice") > 0.5
    assert first.model(torch.zeros(1, 1, 16, 16)).shape == (1, 1, 16, 16)


def test_a_killed_run_goes_on_when_the_data_are_given_again(tmp_path: Path) -> None:
    from helpers import Watcher

    whole = wr.run(run_settings(tmp_path / "whole"), data=given())
    with pytest.raises(KeyboardInterrupt):
        wr.run(run_settings(tmp_path / "broken"), data=given(), listener=Watcher(crash_in_round=2))
    resumed = wr.run(run_settings(tmp_path / "broken"), data=given(), resume=True)

    assert resumed.params_sha256 == whole.params_sha256
    assert wr.Result.load(tmp_path / "broken").params_sha256 == whole.params_sha256


def test_splits_of_ones_own_are_kept() -> None:
    parts = {"train": [pair(1), pair(2)], "test": [pair(3)]}

    data = open_in_memory({"north": parts}, seed=0).load("north")

    assert (len(data.train), len(data.val), len(data.test)) == (2, 0, 1)


def test_a_list_is_divided_60_20_20_the_same_way_each_time() -> None:
    data = [open_in_memory({"n": [pair(i) for i in range(10)]}, seed=3).load("n") for _ in range(2)]

    assert [len(split) for split in (data[0].train, data[0].val, data[0].test)] == [6, 2, 2]
    assert data[0].train.names == data[1].train.names
    assert not set(data[0].train.names) & set(data[0].test.names)


def test_classes_and_channels_come_from_the_arrays() -> None:
    image, label = np.zeros((3, 8, 8, 8)), np.zeros((8, 8, 8), dtype=int)
    label[0, 0, 0] = 2

    found = open_in_memory({"a": [(image, label)] * 3}, seed=0, classes=["organ"])

    assert (found.in_channels, found.dimensions, found.num_classes) == (3, 3, 3)
    assert list(found.regions) == ["organ", "class 2"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "data has no client"),
        ({"a": []}, "data has no case"),
        ({"a": [pair(0), pair(1, 20)]}, "case-0000 is 1x16x16 but case-0001 is 1x20x20"),
        ({"a": [pair(0)], "b": [(np.zeros((2, 16, 16)), pair(0)[1])]}, "same channels and dimensions"),
        ({"a": [(np.zeros((8, 8)), np.zeros((9, 9)))]}, "image is 1x8x8 and label 9x9"),
        ({"a": [np.zeros((8, 8))]}, r"expected \(image, label\)"),
        ({"a": [(np.full((8, 8), np.nan), np.zeros((8, 8)))]}, "not finite"),
        ({"a": [(np.zeros((8, 8)), np.full((8, 8), 0.5))]}, "class numbers"),
        ({"a": [(np.zeros((8, 8)), np.full((8, 8), -1))]}, "class numbers"),
        ({"a": {"training": [pair(0)]}}, "'training' is not a split"),
        ({"a": 3}, "not int"),
        ({"a": [("x", "y")]}, "not an array"),
    ],
)
def test_what_cannot_be_used_is_named(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_in_memory(data, seed=0)


def test_data_beside_a_data_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data"):
        wr.run(settings(tmp_path / "run"), data=given())


def test_a_run_of_given_data_says_what_it_needs_when_they_are_missing(tmp_path: Path) -> None:
    asked = run_settings(tmp_path / "run")
    wr.run(asked, data=given())

    with pytest.raises(ConfigError, match="wr.run"):
        wr.run({**asked, "output": str(tmp_path / "other"), "data": {"in_memory": True}})


def test_a_label_of_none_makes_a_case_that_trains_without_one(tmp_path: Path) -> None:
    data = {**given(), "west": [(pair(number)[0], None) for number in range(5)]}
    data["south"] = {"train": [pair(0), (pair(1)[0], None)], "val": [pair(2)], "test": [pair(3)]}
    loaded = open_in_memory(data, seed=1)
    assert [loaded.load(name).num_unlabelled for name in ("north", "south", "west")] == [0, 1, 5]
    assert len(loaded.load("west").train) == 5 and not len(loaded.load("west").test)
    assert loaded.load("south").train.batch([0, 1]).labelled.tolist() == [True, False]
    found = wr.run(run_settings(tmp_path / "run", objective={"name": "pseudo_labels"}), data=data)
    assert list(found.test.cases) == ["north", "south"]
    data["south"]["test"] = [(pair(3)[0], None)]
    with pytest.raises(DataError, match="client 'south': test-0000 has no label, so it can only train"):
        open_in_memory(data, seed=1)
    with pytest.raises(DataError, match="expected"):
        open_in_memory({"north": [{"image": pair(0)[0]}]}, seed=1)
