"""Any model on any labelled set: numbers by hand, classes by name, the run left alone."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import run

from prediction.threshold import ball, predictor, save_nifti
from wardround import cli
from wardround.cli import common
from wardround.data.federation_file import write
from wardround.data.listing import Entry
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.proposing.proposal import propose
from wardround.errors import ConfigError, DataError
from wardround.prediction.evaluating import evaluate, evaluate_case, find_held_out
from wardround.prediction.labelled import match_classes, open_labelled


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
    report = evaluate(home / "run", home / "data", output=tmp_path / "out")
    assert digest(home / "run") == before
    assert report.num_cases == 8 and not report.problems
    rows = list(csv.DictReader((tmp_path / "out" / "cases.csv").read_text().splitlines()))
    assert {row["client"] for row in rows} == {"north", "east"} and len(rows) == 8
    means = [np.mean([float(r["dice"]) for r in rows if r["client"] == c]) for c in ("north", "east")]
    assert report.evaluation.value("dice") == pytest.approx(np.mean(means))
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    about = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert about["cases"] == 8 and about["grid"] == "the scan's own"
    with pytest.raises(ConfigError, match="holds an evaluation"):
        evaluate(home / "run", home / "data", output=tmp_path / "out")
    with pytest.raises(ConfigError, match="holds a run"):
        evaluate(home / "run", home / "data", output=home / "run")


def test_warnings_are_kept_with_the_cases_they_are_about(home: Path, tmp_path: Path) -> None:
    far = Path(shutil.copytree(home / "run", tmp_path / "run"))
    facts = json.loads((far / "preparation.json").read_text())
    (far / "preparation.json").write_text(json.dumps({**facts, "spacing": [[0.01, 0.01], [0.02, 0.02]]}))
    evaluate(far, home / "data", output=tmp_path / "out", report=False)
    about = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert {centre: len(found) for centre, found in about["warnings"].items()} == {"east": 4, "north": 4}
    assert "far from those of the training scans" in next(iter(about["warnings"]["east"].values()))[-1]


@pytest.mark.parametrize(("form", "unit"), [("png", "px"), ("nifti", "mm")])
def test_distances_of_pictures_are_in_pixels(form: Any, unit: str, tmp_path: Path) -> None:
    evaluated = {"metrics": ["dice", "hd95"]}
    made = run(tmp_path / "run", rounds=1, evaluate=evaluated)
    phantom_files.write(PhantomSettings(size=16, cases=2, hospitals=1), tmp_path / "data", form, seed=5)
    report = evaluate(tmp_path / "run", tmp_path / "data", output=tmp_path / "out", report=False)
    assert made.table.columns[4] == "HD95 (mm)" and report.table.columns[4] == f"HD95 ({unit})"
    assert json.loads((tmp_path / "out" / "result.json").read_text())["lengths"] == unit


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
    row = evaluate_case(model, entry, {"lesion": (200,)})
    assert row["regions"]["lesion"]["dice"] == pytest.approx(2 * 48 / (64 + 64))
    assert row["regions"]["lesion"]["hd95"] == pytest.approx(2.0)  # one voxel along the axis of 2 mm
    mapped = replace(entry, labels={"lesion": (200,)})  # its source has values of its own
    assert evaluate_case(model, mapped, {"lesion": (1,)}) == row


def test_image_and_label_elsewhere_are_refused(tmp_path: Path) -> None:
    values = ball((8, 8, 8), np.array([4.0, 4, 4]), 2, np.eye(4))
    image = save_nifti(tmp_path / "a.nii", values, np.eye(4))
    far = save_nifti(tmp_path / "l.nii", values.astype(np.uint8), np.diag([1.0, 1, 2, 1]))
    small = save_nifti(tmp_path / "s.nii", values[:6].astype(np.uint8), np.eye(4))
    with pytest.raises(DataError, match="different affines"):
        evaluate_case(predictor(), Entry("c", "a", (image,), far, "a"), {"lesion": (1,)})
    with pytest.raises(DataError, match="8x8x8 but label is 6x8x8"):
        evaluate_case(predictor(), Entry("c", "a", (image,), small, "a"), {"lesion": (1,)})


def test_voxels_to_ignore_count_in_no_score(tmp_path: Path) -> None:
    values = np.zeros((8, 8, 8), dtype=np.float32)
    values[2:6, 2:6, 2:6] = 1
    image = save_nifti(tmp_path / "a.nii", values, np.eye(4))
    values[:4] = 9  # half of the scan, and of what is predicted
    entry = Entry("c", "a", (image,), save_nifti(tmp_path / "l.nii", values.astype(np.uint8), np.eye(4)), "a")
    scores = evaluate_case(predictor(), entry, {"lesion": (1,)}, (9,))["regions"]
    assert [found["dice"] for found in scores.values()] == [1.0]


def test_classes_go_by_name_then_by_order() -> None:
    wanted = {"disc": (1,), "cup": (2,)}
    assert match_classes(wanted, {"Cup": (255,), "disc": (128,)}, Path("d"))[0] == {
        "disc": (128,),
        "cup": (255,),
    }
    found, notes = match_classes(wanted, {"a": (5,), "b": (6,)}, Path("d"))
    assert found == {"disc": (5,), "cup": (6,)} and "a is disc, b is cup" in notes[0]
    with pytest.raises(ConfigError, match="trained on disc, cup"):
        match_classes(wanted, {"a": (5,)}, Path("d"))


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
    assert "4 predicted, 1 failed" in out and "mm²" in out
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
        (["--client", "nobody"], "has nothing of a client 'nobody'"),
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
    assert code == 0 and "north" in out and "8 cases evaluated, 0 failed" in out
    assert not (tmp_path / "e" / "report.html").exists()


def test_files_of_somebody_else_are_not_replaced_unasked(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: precious")
    with pytest.raises(ConfigError, match=r"holds config\.yaml.*--overwrite"):
        evaluate(home / "run", home / "data", output=tmp_path, report=False)
    assert (tmp_path / "config.yaml").read_text() == "name: precious"


def test_what_no_check_foresaw_stops_one_case_only(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def odd(predictor: Any, entry: Entry, *given: Any) -> dict[str, Any]:
        if entry.name == "north-001":
            raise ValueError("strides are negative.")
        return evaluate_case(predictor, entry, *given)

    monkeypatch.setattr("wardround.prediction.evaluating.evaluate_case", odd)
    report = evaluate(home / "run", home / "data", output=tmp_path / "out", report=False)
    assert report.num_cases == 7
    assert ["strides are negative" in problem.reason for problem in report.problems] == [True]


# Cases the model has seen

Names = set[tuple[str, str]]
SPLITS = {"by": "ratios", "seed": 7}  # the list of the data fixes others


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run was started: its data, its federation.yaml, and runs/mine, with paths as people give them."""
    folder = tmp_path_factory.mktemp("started")
    phantom_files.write(PhantomSettings(size=16, cases=8, hospitals=2), folder / "data", "nifti", seed=5)
    write(propose([folder / "data"]).file, folder / "federation.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(Path("runs/mine"), rounds=1, data={"federation": "federation.yaml", "splits": SPLITS})
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def cases_in(folder: Path) -> Names:
    rows = csv.DictReader((folder / "cases.csv").read_text().splitlines())
    return {(row["client"], row["case"]) for row in rows}


def evaluate_on(run: Path, data: Path, folder: Path, **options: Any) -> tuple[Names, list[str]]:
    found = evaluate(run, data, output=folder, report=False, **options)
    return cases_in(folder), found.notes


def changed_seed(run: Path, seed: int) -> None:
    text = (run / "config.yaml").read_text()
    assert text.count("    seed: 7\n") == 1
    (run / "config.yaml").write_text(text.replace("    seed: 7\n", f"    seed: {seed}\n"))


def test_the_test_cases_are_those_of_the_run_from_any_folder(started: Path, elsewhere: Path) -> None:
    file, mine = started / "federation.yaml", started / "runs" / "mine"
    tests = cases_in(mine)
    plain = {(entry.client, entry.name) for entry in open_labelled(file, "test").entries}
    assert len(tests) < 16 and tests != plain  # the run's own seed counts
    assert evaluate_on(mine, file, elsewhere / "out") == (tests, [])
    beside = Path(os.path.relpath(mine)), Path(os.path.relpath(file))
    assert evaluate_on(*beside, elsewhere / "beside") == (tests, [])
    assert evaluate_on(mine, file, elsewhere / "asked", split="test") == (tests, [])
    about = json.loads((elsewhere / "asked" / "evaluation.json").read_text())
    assert about["split"] == "test"


def test_cases_the_model_has_seen_are_left_out_wherever_they_lie(started: Path, elsewhere: Path) -> None:
    mine = started / "runs" / "mine"
    tests = cases_in(mine)
    copied = Path(shutil.copytree(started / "data", elsewhere / "copied"))
    write(propose([copied]).file, elsewhere / "federation.yaml")
    places = {"folder": started / "data", "copy": copied, "file": elsewhere / "federation.yaml"}
    for name, data in places.items():
        names, notes = evaluate_on(mine, data, elsewhere / name)
        assert names == tests
        assert [f"{16 - len(tests)} of 16 cases" in note and "left out" in note for note in notes] == [True]
        assert json.loads((elsewhere / name / "evaluation.json").read_text())["split"] == "unseen"


def test_cases_the_model_has_seen_are_evaluated_if_asked_with_a_note(started: Path, elsewhere: Path) -> None:
    mine = started / "runs" / "mine"
    seen = 16 - len(cases_in(mine))
    names, notes = evaluate_on(mine, started / "federation.yaml", elsewhere / "all", split="all")
    assert len(names) == 16
    assert [f"{seen} of 16 cases are ones the model has seen" in note for note in notes] == [True]


def test_a_set_of_nothing_new_is_a_sentence(started: Path, elsewhere: Path) -> None:
    mine = started / "runs" / "mine"
    copied = Path(shutil.copytree(started / "data" / "north", elsewhere / "north"))
    for client, case in cases_in(mine):
        if client == "north":
            for file in copied.rglob(f"{case}*"):
                file.unlink()
    with pytest.raises(DataError, match="all .* labelled cases are ones the model has seen"):
        evaluate(mine, copied, output=elsewhere / "out")


def test_other_data_are_evaluated_whole_even_where_names_are_the_same(started: Path, elsewhere: Path) -> None:
    """The run's federation.yaml counts from where it started, not from where another of that name lies."""
    phantom_files.write(PhantomSettings(size=16, cases=8, hospitals=2), elsewhere / "data", "nifti", seed=6)
    write(propose([elsewhere / "data"]).file, elsewhere / "federation.yaml")
    names, notes = evaluate_on(started / "runs" / "mine", Path("federation.yaml"), elsewhere / "out")
    assert len(names) == 16
    assert ["have the client and name of cases the model has seen" in note for note in notes] == [True]


def test_a_run_that_was_moved_knows_its_data_by_the_test_cases(started: Path, elsewhere: Path) -> None:
    moved = Path(shutil.copytree(started / "runs" / "mine", elsewhere / "moved"))
    names, notes = evaluate_on(moved, started / "federation.yaml", elsewhere / "out")
    assert names == cases_in(moved)
    assert ["is taken for the data" in note for note in notes] == [True]
    (moved / "cases.csv").unlink()
    names, notes = evaluate_on(moved, started / "federation.yaml", elsewhere / "again")
    assert len(names) == 16
    assert ["is unknown" in note for note in notes] == [True]


def test_test_cases_that_were_none_in_the_run_are_noted(started: Path, elsewhere: Path) -> None:
    whole = Path(shutil.copytree(started, elsewhere / "whole"))
    changed_seed(whole / "runs" / "mine", 8)
    names, notes = evaluate_on(whole / "runs" / "mine", whole / "federation.yaml", elsewhere / "out")
    new = len(names - cases_in(started / "runs" / "mine"))
    assert new
    assert [f"{new} of {len(names)} cases were not test cases" in note for note in notes] == [True]


def test_an_ensemble_has_seen_what_any_of_its_models_has(started: Path, elsewhere: Path) -> None:
    whole = Path(shutil.copytree(started, elsewhere / "whole"))
    other = Path(shutil.copytree(whole / "runs" / "mine", whole / "runs" / "other"))
    changed_seed(other, 9)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("runs/mine", "runs/other"))
    (other / "cases.csv").unlink()
    file = whole / "federation.yaml"
    alone, _ = evaluate_on(other, file, elsewhere / "alone")
    both, notes = evaluate_on(whole / "runs" / "mine", file, elsewhere / "both", ensemble=[other])
    tests = cases_in(started / "runs" / "mine")
    assert both == alone & tests < tests
    assert ["are left out" in note for note in notes] == [True]


def test_a_folder_of_a_runs_cases_is_known_without_its_federation_file(
    tmp_path: Path, elsewhere: Path
) -> None:
    phantom_files.write(PhantomSettings(size=16, cases=8, hospitals=2), tmp_path / "data", "png", seed=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        Path("federation.yaml").write_text("sources: [{path: data}]\nlabels: {lesion: [1]}\n")
        run(Path("runs/plain"), rounds=1, data={"federation": "federation.yaml"})
    plain = tmp_path / "runs" / "plain"
    tests = {case for client, case in cases_in(plain) if client == "north"}
    assert evaluate_on(plain, tmp_path / "data", elsewhere / "out")[0] == cases_in(plain)
    names, notes = evaluate_on(plain, tmp_path / "data" / "north", elsewhere / "north")
    assert {case for _, case in names} == tests
    assert f"{8 - len(tests)} of 8 cases" in notes[0] and "left out" in notes[0]


def test_centres_that_the_run_held_out_are_marked_and_not_in_the_mean(tmp_path: Path) -> None:
    phantom_files.write(PhantomSettings(size=16, cases=6, hospitals=3), tmp_path / "data", "nifti", seed=5)
    file = propose([tmp_path / "data"]).file
    write(
        file.model_copy(update={"held_out": ("south",), "clients": ("north", "east")}), tmp_path / "data.yaml"
    )
    made = run(tmp_path / "run", rounds=1, data={"federation": str(tmp_path / "data.yaml")})
    report = evaluate(tmp_path / "run", tmp_path / "data.yaml", output=tmp_path / "out")
    labels = [row[0] for row in report.table.rows]
    again = (tmp_path / "out" / "report.html").read_text()

    assert report.evaluation.held_out == made.test.held_out == ("south",)
    assert "south (held out)" in labels and "south" not in labels and "south (held out)" in again
    scores = {name: entry.mean for name, entry in report.evaluation.clients["dice"].items()}
    assert report.evaluation.value("dice") == pytest.approx((scores["north"] + scores["east"]) / 2)
    assert "on each scan's own grid; a run's own test is on the prepared one" in report.table.caption


def test_centres_elsewhere_are_held_out_where_others_were_trained_at(home: Path) -> None:
    trained = ["north", "east", "south"]  # of the phantom run

    assert find_held_out([home / "run"], trained) == set()
    assert find_held_out([home / "run"], ["north", "new"]) == {"new"}
    assert find_held_out([home / "run"], ["new", "newer"]) == set()  # nothing is known of them


def test_a_centre_is_scored_in_what_it_annotates(tmp_path: Path) -> None:
    organs = {"ventricles": [1], "lesion": [2]}
    made = PhantomSettings(size=16, cases=4, hospitals=2, organs=tuple(organs))
    phantom_files.write(made, tmp_path / "data", "png", seed=5)
    plain = {"sources": [{"path": "data"}], "labels": organs}
    path = tmp_path / "federation.yaml"
    path.write_text(json.dumps(plain))
    run(tmp_path / "run", data={"federation": str(path)}, rounds=1)
    path.write_text(json.dumps({**plain, "annotates": {"north": ["lesion"]}}))
    evaluate(tmp_path / "run", path, output=tmp_path / "out", split="all", report=False)
    with (tmp_path / "out" / "cases.csv").open() as file:
        rows = list(csv.DictReader(file))

    scored = {name: {row["region"] for row in rows if row["client"] == name} for name in ("east", "north")}
    assert scored == {"east": set(organs), "north": {"lesion"}}
    path.write_text(json.dumps({**plain, "annotates": {"nrth": ["lesion"]}}))
    with pytest.raises(ConfigError, match="annotates names client 'nrth'"):
        evaluate(tmp_path / "run", path, output=tmp_path / "again", report=False)
