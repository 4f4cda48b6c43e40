"""Progress of a run, in a terminal and in a notebook."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers import settings
from pytest import CaptureFixture, MonkeyPatch
from rich.console import Console

import wardround as wr
from wardround import progress
from wardround.progress import Notebook, show_bars


def record(round: int, **changes: Any) -> dict[str, Any]:
    return {"round": round, "validation": {}, "seconds": 1.0, "refused": {}, "lost": {}, **changes}


class Cell:
    """The output of a notebook's cell: what `display` put there, and what replaced it."""

    def __init__(self, monkeypatch: MonkeyPatch, has_kernel: bool = True) -> None:
        self.pages: list[str] = []
        shell = SimpleNamespace(kernel=object()) if has_kernel else SimpleNamespace()
        ipython, shown = ModuleType("IPython"), ModuleType("IPython.display")
        ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
        shown.HTML = lambda page: page  # type: ignore[attr-defined]
        shown.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", shown)

    def display(self, page: str, display_id: bool) -> Any:
        assert not self.pages and display_id  # one place, updated from then on
        self.pages.append(page)
        return SimpleNamespace(update=self.pages.append)


def test_a_run_in_a_notebook_fills_one_bar_in_one_place(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    cell = Cell(monkeypatch)

    wr.run(settings(tmp_path / "run"))

    assert "tiny: round 0/2" in cell.pages[0] and '<progress value="0" max="2">' in cell.pages[0]
    assert '<progress value="2" max="2">' in cell.pages[-1]
    assert "validation dice 0." in cell.pages[-1] and "about" not in cell.pages[-1]


def test_quiet_shows_nothing_in_a_notebook(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    cell = Cell(monkeypatch)

    wr.run(settings(tmp_path / "run", rounds=1), quiet=True)

    assert not cell.pages


def test_a_script_without_a_terminal_prints_nothing(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    wr.run(settings(tmp_path / "run", rounds=1))

    assert capsys.readouterr() == ("", "")


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch: MonkeyPatch) -> None:
    Cell(monkeypatch, has_kernel=False)

    assert progress.find_notebook() is None


@pytest.mark.parametrize(("quiet", "is_shown"), [(False, True), (True, False)])
def test_a_run_in_a_terminal_draws_bars_unless_it_is_quiet(
    tmp_path: Path, monkeypatch: MonkeyPatch, quiet: bool, is_shown: bool
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=100)
    )

    wr.run(settings(tmp_path / "run", rounds=2), quiet=quiet)

    assert ("tiny" in screen.getvalue() and "2/2" in screen.getvalue()) == is_shown


def test_a_notebook_shows_clients_in_training_and_the_time_left(monkeypatch: MonkeyPatch) -> None:
    pages: list[str] = []
    monkeypatch.setattr(progress, "SHORTEST", 0.0)
    clock = iter(range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    bar = Notebook(pages.append)

    bar.on_start(SimpleNamespace(name="<b>", rounds=3), 0)
    bar.on_round(1, ["<north>"])
    bar.on_progress("<north>", 2, 4)
    assert "&lt;north&gt;" in pages[-1] and '<progress value="2" max="4">' in pages[-1]
    assert "<b>" not in pages[-1]

    bar.on_record(record(1, lost={"south": "gone"}))
    assert (
        "north" not in pages[-1] and "1 replies refused or lost, about" in pages[-1] and "left" in pages[-1]
    )


def test_bars_of_a_terminal_are_those_of_the_command_line() -> None:
    screen = io.StringIO()
    with show_bars(Console(file=screen, force_terminal=True, width=100)) as bars:
        bars.on_start(SimpleNamespace(name="run", rounds=2), 0)
        bars.on_progress("north", 1, 2)
        bars.on_record(record(1))

    assert "north" in screen.getvalue() and "1/2" in screen.getvalue()
