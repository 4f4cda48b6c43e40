"""The run folder: what is in it, and who may write there."""

import csv
import json
from pathlib import Path

import torch
import yaml
from helpers import config, run, settings
from pytest import LogCaptureFixture, raises

import wardround as wr
from wardround.config_file import resolve
from wardround.engine.experiment import Experiment
from wardround.errors import CheckpointError, ConfigError

KEEP = {"learning_rate": 0.01, "state": "keep"}  # so that clients remember something


def test_resuming_with_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path / "run")

    with raises(CheckpointError, match="'batch_size' was 4 when the run began and is 2 now"):
        wr.run(settings(tmp_path / "run", batch_size=2), resume=True)


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with raises(CheckpointError, match="no checkpoint to resume"):
        wr.run(settings(tmp_path / "none"), resume=True)


def test_a_resume_names_the_setting_that_differs(tmp_path: Path) -> None:
    run(tmp_path / "run", rounds=1)
    with raises(
        CheckpointError, match=r"'optimizer\.learning_rate' was 0\.01 when the run began and is 0\.5"
    ):
        wr.run(settings(tmp_path / "run", rounds=1, optimizer={"learning_rate": 0.5}), resume=True)


def test_more_rounds_continue_a_finished_run_to_the_same_bytes(
    tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    whole = run(tmp_path / "whole", rounds=3, optimizer=KEEP)
    run(tmp_path / "run", rounds=2, optimizer=KEEP)

    longer = wr.run(settings(tmp_path / "run", rounds=3, optimizer=KEEP), resume=True)

    assert longer.params_sha256 == whole.params_sha256
    assert len(longer.records) == 3 and longer.summary["rounds"] == 3
    assert "rounds was raised from 2 to 3 when the run was resumed" in caplog.text
    assert [len(record["warnings"]) for record in longer.records] == [0, 0, 1]
    assert wr.load_config(tmp_path / "run/config.yaml").rounds == 3


def test_more_rounds_of_a_schedule_that_ends_are_named(tmp_path: Path) -> None:
    falling = {"learning_rate": 0.01, "schedule": {"name": "polynomial"}}
    run(tmp_path / "run", rounds=1, optimizer=falling)

    longer = wr.run(settings(tmp_path / "run", rounds=2, optimizer=falling), resume=True)

    assert "The polynomial learning rate was laid out for 1 until then" in longer.records[1]["warnings"][0]


def test_fewer_rounds_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "run")

    with raises(CheckpointError, match="rounds was 2 and is 1 now"):
        wr.run(settings(tmp_path / "run", rounds=1), resume=True)


def test_a_run_folder_that_was_moved_resumes_where_it_lies_now(tmp_path: Path) -> None:
    first = run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")

    again = wr.Result.load(tmp_path / "moved")

    assert again.folder == tmp_path / "moved" and again.table.rows == first.table.rows


def test_an_existing_run_is_never_replaced_unasked(tmp_path: Path) -> None:
    run(tmp_path / "run")
    (tmp_path / "run/notes.txt").write_text("mine")

    with raises(ConfigError, match="already holds a run"):
        run(tmp_path / "run")
    wr.run(settings(tmp_path / "run", seed=1), overwrite=True)
    assert (tmp_path / "run/notes.txt").read_text() == "mine"


def test_files_that_are_no_runs_are_not_replaced_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    mine = tmp_path / "run" / "config.yaml"
    mine.write_text("# mine")
    with raises(ConfigError, match="config.yaml is not of a run, and a run would replace it"):
        run(tmp_path / "run")
    assert mine.read_text() == "# mine"
    wr.run(settings(tmp_path / "run", rounds=1), overwrite=True)


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    first = Experiment(config(tmp_path / "run"))
    (tmp_path / "run").mkdir()

    with first.folder.locked(), raises(ConfigError, match="in use by another process"):
        run(tmp_path / "run")


def test_the_run_folder_holds_the_facts(tmp_path: Path) -> None:
    result = run(tmp_path / "run", evaluate={"metrics": ["dice", "hd95"], "overlays": 1})
    folder = tmp_path / "run"

    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == [
        "calibration.json",
        "cases.csv",
        "checkpoints",
        "clients",
        "config.yaml",
        "egress.jsonl",
        "environment.json",
        "overlays.png",
        "preparation.json",
        "records.jsonl",
        "result.json",
        "run.log",
    ]
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["method"] == {"name": "fedavg", "weighting": "samples"}
    assert resolve(wr.load_config(folder / "config.yaml")) == resolve(result.config)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and environment["seed"] == 42
    rows = list(csv.DictReader((folder / "cases.csv").read_text().splitlines()))
    assert len(rows) == result.test.overall["dice"].num_cases
    assert set(rows[0]) == {"client", "case", "region", "dice", "hd95"}
    assert (folder / "overlays.png").read_bytes().startswith(b"\x89PNG")
    assert result.summary["params_sha256"] == result.outcome.state.params.sha256()


def test_the_ledger_has_a_line_for_every_message_that_left(tmp_path: Path) -> None:
    run(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/egress.jsonl").read_text().splitlines()]

    trained = [line for line in lines if line["task"] == "train"]
    assert [(line["round"], line["client"]) for line in trained] == [
        (r, c) for r in (1, 2) for c in ("east", "north", "south")
    ]
    assert trained[0]["tensors"]["params/head.weight"] == [1, 2, 1, 1]
    assert all(len(line["sha256"]) == 64 for line in lines)
    assert {line["task"] for line in lines} == {"train", "evaluate", "calibrate"}


def test_records_count_bytes_both_ways(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    size = result.params.num_bytes

    exchange = result.records[0]["exchanges"][0]
    assert exchange["bytes_down"] == exchange["bytes_up"] == {"east": size, "north": size, "south": size}
