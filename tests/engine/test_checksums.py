"""A changed bit anywhere in a file that carries its checksum is noticed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from pytest import mark, raises
from safetensors import safe_open

from wardround.engine.checksums import (
    BLANK,
    check_whole,
    read_checksum,
    read_guarded,
    write_guarded,
)
from wardround.engine.memory_file import load_memory, save_memory
from wardround.errors import CheckpointError


def test_every_byte_of_a_tensor_file_is_covered(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_memory(path, {"w": torch.arange(4.0), "note": "x"})
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in (1, 32):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with raises(CheckpointError, match=r"m\.safetensors"):
                load_memory(path)
    path.write_bytes(whole)
    assert torch.equal(load_memory(path)["w"], torch.arange(4.0))


def test_the_checksum_is_that_of_the_file_with_zeros_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    checksum = save_memory(path, {"w": torch.ones(3)})
    content = path.read_bytes()

    assert content.count(checksum.encode()) == 1
    assert hashlib.sha256(content.replace(checksum.encode(), BLANK.encode())).hexdigest() == checksum
    assert read_checksum(path) == checksum
    with safe_open(path, "pt") as file:  # other software reads it too
        assert torch.equal(file.get_tensor("/w"), torch.ones(3))


@mark.parametrize("size", [0, 20, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.safetensors"
    save_memory(path, {"w": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:size])
    with raises(CheckpointError, match=r"m\.safetensors"):
        load_memory(path)


def test_a_whole_file_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    expected = save_memory(tmp_path / "a.safetensors", {"w": torch.ones(1)})
    save_memory(tmp_path / "a.safetensors", {"w": torch.zeros(1)})
    with raises(CheckpointError, match="not of this checkpoint"):
        check_whole(tmp_path / "a.safetensors", expected)
    with raises(CheckpointError, match=r"b\.safetensors is missing"):
        check_whole(tmp_path / "b.safetensors", expected)


def test_a_guarded_object_with_another_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    content = {"round": 3, "seconds": 0.1 + 0.2, "best": None, "names": ["ä", "b"]}
    write_guarded(path, content)
    assert read_guarded(path) == content
    stored = json.loads(path.read_text())
    for spoilt in ({**stored, "round": 4}, {**stored, "more": 1}, content, [1]):
        path.write_text(json.dumps(spoilt))
        with raises(CheckpointError, match=r"index\.json"):
            read_guarded(path)
