"""Progress of a run, drawn: bars on a terminal or in a notebook, for the command line and for `wr.run`."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from wardround.text import describe_round, format_duration

SHORTEST = 0.2  # seconds between two pictures in a notebook


class Screen:
    """Progress on a terminal: one bar for the rounds, one for each client in training."""

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
        self._progress.update(self._rounds, completed=record["round"], note=describe_round(record))

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        """One bar for each of several runs."""
        if name not in self._clients:
            self._clients[name] = self._progress.add_task(escape(name), total=rounds, note="rounds")
        self._progress.update(self._clients[name], completed=done)


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


def bar_columns() -> list[ProgressColumn]:
    return [TextColumn("{task.description}"), BarColumn(28), MofNCompleteColumn(), TimeElapsedColumn()]


@contextmanager
def show_bars(console: Console) -> Iterator[Screen]:
    with Progress(*bar_columns(), TextColumn("{task.fields[note]}"), console=console) as progress:
        yield Screen(progress)


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
