"""`wardround compare` as a person meets it: lines in a pipe, a table on a terminal, exit codes."""

import io
import json
import signal
from collections.abc import Iterator, Sequence
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
from wardround.comparison import Comparison, run
from wardround.comparison.scores import Replicate, RowScores, Sheet
from wardround.comparison.statistics import CaseKey
from wardround.tables import Table


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
        (["{config}", "--on", "slrm"], "--on is 'slrm'. Did you mean 'slurm'?"),
        (["{config}", "--on", "slurm", "--on-options", "gpu"], "--on-options is 'gpu'; give name=value"),
        (["{config}", "--on", "ray", "--on-options", "cpus=2"], "--on ray has no option 'cpus'"),
        (["{config}", "-o", "/proc/nope"], "cannot be written"),
        (["none.yaml"], "error none.yaml does not exist"),
        (["safcf-table2"], "needs data"),
        (["fedevi-tabel1"], "neither a file nor the name of a configuration. Did you mean 'fedevi-table1'"),
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


def test_seeds_that_do_not_fit_the_terminal_become_a_count(
    config: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "err", Console(width=60, file=io.StringIO()))
    fitting, many = drawn(screen_of(config, tmp_path, 3)), drawn(screen_of(config, tmp_path, 6))

    assert "seed 44" in fitting and "0 of 6" in many and "seed 44" not in many


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


# What is printed at the end


def comparison(folder: Path, *seeds: float) -> Any:
    """Two rows and two structures at two hospitals; the second row is better by so much with each seed."""
    keys = [CaseKey(c, f"{c}-{k}", r) for c in ("north", "south") for k in range(6) for r in ("rim", "cup")]

    def row(label: str, gains: Sequence[float], objective: str) -> RowScores:
        found = {
            (seed, None): Replicate(
                seed, None, {"dice": {key: 0.5 + gain + n / 100 for n, key in enumerate(keys)}}
            )
            for seed, gain in enumerate(gains)
        }
        return RowScores(label, found, objective={"name": objective})

    rows = [row("fedavg", [0.0] * len(seeds), "dice_bce"), row("FedEvi", seeds, "evidential")]
    names = [{"label": each.label, "method": each.label.lower()} for each in rows]
    facts = {
        "name": "toy",
        "rows": names,
        "metrics": ["dice"],
        "reference": "fedavg",
        "failures": {},
        "cells": [],
    }
    found = Comparison(
        folder, {**facts, "seeds": list(range(len(seeds))), "folds": [], "held_out": [], "preset": None}
    )
    found.__dict__.update(sheet=Sheet("toy", rows, "fedavg", ["dice"], expected=len(seeds)), runs={})
    return found


@mark.parametrize("width", [80, 100])
def test_the_terminal_has_structures_intervals_objectives_and_flags_at_any_width(
    width: int, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(command, "out", console)
    found = comparison(tmp_path, 0.1, 0.2, -0.05)
    command.show_metric(found, "dice")
    command.show_headline(found)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    text = " ".join(" ".join(lines).split())

    assert max(map(len, lines)) <= width
    assert "evidential" in text and "│ rim " in text and "│ cup " in text
    assert "95 % interval │" in text.replace("┃", "│") and "0.083‡" in text
    assert (
        "FedEvi has the highest mean test Dice: 0.698" in text and "signs that differ between seeds" in text
    )
    assert "It cannot be told apart from fedavg" in text
    if "Not shown" in text:
        assert f"table-dice.md in {tmp_path}".replace(" ", "") in text.replace(" ", "")


def test_json_has_the_headline_structures_and_objectives(
    config: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    _, out, _ = call(monkeypatch, capsys, str(config), "--json", "--methods", "fedavg,fedevi")
    found = json.loads(out)

    assert "has the highest mean test Dice" in found["headline"]
    assert found["metrics"]["dice"]["objectives"] == {"fedavg": "dice_bce", "fedevi": "evidential"}
    assert found["metrics"]["dice"]["structures"] == {}
    estimate = found["metrics"]["dice"]["summaries"][0]["estimates"]["north"]
    assert estimate["num"] > 0 and len(estimate["interval"]) == 2


def test_same_objective_leaves_no_column_of_objectives(
    config: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    _, out, _ = call(monkeypatch, capsys, str(config), "-q", "--methods", "fedavg,fedevi", "--same-objective")

    assert "| objective |" not in out and "All rows have the objective of 'fedevi', evidential" in out
    assert (config.parent / "out" / "clients-dice.csv").exists()


def test_a_table_of_many_rows_keeps_those_of_all_structures_on_a_terminal(monkeypatch: MonkeyPatch) -> None:
    rows = [[f"m{k}", s, 0.5] for s in ("all", "rim", "cup") for k in range(20)]
    table = Table("T", ["method", "structure", "mean"], rows, "Caption.")
    monkeypatch.setattr(command, "out", Console(file=io.StringIO(), force_terminal=True))
    found = command.shorten(table, "table-dice.md")

    assert len(found.rows) == 20 and found.caption == "Caption. 40 rows of single structures: table-dice.md."


def test_held_out_cells_show_the_mean_of_held_out_clients(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """The number beside a cell is the one that the table at the end is about."""
    path = tmp_path / "one.yaml"
    path.write_text(
        yaml.safe_dump({**settings(tmp_path / "out", rounds=1), "sweep": {"methods": ["fedavg"]}})
    )
    _, out, err = call(monkeypatch, capsys, str(path), "--hold-out", "north")
    shown = next(line for line in err.splitlines() if "without north" in line).split("dice ")[1][:5]

    assert out.splitlines()[4].split(" | ")[1] == shown
