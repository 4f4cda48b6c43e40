"""Progress of runs: bars on a terminal, plain lines in a pipe, and what Ctrl-C does."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any

import typer
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

from wardround.cli.common import err
from wardround.text import describe_round, format_duration


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


class Lines:
    """Progress in a pipe or a log file: one plain line for each round."""

    def __init__(self, waiting: Iterable[str] = ()) -> None:
        self._title = ""
        self._rounds = 0
        self._shown: dict[str, int] = {}
        self._left = RoundProgress(waiting)

    def on_start(self, config: Any, first_round: int) -> None:
        self._title = f"{config.name}: "
        self._rounds = config.rounds
        self._left = RoundProgress()
        self._left.note(self._title, first_round, config.rounds)

    def on_round(self, round: int, present: Sequence[str]) -> None: ...

    def on_progress(self, client: str, step: int, steps: int) -> None: ...

    def on_record(self, record: Mapping[str, Any]) -> None:
        self._left.note(self._title, record["round"], self._rounds)
        text = f"{self._title}round {record['round']}/{self._rounds} {describe_round(record)}"
        err.print(escape(f"{text}{self._left.describe_left()}"), markup=True)

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        self._left.note(name, done, rounds)
        if done == rounds:
            self._left.end(name)
        if done and self._shown.get(name) != done and (done == rounds or done % 10 == 0):
            self._shown[name] = done
            left = self._left.describe_left()
            err.print(f"{name}: round {done} of {rounds}{left + ' in all' if left else ''}", markup=False)


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


class TimeLeftColumn(ProgressColumn):
    """The time that is left, by what is done so far."""

    def render(self, task: Task) -> Text:
        if not task.total or not task.completed or task.elapsed is None or task.finished:
            return Text("")
        left = task.elapsed * (task.total - task.completed) / task.completed
        return Text(f"about {format_duration(left)} left")


def bar_columns() -> list[ProgressColumn]:
    bar = BarColumn(28 if err.width >= 100 else 12)
    return [TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn()]


@contextmanager
def show_rounds(hidden: bool, waiting: Iterable[str] = ()) -> Iterator[Any]:
    """A listener that shows progress: bars on a terminal, lines in a pipe, or None.

    waiting: names of the runs, where there are several.
    """
    if hidden:
        yield None
    elif not err.is_terminal:
        yield Lines(waiting)
    else:
        note = TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        columns = [*bar_columns(), TextColumn("{task.fields[left]}"), note]
        with Progress(*columns, console=err) as progress:
            yield Screen(progress, waiting)


@contextmanager
def show_cases(what: str, hidden: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Progress over cases: a bar on a terminal, a line for every tenth of them in a pipe."""
    if hidden:
        yield None
        return
    if not err.is_terminal:
        shown: set[int] = set()

        def line(done: int, total: int, where: str) -> None:
            tenth = 10 * done // max(1, total)
            if tenth not in shown:
                shown.add(tenth)
                err.print(f"{what}: {done} of {total} cases")

        yield line
        return
    with Progress(*bar_columns(), TimeLeftColumn(), console=err) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total, where: bars.update(task, completed=done, total=total)
        total = bars.tasks[0].total
        bars.update(task, completed=total, visible=total is not None)  # all were in the cache: no bar


@contextmanager
def stop_at_round_end(request: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C once: finish the round, write a checkpoint, say how to continue. Twice: stop at once.

    The handler may run in the middle of a print or an import of the main thread, where printing fails: a
    thread prints for it.
    """
    pressed: SimpleQueue[bool] = SimpleQueue()  # the one queue a signal handler may put into

    def announce() -> None:
        if pressed.get():
            err.print(
                "Finishing this round, then stopping with a checkpoint. Press Ctrl-C again to stop at once."
            )

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        request()
        pressed.put(True)

    announcer = Thread(target=announce, name="ctrl-c", daemon=True)
    announcer.start()
    before = signal.signal(signal.SIGINT, handle)
    try:
        try:
            yield
        finally:
            pressed.put(False)
            announcer.join()
    except KeyboardInterrupt:
        err.print("Stopped at once; completed rounds are kept. Continue with --resume.")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, before)
