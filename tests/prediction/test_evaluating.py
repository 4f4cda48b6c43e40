"""Any model on any labelled set: numbers by hand, classes by name, the run left alone."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import run

from prediction.threshold import ball, predictor, save_nifti
from wardround import cli
from wardround.cli import common
from wardround.config import DataSettings
from wardround.data import phantom_files
from wardround.data.federation_file import write
from wardround.data.init import propose
from wardround.data.listing import Entry
from wardround.data.phantom import PhantomSettings
from wardround.errors import ConfigError, DataError
from wardround.prediction.evaluating import evaluate, holds_training_data, judge, open_labelled, values_of


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluating")
    phantom_files.write(PhantomSettings(size=16, cases=4, hospitals=2), folder / "data", "nifti", seed=5)
    run(folder / "run")
    return folder


def digest(folder: Path) -> str:
    every = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(str(p).encode() + p.read_bytes() for p in every)).hexdigest()


def call(monkeypatch: Any, capsys: Any, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["wardround", *map(str, arguments)])
    for console in (common.out, common.err):
        monkeypatch.setattr(console, "soft_wrap", True)
    with pytest.raises(SystemExit) as ended:
        cli.main()
        raise SystemExit(0)
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_every_case_and_centre_is_in_the_tables_and_the_run_is_unchanged(home: Path, tmp_path: Path) -> None:
    before = digest(home / "run")
    judged = evaluate(home / "run", home / "data", output=tmp_path / "out")
    assert digest(home / "run") == before
    assert judged.num_cases == 8 and not judged.problems
    rows = list(csv.DictReader((tmp_path / "out" / "cases.csv").read_text().splitlines()))
    assert {row["client"] for row in rows} == {"north", "east"} and len(rows) == 8
    means = [np.mean([float(r["dice"]) for r in rows if r["client"] == c]) for c in ("north", "east")]
    assert judged.evaluation.value("dice") == pytest.approx(np.mean(means))
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    about = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert about["cases"] == 8 and about["grid"] == "the scan's own"
    with pytest.raises(ConfigError, match="holds an evaluation"):
        evaluate(home / "run", home / "data", output=tmp_path / "out")
    with pytest.raises(ConfigError, match="holds a run"):
        evaluate(home / "run", home / "data", output=home / "run")


def test_one_case_by_hand(tmp_path: Path) -> None:
    affine = np.diag([-2.0, 1.0, 3.0, 1.0])
    values = np.zeros((10, 10, 10), dtype=np.float32)
    values[2:6, 2:6, 2:6] = 1
    truth = np.zeros((10, 10, 10), dtype=np.uint8)
    truth[3:7, 2:6, 2:6] = 200
    entry = Entry(
        "here", "a", (save_nifti(tmp_path / "a.nii", values, affine),),
        save_nifti(tmp_path / "a_label.nii", truth, affine), "a",
    )  # fmt: skip
    model = predictor(evaluate={"metrics": ["dice", "hd95"]})
    row = judge(model, entry, {"lesion": (200,)})
    assert row["regions"]["lesion"]["dice"] == pytest.approx(2 * 48 / (64 + 64))
    assert row["regions"]["lesion"]["hd95"] == pytest.approx(2.0)  # one voxel along the axis of 2 mm


def test_image_and_label_elsewhere_are_refused(tmp_path: Path) -> None:
    values = ball((8, 8, 8), np.array([4.0, 4, 4]), 2, np.eye(4))
    image = save_nifti(tmp_path / "a.nii", values, np.eye(4))
    far = save_nifti(tmp_path / "l.nii", values.astype(np.uint8), np.diag([1.0, 1, 2, 1]))
    small = save_nifti(tmp_path / "s.nii", values[:6].astype(np.uint8), np.eye(4))
    with pytest.raises(DataError, match="different places"):
        judge(predictor(), Entry("c", "a", (image,), far, "a"), {"lesion": (1,)})
    with pytest.raises(DataError, match="8x8x8 but label is 6x8x8"):
        judge(predictor(), Entry("c", "a", (image,), small, "a"), {"lesion": (1,)})


def test_classes_go_by_name_then_by_order() -> None:
    wanted = {"disc": (1,), "cup": (2,)}
    assert values_of(wanted, {"Cup": (255,), "disc": (128,)}, Path("d"))[0] == {"disc": (128,), "cup": (255,)}
    found, notes = values_of(wanted, {"a": (5,), "b": (6,)}, Path("d"))
    assert found == {"disc": (5,), "cup": (6,)} and "a is disc, b is cup" in notes[0]
    with pytest.raises(ConfigError, match="trained on disc, cup"):
        values_of(wanted, {"a": (5,)}, Path("d"))


def test_splits_are_those_of_the_list(home: Path) -> None:
    every, tests = (open_labelled(home / "data", split).entries for split in ("all", "test"))
    assert len(every) == 8 and 0 < len(tests) < 8
    assert all(entry.split == "test" for entry in tests)


# The command line


def test_predict_prints_a_table_and_counts_what_failed(
    home: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    scans = home / "data" / "north" / "images"
    code, out, err = call(
        monkeypatch, capsys, "predict", home / "run", scans, tmp_path / "no.nii", "-o", tmp_path / "o"
    )
    assert code == 2
    assert "4 predicted, 1 not" in out and "mm²" in out
    assert "no.nii does not exist" in err
    code, out, err = call(
        monkeypatch, capsys, "predict", home / "run", scans, "-o", tmp_path / "o", "--overwrite", "--json"
    )
    assert code == 0 and not err
    assert json.loads(out)["predicted"] == 4


def test_wrong_options_are_a_sentence(home: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    scan = next((home / "data" / "north" / "images").iterdir())
    for extra, words in (
        (["--uncertainty", "samples"], "does not offer"),
        (["--client", "nobody"], "keeps nothing of a client 'nobody'"),
        (["--device", "tpu"], "device"),
        (["--ensemble", str(tmp_path / "nowhere")], "does not exist"),
    ):
        code, _, err = call(monkeypatch, capsys, "predict", home / "run", scan, "-o", tmp_path / "o", *extra)
        assert code == 2 and words in err and "Traceback" not in err


def test_evaluate_prints_the_table_by_centre(
    home: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    code, out, _ = call(
        monkeypatch, capsys, "evaluate", home / "run", home / "data", "-o", tmp_path / "e", "--no-report"
    )
    assert code == 0 and "north" in out and "8 cases judged, 0 could not be" in out
    assert not (tmp_path / "e" / "report.html").exists()


def test_files_of_somebody_else_are_not_replaced_unasked(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: precious")
    with pytest.raises(ConfigError, match=r"holds config\.yaml.*--overwrite"):
        evaluate(home / "run", home / "data", output=tmp_path, report=False)
    assert (tmp_path / "config.yaml").read_text() == "name: precious"


def test_data_the_run_has_seen_are_said_to_be(tmp_path: Path) -> None:
    phantom_files.write(PhantomSettings(size=16, cases=4, hospitals=2), tmp_path / "data", "nifti", seed=5)
    write(propose([tmp_path / "data"]).file, tmp_path / "federation.yaml")
    trained_on = DataSettings.model_validate({"federation": tmp_path / "federation.yaml"})
    assert holds_training_data(tmp_path / "federation.yaml", trained_on)
    assert holds_training_data(tmp_path / "data", trained_on)
    assert holds_training_data(tmp_path / "data" / "north", trained_on)
    assert not holds_training_data(tmp_path / "other", trained_on)
    (tmp_path / "federation.yaml").unlink()
    assert not holds_training_data(tmp_path / "data", trained_on)


def test_what_no_check_foresaw_stops_one_case_only(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def odd(predictor: Any, entry: Entry, classes: Any) -> dict[str, Any]:
        if entry.name == "north-001":
            raise ValueError("strides are negative.")
        return judge(predictor, entry, classes)

    monkeypatch.setattr("wardround.prediction.evaluating.judge", odd)
    judged = evaluate(home / "run", home / "data", output=tmp_path / "out", report=False)
    assert judged.num_cases == 7
    assert ["strides are negative" in problem.reason for problem in judged.problems] == [True]
