"""Nested memories survive the disk."""

from __future__ import annotations

from pathlib import Path

import torch
from pytest import raises

from wardround.engine.memory_file import load_memory, pack, read_into_memory, save_memory, unpack
from wardround.errors import CheckpointError
from wardround.params import Params
from wardround.storage import save_tensors

# Memory on the disk


def test_memory_of_any_shape_survives_the_disk(tmp_path: Path) -> None:
    memory = {
        "previous": Params({"a/b": torch.randn(2), "n": torch.tensor(3)}),
        "scores": [1, 2.5, None, "text", True],
        "deep": {"x": {"y": torch.ones(2)}},
        "empty": Params({}),
    }
    save_memory(tmp_path / "m.safetensors", memory)
    back = load_memory(tmp_path / "m.safetensors")

    assert back["scores"] == memory["scores"]
    assert torch.equal(back["deep"]["x"]["y"], torch.ones(2))
    assert back["previous"].sha256() == memory["previous"].sha256()  # type: ignore[attr-defined]
    assert len(back["empty"]) == 0
    assert read_into_memory(back)["scores"] == memory["scores"]


def test_memory_that_cannot_be_saved_is_named() -> None:
    with raises(TypeError, match="'/x' holds a set"):
        pack({"x": {1}}, {})


def test_packing_and_unpacking_is_the_identity() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [1, {"b": torch.zeros(1)}]}

    assert str(unpack(pack(value, tensors), tensors)) == str(value)


def test_a_memory_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", {"w": torch.ones(1)}, {})
    with raises(CheckpointError, match="not a wardround memory file"):
        load_memory(tmp_path / "x.safetensors")
