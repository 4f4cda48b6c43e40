"""What a run writes down of an object: where it was defined, and digits that change with its source or values."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from wardround.objects import digest, name_object, split_name

SMOOTH = 1.0


def mean(values: Any) -> Any:
    return values.mean() + SMOOTH


def make(factor: float) -> Callable[[Any], Any]:
    def scaled(values: Any) -> Any:
        return factor * values

    return scaled


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, values: Any) -> Any:
        return self.factor * values + SMOOTH


def test_a_name_has_module_qualified_name_and_digest() -> None:
    path, digits = split_name(name_object(mean))

    assert path == f"{__name__}:mean" and len(digits) == 12
    assert split_name(name_object(make(1)))[0] == f"{__name__}:make.scaled"
    assert split_name(name_object(lambda x: x))[0].endswith(".lambda")
    assert split_name(name_object(functools.partial(mean)))[0] == f"{__name__}:mean"
    assert split_name(name_object(Scale(2)))[0] == split_name(name_object(Scale))[0] == f"{__name__}:Scale"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (make(1), make(2)),
        (Scale(1), Scale(2)),
        (Scale, Scale(1)),
        (functools.partial(make, 1), functools.partial(make, 2)),
        (lambda x, y=1: x, lambda x, y=2: x),
        (torch.nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(label_smoothing=0.1)),
        (torch.nn.CrossEntropyLoss(torch.ones(2)), torch.nn.CrossEntropyLoss(torch.zeros(2))),
        (Scale(1).__call__, Scale(2).__call__),
    ],
)
def test_other_values_give_another_digest_and_the_same_the_same(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    assert digest(one) == digest(one)


def test_equal_objects_made_twice_have_one_digest() -> None:
    assert digest(make(3)) == digest(make(3))
    assert digest(Scale(3)) == digest(Scale(3))
    assert digest(torch.nn.CrossEntropyLoss(torch.ones(2))) == digest(
        torch.nn.CrossEntropyLoss(torch.ones(2))
    )


def test_a_number_from_outside_counts(monkeypatch: MonkeyPatch) -> None:
    before = digest(mean), digest(Scale)

    monkeypatch.setitem(globals(), "SMOOTH", 2.0)

    assert digest(mean) != before[0] and digest(Scale) != before[1]


def test_code_without_source_has_a_digest_too() -> None:
    def write(number: int) -> dict[str, Any]:
        space: dict[str, Any] = {"__name__": "typed_in"}
        exec(f"class Net:\n    def forward(self, x):\n        return x + {number}\n", space)
        exec(f"def loss(x):\n    return x + {number}\n", space)
        return space

    first, same, other = write(1), write(1), write(2)

    for name in ("Net", "loss"):
        assert digest(first[name]) == digest(same[name]) != digest(other[name])


def test_digests_are_the_same_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("ALPHA = 0.3\n\n\ndef loss(x, y):\n    return ALPHA * (x - y)\n")
    command = "import mine; from wardround.objects import name_object; print(name_object(mine.loss))"

    names = {
        subprocess.run(
            [sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }

    assert len(names) == 1 and names.pop().startswith("mine:loss@")
