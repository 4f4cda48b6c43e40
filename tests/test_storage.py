"""Files are written whole or not at all."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from wardround.errors import CheckpointError
from wardround.files import write_parts
from wardround.storage import MAX_HEADER_BYTES, StoredTensors


def test_an_interrupted_write_leaves_nothing_behind_and_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "mask.bin"
    write_parts(path, [b"old"])

    def interrupted() -> Iterator[bytes]:
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_parts(path, interrupted())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"some"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError) as found:
        write_parts(tmp_path / "model.bin", parts())
    assert found.value.filename == str(tmp_path / "model.bin") and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "facts",
    [
        {"shape": [2**62] * 5000, "data_offsets": [0, 8]},  # whose product would take minutes
        {"shape": [10**400], "data_offsets": [0, 8]},
        {"shape": [-2], "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [-8, 0]},
        {"shape": [2], "data_offsets": [0]},
        {"shape": "ab", "data_offsets": [0, 8]},
    ],
)
def test_an_impossible_tensor_is_refused_when_its_file_is_opened(
    tmp_path: Path, facts: dict[str, object]
) -> None:
    text = json.dumps({"w": {"dtype": "F32", **facts}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(CheckpointError, match="not a readable tensor file"):
        StoredTensors(path)


def test_a_header_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for text in (b"[" * 100_000, b'"abc"', b"3", b"[1]"):
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(CheckpointError, match="not a readable tensor file"):
            StoredTensors(path)


def test_a_header_longer_than_its_file_is_refused_before_room_is_made_for_it(tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES) + b"{}")
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="file ends too early"):
        StoredTensors(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
