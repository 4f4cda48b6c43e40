"""Tensors of a GPU reach another thread on the host as they were; tensors of the host are not copied."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from pytest import mark

from wardround.host_copy import HostCopy
from wardround.storage import StoredTensors, save_tensors


def test_tensors_of_the_host_are_handed_on_as_they_are(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(3), "n": torch.tensor(2)}
    assert HostCopy(tensors).get() is tensors
    save_tensors(tmp_path / "file", tensors, {})
    stored = StoredTensors(tmp_path / "file")
    assert HostCopy(stored).get() is stored  # read when they are used


@mark.gpu
def test_another_thread_gets_what_the_gpu_computes_before_the_copy_was_asked_for() -> None:
    expected = torch.arange(200_000, dtype=torch.float32).view(500, 400)
    with ThreadPoolExecutor(1) as pool:
        value = expected.cuda()
        for _ in range(50):  # still computing when the copy is asked for
            value = value @ torch.eye(400, device="cuda")
        tensors = {"w": value.T, "none": torch.empty(0, device="cuda"), "n": torch.tensor(7, device="cuda")}
        copy = HostCopy({**tensors, "host": torch.ones(2)})
        found = pool.submit(copy.get).result()
    assert list(found) == ["w", "none", "n", "host"] and found["n"].shape == ()
    assert all(tensor.device.type == "cpu" for tensor in found.values())
    torch.testing.assert_close(found["w"], tensors["w"].cpu(), rtol=0, atol=0)
