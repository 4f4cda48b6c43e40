"""Pool: prepare many cases on all cores. This process and some helpers take them from one queue.

A helper is `python -m wardround.data.preparing.pool`: it reads one JSON line a case and answers with one.
Only paths and settings are sent, no voxels and no pickle. Helpers start once the work takes longer than
starting them, and end with their input; one that dies costs the case it was preparing.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from wardround.child_process import ChildProcess, connect
from wardround.data.federation_file import FederationFile, PrepareSettings, check_settings
from wardround.data.listing import Entry, LabelCoding, Watch
from wardround.data.preparing.cache import (
    Cache,
    CacheFolderError,
    DigestIndex,
    Recipe,
    Signature,
    remove_stale,
)
from wardround.data.preparing.prepare import MOST_CUT, cut_off
from wardround.errors import DataError
from wardround.machine import cores

log = logging.getLogger(__name__)

PATIENCE = 0.2  # seconds of work before helpers are worth starting
Note = Callable[[Entry, Path | None, str | None, float], None]


@dataclass(frozen=True)
class PreparedCases:
    """paths: (client, case) -> its file; failures: (client, case, reason with the case's name in front);
    cut: (client, case) -> the share of its labelled voxels that prepare.size cuts off, of those prepared now.
    """

    paths: Mapping[tuple[str, str], Path]
    failures: Sequence[tuple[str, str, str]]
    cut: Mapping[tuple[str, str], float] = field(default_factory=dict)


def prepare_cases(
    cache: Cache,
    entries: Sequence[Entry],
    file: FederationFile,
    *,
    jobs: int | None = None,
    watch: Watch | None = None,
    background: Collection[int] | None = (),
) -> PreparedCases:
    """Look up cases in the cache and prepare the missing ones in `jobs` processes (default: one a core).

    watch: called with cases done, cases in all, and which one; background: label values of no class that
    `data.checking.check` allowed, None for any.
    """
    check_settings(file.prepare)
    allowed = None if background is None else tuple(sorted(background))
    recipe = Recipe(file.prepare, file.labels, allowed, file.ignore)
    recipes = {own.key: own for own in (recipe, *(recipe.of_case(entry) for entry in entries))}
    for own in recipes.values():
        cache.open(own)
    known = DigestIndex(cache.folder)
    paths: dict[tuple[str, str], Path] = {}
    failures: list[tuple[str, str, str]] = []
    cut: dict[tuple[str, str], float] = {}

    def note(entry: Entry, path: Path | None, reason: str | None, share_cut: float = 0.0) -> None:
        if path is not None:
            paths[entry.client, entry.name] = path
            if share_cut > MOST_CUT:
                cut[entry.client, entry.name] = share_cut
        else:
            sentence = f"{entry.where}: {reason or 'it could not be prepared.'}"
            failures.append((entry.client, entry.name, sentence))
        if watch is not None:
            watch(len(paths) + len(failures), len(entries), entry.where)

    missing = []
    for entry in entries:
        try:
            path = cache.find(entry, recipe, known)
        except DataError as error:
            note(entry, None, str(error))
            continue
        if path is None:
            missing.append(entry)
        else:
            note(entry, path, None)
    prepare_all(cache, missing, recipe, known, jobs or cores(), note)
    for key in recipes:
        remove_stale(cache.folder / key)
    warn_of_cut(cut)
    # sorted: helpers finish in any order
    return PreparedCases(dict(sorted(paths.items())), sorted(failures), dict(sorted(cut.items())))


def warn_of_cut(cut: Mapping[tuple[str, str], float]) -> None:
    """Log one line for all cases that lose labelled voxels; `data.checking.check` names each."""
    if not cut:
        return
    (client, case), share = max(sorted(cut.items()), key=lambda item: item[1])
    where = f"client '{client}', case '{case}'"
    if len(cut) == 1:
        log.warning("%s: %s", where, cut_off(share))
        return
    log.warning("%d cases lose labelled voxels, the most %s: %s", len(cut), where, cut_off(share))


@dataclass(frozen=True)
class Attempt:
    """Result of preparing one case: its file, or the reason why there is none.

    fatal: no other case will succeed either; cut: the share of labelled voxels that was cut off.
    """

    path: str | None = None
    reason: str | None = None
    fatal: bool = False
    cut: float = 0.0
    found: Mapping[str, tuple[Signature, str]] = field(default_factory=dict)


def attempt(cache: Cache, entry: Entry, recipe: Recipe) -> Attempt:
    """Prepare one case; any error becomes a sentence."""
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
    cache: Cache, entries: Sequence[Entry], recipe: Recipe, known: DigestIndex, jobs: int, note: Note
) -> None:
    """Prepare cases here and in up to jobs - 1 helpers; `note` and `known` are updated in this process."""
    pending = deque(entries)
    results: queue.Queue[tuple[Entry, Attempt]] = queue.Queue()
    helpers = [Helper(cache, recipe, pending, results) for _ in range(min(jobs, len(entries)) - 1)]
    begun = time.monotonic()
    num_left = len(entries)
    with one_thread(), contextlib.ExitStack() as stack:
        for helper in helpers:
            stack.callback(helper.stop)
        while num_left:
            for helper in helpers:
                if pending and not helper.started and time.monotonic() - begun >= PATIENCE:
                    helper.start()
            for entry, result in next_results(cache, recipe, pending, results):
                num_left -= 1
                if result.fatal:
                    raise CacheFolderError(result.reason)
                known.add(result.found)
                note(entry, None if result.path is None else Path(result.path), result.reason, result.cut)


def next_results(
    cache: Cache, recipe: Recipe, pending: deque[Entry], results: queue.Queue[tuple[Entry, Attempt]]
) -> Iterator[tuple[Entry, Attempt]]:
    """Prepare one case from the queue, then yield what helpers finished; wait for them if it is empty."""
    try:
        entry = pending.popleft()
    except IndexError:
        with contextlib.suppress(queue.Empty):  # a helper that could not start puts its case back
            yield results.get(timeout=1.0)
    else:
        yield entry, attempt(cache, entry, recipe)
    with contextlib.suppress(queue.Empty):
        while True:
            yield results.get_nowait()


class Helper:
    """A process and the thread that feeds it from the pile."""

    def __init__(
        self, cache: Cache, recipe: Recipe, pile: deque[Entry], results: queue.Queue[tuple[Entry, Attempt]]
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
                answer["found"] = found_again(answer["found"])
                self._results.put((entry, Attempt(**answer)))
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


# What goes through the pipe


def plain_entry(entry: Entry) -> dict[str, Any]:
    label = None if entry.label is None else str(entry.label)
    return {
        "client": entry.client, "name": entry.name, "images": [str(path) for path in entry.images],
        "label": label, "group": entry.group, "labels": entry.labels and list(entry.labels.items()),
        "masks": [[name, str(path)] for name, path in entry.masks.items()],
        "coding": None if entry.coding is None else vars(entry.coding),
        "data_files": [str(path) for path in entry.data_files], "places": list(entry.places),
    }  # fmt: skip


def entry_again(plain: Mapping[str, Any]) -> Entry:
    label = None if plain["label"] is None else Path(plain["label"])
    images = tuple(Path(path) for path in plain["images"])
    own = plain["labels"] and {name: tuple(values) for name, values in plain["labels"]}
    masks = {name: Path(path) for name, path in plain["masks"]}
    coding = None if plain["coding"] is None else LabelCoding(**plain["coding"])
    files = tuple(Path(path) for path in plain["data_files"])
    return Entry(
        plain["client"], plain["name"], images, label, plain["group"],
        labels=own, masks=masks, coding=coding, data_files=files, places=tuple(plain["places"]),
    )  # fmt: skip


def plain_recipe(recipe: Recipe) -> dict[str, Any]:
    background = None if recipe.background is None else list(recipe.background)
    return {**recipe.as_dict(), "background": background}


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
