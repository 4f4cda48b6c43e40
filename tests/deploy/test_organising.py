"""submit: hospitals that are not connected, runs that are still going, what a program reads."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from helpers import call, config
from pytest import CaptureFixture, MonkeyPatch, importorskip, mark, raises

importorskip("grpc")

from wardround.deploy import organising
from wardround.errors import ConfigError


class Line:
    """The queue of a server that is not there; state: of every job."""

    def __init__(self, *names: str, state: str = "running") -> None:
        self.kit, self._names, self._state = SimpleNamespace(folder=Path("kits/organiser")), names, state

    def connected(self) -> dict[str, float]:
        return dict.fromkeys(self._names, 1.0)

    def find_state(self, job: str) -> str:
        return self._state


def test_hospitals_are_named_once_and_by_a_name_that_is_there(tmp_path: Path) -> None:
    line, plain = cast(Any, Line("east", "north")), config(tmp_path)

    assert organising.parse_hospitals(" north, east,north,") == ["east", "north"]
    assert organising.choose_hospitals(line, plain, ["east"], resume=False) == ["east"]
    with raises(ConfigError, match="names no hospital"):
        organising.parse_hospitals(" , ")
    with raises(
        ConfigError, match=r"'est', which is not connected. Did you mean 'east'\? Connected: east, n"
    ):
        organising.choose_hospitals(line, plain, ["est", "north"], resume=False)
    assert organising.choose_hospitals(line, plain, ["west"], resume=True) == ["west"]  # on its way back


def test_splits_of_cases_that_are_at_hospitals_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    data = {"federation": str(tmp_path / "federation.yaml"), "splits": {"by": "kfold"}}
    kit = cast(Any, SimpleNamespace(runs=tmp_path / "runs"))

    with raises(ConfigError, match="splits are each hospital's own decision. Leave data.splits out"):
        organising.place_at_organiser(config(tmp_path, data=data), kit)


@mark.parametrize("state", ["waiting", "working", "starting"])
def test_a_run_that_goes_on_is_not_begun_again(state: str, tmp_path: Path) -> None:
    plain = config(tmp_path / "long")
    organising.refuse_running(cast(Any, Line()), plain)  # nothing there yet
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "live.json").write_text(json.dumps({"state": state, "job": "j1"}))

    with raises(ConfigError, match="run 'long' is in progress. See it with: wardround status --watch"):
        organising.refuse_running(cast(Any, Line()), plain)
    organising.refuse_running(cast(Any, Line(state="ended")), plain)  # its process was killed


def test_submit_detached_with_json_prints_one_object(
    mine: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    from wardround.cli import hospitals

    (tmp_path / "run.yaml").write_text("name: polyps\ndata: {hospitals: true}\n")
    monkeypatch.setattr(hospitals, "open_queue", lambda kit: Line("north"))
    monkeypatch.setattr(organising, "submit", lambda *_, **__: SimpleNamespace(job="j1"))

    code, out, err = call(
        monkeypatch,
        capsys,
        *("submit", str(tmp_path / "run.yaml"), "--kit", str(mine / "organiser")),
        *("--detach", "--json", "--set", "min_clients=1"),
    )

    told = json.loads(out)
    assert (code, err, told["run"], told["job"], told["hospitals"]) == (0, "", "polyps", "j1", ["north"])
    assert told["folder"] == str(mine / "organiser" / "runs" / "polyps")
