"""Windows: equal to the whole where they cover it, bounded in memory, smaller when the device is out of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prediction.threshold import Threshold
from wardround.errors import DataError
from wardround.models.unet import unet2d, unet3d
from wardround.prediction import windows
from wardround.prediction.windows import Forward
from wardround.training.inference import count_windows

CPU = torch.device("cpu")


def small_unet(dimensions: int) -> torch.nn.Module:
    torch.manual_seed(0)
    build = unet3d if dimensions == 3 else unet2d
    return build(in_channels=1, num_outputs=2, base_filters=2, levels=3, norm="instance", dropout=0.0).eval()


def test_window_as_large_as_the_volume_is_one_plain_pass() -> None:
    model = small_unet(3)
    image = torch.randn(1, 17, 20, 22)
    with torch.no_grad():
        whole = model(image[None])[0]
    for window in ((17, 20, 22), (64, 64, 64), (17, 32, 22)):
        assert torch.equal(Forward(model, device=CPU, window=window)(image), whole)


def test_windows_of_a_local_network_give_the_whole_back() -> None:
    """A network that looks at one voxel at a time cannot see the windows: any weighting gives the same."""
    image = torch.randn(1, 30, 25, 20)
    model = Threshold()
    found = Forward(model, device=CPU, window=(12, 12, 12))(image)
    assert torch.allclose(found, 20 * (image - 0.5), atol=1e-4)
    assert len(model.shapes) == count_windows((30, 25, 20), (12, 12, 12))
    assert {shape[2:] for shape in model.shapes} == {(12, 12, 12)}


def test_pictures_are_seen_whole_and_huge_ones_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Threshold(2)
    image = torch.randn(1, 60, 50)
    Forward(model, device=CPU, window=None)(image)
    assert model.shapes == [(1, 1, 60, 50)]
    monkeypatch.setattr(windows, "HUGE_PICTURE", 1000)
    monkeypatch.setattr(windows, "TILE", 32)
    model.shapes.clear()
    found = Forward(model, device=CPU, window=None)(image)
    assert {shape[2:] for shape in model.shapes} == {(32, 32)}
    assert torch.allclose(found, 20 * (image - 0.5), atol=1e-4)


class Full(Threshold):
    """A device with room for so many voxels at once."""

    room = 40_000

    def _output(self, x):  # type: ignore[no-untyped-def]
        if x.numel() > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super()._output(x)


def test_full_device_gets_smaller_windows_and_says_so_once() -> None:
    said: list[str] = []
    forward = Forward(Full(), device=CPU, window=(64, 64, 64), say=said.append)
    image = torch.randn(1, 64, 64, 64)
    for _ in range(2):
        assert torch.allclose(forward(image), 20 * (image - 0.5), atol=1e-4)
    assert len(said) == 1 and "32x32x32 are used instead of 64x64x64" in said[0]


def test_fewer_windows_come_before_smaller_ones() -> None:
    said: list[str] = []
    forward = Forward(Full(), device=CPU, window=(32, 32, 32), say=said.append)
    forward.plan = windows.WindowPlan(CPU, (32, 32, 32), 4)
    forward(torch.randn(1, 40, 40, 40))
    assert forward.plan == windows.WindowPlan(CPU, (32, 32, 32), 1)
    assert len(said) == 2 and all("at a time" in text for text in said)


def test_no_room_at_all_is_a_sentence() -> None:
    model = Full()
    model.room = 10
    with pytest.raises(DataError, match="does not fit into memory"):
        Forward(model, device=CPU, window=(64, 64, 64), say=lambda text: None)(torch.randn(1, 64, 64, 64))


def test_other_errors_are_not_taken_for_a_full_device() -> None:
    class Broken(Threshold):
        def _output(self, x):  # type: ignore[no-untyped-def]
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        Forward(Broken(), device=CPU, window=None)(torch.randn(1, 8, 8, 8))


MEASURE = """
import resource, sys
import numpy as np, torch
sys.path[:0] = [{root!r}]
from pathlib import Path
from prediction.threshold import predictor, save_nifti
from wardround.prediction.session import predict_into
torch.set_num_threads(1)
side, folder = {side}, Path({folder!r})
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
run = predictor(patch=(64, 64, 64), prepare={{"normalise": "zscore"}}, options={{"tta": True}})
values = np.random.default_rng(0).normal(size=(side,) * 3).astype(np.float32)
save_nifti(folder / "scan.nii", values, np.diag([-1.0, 1.0, 1.0, 1.0]))
del values
before = peak()
report = predict_into(run, [folder / "scan.nii"], folder / "out")
assert not report.problems, report.problems
print(before, peak())
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """A volume of 128 cubed may take 14 copies of itself, mirror images or not; that is 1.8 GiB for 320 cubed."""
    root = str(Path(__file__).resolve().parents[1])
    code = MEASURE.format(root=root, side=128, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = map(float, done.stdout.split())
    assert after - before < 14 * 128**3 * 4 / 2**20 + 150  # MiB; the last for libraries that load late
