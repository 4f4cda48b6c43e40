"""Trackers get numbers, are optional, and never end a run."""

from __future__ import annotations

import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

from helpers import config, run
from pytest import fixture, mark, raises

from wardround.config_file import resolve
from wardround.engine.trackers import (
    TRACKERS,
    Tracking,
    evaluation_scalars,
    open_trackers,
    record_scalars,
    scalars,
)
from wardround.errors import ConfigError


class FakeWriter:
    made: list[FakeWriter]

    def __init__(self, folder: str, **options: Any) -> None:
        self.folder, self.options, self.values, self.texts, self.closed = folder, options, {}, {}, False
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values[name, step] = value

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts[name] = text

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class FakeClient:
    made: list[FakeClient]

    def __init__(self) -> None:
        self.metrics: dict[tuple[str, str, int], float] = {}
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.ended: dict[str, str] = {}
        self.runs = 0
        FakeClient.made.append(self)

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.runs += 1
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"{experiment}-{run_name}"))

    def log_param(self, run: str, key: str, value: str) -> None:
        assert len(value) <= 500
        self.params[key] = value

    def log_metric(self, run: str, key: str, value: float, step: int) -> None:
        self.metrics[run, key, step] = value

    def set_tag(self, run: str, key: str, value: str) -> None:
        self.tags[key] = value

    def set_terminated(self, run: str, status: str) -> None:
        self.ended[run] = status


@fixture
def fakes(monkeypatch: Any) -> None:
    FakeWriter.made, FakeClient.made = [], []
    board, flow = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("mlflow")
    board.SummaryWriter, flow.MlflowClient = FakeWriter, FakeClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "mlflow", flow)


def facts(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return records, json.loads((folder / "result.json").read_text())


def test_tensorboard_gets_every_round_and_the_test(tmp_path: Path, fakes: None) -> None:
    run(tmp_path / "run")
    records, result = facts(tmp_path / "run")
    tracking = open_trackers(["tensorboard"], tmp_path / "run", resolve(config(tmp_path / "run")))
    for record in records:
        tracking.on_record(record)
    tracking.on_end(result)

    (writer,) = FakeWriter.made
    assert writer.folder == str(tmp_path / "run/tensorboard") and writer.closed
    assert writer.values["loss/north/total", 2] == records[1]["loss"]["north"]["total"]
    assert writer.values["weights/east", 1] == records[0]["weights"]["east"]
    assert (
        writer.values["validation/dice/clients/south", 2]
        == records[1]["validation"]["dice"]["clients"]["south"]["mean"]
    )
    assert writer.values["test/dice/mean", 2] == result["test"]["dice"]["mean"]
    assert writer.texts["params_sha256"] == result["params_sha256"]


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path: Path, fakes: None) -> None:
    open_trackers(["tensorboard"], tmp_path, {}, first_round=3)

    assert FakeWriter.made[0].options == {"purge_step": 4}


def test_mlflow_gets_settings_rounds_and_the_end(tmp_path: Path, fakes: None) -> None:
    run(tmp_path / "run")
    records, result = facts(tmp_path / "run")
    tracking = open_trackers(["mlflow"], tmp_path / "run", resolve(config(tmp_path / "run")))
    tracking.on_record(records[0])
    tracking.on_end(result)

    (client,) = FakeClient.made
    assert client.params["method.name"] == "fedavg"
    assert client.metrics["wardround-tiny", "test/dice/worst", 2] == result["test"]["dice"]["worst"][1]
    assert client.tags["params_sha256"] == result["params_sha256"]
    assert client.ended == {"wardround-tiny": "FINISHED"}


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(tmp_path: Path, fakes: None) -> None:
    open_trackers(["mlflow"], tmp_path, {"name": "a"})
    open_trackers(["mlflow"], tmp_path, {"name": "a"}, first_round=1).on_record({"round": 2, "seconds": 1.5})

    assert [client.runs for client in FakeClient.made] == [1, 0]
    assert FakeClient.made[1].metrics["wardround-a", "seconds", 2] == 1.5


def test_a_stopped_run_is_marked_so(tmp_path: Path, fakes: None) -> None:
    open_trackers(["mlflow"], tmp_path, {"name": "a"}).on_end(
        {"status": "stopped", "test": None, "rounds": 1}
    )

    assert list(FakeClient.made[0].ended.values()) == ["KILLED"]


@mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow")])
def test_a_missing_library_is_told_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: Any, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)

    with raises(ConfigError, match=rf"'{name}', which is not installed. .*wardround\[{name}\]"):
        open_trackers([name], tmp_path, {})


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, match="trackers names 'wandb'. There are: tensorboard, mlflow."):
        open_trackers(["wandb"], tmp_path, {})


def test_no_trackers_is_nobody_to_tell(tmp_path: Path) -> None:
    open_trackers([], tmp_path, {}).on_record({"round": 1})

    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(caplog: Any) -> None:
    class Broken:
        def on_record(self, record: Any) -> None:
            raise OSError("disk full")

        def on_end(self, result: Any) -> None:
            raise AssertionError("it was left out")

    class Fine(list[Any]):
        def on_record(self, record: Any) -> None:
            self.append(record)

        def on_end(self, result: Any) -> None:
            self.append(result)

    fine = Fine()
    tracking = Tracking({"broken": Broken(), "fine": fine})
    with caplog.at_level(logging.WARNING):
        tracking.on_record(1)  # type: ignore[arg-type]
        tracking.on_end(2)  # type: ignore[arg-type]

    assert fine == [1, 2]
    assert "tracker 'broken' is left out from here on: disk full" in caplog.text


def test_names_become_plain_paths_and_odd_values_are_skipped() -> None:
    odd = {"loss": {"<b>/..": {"total": 1.0, "nan": float("nan"), "word": "inf", "flag": True}}, "held": []}
    ((name, value),) = scalars(odd)

    assert value == 1.0 and "<" not in name and ".." not in name and name.count("/") == 2


def test_records_without_validation_or_exchanges_are_fine() -> None:
    assert record_scalars({"round": 1, "seconds": 2.0, "refused": {"train/a": "why"}}) == {
        "seconds": 2.0,
        "refused": 1.0,
        "lost": 0.0,
        "warnings": 0.0,
    }
    assert evaluation_scalars("test", None) == {}


def test_no_case_is_named(tmp_path: Path) -> None:
    run(tmp_path / "run")
    records, result = facts(tmp_path / "run")
    names = {*record_scalars(records[-1]), *evaluation_scalars("test", result["test"])}

    cases = [line.split(",")[1] for line in (tmp_path / "run/cases.csv").read_text().splitlines()[1:]]
    assert not [name for name in names for case in cases if case in name]


def test_a_tracker_that_cannot_be_opened_is_one_sentence(monkeypatch: Any, tmp_path: Path) -> None:
    def broken(folder: Path, config: Any, first_round: int) -> Any:
        raise RuntimeError("no such store\nwith a long story")

    monkeypatch.setitem(TRACKERS, "mlflow", broken)
    with raises(
        ConfigError, match="tracker 'mlflow' cannot be opened: no such store. Fix it, or leave it out"
    ):
        open_trackers(["mlflow"], tmp_path, {})
