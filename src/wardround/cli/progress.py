"""Progress of runs: bars on a terminal, plain lines in a pipe, and what Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from wardround.cli.common import err


class Screen:
    """Progress on a terminal: one bar for the rounds, one line for the client at work."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._rounds: TaskID | None = None
        self._clients: dict[str, TaskID] = {}

    def on_start(self, config: Any, first_round: int) -> None:
        if self._rounds is not None:
            self._progress.remove_task(self._rounds)
        self._rounds = self._progress.add_task(
            escape(config.name), total=config.rounds, completed=first_round, note=""
        )

    def on_round(self, round: int, present: Sequence[str]) -> None:
        for task in self._clients.values():
            self._progress.remove_task(task)
        self._clients = {}

    def on_progress(self, client: str, step: int, steps: int) -> None:
        if client not in self._clients:
            self._clients[client] = self._progress.add_task(
                f"  {escape(client)}", total=steps, note="training"
            )
        note = "" if step == steps else "training"
        self._progress.update(self._clients[client], completed=step, total=steps, note=note)

    def on_record(self, record: Mapping[str, Any]) -> None:
        assert self._rounds is not None
        self._progress.update(self._rounds, completed=record["round"], note=running_note(record))

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        """One bar for each of several runs."""
        if name not in self._clients:
            self._clients[name] = self._progress.add_task(escape(name), total=rounds, note="rounds")
        self._progress.update(self._clients[name], completed=done)


class Lines:
    """Progress in a pipe or a log file: one plain line a round."""

    def __init__(self) -> None:
        self._title = ""
        self._rounds = 0
        self._shown: dict[str, int] = {}

    def on_start(self, config: Any, first_round: int) -> None:
        self._title = f"{config.name}: "
        self._rounds = config.rounds

    def on_round(self, round: int, present: Sequence[str]) -> None: ...

    def on_progress(self, client: str, step: int, steps: int) -> None: ...

    def on_record(self, record: Mapping[str, Any]) -> None:
        text = f"{self._title}round {record['round']}/{self._rounds} {running_note(record)}"
        err.print(escape(text), markup=True)

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        if done and self._shown.get(name) != done and (done == rounds or done % 10 == 0):
            self._shown[name] = done
            err.print(f"{name}: round {done} of {rounds}")


def running_note(record: Mapping[str, Any]) -> str:
    """What a round's line says: validation Dice, time, and trouble if any."""
    parts = []
    for metric, entry in record.get("validation", {}).items():
        if metric != "loss":
            parts.append(f"validation {metric} {entry['mean']:.3f}")
            break
    parts.append(f"{record['seconds']:.1f} s")
    trouble = len(record["refused"]) + len(record["lost"])
    if trouble:
        parts.append(f"{trouble} replies refused or lost")
    return ", ".join(parts)


@contextmanager
def live(hidden: bool) -> Iterator[Any]:
    """Somebody who shows progress, suited to where the output goes."""
    if hidden:
        yield None
    elif not err.is_terminal:
        yield Lines()
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=err, transient=False) as progress:
            yield Screen(progress)


@contextmanager
def counting(what: str, hidden: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Progress of a pass over cases: a bar on a terminal, a line for every tenth part in a pipe."""
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
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total, where: bars.update(task, completed=done, total=total)


@contextmanager
def stopping_at_a_round_end(request: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C once: finish the round, write a checkpoint, say how to go on. Twice: stop now.

    The handler may run in the middle of a print or an import of the main thread, where printing fails: a
    thread speaks for it.
    """
    pressed: SimpleQueue[bool] = SimpleQueue()  # the one queue a signal handler may put into

    def speak() -> None:
        if pressed.get():
            err.print(
                "Finishing this round, then stopping with a checkpoint. Press Ctrl-C again to stop at once."
            )

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        request()
        pressed.put(True)

    speaker = Thread(target=speak, name="ctrl-c", daemon=True)
    speaker.start()
    before = signal.signal(signal.SIGINT, handle)
    try:
        try:
            yield
        finally:
            pressed.put(False)
            speaker.join()
    except KeyboardInterrupt:
        err.print("Stopped at once; the last whole round is safe. Continue with --resume.")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, before)
