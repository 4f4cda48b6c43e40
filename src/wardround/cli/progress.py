"""Progress of commands: bars on a terminal, plain lines in a pipe, and what Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any

import typer
from rich.markup import escape
from rich.progress import Progress

from wardround.cli.common import err
from wardround.progress import RoundProgress, TimeLeftColumn, bar_columns, show_bars
from wardround.text import describe_round


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
        with show_bars(err, waiting) as screen:
            yield screen


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
    with Progress(*bar_columns(err), TimeLeftColumn(), console=err) as bars:
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
