"""Files are written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from wardround.files import write_parts


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
