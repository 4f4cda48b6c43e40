"""Inputs: every way to name scans, every wrong one a sentence, the others still done and counted."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from prediction.threshold import ball, predictor, save_nifti
from wardround.errors import ConfigError, DataError
from wardround.prediction.inputs import InputProblem, Layout, find_scans
from wardround.prediction.session import Report, predict_all, predict_into

SHAPE = (12, 12, 12)


def scan(path: Path, channels: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = ball(SHAPE, np.array([6.0, 6, 6]), 3, np.eye(4))
    stacked = np.stack([values] * channels, axis=-1) if channels > 1 else values
    return save_nifti(path, stacked, np.eye(4))


def names(found: object) -> list[str]:
    return [scan.name for scan in found.scans]  # type: ignore[attr-defined]


# Wrong input


def truncated(folder: Path) -> Path:
    path = folder / "cut.nii.gz"
    whole = gzip.compress(nibabel.Nifti1Image(np.random.rand(9, 9, 9), np.eye(4)).to_bytes())
    path.write_bytes(whole[: len(whole) // 2])
    return path


def text(folder: Path) -> Path:
    path = folder / "scan.nii.gz"
    path.write_text("this is no scan")
    return path


def plain_text(folder: Path) -> Path:
    path = folder / "letter.txt"
    path.write_text("Dear colleague,\nthank you for the scan.\n")
    return path


def five_axes(folder: Path) -> Path:
    return save_nifti(folder / "five.nii", np.zeros((4, 4, 4, 3, 2), dtype=np.float32), np.eye(4))


def other_channels(folder: Path) -> Path:
    return save_nifti(folder / "two.nii", np.zeros((*SHAPE, 2), dtype=np.float32), np.eye(4))


def other_dimensions(folder: Path) -> Path:
    return save_nifti(folder / "flat.nii", np.zeros((12, 12), dtype=np.float32), np.eye(4))


def not_finite(folder: Path) -> Path:
    return save_nifti(folder / "nan.nii", np.full(SHAPE, np.nan, dtype=np.float32), np.eye(4))


def odd_ending(folder: Path) -> Path:
    path = folder / "scan.mgz"
    path.write_bytes(b"ObjectType = Image")
    return path


WRONG = {
    "missing": (lambda folder: folder / "nowhere.nii.gz", "does not exist"),
    "text": (text, "cannot be read|not a NIfTI"),
    "plain text": (plain_text, "line 1 .'Dear colleague,'. is not a file"),
    "5D": (five_axes, "5 axes"),
    "channels": (other_channels, "2 channels, but this run needs one channel"),
    "dimensions": (other_dimensions, "is 2D, but this run was trained on 3D"),
    "truncated": (truncated, "truncated|ends too early|end-of-stream"),
    "not finite": (not_finite, "NaN"),
    "ending": (odd_ending, "not a format that wardround reads"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_input_is_a_sentence_and_the_others_are_done(kind: str, tmp_path: Path) -> None:
    make, sentence = WRONG[kind]
    (tmp_path / "bad").mkdir()
    bad = make(tmp_path / "bad")
    good = [scan(tmp_path / f"good{number}.nii.gz") for number in (1, 2)]
    report = predict_into(predictor(), [good[0], bad, good[1]], tmp_path / "out")
    assert sorted(report.done) == ["good1.nii.gz", "good2.nii.gz"]
    (problem,) = report.problems
    assert bad.name in problem.reason
    assert "\n" not in problem.reason
    import re

    assert re.search(sentence, problem.reason), problem.reason
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"good1.nii.gz", "good2.nii.gz", "predictions.json"}


def test_existing_output_is_kept_unless_asked(tmp_path: Path) -> None:
    path, other = scan(tmp_path / "a.nii.gz"), scan(tmp_path / "b.nii.gz")
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.nii.gz").write_bytes(b"mine")
    report = predict_into(predictor(), [path, other], out)
    assert list(report.done) == ["b.nii.gz"]
    assert "--overwrite" in report.problems[0].reason
    assert (out / "a.nii.gz").read_bytes() == b"mine"
    report = predict_into(predictor(), [path], out, overwrite=True)
    assert not report.problems
    assert (out / "a.nii.gz").read_bytes() != b"mine"
    import json

    known = json.loads((out / "predictions.json").read_text())
    assert set(known["scans"]) == {"a.nii.gz", "b.nii.gz"}  # the earlier one is still told


def test_a_scan_is_never_replaced_by_its_mask(tmp_path: Path) -> None:
    path = scan(tmp_path / "a.nii.gz")
    before = path.read_bytes()
    report = predict_into(predictor(), [path], tmp_path, overwrite=True)
    assert "the scan itself" in report.problems[0].reason
    assert path.read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        predict_into(predictor(), [scan(tmp_path / "a.nii")], closed / "out")


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be written"):
        predict_into(predictor(), [scan(tmp_path / "a.nii")], tmp_path / "out")


def test_foreign_predictions_json_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "predictions.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="not written by wardround"):
        predict_into(predictor(), [scan(tmp_path / "a.nii")], tmp_path / "out")


# Names


def test_two_scans_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [scan(tmp_path / folder / "scan.nii.gz") for folder in ("monday", "tuesday")]
    report = predict_into(predictor(), paths, tmp_path / "out")
    assert not report.problems
    assert sorted(report.done) == ["monday_scan.nii.gz", "tuesday_scan.nii.gz"]


def test_names_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    paths = [scan(tmp_path / "x" / "scan.nii"), scan(tmp_path / "x" / "scan.nii.gz")]
    report = predict_into(predictor(), paths, tmp_path / "out")
    assert not report.done
    assert len(report.problems) == 2
    assert "two folders" in report.problems[0].reason


def test_a_scan_named_twice_is_predicted_once(tmp_path: Path) -> None:
    path = scan(tmp_path / "scan.nii.gz")
    report = predict_into(predictor(), [path, tmp_path, path], tmp_path / "out")
    assert list(report.done) == ["scan.nii.gz"]


def test_folder_list_and_hidden_files(tmp_path: Path) -> None:
    for name in ("b.nii.gz", "a.nii", ".hidden.nii"):
        scan(tmp_path / "scans" / name)
    (tmp_path / "scans" / "notes.txt").write_text("nothing")
    listed = tmp_path / "list.txt"
    listed.write_text("# scans\nscans/a.nii\n\nscans/nowhere.nii\n")
    assert names(find_scans([tmp_path / "scans"], Layout(1), tmp_path)) == ["a.nii", "b.nii.gz"]
    found = find_scans([listed], Layout(1), tmp_path)
    assert names(found) == ["a.nii"]
    assert "line 4" in found.problems[0].reason


def test_folder_of_folders(tmp_path: Path) -> None:
    scan(tmp_path / "set" / "case1" / "t1.nii.gz")
    scan(tmp_path / "set" / "case2" / "t1.nii.gz")
    scan(tmp_path / "set" / "labels" / "t1.nii.gz")
    found = find_scans([tmp_path / "set"], Layout(1), tmp_path)
    assert names(found) == ["case1_t1.nii.gz", "case2_t1.nii.gz"]


def test_a_folder_of_hospital_folders_takes_the_names_that_differ(tmp_path: Path) -> None:
    for hospital in ("north", "south"):
        scan(tmp_path / "pic" / hospital / "images" / "p3.nii.gz")
        scan(tmp_path / "pic" / hospital / "images" / f"{hospital}9.nii.gz")
    found = find_scans([tmp_path / "pic"], Layout(1), tmp_path)
    assert not found.problems
    assert names(found) == ["north9.nii.gz", "north_p3.nii.gz", "south_p3.nii.gz", "south9.nii.gz"]


def test_as_many_folders_as_are_needed_come_in_front(tmp_path: Path) -> None:
    folders = ("a/x/images", "a/y/images", "b/x/images", "b/x/deep/images")
    found = find_scans([scan(tmp_path / folder / "p.nii") for folder in folders], Layout(1), tmp_path)
    assert not found.problems
    assert names(found) == ["a_x_p.nii", "a_y_p.nii", "b_x_p.nii", "x_deep_p.nii"]


def test_one_pair_that_cannot_be_told_apart_does_not_hinder_the_others(tmp_path: Path) -> None:
    paths = [scan(tmp_path / name) for name in ("x/s.nii", "x/s.nii.gz", "y/s.nii")]
    found = find_scans(paths, Layout(1), tmp_path)
    assert names(found) == ["y_s.nii"]
    assert ["two folders" in problem.reason for problem in found.problems] == [True, True]


def test_empty_folder_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = find_scans([tmp_path / "empty"], Layout(1), tmp_path)
    assert "holds no scans" in found.problems[0].reason


# Channels


def test_channels_in_several_files_numbered_or_named(tmp_path: Path) -> None:
    for case in ("p1", "p2"):
        for number in range(3):
            scan(tmp_path / "numbered" / f"{case}_{number:04d}.nii.gz")
        for name in ("FLAIR", "t1", "t2"):
            scan(tmp_path / "named" / f"{case}_{name}.nii.gz")
    layout = Layout(3, ("flair", "t1", "t2"))
    for folder in ("numbered", "named"):
        found = find_scans([tmp_path / folder], layout, tmp_path)
        assert names(found) == ["p1.nii.gz", "p2.nii.gz"]
        assert all(len(entry.files) == 3 for entry in found.scans)
    first = find_scans([tmp_path / "named"], layout, tmp_path).scans[0]
    assert [file.name for file in first.files] == ["p1_FLAIR.nii.gz", "p1_t1.nii.gz", "p1_t2.nii.gz"]
    report = predict_into(predictor(in_channels=3), [tmp_path / "numbered"], tmp_path / "out")
    assert sorted(report.done) == ["p1.nii.gz", "p2.nii.gz"] and not report.problems


def test_channels_in_one_file_and_in_a_list(tmp_path: Path) -> None:
    whole = scan(tmp_path / "whole.nii.gz", channels=3)
    for name in ("x_a", "x_b", "x_c"):
        scan(tmp_path / f"{name}.nii")
    (tmp_path / "list.txt").write_text("x_a.nii\tx_b.nii\tx_c.nii\n")
    report = predict_into(predictor(in_channels=3), [whole, tmp_path / "list.txt"], tmp_path / "out")
    assert not report.problems
    assert sorted(report.done) == ["whole.nii.gz", "x.nii"]
    assert nibabel.load(tmp_path / "out" / "whole.nii.gz").shape == SHAPE


def test_missing_channel_says_what_is_expected(tmp_path: Path) -> None:
    for number in (0, 2):
        scan(tmp_path / "c" / f"p_{number:04d}.nii.gz")
    lone = scan(tmp_path / "lone.nii.gz")
    report = predict_into(predictor(in_channels=3), [tmp_path / "c", lone], tmp_path / "out")
    assert not report.done
    for problem in report.problems:
        assert "needs 3 channels" in problem.reason
        assert "<case>_0000 to <case>_0002" in problem.reason


def test_colour_pictures_have_three_channels(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((20, 24, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    Image.fromarray(np.zeros((20, 24), dtype=np.uint8)).save(tmp_path / "grey.png")
    report = predict_into(predictor(2, in_channels=3), [tmp_path], tmp_path / "out")
    assert list(report.done) == ["a.png"]
    assert "1 channel, but this run needs 3 channels" in report.problems[0].reason


# DICOM


def test_dicom_series_becomes_a_nifti_mask(tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    from data.dicom.test_dicom import stack  # the files a scanner writes

    stack(pytest.importorskip("pydicom"), tmp_path / "study")
    report = predict_into(predictor(), [tmp_path / "study"], tmp_path / "out")
    assert not report.problems, report.problems
    (name,) = report.done
    assert name.endswith(".nii.gz")
    assert nibabel.load(tmp_path / "out" / name).get_data_dtype() == np.uint8


# Files of one session


def test_a_map_and_a_mask_of_one_name_never_replace_each_other(tmp_path: Path) -> None:
    scan(tmp_path / "in" / "x.nii.gz")
    scan(tmp_path / "in" / "x_uncertainty.nii.gz")
    asked = predictor(options={"uncertainty": "entropy"})
    report = predict_into(asked, [tmp_path / "in"], tmp_path / "out", overwrite=True)
    assert list(report.done) == ["x.nii.gz"]
    assert "would replace a file of" in report.problems[0].reason
    assert nibabel.load(tmp_path / "out" / "x_uncertainty.nii.gz").get_data_dtype() == np.float32


def test_a_map_never_replaces_another_scan(tmp_path: Path) -> None:
    kept = scan(tmp_path / "out" / "x_uncertainty.nii.gz")
    before = kept.read_bytes()
    inputs = [scan(tmp_path / "in" / "x.nii.gz"), kept]
    asked = predictor(options={"uncertainty": "entropy"})
    report = predict_into(asked, inputs, tmp_path / "out", overwrite=True)
    assert len(report.problems) == 2 and kept.read_bytes() == before


def test_what_no_check_foresaw_stops_one_scan_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = predictor()
    infer = asked.infer

    def odd(image: object, name: str = "", watch: object = None) -> object:
        if name.startswith("a"):
            raise ValueError("strides are negative.")
        return infer(image, name, watch)  # type: ignore[arg-type]

    monkeypatch.setattr(asked, "infer", odd)
    inputs = [scan(tmp_path / "a.nii"), scan(tmp_path / "b.nii")]
    report = predict_into(asked, inputs, tmp_path / "out")
    assert list(report.done) == ["b.nii"]
    assert report.problems[0].reason.endswith("a.nii cannot be predicted: strides are negative.")


def test_stopped_half_way_the_masks_there_have_their_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = predictor()
    infer = asked.infer

    def stopped(image: object, name: str = "", watch: object = None) -> object:
        if name.startswith("b"):
            raise KeyboardInterrupt
        return infer(image, name, watch)  # type: ignore[arg-type]

    monkeypatch.setattr(asked, "infer", stopped)
    inputs = [scan(tmp_path / "a.nii"), scan(tmp_path / "b.nii")]
    with pytest.raises(KeyboardInterrupt):
        predict_into(asked, inputs, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.nii", "predictions.json"]
    assert list(json.loads((tmp_path / "out" / "predictions.json").read_text())["scans"]) == ["a.nii"]


def test_a_list_saved_by_windows_and_a_folder_in_a_list(tmp_path: Path) -> None:
    scan(tmp_path / "a.nii")
    (tmp_path / "folder").mkdir()
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.nii\r\nfolder\r\n")
    report = predict_into(predictor(), [tmp_path / "list.txt"], tmp_path / "out")
    assert list(report.done) == ["a.nii"]
    assert "folder is a folder; a list names files" in report.problems[0].reason


def test_two_sentences_about_one_input_are_both_told(tmp_path: Path) -> None:
    told = Report(tmp_path, problems=[InputProblem("x", "One."), InputProblem("x", "Two.")]).as_dict()
    assert told["problems"] == {"x": "One. Two."} and told["failed"] == 2


# The Python interface


def test_in_python_the_first_mistake_is_raised(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        predict_all(predictor(), [tmp_path / "nowhere.nii"])
