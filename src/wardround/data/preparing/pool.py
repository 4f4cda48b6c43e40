"""Preparing on all processors: this process and some helpers take cases from one pile.

Helpers: `python -m wardround.data.preparing.pool`. It reads one JSON line a case and answers with one; only
paths and settings go there, no voxels and no pickle. Helpers start when the work turns out to take longer
than starting them, end when their input does, and one that dies costs the one case it had.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from wardround.child_process import ChildProcess, connect
from wardround.data.federation_file import PrepareSettings
from wardround.data.listing import Entry
from wardround.data.preparing.cache import Cache, CacheFolderError, Known, Recipe, Signature
from wardround.errors import DataError

log = logging.getLogger(__name__)

PATIENCE = 0.2  # seconds of work alone before helpers are worth their start
Note = Callable[[Entry, Path | None, str | None, float], None]


@dataclass(frozen=True)
class Attempt:
    """What became of a case: its file, or why not.

    fatal: no other case will do better; cut: the share of labelled voxels that was cut off.
    """

    path: str | None = None
    reason: str | None = None
    fatal: bool = False
    cut: float = 0.0
    found: Mapping[str, tuple[Signature, str]] = field(default_factory=dict)


def attempt(cache: Cache, entry: Entry, recipe: Recipe) -> Attempt:
    """Prepare one case; whatever is wrong with it becomes a sentence."""
    try:
        path, found, cut = cache.prepare(entry, recipe)
        return Attempt(path=str(path), found=found, cut=cut)
    except CacheFolderError as error:
        return Attempt(reason=str(error), fatal=True)
    except DataError as error:
        return Attempt(reason=str(error))
    except MemoryError:
        return Attempt(reason="it does not fit into memory.")
    except Exception as error:  # a case must not end the preparation of the others
        log.debug("%s", entry.where, exc_info=True)
        return Attempt(reason=f"it could not be prepared ({type(error).__name__}: {error}).")


def prepare_all(
    cache: Cache, entries: Sequence[Entry], recipe: Recipe, known: Known, jobs: int, note: Note
) -> None:
    """Every case, here and in up to jobs - 1 helpers; `note` and `known` are told in this process."""
    pile = deque(entries)
    results: queue.Queue[tuple[Entry, Attempt]] = queue.Queue()
    helpers = [Helper(cache, recipe, pile, results) for _ in range(min(jobs, len(entries)) - 1)]
    begun = time.monotonic()
    num_left = len(entries)
    with one_thread(), stopping(helpers):
        while num_left:
            for helper in helpers:
                if pile and not helper.started and time.monotonic() - begun >= PATIENCE:
                    helper.start()
            for entry, result in next_results(cache, recipe, pile, results):
                num_left -= 1
                settle(entry, result, known, note)


def next_results(
    cache: Cache, recipe: Recipe, pile: deque[Entry], results: queue.Queue[tuple[Entry, Attempt]]
) -> Iterator[tuple[Entry, Attempt]]:
    """A case of our own from the pile, then what helpers finished; with an empty pile, wait for them."""
    try:
        entry = pile.popleft()
    except IndexError:
        with contextlib.suppress(queue.Empty):  # a helper that could not start puts its case back
            yield results.get(timeout=1.0)
    else:
        yield entry, attempt(cache, entry, recipe)
    with contextlib.suppress(queue.Empty):
        while True:
            yield results.get_nowait()


def settle(entry: Entry, result: Attempt, known: Known, note: Note) -> None:
    if result.fatal:
        raise CacheFolderError(result.reason)
    known.learn(result.found)
    note(entry, None if result.path is None else Path(result.path), result.reason, result.cut)


class Helper:
    """A process and the thread that feeds it from the pile."""

    def __init__(
        self,
        cache: Cache,
        recipe: Recipe,
        pile: deque[Entry],
        results: queue.Queue[tuple[Entry, Attempt]],
    ) -> None:
        self._task = {"folder": str(cache.folder), "recipe": plain_recipe(recipe)}
        self._pile, self._results = pile, results
        self._child: ChildProcess | None = None
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._stopped = False
        self.started = False

    def start(self) -> None:
        self.started = True
        self._thread.start()

    def stop(self) -> None:
        """At once: a half-made case is made again another time."""
        self._stopped = True
        if self._child is not None:
            self._child.kill()
        if self.started:
            self._thread.join(timeout=10)

    def _feed(self) -> None:
        with contextlib.suppress(OSError):  # no more processes: the others do the work
            while self._pile and not self._stopped and self._serve():
                pass

    def _serve(self) -> bool:
        """Feed one process until the pile or the process ends; whether to start another."""
        with self._launched() as child:
            if child.ask(self._task) is None:
                log.debug("a helper could not start")
                return False
            while not self._stopped:
                try:
                    entry = self._pile.popleft()
                except IndexError:
                    return False
                answer = child.ask(plain_entry(entry))
                if answer is None:
                    code = child.exit_code()
                    reason = f"the process that prepared it ended (exit code {code}); is memory short?"
                    self._results.put((entry, Attempt(reason=reason)))
                    return True
                found = found_again(answer.pop("found"))
                self._results.put((entry, Attempt(**answer, found=found)))
        return False

    @contextlib.contextmanager
    def _launched(self) -> Iterator[ChildProcess]:
        self._child = child = ChildProcess("wardround.data.preparing.pool", helper_environment(), quiet=True)
        if self._stopped:  # between the two lines above
            child.kill()
        try:
            yield child
        finally:
            child.stop()


def helper_environment() -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Cases side by side, each on one processor, is faster than one case on all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def stopping(helpers: Sequence[Helper]) -> Iterator[None]:
    try:
        yield
    finally:
        for helper in helpers:
            helper.stop()


# What goes through the pipe


def plain_entry(entry: Entry) -> dict[str, Any]:
    label = None if entry.label is None else str(entry.label)
    return {
        "client": entry.client, "name": entry.name, "images": [str(path) for path in entry.images],
        "label": label, "group": entry.group,
    }  # fmt: skip


def entry_again(plain: Mapping[str, Any]) -> Entry:
    label = None if plain["label"] is None else Path(plain["label"])
    images = tuple(Path(path) for path in plain["images"])
    return Entry(plain["client"], plain["name"], images, label, plain["group"])


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    background = None if recipe.background is None else list(recipe.background)
    return {**recipe.described, "background": background}


def recipe_again(plain: Mapping[str, Any]) -> Recipe:
    labels = {name: tuple(values) for name, values in plain["labels"]}
    background = None if plain["background"] is None else tuple(plain["background"])
    return Recipe(PrepareSettings.model_validate(plain["prepare"]), labels, background)


def found_again(plain: Mapping[str, Any]) -> dict[str, tuple[Signature, str]]:
    return {path: ((seen[0], seen[1], seen[2]), digest) for path, (seen, digest) in plain.items()}


# The helper's side


def serve() -> None:
    """Answer one line for each line, until there are no more."""
    requests, answer = connect()
    torch.set_num_threads(1)
    task = next(requests)
    cache, recipe = Cache(Path(task["folder"])), recipe_again(task["recipe"])
    answer({"ready": True})
    for request in requests:
        answer(vars(attempt(cache, entry_again(request), recipe)))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt, StopIteration):
        serve()
