"""The exported script: in a process without wardround and PyTorch, its masks are those of `predict`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import yaml
from helpers import run
from PIL import Image
from scipy import ndimage

from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.exporting import export
from wardround.prediction.session import predict

pytest.importorskip("onnxruntime", reason="needs the extra wardround[onnx]")
for module in ("onnx", "onnxscript"):
    pytest.importorskip(module, reason="needs the extra wardround[onnx]")

# Runs the script as `python prepare_and_run.py ...` in an environment that has neither.
ALONE = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "wardround", "monai", *hidden):
            raise ModuleNotFoundError(name)
hidden = sys.argv[1].split(",")
sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[2:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def alone(folder: Path, *arguments: object, hidden: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", ALONE, hidden, f"{folder}/prepare_and_run.py"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def read_mask(path: Path) -> Any:
    if path.name.endswith((".nii", ".nii.gz")):
        return np.asarray(nibabel.load(path).dataobj)
    return np.asarray(Image.open(path))


def has_masks_of_predict(trained: Path, exported: Path, scans: Sequence[Path], folder: Path) -> None:
    """Each mask is equal voxel for voxel, and not all of them are empty."""
    folder.mkdir()
    found = {}
    for scan in scans:
        expected = predict(trained, scan, uncertainty=None, probabilities=False, device="cpu")[0]
        target = folder / expected.name
        done = alone(exported, scan, target)
        assert done.returncode == 0, done.stderr
        found[scan.name] = read_mask(target)
        np.testing.assert_array_equal(found[scan.name].reshape(expected.mask.shape), expected.mask, scan.name)
        if expected.affine is not None:
            np.testing.assert_array_equal(nibabel.load(target).affine, nibabel.load(scan).affine)
    assert len({int(value) for mask in found.values() for value in np.unique(mask)}) > 1


# Scans


def smooth_noise(shape: Sequence[int], seed: int) -> Any:
    values = ndimage.gaussian_filter(
        np.random.default_rng(seed).normal(size=shape), [side / 10 for side in shape]
    )
    values = values - values.min()
    return values / values.max()


def make_pictures(folder: Path, count: int) -> list[Path]:
    """Pictures of mixed size and format: 8 and 16 bits, JPEG on its side, TIFF, alpha."""
    folder.mkdir()
    made = []
    for number in range(count):
        shape = ((16, 16), (37, 21), (9, 64), (50, 70), (33, 32))[number % 5]
        shape = (shape[0] + number, shape[1] + 2 * (number // 5))
        values = smooth_noise(shape, number)
        name = f"p{number}.{('png', 'jpg', 'tif', 'png', 'png')[number % 5]}"
        picture = Image.fromarray((255 * values).astype(np.uint8))
        if number % 5 == 3:
            picture = Image.fromarray((60000 * values).astype(np.uint16))
        if number % 5 == 4:
            picture = Image.merge("LA", [picture, picture])
        exif = Image.Exif()
        exif[0x0112] = 6
        picture.save(folder / name, **({"exif": exif} if number % 5 == 1 else {}))
        made.append(folder / name)
    return made


def make_volumes(folder: Path, count: int) -> list[Path]:
    """Volumes of mixed size, spacing, orientation and type, some oblique, some inside an empty border."""
    folder.mkdir()
    made = []
    codes = ("RAS", "LPS", "PIR", "SAL", "ILP")
    for number in range(count):
        shape = (14 + 2 * number, 21 - number, 11 + 3 * (number % 4))
        values = 900 * smooth_noise(shape, number) - 100 * (number % 3 == 0)
        if number % 2:
            values[:3], values[:, -2:] = values.flat[0], values.flat[0]
        spacing = np.diag([9.0 + number, 12.0 - number % 4, 7.5 + 2 * (number % 3), 1])
        start = nibabel.orientations.axcodes2ornt("RAS")
        turn = nibabel.orientations.ornt_transform(
            start, nibabel.orientations.axcodes2ornt(codes[number % 5])
        )
        affine = spacing @ nibabel.orientations.inv_ornt_aff(turn, shape)
        if number % 3 == 2:
            angle = np.deg2rad(17)
            tilt = np.eye(4)
            tilt[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
            affine = tilt @ affine
        values = values.astype((np.int16, np.float32)[number % 2])
        nibabel.Nifti1Image(values, affine).to_filename(folder / f"v{number}.nii.gz")
        made.append(folder / f"v{number}.nii.gz")
    return made


def train(folder: Path, dimensions: int, prepare: dict[str, Any], **changes: Any) -> Path:
    """A run on phantoms in files, prepared as asked."""
    made = PhantomSettings(hospitals=2, dimensions=dimensions, size=16, cases=6, num_classes=3)
    phantom_files.write(made, folder / "data", "nifti", seed=1)
    labels = {"rim": [1], "core": [2]}
    federation = {"sources": [{"path": "data"}], "labels": labels, "prepare": prepare}
    (folder / "federation.yaml").write_text(yaml.safe_dump(federation))
    model = {"name": f"unet{dimensions}d", "base_filters": 2, "levels": 2}
    data = {"federation": str(folder / "federation.yaml")}
    run(folder / "run", **{"data": data, "model": model, "batch_size": 2, "rounds": 1, **changes})
    return folder / "run"


# Masks


def test_pictures_have_the_masks_of_predict(pictures: Path, tmp_path: Path) -> None:
    exported = export(pictures, "onnx", tmp_path / "out").folder

    has_masks_of_predict(pictures, exported, make_pictures(tmp_path / "in", 5), tmp_path / "masks")


def test_volumes_have_the_masks_of_predict(volumes: Path, tmp_path: Path) -> None:
    exported = export(volumes, "onnx", tmp_path / "out").folder

    has_masks_of_predict(volumes, exported, make_volumes(tmp_path / "in", 3), tmp_path / "masks")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "changes"),
    [
        ({"size": [24, 20], "normalise": "percentile"}, {}),
        ({"normalise": "minmax", "crop": "foreground"}, {"evaluate": {"tta": True}}),
    ],
)
def test_twenty_pictures_have_the_masks_of_predict(
    prepare: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    trained = train(tmp_path, 2, prepare, **changes)
    exported = export(trained, "onnx", tmp_path / "out").folder

    has_masks_of_predict(trained, exported, make_pictures(tmp_path / "in", 20), tmp_path / "masks")


REGIONS = {"name": "region_dice_bce", "regions": [[1, 2], [2]]}
CT = {"normalise": "ct", "intensities": [[10.0, 700.0, 300.0, 150.0]]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "changes"),
    [
        (
            {"spacing": [10, 11, 12], "orientation": "LPS", "crop": "foreground", **CT},
            {"objective": REGIONS, "evaluate": {"window": [8, 8, 8], "postprocess": "largest_component"}},
        ),
        (
            {"size": [16, 12, 20], "spacing": [8, 9, 10], "normalise": "zscore_nonzero"},
            {"objective": {"name": "evidential"}, "evaluate": {"window": [8, 12, 8], "tta": True}},
        ),
        ({"orientation": None, "normalise": "zscore"}, {"evaluate": {"window": [9, 8, 10]}}),
    ],
)
def test_ten_volumes_have_the_masks_of_predict(
    prepare: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    trained = train(tmp_path, 3, prepare, **changes)
    (trained / "calibration.json").write_text(json.dumps({"temperature": 1.7, "quantiles": {}}))
    exported = export(trained, "onnx", tmp_path / "out").folder

    has_masks_of_predict(trained, exported, make_volumes(tmp_path / "in", 10), tmp_path / "masks")
