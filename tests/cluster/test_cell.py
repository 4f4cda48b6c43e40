"""The process of a cell does what is left of its run, wherever it is started again."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from helpers import settings
from pytest import MonkeyPatch, fixture, raises

from wardround.cluster import cell


@fixture
def request_path(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A request for a run of one round, made in tmp_path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings(Path("run"), rounds=1)))
    path = tmp_path / "a-1.json"
    request = {
        "config": "a.yaml", "overrides": ["compute.workers=1"], "resume": False,
        "working_directory": str(tmp_path), "next": str(tmp_path / "a-2.json"),
    }  # fmt: skip
    path.write_text(json.dumps(request))
    path.with_suffix(".jsonl").touch()
    monkeypatch.setattr(sys, "argv", ["cell", str(path)])
    monkeypatch.setattr(cell, "end_with_parent", lambda: None)
    monkeypatch.chdir("/")
    return path


def answers(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def test_a_run_is_done_where_it_was_asked_for_and_not_a_second_time(
    request_path: Path, tmp_path: Path
) -> None:
    cell.main()
    first = answers(request_path)
    cell.main()  # a node failed, and the cluster starts the job again
    again = answers(request_path)[len(first) :]

    assert first[0]["pid"] == os.getpid() and [line.get("rounds") for line in first[1:3]] == [0, 1]
    assert first[-1]["end"] is None and (tmp_path / "run/result.json").exists()
    assert len(again) == 2 and again[-1] == {"end": None}


def test_a_request_that_a_later_one_replaced_is_left_alone(request_path: Path, tmp_path: Path) -> None:
    (tmp_path / "a-2.json").touch()
    cell.main()

    assert answers(request_path) == [] and not (tmp_path / "run").exists()


def test_a_node_that_does_not_see_the_folder_says_so(request_path: Path) -> None:
    request_path.unlink()

    with raises(SystemExit, match=r"node .* does not see .*a-1.json \(No such file or directory\)"):
        cell.main()


def test_what_keeps_a_run_from_starting_is_its_end(request_path: Path, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("rounds: -1\n")
    cell.main()

    assert "rounds is -1" in answers(request_path)[-1]["end"]
