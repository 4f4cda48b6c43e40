"""Progress of a run, drawn: bars on a terminal or in a notebook, for the command line and for `wr.run`."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from wardround.text import describe_round, format_duration

SHORTEST = 0.2  # seconds between two pictures in a notebook


class RoundProgress:
    """Rounds of several runs, and the time that is left. waiting: runs that have not begun."""

    def __init__(self, waiting: Iterable[str] = ()) -> None:
        self.waiting: set[str] = set(waiting)
        self._ended: set[str] = set()
        self._first: dict[str, int] = {}  # rounds that were done when the run began here
        self._done: dict[str, int] = {}
        self._rounds: dict[str, int] = {}
        self._began = 0.0

    @property
    def running(self) -> list[str]:
        return [name for name in self._done if name not in self._ended]

    def note(self, name: str, done: int, rounds: int) -> None:
        self._began = self._began or time.monotonic()
        self.waiting.discard(name)
        self._first.setdefault(name, done)
        self._done[name], self._rounds[name] = done, rounds

    def end(self, name: str) -> None:
        self.waiting.discard(name)
        self._ended.add(name)

    def count_left(self) -> float:
        """Rounds to come; a run that has not begun is taken to have as many as the others."""
        usual = sum(self._rounds.values()) / max(1, len(self._rounds))
        return len(self.waiting) * usual + sum(self._rounds[n] - self._done[n] for n in self.running)

    def describe_run(self, name: str) -> str:
        return f"{self._done[name]}/{self._rounds[name]}" if name in self._done else "waiting"

    def describe_rounds(self) -> str:
        done = sum(self._done.values())
        return f", {done} of {done + self.count_left():.0f} rounds" if self._rounds else ""

    def describe_left(self) -> str:
        """The time that is left, by the rounds so far of all runs together, once there are some of each."""
        done = sum(self._done.values()) - sum(self._first.values())
        left = self.count_left()
        if not left or done < 2 * max(1, len(self.running)):
            return ""
        return f", about {format_duration(left * (time.monotonic() - self._began) / done)} left"


class Screen:
    """Progress on a terminal: one bar for the rounds, one for each client in training; or one for each run.

    waiting: runs that have not begun, where there are several.
    """

    def __init__(self, progress: Progress, waiting: Iterable[str] = ()) -> None:
        self._progress = progress
        self._left = RoundProgress(waiting)
        self._rounds: TaskID | None = None
        self._run = "", 0  # its name, its rounds
        self._clients: dict[str, TaskID] = {}

    def on_start(self, config: Any, first_round: int) -> None:
        if self._rounds is not None:
            self._progress.remove_task(self._rounds)
        self._left = RoundProgress()
        self._left.note(config.name, first_round, config.rounds)
        self._rounds = self._progress.add_task(
            escape(config.name), total=config.rounds, completed=first_round, note="", left=""
        )
        self._run = config.name, config.rounds

    def on_round(self, round: int, present: Sequence[str]) -> None:
        for task in self._clients.values():
            self._progress.remove_task(task)
        self._clients = {}

    def on_progress(self, client: str, step: int, steps: int) -> None:
        if client not in self._clients:
            self._clients[client] = self._progress.add_task(
                f"  {escape(client)}", total=steps, note="training", left=""
            )
        note = "" if step == steps else "training"
        self._progress.update(self._clients[client], completed=step, total=steps, note=note)

    def on_record(self, record: Mapping[str, Any]) -> None:
        assert self._rounds is not None
        name, rounds = self._run
        self._left.note(name, record["round"], rounds)
        self._progress.update(
            self._rounds,
            completed=record["round"],
            note=describe_round(record),
            left=self._left.describe_left().removeprefix(", "),
        )

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        """One bar for each of several runs."""
        if name not in self._clients:
            self._clients[name] = self._progress.add_task(escape(name), total=rounds, note="rounds", left="")
        self._left.note(name, done, rounds)
        if done == rounds:
            self._left.end(name)
        for task in self._clients.values():  # the time of all of them stands beside the newest
            self._progress.update(task, left="")
        left = self._left.describe_left().removeprefix(", ")
        self._progress.update(self._clients[name], completed=done, left=f"{left} in all" if left else "")


class Notebook:
    """Progress in a notebook: a bar for the rounds, one for each client in training.

    show: puts HTML in the place of what it showed before.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._name, self._rounds, self._first, self._done = "", 0, 0, 0
        self._note = ""
        self._clients: dict[str, tuple[int, int]] = {}
        self._began = self._shown = time.monotonic()

    def on_start(self, config: Any, first_round: int) -> None:
        self._name, self._rounds = config.name, config.rounds
        self._first = self._done = first_round
        self._began = time.monotonic()
        self._draw()

    def on_round(self, round: int, present: Sequence[str]) -> None:
        self._clients = {}

    def on_progress(self, client: str, step: int, steps: int) -> None:
        self._clients[client] = step, steps
        if time.monotonic() - self._shown >= SHORTEST:
            self._draw()

    def on_record(self, record: Mapping[str, Any]) -> None:
        self._done, self._note, self._clients = record["round"], describe_round(record), {}
        self._draw()

    def _draw(self) -> None:
        self._shown = time.monotonic()
        bars = [(f"{self._name}: round {self._done}/{self._rounds}", self._done, self._rounds, self._note)]
        left = self._rounds - self._done
        if left and self._done > self._first:
            seconds = left * (self._shown - self._began) / (self._done - self._first)
            bars[0] = (*bars[0][:3], f"{self._note}, about {format_duration(seconds)} left")
        bars += [(client, step, steps, "") for client, (step, steps) in self._clients.items()]
        rows = "".join(
            f'<tr><td style="text-align:left">{html.escape(name)}</td>'
            f'<td><progress value="{done}" max="{of}"></progress></td>'
            f'<td style="text-align:left">{html.escape(note)}</td></tr>'
            for name, done, of, note in bars
        )
        self._show(f"<table>{rows}</table>")


class TimeLeftColumn(ProgressColumn):
    """The time that is left, by what is done so far."""

    def render(self, task: Task) -> Text:
        if not task.total or not task.completed or task.elapsed is None or task.finished:
            return Text("")
        left = task.elapsed * (task.total - task.completed) / task.completed
        return Text(f"about {format_duration(left)} left")


def bar_columns(console: Console) -> list[ProgressColumn]:
    bar = BarColumn(28 if console.width >= 100 else 12)
    return [TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn()]


@contextmanager
def show_bars(console: Console, waiting: Iterable[str] = ()) -> Iterator[Screen]:
    """Bars on a terminal; waiting: names of the runs, where there are several."""
    note = TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = [*bar_columns(console), TextColumn("{task.fields[left]}"), note]
    with Progress(*columns, console=console) as progress:
        yield Screen(progress, waiting)


@contextmanager
def follow(quiet: bool) -> Iterator[Any]:
    """A listener that draws where somebody looks, a terminal or a notebook; else None."""
    console = Console(stderr=True)
    if quiet:
        yield None
    elif (show := find_notebook()) is not None:
        yield Notebook(show)
    elif console.is_terminal:
        with show_bars(console) as screen:
            yield screen
    else:
        yield None


def find_notebook() -> Callable[[str], None] | None:
    """What shows HTML in the notebook that this process is the kernel of, if it is one."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import HTML, display

    if not hasattr(get_ipython(), "kernel"):
        return None
    place: Any = None

    def show(page: str) -> None:
        nonlocal place
        if place is None:
            place = display(HTML(page), display_id=True)
        else:
            place.update(HTML(page))

    return show
