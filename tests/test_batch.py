"""Several runs side by side give what each gives alone; a finished run can be read back."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import yaml
from helpers import run, settings
from pytest import MonkeyPatch, fixture, raises

from wardround import batch
from wardround.api import Result
from wardround.batch import count_rounds, run_all
from wardround.config_file import load_config, resolve
from wardround.errors import CheckpointError, ConfigError, WardroundError

BREAKS: dict[str, Any] = {
    "optimizer": {"name": "sgd", "learning_rate": 1e30},
    "local_epochs": 3,
    "retries": 0,
}


def plain(**changes: Any) -> dict[str, Any]:
    """Settings of a tiny run without a folder; run_all gives it one."""
    chosen = settings(Path("unused"), **changes)
    del chosen["output"]
    return chosen


class Seen:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        self.calls.append((name, done, rounds))


@fixture
def children(monkeypatch: MonkeyPatch) -> list[Any]:
    """The processes that were started, in order."""
    started: list[Any] = []

    class Counted(batch.ChildProcess):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(batch, "ChildProcess", Counted)
    return started


# Side by side, and one after the other


def test_runs_give_what_each_gives_alone_side_by_side_and_one_after_the_other(
    tmp_path: Path, children: list[Any]
) -> None:
    runs = {
        "mean": plain(),
        "alone": plain(method={"name": "local"}, rounds=1),
        "again": plain(objective={"name": "evidential"}, method={"name": "fedevi"}),
    }
    seen = Seen()

    results = run_all(runs, tmp_path / "all", jobs=2, watch=seen)

    assert list(results) == ["mean", "alone", "again"] and len(children) == 2
    for name, chosen in runs.items():
        expected = run(tmp_path / "one" / name, **chosen)
        assert results[name].params_sha256 == expected.params_sha256
        assert results[name].table.rows == expected.table.rows
        assert results[name].folder == tmp_path / "all" / name
        for file in ("cases.csv", "preparation.json", "result.json", "environment.json"):
            ours, theirs = (read_comparable(result.folder / file) for result in (results[name], expected))
            assert ours == theirs, file
    assert {(name, rounds) for name, _, rounds in seen.calls} == {("mean", 2), ("alone", 1), ("again", 2)}
    assert [done for name, done, _ in seen.calls if name == "mean"] == [0, 1, 2]
    written = yaml.safe_load((tmp_path / "all/mean.yaml").read_text())
    assert written == {**runs["mean"], "output": str(tmp_path / "all/mean")}


def read_comparable(path: Path) -> Any:
    """A file of a run, without times and the reason for the number of workers."""
    text = path.read_text()
    return {**json.loads(text), "seconds": 0, "workers_why": ""} if path.suffix == ".json" else text


def test_a_killed_process_fails_its_run_alone_and_ctrl_c_keeps_completed_rounds(
    tmp_path: Path, children: list[Any]
) -> None:
    class Killer(Seen):
        def on_rounds(self, name: str, done: int, rounds: int) -> None:
            if name == "killed" and done == 1:
                os.kill(children[0].pid, signal.SIGKILL)
            if name == "stopped" and done == 2:
                raise KeyboardInterrupt

    runs = {"killed": plain(rounds=500), "next": plain(rounds=1), "stopped": plain(rounds=500)}
    ends = {}
    with raises(KeyboardInterrupt):
        for name, error in batch.run_each(runs, tmp_path, jobs=1, watch=Killer()):
            ends[name] = error

    assert "run 'killed' failed: its process was ended by SIGKILL. Memory may be short" in str(ends["killed"])
    assert ends["next"] is None and Result.load(tmp_path / "next").status == "done"
    assert len(children) == 2 and not any(child.is_alive() for child in children)
    config = load_config(tmp_path / "stopped.yaml")
    assert batch.find_stage(tmp_path / "stopped", config) == "unfinished"


def test_a_process_is_used_again_only_with_the_same_compute_settings(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "ChildProcess", Obedient)
    processes = batch.Processes()
    used = []
    for name, compute in [("a", "cpu"), ("b", "cpu"), ("c", "cuda"), ("failing", "cuda"), ("e", "cuda")]:
        processes.begin(name, {"fails": name == "failing"}, compute)
        used.append(processes.running[0])
        assert [told for told, _ in processes.receive()] == [name] and not processes.running

    processes.kill()
    assert used[0] is used[1] is not used[2] and used[2] is used[3] is not used[4]


def test_processes_share_the_gpus_unless_a_run_names_its_own(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "ChildProcess", Obedient)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    free, named = (load_config(plain(compute={"device": name})) for name in ("auto", "cuda:1"))

    assert batch.list_gpus([free]) == ["0", "1"] and batch.list_gpus([free, named]) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    processes = batch.Processes(batch.list_gpus([free]))
    for name in "abc":
        processes.begin(name, {"fails": False}, "cuda")
    assert [process.gpu for process in processes.running] == ["4", "7", "4"]
    processes.kill()


class Obedient:
    """Stands in for a `ChildProcess`: ends every run at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.lines: list[Any] = []

    def send(self, request: Any) -> None:
        self.lines.append({"end": None, "reusable": not request["fails"]})

    def receive(self, deadline: float) -> Any:
        return self.lines.pop()

    def kill(self) -> None: ...

    def stop(self) -> None: ...


def test_a_failing_run_is_named(tmp_path: Path) -> None:
    with raises(WardroundError, match=r"run 'bad' failed: .*the loss became NaN") as caught:
        run_all({"bad": plain(**BREAKS)}, tmp_path)

    assert "\n" not in str(caught.value)


def test_a_mistake_in_the_settings_is_found_before_anything_runs(tmp_path: Path) -> None:
    with raises(ConfigError, match="rounds"):
        run_all({"good": plain(), "bad": plain(rounds=0)}, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_rounds_done_counts_whole_records(tmp_path: Path) -> None:
    assert count_rounds(tmp_path) == 0
    (tmp_path / "records.jsonl").write_text('{"round": 1}\n{"round": 2}\n{"rou')

    assert count_rounds(tmp_path) == 2


# Reading back


@fixture(scope="module")
def finished(tmp_path_factory: Any) -> Result:
    evaluate = {"metrics": ["dice", "hd95"], "cross_site": True, "overlays": 0}
    result: Result = run(
        tmp_path_factory.mktemp("batch") / "run", method={"name": "local"}, evaluate=evaluate
    )
    return result


def test_a_finished_run_is_read_back_whole(finished: Result) -> None:
    back = Result.load(finished.folder)

    assert str(back.table) == str(finished.table)
    assert json.dumps(back.table.rows) == json.dumps(finished.table.rows)  # NaN equals NaN in text
    assert back.status == "done" and back.records == finished.records
    assert back.params_sha256 == finished.params_sha256 == back.outcome.state.params.sha256()
    assert back.outcome.state.round == finished.outcome.state.round
    assert back.outcome.state.memory == finished.outcome.state.memory
    assert back.outcome.progress == finished.outcome.progress
    assert back.params.sha256() == finished.params.sha256()
    assert resolve(back.config) == resolve(finished.config)


def test_the_cross_site_scores_are_read_back(finished: Result) -> None:
    back = Result.load(str(finished.folder))

    def told(result: Result) -> str:
        return json.dumps({name: entry.as_dict() for name, entry in result.outcome.cross_site.items()})

    assert set(back.outcome.cross_site) == {"east", "north", "south"}
    assert told(back) == told(finished)


def test_a_run_that_was_moved_is_read_where_it_is_now(finished: Result, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "moved")

    assert Result.load(tmp_path / "moved").folder == tmp_path / "moved"


def test_an_empty_folder_is_no_run(tmp_path: Path) -> None:
    with raises(CheckpointError, match="holds no finished run"):
        Result.load(tmp_path)
