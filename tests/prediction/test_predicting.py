"""What is said of a scan: kinds of uncertainty, flips, ensembles, warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prediction.threshold import Threshold, ball, predictor, save_nifti, trained
from wardround.errors import ConfigError
from wardround.models.base import Output
from wardround.prediction.predicting import Predictor, flipped_axes
from wardround.prediction.session import predictions


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    return save_nifti(
        tmp_path / "scan.nii", ball((14, 12, 10), np.array([7.0, 6, 5]), 3, np.eye(4)), np.eye(4)
    )


class Leaning(Threshold):
    """Looks one voxel to the right of where it should."""

    def _output(self, x: Tensor) -> Output:
        return Output(logits=torch.roll(super()._output(x).logits, 1, dims=2))


class Dropping(Threshold):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout3d(0.5)

    def _output(self, x: Tensor) -> Output:
        self.shapes.append(tuple(x.shape))
        return Output(logits=20 * (self.drop(torch.ones_like(x)) * x - self.level))


def test_flips_are_averaged_by_hand() -> None:
    image = torch.randn(1, 6, 5, 4)
    model = Leaning()
    found = Predictor([trained(model=model)], flips=True).look(image)
    passes = []
    for axes in flipped_axes(3):
        turned = torch.flip(image, axes) if axes else image
        logits = model(turned[None])[0]
        passes.append(torch.flip(logits, axes) if axes else logits)
    assert len(passes) == 8
    expected = torch.sigmoid(torch.stack(passes).mean(0))[0]
    assert torch.allclose(found.probabilities[1], expected, atol=1e-6)
    assert found.kind == "entropy" and found.epistemic is None  # mirror images are one pass, not samples


def test_dropout_is_off_unless_asked_and_the_same_every_time(scan: Path) -> None:
    plain = predictions(predictor(model=Dropping()), [scan])[0]
    assert plain.kind == "entropy" and not plain.uncertainty
    options = {"uncertainty": "dropout", "samples": 5}
    model = Dropping()
    torch.manual_seed(1)
    first, again = (predictions(predictor(model=model, options=options), [scan])[0] for _ in range(2))
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))  # the caller's random numbers are left alone
    assert len(model.shapes) == 10
    assert first.kind == "dropout" and set(first.uncertainty) == {"total", "epistemic", "aleatoric"}
    assert first.uncertainty["epistemic"].max() > 0.01
    assert np.array_equal(first.uncertainty["total"], again.uncertainty["total"])


def test_the_best_kind_is_chosen_and_others_are_refused_with_what_there_is() -> None:
    assert predictor(model=Dropping(), options={"uncertainty": "auto"}).kind == "dropout"
    assert predictor(options={"uncertainty": "auto"}).kind == "entropy"
    with pytest.raises(ConfigError, match="does not offer. It has: entropy"):
        predictor(options={"uncertainty": "samples"})
    with pytest.raises(ConfigError, match="needs further models"):
        predictor(options={"uncertainty": "ensemble"})
    with pytest.raises(ConfigError, match="give 1 or more"):
        predictor(options={"samples": 0})


def test_ensemble_is_the_mean_of_probabilities(scan: Path) -> None:
    models = [trained(model=Threshold(level=level)) for level in (0.4, 0.6)]
    options: dict[str, Any] = {"uncertainty": "auto", "probabilities": True}
    together = predictions(Predictor(models, **options), [scan])[0]
    apart = [predictions(Predictor([model], **options), [scan])[0] for model in models]
    assert together.kind == "ensemble"
    mean = np.mean([entry.probabilities for entry in apart], axis=0)
    assert np.allclose(together.probabilities, mean, atol=1e-6)
    assert set(together.uncertainty) == {"total", "epistemic", "aleatoric"}


def test_runs_prepared_otherwise_cannot_join() -> None:
    other = trained(prepare={"spacing": [2.0, 2.0, 2.0]}, folder=Path("runs/other"))
    with pytest.raises(ConfigError, match="runs/other cannot join .* their prepare differ"):
        Predictor([trained(), other])


# Warnings


def quantiles(**limits: float) -> dict[str, Any]:
    return {"temperature": 1.0, "quantiles": {"entropy": {"case": {**limits, "count": 40}}}}


def test_scan_unlike_the_training_hospitals_is_flagged_with_the_number(scan: Path) -> None:
    doubt = predictions(predictor(), [scan])[0].doubt
    for limits, words in (
        ({"q95": doubt / 2, "q99": doubt * 2}, "95 % of their 40 validation scans"),
        ({"q95": doubt / 3, "q99": doubt / 2}, "99 % of their 40 validation scans"),
    ):
        (warning,) = predictions(predictor(calibration=quantiles(**limits)), [scan])[0].warnings
        assert words in warning and f"{doubt:.3g} lies beyond {doubt / 2:.3g}" in warning
    assert not predictions(predictor(calibration=quantiles(q95=2 * doubt, q99=3 * doubt)), [scan])[0].warnings
    elsewhere = {"temperature": 1.0, "quantiles": {"dropout": {"case": {"q95": 0.0, "q99": 0.0}}}}
    assert not predictions(predictor(calibration=elsewhere), [scan])[0].warnings  # another kind of number


def test_temperature_softens_probabilities_and_keeps_the_mask(scan: Path) -> None:
    options = {"probabilities": True}
    cold = predictions(predictor(options=options), [scan])[0]
    warm = predictions(predictor(options=options, calibration={"temperature": 4.0}), [scan])[0]
    assert np.array_equal(cold.mask, warm.mask)
    assert cold.probabilities is not None and warm.probabilities is not None
    assert warm.probabilities[1].max() < cold.probabilities[1].max()


def test_empty_structure_and_far_spacing_are_said(tmp_path: Path) -> None:
    dark = save_nifti(tmp_path / "dark.nii", np.zeros((8, 8, 8), dtype=np.float32), np.diag([1.0, 1, 9, 1]))
    model = predictor(spacing=((0.9, 0.9, 2.0), (1.1, 1.1, 4.0)))
    warnings = predictions(model, [dark])[0].warnings
    assert "no voxel is 'lesion'" in warnings
    assert any("1 x 1 x 9 mm are far" in warning for warning in warnings)


def test_spacing_is_compared_along_the_prepared_axes(tmp_path: Path) -> None:
    """A scan stored with its slices along the first axis is no stranger."""
    affine = np.array([[0, 0, 1.0, 0], [1.0, 0, 0, 0], [0, 3.0, 0, 0], [0, 0, 0, 1]])
    scan = save_nifti(tmp_path / "scan.nii", ball((12, 12, 12), np.array([6.0, 6, 18]), 5, affine), affine)
    model = predictor(spacing=((0.9, 0.9, 2.0), (1.1, 1.1, 4.0)))
    assert not predictions(model, [scan])[0].warnings


def test_largest_component_is_kept_where_the_run_asked_for_it(tmp_path: Path) -> None:
    values = np.zeros((16, 16, 16), dtype=np.float32)
    values[2:8, 2:8, 2:8] = values[12:14, 12:14, 12:14] = 1
    scan = save_nifti(tmp_path / "scan.nii", values, np.eye(4))
    whole = predictions(predictor(), [scan])[0]
    largest = predictions(predictor(evaluate={"postprocess": "largest_component"}), [scan])[0]
    assert whole.sizes["lesion"]["voxels"] == 216 + 8
    assert largest.sizes["lesion"]["voxels"] == 216
