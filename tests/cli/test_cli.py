"""The command line as a person meets it: real processes, exit codes, one sentence for a mistake."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nibabel
import yaml
from helpers import call, settings
from pytest import CaptureFixture, MonkeyPatch, fixture, mark
from rich.console import Console
from rich.progress import Progress, TextColumn

from wardround.cli import common, progress
from wardround.progress import Screen


@fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path / "run")))
    return path


def test_training_prints_progress_and_the_table(
    config_file: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, err = call(monkeypatch, capsys, "train", str(config_file))

    assert code == 0
    assert "round 2/2 validation dice" in err
    assert "| client | Dice |" in out and "| worst client |" in out
    assert "sha256" in out


def test_json_is_one_object_and_nothing_else(
    config_file: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, err = call(monkeypatch, capsys, "train", str(config_file), "--json", "--set", "rounds=1")

    assert code == 0 and err == ""
    assert json.loads(out)["rounds"] == 1


def test_quiet_shows_the_result_alone(
    config_file: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, err = call(monkeypatch, capsys, "train", str(config_file), "--quiet")

    assert code == 0 and err == "" and "| mean |" in out


@mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "none.yaml"], "none.yaml does not exist"),
        (["train", "{config}", "--set", "method.name=fedavgg"], "Did you mean 'fedavg'?"),
        (["train", "{config}", "--set", "roundz=1"], "Did you mean 'rounds'?"),
        (["train", "{config}", "--resume"], "no checkpoint to resume"),
        (["train", "{config}", "--set", "output=/proc/nope"], "cannot be written"),
        (["train", "{config}", "--set", "compute.device=quantum"], "compute.device is 'quantum'"),
        (["train", "{config}", "--set", "model.name=unet3d"], "unet3d"),
        (["train", "{config}", "--set", "model.name=monai:UNett"], "monai"),
        (["demo", "--output", "/proc/nope"], "cannot be written"),
        (["methods", "fedavgg"], "'fedavgg' is not a method. Did you mean 'fedavg'?"),
        (["models", "show", "unet"], "model.name is 'unet'. Did you mean 'unet"),
        (["data", "phantom", "{folder}", "--format", "tiff"], "use nifti, png or dicom"),
        (["data", "phantom", "{folder}", "--set", "hospital=3"], "Did you mean 'hospitals'?"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str],
    sentence: str,
    config_file: Path,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    filled = [a.format(config=config_file, folder=config_file.parent / "new") for a in arguments]

    code, _, err = call(monkeypatch, capsys, *filled)

    assert code == 2
    assert sentence in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_debug_adds_the_traceback(
    config_file: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, _, err = call(monkeypatch, capsys, "train", str(config_file), "--set", "rounds=0", "--debug")

    assert code == 2 and "Traceback" in err


def test_unknown_options_and_no_command_show_help(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    assert call(monkeypatch, capsys, "train", "--nope")[0] == 2
    assert "Usage" in call(monkeypatch, capsys, "--help")[1]
    assert call(monkeypatch, capsys, "--version")[1].startswith("wardround 0.")


@mark.parametrize("what", ["methods", "objectives"])
def test_catalogues_list_and_show_everything(
    what: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, what, "--json")
    names = [row["name"] for row in json.loads(out)]

    assert code == 0 and len(names) >= 3
    for name in [name for name in names if ":" not in name]:
        code, out, _ = call(monkeypatch, capsys, what, name)
        assert (code == 0 and "setting" in out) or name in out


@mark.parametrize("what", ["methods", "objectives", "models", "datasets", "papers"])
def test_help_says_that_a_list_is_an_array(
    what: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    _, told, _ = call(monkeypatch, capsys, what, "--help")
    _, out, _ = call(monkeypatch, capsys, what, "--json")

    assert "Print a JSON array" in told
    assert {type(row) for row in json.loads(out)} == {dict}


def test_a_card_shows_settings_with_their_defaults(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    _, out, _ = call(monkeypatch, capsys, "methods", "fedavg")

    assert "setting weighting" in out and "'samples' (samples" in out.replace("\\|", "|")


@mark.parametrize("method", ["fedce", "fedga"])
def test_a_method_made_for_all_clients_says_so_and_warns_where_some_are_drawn(
    method: str, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    _, card, _ = call(monkeypatch, capsys, "methods", method)
    assert "every client in every round; with fewer the absent keep their weight" in card

    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings(tmp_path / "run", rounds=1, method={"name": method})))
    _, _, told = call(monkeypatch, capsys, "train", str(file))
    assert "Prefer participation" not in told
    code, _, told = call(
        monkeypatch, capsys, "train", str(file), "--overwrite", "--set", "participation=0.67"
    )
    assert code == 0 and " ".join(told.split()).count("Prefer participation 1") == 1


def test_phantoms_are_written_as_folders(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    folder = tmp_path / "phantoms"
    code, out, _ = call(
        monkeypatch, capsys, "data", "phantom", str(folder), "--set", "cases=3", "--set", "size=16"
    )

    assert code == 0 and "Wrote 3 hospitals" in out
    images = sorted(folder.glob("north/images/*.nii.gz"))
    assert len(images) == 3
    assert nibabel.load(images[0]).shape[:2] == (16, 16)


def start(config_file: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "wardround", "train", str(config_file), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_ctrl_c_ends_the_round_with_a_checkpoint_and_says_how_to_resume(
    config_file: Path, tmp_path: Path
) -> None:
    process = start(config_file, "--set", "rounds=500")
    records = tmp_path / "run/records.jsonl"
    deadline = time.monotonic() + 120
    while not (records.exists() and records.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)

    assert process.returncode == 130, err
    assert "Finishing this round" in err and "--resume" in err and "Traceback" not in err
    done = json.loads((tmp_path / "run/checkpoints/latest.json").read_text())["round"]
    assert done >= 1 and len(records.read_text().splitlines()) == done


def test_ctrl_c_in_the_middle_of_a_print_is_heard_and_answered(monkeypatch: MonkeyPatch) -> None:
    class Pen(io.StringIO):
        """Like a real stream, it cannot be written to from inside its own write."""

        writer: int | None = None

        def write(self, text: str) -> int:
            assert self.writer != threading.get_ident(), "reentrant call"
            self.writer, before = threading.get_ident(), self.writer
            if "round 1" in text:
                signal.raise_signal(signal.SIGINT)
            self.writer = before
            return super().write(text)

    console = Console(file=Pen())
    monkeypatch.setattr(progress, "err", console)
    asked: list[bool] = []

    with progress.stop_at_round_end(lambda: asked.append(True)):
        console.print("round 1")

    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert asked == [True] and "Finishing this round" in shown
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_ends_any_command_with_one_sentence(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    def pressed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wardround.data.federation_file.load", pressed)
    monkeypatch.setattr("wardround.demo.run_demo", pressed)

    assert call(monkeypatch, capsys, "data", "check", "federation.yaml")[::2] == (
        130,
        "Stopped; what was finished is kept.\n",
    )
    code, _, err = call(monkeypatch, capsys, "demo", "--output", str(tmp_path))  # which has its own sentence
    assert code == 130 and err.startswith("Stopped. The demo") and err.count("Stopped") == 1


def test_names_with_colons_stay_as_they_are(capsys: CaptureFixture[str]) -> None:
    common.out.print("a:heart:b")

    assert capsys.readouterr().out == "a:heart:b\n"


def test_a_pipe_that_closes_early_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m wardround methods | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_the_demo_compares_alone_together_pooled_and_the_papers(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    from wardround import demo

    small: dict[str, Any] = settings(tmp_path, rounds=1)
    for key in ("name", "output"):
        small.pop(key)
    monkeypatch.setattr(demo, "SETTINGS", {**small, "evaluate": {"metrics": ["dice"], "overlays": 1}})
    monkeypatch.setattr(demo, "PAPERS", {"fedevi": "FedEvi"})

    code, out, err = call(monkeypatch, capsys, "demo", "--output", str(tmp_path / "demo"))

    assert code == 0 and "fedevi: round 1 of 1" in err
    for row in ("each alone", "together (FedAvg)", "all data pooled", "at other hospitals", "| FedEvi |"):
        assert row in out
    assert (tmp_path / "demo/fedavg/overlays.png").exists()


def test_progress_on_a_terminal_shows_rounds_and_clients() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Progress(TextColumn("{task.description} {task.fields[note]}"), console=console) as bars:
        screen = Screen(bars)
        screen.on_start(type("Config", (), {"name": "[b]run", "rounds": 2})(), 0)
        screen.on_round(1, ["north"])
        screen.on_progress("north", 1, 2)
        screen.on_progress("north", 2, 2)
        record = {"round": 1, "seconds": 1.0, "refused": {"train/east": "x"}, "lost": {}}
        screen.on_record({**record, "validation": {"loss": {}, "dice": {"mean": 0.5}}})
        screen.on_rounds("fedavg", 1, 2)
    shown = console.file.getvalue()  # type: ignore[attr-defined]

    assert "[b]run" in shown and "north" in shown
    assert "validation dice 0.500, 1.0 s, 1 replies refused or lost" in shown


def test_tables_on_a_terminal_are_drawn(monkeypatch: MonkeyPatch) -> None:
    from wardround.tables import Table

    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(common, "out", console)
    common.print_table(Table("T", ["client", "Dice"], [["[north]", 0.5], ["east", float("nan")]], "caption"))

    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[north]" in shown and "0.500" in shown and "n/a" in shown


def test_a_run_that_failed_before_its_first_checkpoint_can_simply_be_started_again(
    config_file: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    wrong = ["train", str(config_file), "--set", "model.name=unet3d"]
    assert call(monkeypatch, capsys, *wrong)[0] == 2

    assert call(monkeypatch, capsys, "train", str(config_file), "--quiet")[0] == 0


def test_a_damaged_checkpoint_is_one_sentence_and_an_earlier_round_continues(
    config_file: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    assert call(monkeypatch, capsys, "train", str(config_file), "--quiet")[0] == 0
    state = tmp_path / "run/checkpoints/round-00002.safetensors"
    state.write_bytes(state.read_bytes()[:-1])

    code, _, err = call(monkeypatch, capsys, "train", str(tmp_path / "run"), "--resume", "--quiet")
    advice = "Round 1 is whole; continue after it with --resume --from-round 1."
    assert code == 2 and "Traceback" not in err
    told = "".join(err.split())  # lines are broken where the terminal ends
    assert f"{state} is damaged".replace(" ", "") in told and told.endswith(advice.replace(" ", ""))

    words = ["train", str(tmp_path / "run"), "--resume", "--from-round", "1", "--quiet"]
    assert call(monkeypatch, capsys, *words)[0] == 0
    assert len((tmp_path / "run/records.jsonl").read_text().splitlines()) == 2


def test_a_full_disk_is_one_sentence(
    config_file: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(28, "No space left on device", "latest.json")

    monkeypatch.setattr("wardround.engine.checkpoint.Checkpoints._write", full)
    code, _, err = call(monkeypatch, capsys, "train", str(config_file), "--quiet")

    told = "error latest.json: No space left on device. Free some space; a run then continues with --resume."
    assert code == 1 and " ".join(err.split()) == told


def test_ctrl_c_in_the_demo_ends_its_runs_and_says_so(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wardround.demo.run_demo", interrupted)
    code, _, err = call(monkeypatch, capsys, "demo", "--output", str(tmp_path / "demo"))

    assert code == 130 and err.strip().startswith("Stopped.")


@mark.parametrize(
    "words", [["datasets"], ["egress", "verify", "nothing"], ["status", "--kit", "nothing"], ["stop"]]
)
def test_commands_that_compute_nothing_do_not_wait_for_torch(tmp_path: Path, words: list[str]) -> None:
    code = "import sys; sys.modules['torch'] = None; from wardround.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "torch" not in done.stderr
    assert done.returncode == (0 if words == ["datasets"] else 2)
