"""Progress says how much time is left; whoever waits is told why."""

import io
import time
from typing import Any

from pytest import CaptureFixture, MonkeyPatch, fixture, mark, raises
from rich.console import Console
from rich.progress import Progress

from wardround.cli import common, progress
from wardround.cli.progress import Lines, show_rounds
from wardround.progress import RoundProgress, TimeLeftColumn


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def config(rounds: int) -> Any:
    return type("Config", (), {"name": "trial", "rounds": rounds})()


def record(round: int) -> dict[str, Any]:
    validation = {"loss": {}, "dice": {"mean": 0.5}}
    return {"round": round, "seconds": 10.0, "refused": {}, "lost": {}, "validation": validation}


def test_a_line_of_a_round_has_the_time_that_is_left(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    lines = Lines()
    lines.on_start(config(10), 4)  # it resumes after round 4
    for number in (5, 6, 7, 10):
        clock.now += 10 * (3 if number == 10 else 1)
        lines.on_record(record(number))
    told = capsys.readouterr().err.splitlines()

    assert told[0] == "trial: round 5/10 validation dice 0.500, 10.0 s"
    assert told[1].endswith("10.0 s, about 40 s left") and told[2].endswith("about 30 s left")
    assert "left" not in told[3]


def test_runs_that_have_not_begun_count_in_the_time_that_is_left(monkeypatch: MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    found = RoundProgress(["a", "b"])
    found.note("a", 0, 4)
    clock.now += 20
    found.note("a", 2, 4)

    assert found.describe_left() == ", about 60 s left"


@mark.parametrize("width", [80, 100])
def test_bars_of_a_run_fit_the_terminal_and_show_the_time_left(width: int, monkeypatch: MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(progress, "err", console)
    with show_rounds(False) as screen:
        screen.on_start(config(32), 0)
        for number in (1, 2, 3):
            clock.now += 10
            screen.on_record(record(number))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    shown = [line for line in lines if "trial" in line]

    assert "about 5 min left" in shown[-1] and "validation dice" in shown[-1]


def test_bars_of_several_runs_show_the_time_left_of_all(monkeypatch: MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(progress, "err", console)
    with show_rounds(False, waiting=["local", "fedavg"]) as screen:
        screen.on_rounds("local", 0, 4)
        clock.now += 20
        screen.on_rounds("local", 2, 4)
    shown = console.file.getvalue()  # type: ignore[attr-defined]

    assert "about 60 s left in all" in shown


def test_bars_of_cases_show_the_time_left() -> None:
    with Progress(console=Console(file=io.StringIO())) as bars:
        bars.add_task("checking", total=10)
        task = bars.tasks[0]
        assert str(TimeLeftColumn().render(task)) == ""
        task.start_time, task.completed = task.get_time() - 30, 4

        assert str(TimeLeftColumn().render(task)) == "about 45 s left"


def test_a_pipe_is_told_why_it_waits_once_it_has_waited(
    monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    with common.show_wait("Measuring [it]"):
        pass
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(common, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(common, "Timer", AtOnce)
    with common.show_wait("Measuring [it]", hidden=True):
        pass
    assert capsys.readouterr().err == ""
    with common.show_wait("Measuring [it]"):
        pass
    assert capsys.readouterr().err == "Measuring [it] ...\n"


def test_a_terminal_has_a_spinner(monkeypatch: MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(common, "err", console)
    with common.show_wait("Drawing the report"):
        pass

    assert "Drawing the report" in console.file.getvalue()  # type: ignore[attr-defined]


class AtOnce:
    """A timer that does not wait."""

    def __init__(self, seconds: float, function: Any, arguments: list[Any]) -> None:
        self.start = lambda: function(*arguments)

    def cancel(self) -> None: ...


@fixture
def terminal(monkeypatch: MonkeyPatch) -> Console:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "err", console)
    return console


def last_line(console: Console) -> str:
    return console.file.getvalue().rstrip().rpartition("\r")[2]  # type: ignore[attr-defined]


@mark.parametrize("reported", [108, 100])
def test_a_bar_over_cases_ends_at_its_end(terminal: Console, reported: int) -> None:
    with progress.show_cases("preparing", hidden=False) as watch:
        assert watch is not None
        watch(reported, 108, "p001")

    assert "108/108" in last_line(terminal)


def test_there_is_no_bar_where_there_was_nothing_to_do(terminal: Console) -> None:
    with progress.show_cases("preparing", hidden=False):
        pass

    assert "preparing" not in last_line(terminal)


def test_a_bar_that_was_interrupted_stays_where_it_was(terminal: Console) -> None:
    with raises(KeyboardInterrupt), progress.show_cases("preparing", hidden=False) as watch:
        assert watch is not None
        watch(3, 108, "p001")
        raise KeyboardInterrupt

    assert "3/108" in last_line(terminal)
