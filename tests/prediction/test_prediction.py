"""What is said of a scan: kinds of uncertainty, mirror images, ensembles, warnings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prediction.threshold import Threshold, ball, predictor, save_nifti, trained
from wardround.data.serving.augment import Augmentation
from wardround.errors import ConfigError
from wardround.models.base import Output
from wardround.prediction.predicting import Predictor
from wardround.prediction.session import predict_all, predict_into


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


def test_mirror_images_are_one_pass_and_a_run_tested_with_them_predicts_with_them() -> None:
    image = torch.rand(1, 6, 5, 4)
    plain = Predictor([trained(model=Leaning())]).infer(image)
    mirrored = Predictor([trained(model=Leaning())], tta=True).infer(image)
    as_tested = Predictor([trained(model=Leaning(), evaluate={"tta": True})]).infer(image)

    assert torch.equal(mirrored.probabilities, as_tested.probabilities)
    assert not torch.allclose(mirrored.probabilities, plain.probabilities, atol=0.01)
    assert mirrored.kind == "entropy" and mirrored.epistemic is None  # not samples


def test_a_run_predicts_with_mirror_images_along_the_axes_it_trained_with() -> None:
    image, run = torch.rand(1, 6, 5, 4), trained(model=Leaning())

    def infer(axes: tuple[int, ...] | None) -> Tensor:
        chosen = run.config.model_copy(update={"augmentation": Augmentation(mirror_axes=axes)})
        return Predictor([replace(run, config=chosen)], tta=True).infer(image).probabilities

    assert torch.allclose(infer((1, 2)), Predictor([run]).infer(image).probabilities), (
        "it leans along 0 alone"
    )
    assert torch.allclose(infer((0,)), infer(None), atol=1e-5)
    with pytest.raises(ConfigError, match="images are not mirrored"):
        infer(())


def test_dropout_is_off_unless_asked_and_the_same_every_time(scan: Path) -> None:
    plain = predict_all(predictor(model=Dropping()), [scan])[0]
    assert plain.kind == "entropy" and not plain.uncertainty
    options = {"uncertainty": "dropout", "samples": 5}
    model = Dropping()
    torch.manual_seed(1)
    first, again = (predict_all(predictor(model=model, options=options), [scan])[0] for _ in range(2))
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
    with pytest.raises(ConfigError, match="needs more models"):
        predictor(options={"uncertainty": "ensemble"})
    with pytest.raises(ConfigError, match="give 1 or more"):
        predictor(options={"samples": 0})


def test_ensemble_is_the_mean_of_probabilities(scan: Path) -> None:
    models = [trained(model=Threshold(level=level)) for level in (0.4, 0.6)]
    options: dict[str, Any] = {"uncertainty": "auto", "probabilities": True}
    together = predict_all(Predictor(models, **options), [scan])[0]
    apart = [predict_all(Predictor([model], **options), [scan])[0] for model in models]
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
    doubt = predict_all(predictor(), [scan])[0].doubt
    for limits, words in (
        ({"q95": doubt / 2, "q99": doubt * 2}, "95 % of their 40 validation scans"),
        ({"q95": doubt / 3, "q99": doubt / 2}, "99 % of their 40 validation scans"),
    ):
        (warning,) = predict_all(predictor(calibration=quantiles(**limits)), [scan])[0].warnings
        assert words in warning and f"{doubt:.3g} lies beyond {doubt / 2:.3g}" in warning
    assert not predict_all(predictor(calibration=quantiles(q95=2 * doubt, q99=3 * doubt)), [scan])[0].warnings
    elsewhere = {"temperature": 1.0, "quantiles": {"dropout": {"case": {"q95": 0.0, "q99": 0.0}}}}
    assert not predict_all(predictor(calibration=elsewhere), [scan])[0].warnings  # another kind of number


def few(most: float, count: int = 3) -> dict[str, Any]:
    limits = {"q95": most * 0.99, "q99": most * 0.999, "max": most, "count": count}
    return {"quantiles": {"entropy": {"case": limits}}}


def test_few_validation_scans_have_no_quantiles(scan: Path) -> None:
    doubt = predict_all(predictor(), [scan])[0].doubt
    (warning,) = predict_all(predictor(calibration=few(doubt / 2)), [scan])[0].warnings
    assert "%" not in warning and "unlike" not in warning
    assert f"{doubt:.3g} lies beyond {doubt / 2:.3g}, and so beyond all 3 validation scans" in warning
    assert "one scan in 4" in warning
    assert not predict_all(predictor(calibration=few(doubt * 1.005)), [scan])[0].warnings  # beyond q95 alone
    (warning,) = predict_all(predictor(calibration=few(doubt * 1.005, 20)), [scan])[0].warnings
    assert "95 % of their 20 validation scans" in warning


def test_a_number_is_never_said_to_lie_beyond_itself(scan: Path) -> None:
    doubt = predict_all(predictor(), [scan])[0].doubt
    limits = {"q95": doubt * (1 - 1e-6), "q99": 1.0}
    (warning,) = predict_all(predictor(calibration=quantiles(**limits)), [scan])[0].warnings
    value, limit = warning.partition("uncertainty ")[2].partition(",")[0].split(" lies beyond ")
    assert float(value) > float(limit)


def test_temperature_softens_probabilities_and_keeps_the_mask(scan: Path) -> None:
    options = {"probabilities": True}
    cold = predict_all(predictor(options=options), [scan])[0]
    warm = predict_all(predictor(options=options, calibration={"temperature": 4.0}), [scan])[0]
    assert np.array_equal(cold.mask, warm.mask)
    assert cold.probabilities is not None and warm.probabilities is not None
    assert warm.probabilities[1].max() < cold.probabilities[1].max()


def test_empty_structure_and_far_spacing_are_said(tmp_path: Path) -> None:
    dark = save_nifti(tmp_path / "dark.nii", np.zeros((8, 8, 8), dtype=np.float32), np.diag([1.0, 1, 9, 1]))
    model = predictor(spacing=((0.9, 0.9, 2.0), (1.1, 1.1, 4.0)))
    warnings = predict_all(model, [dark])[0].warnings
    assert "no voxel is 'lesion'" in warnings
    assert any("1 x 1 x 9 mm are far" in warning for warning in warnings)


def test_spacing_is_compared_along_the_prepared_axes(tmp_path: Path) -> None:
    """A scan stored with its slices along the first axis is no stranger."""
    affine = np.array([[0, 0, 1.0, 0], [1.0, 0, 0, 0], [0, 3.0, 0, 0], [0, 0, 0, 1]])
    scan = save_nifti(tmp_path / "scan.nii", ball((12, 12, 12), np.array([6.0, 6, 18]), 5, affine), affine)
    model = predictor(spacing=((0.9, 0.9, 2.0), (1.1, 1.1, 4.0)))
    assert not predict_all(model, [scan])[0].warnings


def test_largest_component_is_kept_where_the_run_asked_for_it(tmp_path: Path) -> None:
    values = np.zeros((16, 16, 16), dtype=np.float32)
    values[2:8, 2:8, 2:8] = values[12:14, 12:14, 12:14] = 1
    scan = save_nifti(tmp_path / "scan.nii", values, np.eye(4))
    whole = predict_all(predictor(), [scan])[0]
    largest = predict_all(predictor(evaluate={"postprocess": "largest_component"}), [scan])[0]
    assert whole.sizes["lesion"]["voxels"] == 216 + 8
    assert largest.sizes["lesion"]["voxels"] == 216


def test_temperature_may_move_the_mask_of_several_passes(scan: Path) -> None:
    """One is sure of lesion, two lean towards background: the cooler, the more the sure one counts."""
    options: dict[str, Any] = {"uncertainty": "dropout", "samples": 3}
    masks = []
    for temperature in (0.05, 20.0):
        model = predictor(model=Hesitant(), options=options, calibration={"temperature": temperature})
        masks.append(predict_all(model, [scan])[0].mask)
    assert not masks[0].any() and masks[1].all()


class Hesitant(Dropping):
    def _output(self, x: Tensor) -> Output:
        self.shapes.append(tuple(x.shape))
        return Output(logits=torch.full_like(x, 3.0 if len(self.shapes) % 3 == 0 else -1.0))


# What a user is told


def test_samples_that_are_not_drawn_are_said() -> None:
    (note,) = predictor(options={"samples": 3}).notes
    assert note == "--samples 3 is not used: uncertainty is entropy here, which does not sample."
    (note,) = predictor(model=Dropping(), options={"samples": 3}).notes
    assert note.endswith("Add --uncertainty dropout.")
    assert not predictor(model=Dropping(), options={"samples": 3, "uncertainty": "auto"}).notes
    assert not predictor().notes


def test_the_runs_own_test_cases_stand_beside_the_uncertainty(
    scan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from wardround.cli.predict import show_predictions

    cases = [{"dice": 0.8, "uncertainty": 0.04}, {"dice": 0.9, "uncertainty": 0.06}, {"dice": None}]
    model = predictor(calibration={"cases": cases})
    show_predictions(predict_into(model, [scan], tmp_path / "out"), model.summarise_test_cases(), "case")
    said = " ".join(capsys.readouterr().out.split())
    assert "Mean over the run's 2 test cases: uncertainty 0.050, Dice 0.850" in said
    assert "does not estimate Dice" in said and "Dice to expect" not in said
    assert predictor().summarise_test_cases() is None
    drawn = predictor(model=Dropping(), calibration={"cases": cases}, options={"uncertainty": "dropout"})
    assert drawn.summarise_test_cases() is None  # their numbers are of one plain pass


# Files of a prediction before


def test_overwriting_removes_the_maps_of_the_earlier_mask_and_nothing_else(
    scan: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    everything = {"uncertainty": "dropout", "samples": 2, "probabilities": True}
    predict_into(predictor(model=Dropping(), options=everything), [scan], out)
    for name in ("scan_notes.nii", "scan_uncertainty.png", "scan_epistemic.txt"):
        (out / name).write_text("mine")
    mine = {"scan_notes.nii", "scan_uncertainty.png", "scan_epistemic.txt", "predictions.json"}

    predict_into(predictor(options={"uncertainty": "entropy"}), [scan], out, overwrite=True)
    assert {path.name for path in out.iterdir()} == {"scan.nii", "scan_uncertainty.nii", *mine}
    predict_into(predictor(), [scan], out, overwrite=True)
    assert {path.name for path in out.iterdir()} == {"scan.nii", *mine}


def test_files_that_predictions_json_does_not_list_or_lists_elsewhere_stay(
    scan: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    predict_into(predictor(), [scan], out)
    (out / "scan_uncertainty.nii").write_text("mine")
    (out / "scan_epistemic.nii").write_text("of another scan")
    (tmp_path / "letter.txt").write_text("mine")
    told = json.loads((out / "predictions.json").read_text())
    told["scans"]["scan.nii"]["files"] |= {"epistemic": "scan_epistemic.nii", "odd": "../letter.txt"}
    told["scans"]["scan_epistemic.nii"] = {"files": {"mask": "scan_epistemic.nii"}}
    (out / "predictions.json").write_text(json.dumps(told))

    report = predict_into(predictor(), [scan], out, overwrite=True)
    assert not report.problems and not report.notes
    assert (tmp_path / "letter.txt").exists()
    assert (out / "scan_uncertainty.nii").exists() and (out / "scan_epistemic.nii").exists()


def test_a_scan_in_the_folder_is_not_taken_for_an_old_map(scan: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    predict_into(predictor(options={"uncertainty": "entropy"}), [scan], out)
    other = out / "scan_uncertainty.nii"
    other.write_bytes(scan.read_bytes())

    predict_into(predictor(), [scan, other], out, overwrite=True)
    assert other.read_bytes() == scan.read_bytes()
