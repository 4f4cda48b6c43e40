"""flare-job on the command line."""

import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import yaml
from helpers import call, settings
from pytest import CaptureFixture, MonkeyPatch, fixture, importorskip


@fixture
def run_yaml(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**settings(tmp_path / "run"), "output": None}))
    return file


def test_a_job_is_written_and_the_next_command_named(
    run_yaml: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    importorskip("nvflare")
    words = ["-o", "job", "--hospitals", "south, north", "--output", "/srv/run", "--resume"]

    code, out, err = call(monkeypatch, capsys, "flare-job", str(run_yaml), *words, "--set", "rounds=7")

    assert (code, err) == (0, "") and "nvflare job submit -j job" in out and "/srv/run" in out
    arguments = json.loads(Path("job/server/config/run.json").read_text())
    assert (arguments["names"], arguments["resume"]) == (["north", "south"], True)
    assert (arguments["config"]["output"], arguments["config"]["rounds"]) == ("/srv/run", 7)


def test_a_run_without_a_folder_or_hospitals_is_refused_in_a_sentence(
    run_yaml: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    importorskip("nvflare")
    words = ["flare-job", str(run_yaml), "-o", "job", "--hospitals"]

    code, _, err = call(monkeypatch, capsys, *words, "north")
    assert code == 2 and "Name it with --output." in err

    code, _, err = call(monkeypatch, capsys, *words, " ,", "--output", "/srv/run")
    assert code == 2 and "0 hospitals are named" in err


def test_flare_that_is_missing_is_said(
    run_yaml: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def hide(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "nvflare" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", hide)

    code, _, err = call(monkeypatch, capsys, "flare-job", str(run_yaml), "-o", "job", "--hospitals", "north")

    assert (code, err) == (2, "error this needs NVIDIA FLARE: pip install 'wardround[nvflare]'\n")
