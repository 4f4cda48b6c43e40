"""Writing beside the training: one thread, in order, at most two rounds behind."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from wardround.engine.memory_store import IN_FLIGHT

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005  # the usual 5 ms for which a thread may keep others waiting are long beside a step


class BackgroundWriter:
    """Runs jobs one after the other in a thread; after one that fails no other is run."""

    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._pending: deque[Future[None]] = deque()
        self._failed = False

    def submit(self, steps: Sequence[Callable[[], None]]) -> None:
        """Run these steps when those before them are done; wait first where two jobs are behind.

        What an earlier job raised is raised here.
        """
        while len(self._pending) >= IN_FLIGHT:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._run, steps))

    def is_busy(self) -> bool:
        """Whether something is still to be written."""
        return any(not future.done() for future in self._pending)

    def flush(self) -> None:
        """Return when everything is written; what a job raised is raised here."""
        while self._pending:
            self._pending.popleft().result()

    def close(self, steps: Sequence[Callable[[], None]] = ()) -> None:
        """Write what is left, and these steps; a failure is logged, since the run ends for another reason."""
        try:
            self.submit(steps)
            self.flush()
        except Exception as error:
            log.error("the last rounds could not be written: %s", error)
        self._thread.shutdown()

    def _run(self, steps: Sequence[Callable[[], None]]) -> None:
        if self._failed:
            return
        try:
            for step in steps:
                step()
        except BaseException:
            self._failed = True
            raise
