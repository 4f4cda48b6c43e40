"""Progress on a terminal."""

import io

from pytest import MonkeyPatch, fixture, mark, raises
from rich.console import Console

from wardround.cli import progress


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
