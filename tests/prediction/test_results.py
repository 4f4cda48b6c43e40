"""A network trained on slices goes through a whole volume, slice by slice."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from helpers import run

from prediction.threshold import Threshold, ball, predictor, save_nifti
from wardround.data.federation_file import write
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.proposing.proposal import propose
from wardround.data.readers.image_files import read_image
from wardround.data.slices.cutting import Slices, cut
from wardround.errors import ConfigError, DataError
from wardround.exporting import export
from wardround.exporting.package import opened
from wardround.models.base import Output
from wardround.prediction.evaluating import evaluate
from wardround.prediction.predicting import Predictor
from wardround.prediction.session import load_models, predict_all, predict_into

OBLIQUE = np.array([[-1.9, 0.1, 0.2, 30], [0.1, 0.2, -3.0, 40], [-0.1, -2.1, 0.3, -5], [0, 0, 0, 1.0]])


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """Stored left to right, head to foot, front to back."""
    centre = (OBLIQUE @ [6, 5, 4, 1])[:3]
    return save_nifti(tmp_path / "scan.nii.gz", ball((14, 12, 10), centre, 6, OBLIQUE), OBLIQUE)


@pytest.mark.parametrize("along", ["R", "A", "S"])
def test_a_volume_keeps_its_grid_and_its_ball(along: str, volume: Path, tmp_path: Path) -> None:
    model = Threshold(2)
    seen = predictor(2, model=model, options={"slices": along, "uncertainty": "auto", "probabilities": True})
    told: list[tuple[int, int]] = []
    report = predict_into(
        seen, [volume], tmp_path / "out", watch=lambda where, n, of, done, all_: told.append((done, all_))
    )

    assert not report.problems
    loaded, made = nibabel.load(volume), nibabel.load(tmp_path / "out/scan.nii.gz")
    truth, mask = np.asarray(loaded.dataobj), np.asarray(made.dataobj)
    assert np.array_equal(mask, truth) and np.allclose(made.affine, loaded.affine)
    slices = {"R": 14, "A": 10, "S": 12}[along]
    assert len(model.shapes) == slices and told[-1] == (slices, slices)
    facts = report.done["scan.nii.gz"]
    voxel = abs(np.linalg.det(OBLIQUE[:3, :3])) / 1000
    assert facts["classes"]["lesion"]["ml"] == pytest.approx(float(truth.sum()) * voxel)
    maps = np.asarray(nibabel.load(tmp_path / "out/scan_probabilities.nii.gz").dataobj)
    assert maps.shape == (14, 12, 10, 2)
    assert np.array_equal(maps[..., 1] > 0.5, truth > 0)
    assert np.asarray(nibabel.load(tmp_path / "out/scan_uncertainty.nii.gz").dataobj).shape == truth.shape


def test_a_volume_is_what_its_slices_are(volume: Path, tmp_path: Path) -> None:
    """Resized slices too: predicted one by one as files, they are the planes of the volume's mask."""
    prepare = {"size": (20, 17), "slices": {"along": "S"}}
    seen = predictor(2, prepare=prepare)
    whole = predict_all(seen, [volume])[0]
    image = read_image([volume])
    planes = []
    for number, plane in enumerate(Slices.of(image, "S", "RAS")):
        path = tmp_path / f"s{number}.nii.gz"
        data = np.expand_dims(plane.data[0], 2)
        planes.append(predict_all(seen, [save_nifti(path, data, plane.affine)])[0].mask)
    assert np.array_equal(Slices.of(image, "S", "RAS").join([p[None] for p in planes])[0], whole.mask)
    assert whole.mask.any() and 0 <= whole.doubt <= 1


def test_the_doubt_of_a_volume_is_that_of_all_its_voxels(volume: Path) -> None:
    """Nothing is resampled, so a 3D pass of the same threshold sees the same voxels."""
    flat = predictor(2, options={"slices": "S"}, prepare={"normalise": "none"})
    deep = predictor(3, prepare={"normalise": "none"})
    one, other = predict_all(flat, [volume])[0], predict_all(deep, [volume])[0]
    assert np.array_equal(one.mask, other.mask)
    assert one.doubt == pytest.approx(other.doubt) and one.structures == pytest.approx(other.structures)
    assert (one.mean, one.highest) == pytest.approx((other.mean, other.highest))


def test_a_run_that_does_not_know_its_axis_asks_for_it(volume: Path) -> None:
    with pytest.raises(DataError, match="is 3D, but this run was trained on 2D images. If .*--slices S"):
        predict_all(predictor(2), [volume])


def test_a_format_without_a_place_in_space_is_a_sentence(tmp_path: Path) -> None:
    np.save(tmp_path / "scan.npy", np.zeros((8, 8, 8), np.float32))
    with pytest.raises(
        DataError, match=r"scan.npy: its format does not store the orientation, .* convert it to NIfTI"
    ):
        predict_all(predictor(2, options={"slices": "S"}), [tmp_path / "scan.npy"])


def test_voxels_of_another_size_are_told(volume: Path) -> None:
    far = predictor(2, options={"slices": "S"}, spacing=((0.1, 0.1), (0.2, 0.2)))
    (warning,) = predict_all(far, [volume])[0].warnings
    assert "far from those" in warning


def test_trained_on_slices_evaluated_on_volumes(tmp_path: Path) -> None:
    """The run knows its axis, and which volumes its training slices were cut from."""
    settings = PhantomSettings(size=16, cases=6, hospitals=2, dimensions=3)
    phantom_files.write(settings, tmp_path / "data", "nifti", seed=5)
    write(propose([tmp_path / "data"]).file, tmp_path / "volumes.yaml")
    made = cut(tmp_path / "volumes.yaml", tmp_path / "cut")
    run(tmp_path / "run", rounds=1, data={"federation": str(made.path)})

    export(tmp_path / "run", "torch", tmp_path / "exported")  # says how slices are made, and does it
    for page in ("README.md", "MODEL_CARD.md"):
        assert (
            "volumes were reoriented to RAS, then cut along S" in (tmp_path / "exported" / page).read_text()
        )
    model = opened(tmp_path / "exported/model.json", tmp_path / "exported/model.safetensors", "cpu")
    scan = next((tmp_path / "data/north/images").iterdir())
    taken, ours = (predict_all(Predictor([m]), [scan])[0] for m in (model, *load_models(tmp_path / "run")))
    assert np.array_equal(taken.mask, ours.mask) and taken.slices == ours.slices == "S"

    found = evaluate(tmp_path / "run", tmp_path / "volumes.yaml", output=tmp_path / "out", report=False)

    assert 0 < found.num_cases < 12 and not found.problems
    assert any(f"{12 - found.num_cases} of 12 cases" in note and "left out" in note for note in found.notes)

    moved = tmp_path / "moved"
    for path in (tmp_path / "data").rglob("*.nii.gz"):  # the same scans, written again
        new = moved / path.relative_to(tmp_path / "data")
        new.parent.mkdir(parents=True, exist_ok=True)
        loaded = nibabel.load(path)
        nibabel.save(nibabel.Nifti1Image(np.asarray(loaded.dataobj), loaded.affine), new)
    again = evaluate(tmp_path / "run", moved, output=tmp_path / "again", report=False)
    assert any("have the client and name of cases the model has seen" in note for note in again.notes)


def test_values_are_cut_off_as_before_the_training(tmp_path: Path) -> None:
    """A single bright voxel would make everything else dark."""
    values = ball((12, 12, 6), np.array([6.0, 6, 3]), 3, np.eye(4))
    values[0, 0] = 1000
    path = save_nifti(tmp_path / "scan.nii.gz", values, np.eye(4))
    plain, clipped = (
        predict_all(predictor(2, prepare={"slices": {"along": "S", "clip": clip}}), [path])[0]
        for clip in (None, 95)
    )
    expected = values > 0
    assert not plain.mask[6, 6, 3] and np.array_equal(clipped.mask, expected)


def test_a_slice_stored_another_way_is_turned_as_the_training_slices_were(tmp_path: Path) -> None:
    """Whatever lies to the right is lesion: only an upright slice tells."""

    class RightHalf(Threshold):
        def _output(self, x: torch.Tensor) -> Output:
            side = torch.linspace(-1, 1, x.shape[2]).reshape(1, 1, -1, 1)
            return Output(logits=20 * side.expand_as(x[:, :1]))

    values = np.random.default_rng(0).normal(size=(8, 6, 1)).astype(np.float32)
    upright = save_nifti(tmp_path / "ras.nii.gz", values, np.eye(4))
    flipped = save_nifti(tmp_path / "lps.nii.gz", values[::-1, ::-1].copy(), np.diag([-1.0, -1, 1, 1]))
    seen = predictor(2, model=RightHalf(2), prepare={"slices": {"along": "S"}})
    one, other = (predict_all(seen, [path])[0].mask for path in (upright, flipped))
    assert one.shape == other.shape == (8, 6, 1) and one[4:].all() and not one[:4].any()
    assert np.array_equal(other, one[::-1, ::-1])


def test_an_axis_is_of_no_use_to_a_run_on_volumes() -> None:
    with pytest.raises(ConfigError, match="trained on volumes. Leave it out"):
        predictor(3, options={"slices": "S"})
