"""`wardround compare` as a person meets it: lines in a pipe, a table on a terminal, exit codes."""

import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helpers import call as called
from helpers import settings
from pytest import CaptureFixture, MonkeyPatch, fixture, mark
from rich.console import Console

from comparison.here import Here
from wardround import batch
from wardround.cli import compare as command
from wardround.comparison import run


@fixture(autouse=True)
def quick(monkeypatch: MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batch, "ChildProcess", Here)
    monkeypatch.setattr(batch, "POLL_SECONDS", 0)
    yield


@fixture
def config(tmp_path: Path) -> Path:
    values = {**settings(tmp_path / "out", rounds=1), "sweep": {"methods": ["fedavg", "local"]}}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def call(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return called(monkeypatch, capsys, "compare", *arguments)


def test_a_pipe_gets_a_line_a_cell_and_the_tables(
    config: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, err = call(monkeypatch, capsys, str(config), "--seeds", "1,2")

    assert code == 0
    assert "tiny: 4 cells" in err and "at a time: " in err
    assert "local, seed 2: dice 0." in err and "(4 of 4)" in err
    assert "| method | mean |" in out and "| east | north | south |" in out and "p (Holm)" in out
    again = call(monkeypatch, capsys, str(config), "--seeds", "1,2")
    assert again[1] == out and "4 cells, 4 done, 0 to resume" in again[2]


def test_json_is_one_object(config: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    code, out, err = call(monkeypatch, capsys, str(config), "--json", "--methods", "fedavg")
    found = json.loads(out)

    assert code == 0 and err == ""
    assert found["done"] == 1 and found["metrics"]["dice"]["summaries"][0]["label"] == "fedavg"


def test_failures_are_listed_and_give_exit_code_1(
    config: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    bad = "{name: sgd, learning_rate: 1e30}"
    code, out, err = call(
        monkeypatch, capsys, str(config), "-q", "--set", f"sweep.optimizer=[{bad}, {{name: adam}}]",
        "--set", "local_epochs=3", "--methods", "fedavg",
    )  # fmt: skip

    assert code == 1 and "1 of 2 cells failed" in err and "the loss became NaN" in err
    assert "| method |" in out


@mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{config}", "--methods", "fedavg,fedprx"], "row 'fedprx': method.name is 'fedprx'"),
        (["{config}", "--seeds", "x"], "--seeds is 'x'"),
        (["{config}", "--folds", "3"], "splits needs real data"),
        (["{config}", "--reference", "lokal"], "Did you mean 'local'"),
        (["{config}", "--hold-out", "nort"], "Did you mean 'north'"),
        (["{config}", "--leave-one-out"], "has no common model"),
        (["{config}", "--jobs", "0"], "jobs is 0"),
        (["{config}", "--jobs", "many"], "--jobs is 'many'; give a number, or auto"),
        (["{config}", "-o", "/proc/nope"], "cannot be written"),
        (["none.yaml"], "error none.yaml does not exist"),
        (["safcf-table2"], "needs data"),
        (["fedevi-tabel1"], "neither a file nor a paper's preset. Did you mean 'fedevi-table1'"),
        (["{config}", "--methods", ""], "--methods is empty; give names like a,b"),
        (["{config}", "--objectives", ","], "List all: wardround objectives"),
        (["{config}", "--methods", "fedprox,local", "--set", "method.mu=1"], "method 'local' has no setting 'mu'"),
        (["{config}", "--methods", "fedprox", "--set", "method.name=local"], "--methods names every method"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_and_exit_code_2(
    arguments: list[str],
    sentence: str,
    config: Path,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    code, out, err = call(monkeypatch, capsys, *(word.format(config=config) for word in arguments))

    assert code == 2 and sentence in err and "Traceback" not in err and out == ""


def test_ctrl_c_says_how_to_go_on(
    config: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_each", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    code, _, err = call(monkeypatch, capsys, str(config))

    assert code == 130 and "run the same command to continue" in err
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_pipe_hears_now_and_then_how_far_the_cells_are(
    config: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    grid, _ = run.plan_comparison(config, {"seeds": 2})
    lines = command.CellLines()
    lines.on_plan(grid, {"local-seed43": "done"})
    lines.on_end("local-seed43", 0.5, None)
    monkeypatch.setattr(command, "SECONDS_BETWEEN_LINES", -1)
    for done in (4, 5, 6):  # it resumes after round 4
        lines.on_rounds("fedavg-seed42", done, 10)
    lines.on_end("fedavg-seed42", None, "boom")
    told = capsys.readouterr().err.splitlines()

    assert "1 of 4 cells done, 1 running, 4 of 30 rounds, 0:00" in told
    assert "1 of 4 cells done, 1 running, 6 of 30 rounds, 0:00, about" in told[-2]
    assert told[-1].startswith("fedavg, seed 42: failed: boom (2 of 4, about")


# On a terminal


def screen_of(config: Path, tmp_path: Path, seeds: int) -> Any:
    grid, _ = run.plan_comparison(config, {"seeds": seeds})
    screen = command.CellScreen()
    screen.on_plan(grid, {})
    screen.on_jobs(2, "one for each core that is free")
    return screen


def drawn(screen: Any) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen.draw())
    return console.export_text()


def test_the_live_table_fills_in(config: Path, tmp_path: Path) -> None:
    screen = screen_of(config, tmp_path, 2)
    screen.on_rounds("fedavg-seed42", 3, 10)
    screen.on_end("local-seed42", 0.75, None)
    screen.on_end("local-seed43", None, "boom")
    text = drawn(screen)

    assert "seed 42" in text and "3/10" in text and "0.750" in text and "failed" in text and "waiting" in text
    assert "2 of 4 cells done, 1 running" in text and "at a time" in text


def test_many_seeds_become_a_count(config: Path, tmp_path: Path) -> None:
    screen = screen_of(config, tmp_path, 9)
    screen.on_end("local-seed42", 0.75, None)
    text = drawn(screen)

    assert "1 of 9" in text and "seed 44" not in text


def test_the_table_is_marked_on_a_terminal(
    config: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    call(monkeypatch, capsys, str(config), "-q")
    console = Console(force_terminal=True, width=200, color_system="standard")
    monkeypatch.setattr(command, "out", console)
    _, out, _ = call(monkeypatch, capsys, str(config), "-q")

    assert "\x1b[1m0." in out and "\x1b[4m0." in out  # bold and underlined
