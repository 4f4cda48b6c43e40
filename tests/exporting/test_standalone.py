"""The exported script: in a process without wardround and PyTorch, its masks are those of `predict`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
import yaml
from helpers import run
from PIL import Image
from scipy import ndimage

from wardround.data.federation_file import PrepareSettings
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.preparing.geometry import find_reorientation, resample_image
from wardround.data.preparing.prepare import MARGIN, find_body, normalise
from wardround.exporting import export
from wardround.exporting.inference import SCRIPTS, describe_script, rule_of_logits, write_inference
from wardround.exporting.package import Package
from wardround.losses.objective import Dice, Objective
from wardround.losses.regions import RegionDiceBCE
from wardround.methods.fedevi import Evidential
from wardround.prediction.session import predict
from wardround.training.inference import OVERLAP, slide
from wardround.uncertainty.maps import tempered

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
    """Each mask is equal voxel for voxel, and most show something."""
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
    assert np.mean([mask.any() for mask in found.values()]) > 0.5


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
    usual = {"objective": {"name": "dice"}, "optimizer": {"learning_rate": 0.05}, "rounds": 3}
    run(folder / "run", **{"data": data, "model": model, "batch_size": 2, **usual, **changes})
    return folder / "run"


# Masks


def test_pictures_have_the_masks_of_predict(pictures: Path, tmp_path: Path) -> None:
    exported = export(pictures, "onnx", tmp_path / "out").folder

    has_masks_of_predict(pictures, exported, make_pictures(tmp_path / "in", 5), tmp_path / "masks")

    assert not list(exported.rglob("__pycache__"))  # the folder is as it was exported


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
            {
                "objective": {"name": "evidential"},
                "evaluate": {"window": [8, 12, 8], "tta": True},
                "augmentation": {"mirror_axes": [0, 2]},
            },
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


@pytest.mark.slow
def test_a_network_of_slices_goes_through_volumes_as_predict_does(tmp_path: Path) -> None:
    prepare = {"slices": {"along": "A", "clip": 99.0}, "size": [16, 20], "orientation": "RAS"}
    trained = train(tmp_path, 2, prepare)
    exported = export(trained, "onnx", tmp_path / "out").folder

    has_masks_of_predict(trained, exported, make_volumes(tmp_path / "in", 4), tmp_path / "masks")


# Its parts, each against ours


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("prepare_and_run", "scan_files"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("prepare_and_run")


def test_resampling_is_that_of_pytorch(script: Any) -> None:
    draw = np.random.default_rng(0)
    for _ in range(60):
        dims = int(draw.integers(2, 4))
        # Not to a side of 1: there PyTorch (2.13) repeats the first row where another axis changes too.
        before, after = (draw.integers(least, 24, dims).tolist() for least in (1, 2))
        data = draw.normal(size=(2, *before)).astype(np.float32)
        data[:, : before[0] // 2] = 0
        expected = resample_image(torch.from_numpy(data), after).numpy()
        found = script.resample(data, after)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=0)
        np.testing.assert_array_equal(found == 0, expected == 0)  # zscore_nonzero asks which voxels are 0


@pytest.mark.parametrize("kind", ["zscore", "zscore_nonzero", "percentile", "minmax", "maximum", "window", "ct", "none"])  # fmt: skip
def test_intensities_are_scaled_as_ours(script: Any, kind: str) -> None:
    rows = [[-0.5, 1.5, 0.2, 0.7], None] if kind == "ct" else None
    settings = PrepareSettings(normalise=kind, window=(0.1, 2.0), intensities=rows)  # type: ignore[arg-type]
    data = np.random.default_rng(0).normal(size=(2, 9, 8)).astype(np.float32)
    for image in (data, np.ones_like(data), np.zeros_like(data)):
        found = script.normalise(image, settings.model_dump(mode="json"))
        np.testing.assert_array_equal(found, normalise(image, settings))


@pytest.mark.parametrize("wanted", ["RAS", "LPS", "sar", None])
def test_axes_turn_as_nibabel_turns_them(script: Any, wanted: str | None) -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        affine = np.eye(4)
        affine[:3, :3] = draw.normal(size=(3, 3)) * draw.uniform(0.3, 5, 3)
        assert script.find_reorientation(affine, wanted) == find_reorientation(affine, 3, wanted)


def test_the_body_is_found_as_ours(script: Any) -> None:
    data = np.zeros((2, 12, 9, 10), np.float32)
    assert script.find_body(data, MARGIN) == find_body(data, None)
    data[0, 4:6, 3, 5:9], data[1, 7, 4, 4] = 2, -1
    assert script.find_body(data, MARGIN) == find_body(data, None)


OBJECTIVES = [
    (Dice(), 1), (Dice(), 3), (RegionDiceBCE(regions=((1, 2), (2,))), 2), (RegionDiceBCE(regions=((2, 1), (1,))), 2),
    (Evidential(), 3), (Evidential(evidence="softplus"), 2), (Evidential(cap_kind="hard", cap=2), 3),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "outputs"), OBJECTIVES)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_logits_mean_what_the_objective_says(
    script: Any, objective: Objective, outputs: int, temperature: float
) -> None:
    logits = 4 * torch.randn(outputs, 40, 3, generator=torch.Generator().manual_seed(0))
    rule = rule_of_logits(objective, outputs)
    facts = {"logits": rule, "temperature": temperature}

    expected = tempered(objective, logits[None], temperature)[0]
    np.testing.assert_allclose(script.probabilities(logits.numpy(), facts), expected, atol=1e-6)
    np.testing.assert_array_equal(script.decide(logits.numpy(), rule), objective.predict(logits[None])[0])
    mean = objective.to_average(logits[None])
    np.testing.assert_allclose(script.to_average(logits.numpy(), rule), mean[0], rtol=2e-6)
    back = script.from_average(mean[0].numpy(), rule)
    np.testing.assert_allclose(back, objective.from_average(mean)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("spatial", "window"), [((20, 13), (8, 8)), ((9, 30, 7), (9, 8, 5)), ((5, 6), (5, 4))]
)
def test_windows_are_those_of_monai(script: Any, spatial: tuple[int, ...], window: tuple[int, ...]) -> None:
    image = torch.randn(1, *spatial, generator=torch.Generator().manual_seed(0))
    windows = {"size": window, "overlap": OVERLAP, "sigma": 0.125, "least_weight": 1e-3}

    def network(part: Any) -> Any:  # depends on where a voxel lies in the window
        return part * (1 + part.mean()) + 0.1 * part.cumsum(-1)

    found = script.slide(image.numpy(), {"windows": windows, "tta": False}, network)
    np.testing.assert_allclose(found, slide(network, image[None], window, 1)[0], atol=2e-6)


# What is said


def test_a_missing_package_and_a_wrong_scan_are_one_sentence(pictures: Path, tmp_path: Path) -> None:
    out = export(pictures, "onnx", tmp_path / "out").folder
    scan = make_pictures(tmp_path / "in", 1)[0]
    colour = tmp_path / "colour.png"
    Image.new("RGB", (8, 8)).save(colour)
    broken = tmp_path / "broken.nii.gz"
    broken.write_bytes(b"\x1f\x8b no NIfTI")
    for arguments, hidden, sentence in (
        ((scan, tmp_path / "m.png"), "onnxruntime", "onnxruntime is missing here: pip install onnxruntime"),
        ((scan, tmp_path / "m.png"), "PIL", "pillow is missing here: pip install pillow"),
        ((colour, tmp_path / "m.png"), "", "has 3 channels, the model takes 1"),
        ((scan, scan, "--overwrite"), "", "never for the scan itself"),
        ((scan, tmp_path / "m.nii.gz"), "", "no NIfTI file"),
        ((tmp_path / "none.png", tmp_path / "m.png"), "", "none.png cannot be read: "),
        ((broken, tmp_path / "m.nii.gz"), "", "broken.nii.gz cannot be read: "),
    ):
        done = alone(out, *arguments, hidden=hidden)
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
    facts = json.loads((out / "inference.json").read_text())
    assert "maps of uncertainty" in facts["not_carried"][0]
    assert facts["not_carried"][0] in (out / "README.md").read_text()


@dataclass(frozen=True)
class OwnWay(Dice):
    """An objective that decides in a way no script knows."""

    def predict(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits[:, 0] > 1).to(torch.uint8)


def test_an_objective_with_a_way_of_its_own_has_no_script(pictures: Path, tmp_path: Path) -> None:
    package = Package.of(pictures)
    package = replace(package, trained=replace(package.trained, objective=OwnWay()))
    write_inference(tmp_path, package)

    assert [path.name for path in tmp_path.iterdir()] == ["inference.json"]
    assert "There is no prepare_and_run.py: objective OwnWay" in describe_script(package)
