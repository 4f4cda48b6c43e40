"""The commands for real hospitals, as far as they go without a server: help, mistakes, exit codes."""

import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import yaml
from helpers import call, settings
from pytest import CaptureFixture, MonkeyPatch, fixture, importorskip, mark

from wardround.files import write_json, write_text

COMMANDS = ("rehearse", "provision", "preflight", "server", "join", "submit", "status", "stop")
NEEDS_ENGINE = {
    "rehearse": ["run.yaml"],
    "provision": ["project.yaml"],
    "preflight": ["kit"],
    "server": ["kit"],
    "join": ["kit"],
    "submit": ["run.yaml"],
    "status": [],
    "stop": [],
}
PROJECT = "project: demo\norganiser: {host: 127.0.0.1}\nhospitals: [north]\n"


@fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """No kit is nearby."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WARDROUND_KIT", raising=False)


@fixture
def engine() -> None:
    importorskip("grpc")


def put_kit(folder: Path, role: str, **more: Any) -> Path:
    """As much of a kit as these commands look at."""
    facts = {
        "schema": "wardround-kit-2",
        "project": "demo",
        "project_id": "ab12",
        "name": folder.name,
        "role": role,
        "server": "127.0.0.1",
        "port": 8002,
        "wardround": "0.1.0",
        **({"listen": "127.0.0.1"} if role == "organiser" else {}),
        **more,
    }
    write_json(folder / "kit.json", facts)
    return folder


@fixture
def organiser(tmp_path: Path) -> Path:
    """An organiser's kit whose server does not run."""
    return put_kit(tmp_path / "kits" / "organiser", "organiser")


def put_run(kit: Path, name: str, state: str, **facts: Any) -> Path:
    folder = kit / "runs" / name
    write_text(folder / "config.yaml", "name: x\n")
    plain = {
        "job": "j1",
        "task": "train",
        "round": 2,
        "rounds": 5,
        "away": {},
        "waiting_for": [],
        "until": None,
    }
    write_json(folder / "live.json", {**plain, "state": state, **facts})
    return folder


@mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(
    command: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, command, "--help")

    assert code == 0 and f"wardround {command}" in out


@mark.parametrize("command", COMMANDS)
def test_without_the_engine_a_command_says_how_to_get_it(
    command: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "grpc" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    Path("project.yaml").write_text(PROJECT)

    code, _, err = call(monkeypatch, capsys, command, *NEEDS_ENGINE[command])

    assert (code, err) == (2, "error this needs gRPC and cryptography: pip install 'wardround[hospitals]'\n")


@mark.usefixtures("engine")
class TestKits:
    def test_a_folder_that_is_no_kit_is_named(
        self, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        put_kit(tmp_path / "kits" / "north", "hospital")

        missing = call(monkeypatch, capsys, "join", "nowhere")
        above = call(monkeypatch, capsys, "server", "kits")

        assert missing[0] == 2 and "nowhere does not exist. Give the folder of your kit" in missing[2]
        assert above[0] == 2 and "kits is not a kit. It holds the kits north; give one of them." in above[2]

    @mark.parametrize(
        ("command", "role", "right"), [("server", "hospital", "join"), ("join", "organiser", "server")]
    )
    def test_a_kit_of_the_other_side_says_what_it_is_for(
        self, command: str, role: str, right: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        put_kit(Path("theirs"), role)

        code, _, err = call(monkeypatch, capsys, command, "theirs")

        assert code == 2 and f"This kit is for: wardround {right} theirs" in err

    def test_a_key_that_others_may_read_is_refused(
        self, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        key = put_kit(tmp_path / "north", "hospital") / "keys" / "own.key"
        write_text(key, "secret")
        key.chmod(0o644)

        code, _, err = call(monkeypatch, capsys, "join", "north")

        assert code == 2 and "(mode 644)" in err and "chmod -R go-rwx" in err

    @mark.parametrize("command", ["submit", "status", "stop"])
    def test_the_organisers_commands_ask_for_the_kit(
        self, command: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        code, _, err = call(monkeypatch, capsys, command, *NEEDS_ENGINE[command])

        assert code == 2 and "Name it with --kit, for example --kit kits/organiser." in err

    def test_provision_without_a_project_shows_how_to_begin(
        self, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        code, _, err = call(monkeypatch, capsys, "provision")
        _, example, _ = call(monkeypatch, capsys, "provision", "--example")

        assert code == 2 and "wardround provision --example > project.yaml" in err
        assert yaml.safe_load(example)["organiser"]["port"] == 8002


@mark.usefixtures("engine")
class TestSubmit:
    @mark.parametrize(
        ("arguments", "advice"),
        [
            ([], "give a configuration to start a run, or --resume RUN"),
            (
                ["run.yaml", "--resume", "first"],
                "give one of these: a configuration to start a run, --resume RUN",
            ),
        ],
    )
    def test_needs_either_a_configuration_or_a_run_to_resume(
        self,
        arguments: list[str],
        advice: str,
        organiser: Path,
        monkeypatch: MonkeyPatch,
        capsys: CaptureFixture[str],
    ) -> None:
        code, _, err = call(monkeypatch, capsys, "submit", *arguments)

        assert code == 2 and advice in err

    def test_names_the_runs_there_are_when_one_cannot_be_resumed(
        self, organiser: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        put_run(organiser, "polyps", "stopped")

        code, _, err = call(monkeypatch, capsys, "submit", "--resume", "polips")

        assert code == 2 and "has no run 'polips'. Its runs: polyps." in err

    def test_does_not_replace_a_run_by_accident(
        self, organiser: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        put_run(organiser, "polyps", "done")
        Path("run.yaml").write_text("name: polyps\ndata: {hospitals: true}\n")

        code, _, err = call(monkeypatch, capsys, "submit", "run.yaml")

        assert code == 2 and "already holds a run" in err
        assert "--resume polyps" in err and "--overwrite" in err and "--set name=" in err

    def test_says_at_once_that_no_server_runs(
        self, organiser: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        Path("run.yaml").write_text("name: polyps\ndata: {hospitals: true}\n")

        code, _, err = call(monkeypatch, capsys, "submit", "run.yaml")

        assert code == 1 and f"Start it: wardround server {organiser}" in err


@mark.usefixtures("engine")
class TestStatusAndStop:
    def test_status_without_a_server_shows_the_runs_and_what_was_interrupted(
        self, organiser: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        put_run(organiser, "polyps", "waiting", waiting_for=["north"], until="2026-03-01T12:00:00+00:00")
        put_run(organiser, "prostate", "done", round=6, away={"east": "no answer"})

        code, out, err = call(monkeypatch, capsys, "status", "--watch")

        assert code == 1 and "no server of this kit is running on this machine" in err
        assert "| polyps | interrupted | 2 of 5 | continue it with: wardround submit --resume polyps |" in out
        assert "| prostate | done | 5 of 5 | without 'east': no answer |" in out

    def test_status_json_is_one_object(
        self, organiser: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        code, out, err = call(monkeypatch, capsys, "status", "--json", "--kit", str(organiser))

        facts = json.loads(out)
        assert code == 1 and err == ""
        assert (facts["hospitals"], facts["runs"]) == ([], []) and "no server" in facts["server"]

    def test_stop_says_that_nothing_goes_on(
        self, organiser: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        put_run(organiser, "polyps", "done")

        any_run = call(monkeypatch, capsys, "stop")
        this_run = call(monkeypatch, capsys, "stop", "polyps")

        assert (any_run[0], any_run[2]) == (1, "error no run is in progress.\n")
        assert (this_run[0], this_run[2]) == (1, "error run 'polyps' is not in progress.\n")

    def test_stop_wants_a_name_when_several_go_on(
        self, organiser: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
    ) -> None:
        put_run(organiser, "polyps", "waiting")
        put_run(organiser, "prostate", "working")

        code, _, err = call(monkeypatch, capsys, "stop")

        assert code == 2 and "several runs are in progress: polyps, prostate. Name one." in err


@mark.usefixtures("engine")
def test_rehearse_refuses_what_hospitals_could_not_do(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    values = {**settings(tmp_path / "run"), "method": {"name": "centralised"}}
    Path("run.yaml").write_text(yaml.safe_dump(values))

    code, _, err = call(monkeypatch, capsys, "rehearse", "run.yaml")

    assert code == 2 and "pools all cases in one place" in err
    assert not (tmp_path / "run" / "rehearsal").exists()
