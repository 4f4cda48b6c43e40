"""Compiled kernels are kept in a folder of the user's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wardround.training import kernel_cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WARDROUND_CACHE", str(tmp_path / "cache"))
    for variable in kernel_cache.VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is as before after the test
        monkeypatch.delenv(variable)
    return tmp_path / "cache" / "kernels"


def test_kernels_go_to_a_folder_for_the_user_alone(folder: Path) -> None:
    assert kernel_cache.use() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")


def test_a_folder_that_triton_was_given_by_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/triton")
    kernel_cache.use()
    assert os.environ["TRITON_CACHE_DIR"] == "/scratch/triton"


def test_code_is_not_loaded_from_a_folder_that_others_can_write(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    used = kernel_cache.use()
    assert used != folder and used.stat().st_mode & 0o777 == 0o700
    assert "can be written by others, so compiled kernels are not kept" in caplog.text


def test_neither_from_behind_a_link(folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir()
    (tmp_path / "there").mkdir()
    folder.symlink_to(tmp_path / "there")
    assert kernel_cache.use() != folder


def test_a_cache_that_cannot_be_made_does_not_stop_the_run(folder: Path) -> None:
    folder.parent.write_text("a file in its place")
    assert kernel_cache.use().is_dir()


def test_loading_is_estimated_from_compiling_until_it_was_timed() -> None:
    kernel_cache.use()
    assert kernel_cache.loading_seconds("abc") is None
    kernel_cache.record_seconds("abc", 60.0)
    estimate = kernel_cache.loading_seconds("abc")
    assert estimate is not None and 0 < estimate < 60
    kernel_cache.record_seconds("abc", 9.5)
    assert kernel_cache.loading_seconds("abc") == 9.5
    assert kernel_cache.loading_seconds("another") is None


def test_clearing_forgets_kernels_and_their_seconds(folder: Path) -> None:
    kernel_cache.use()
    kernel_cache.record_seconds("abc", 60.0)
    (folder / "triton").mkdir()
    (folder / "triton" / "kernel.cubin").write_bytes(b"1234")
    assert kernel_cache.measure(folder)[0] == 2
    kernel_cache.clear(folder)
    assert kernel_cache.measure(folder) == (0, 0)
    assert kernel_cache.loading_seconds("abc") is None
