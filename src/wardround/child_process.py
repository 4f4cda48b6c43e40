"""A child process of ours: one JSON line for each request, JSON lines for answers.

The parent starts `ChildProcess("package.module")`; that module's main calls `connect`. Only paths, settings
and numbers go through the pipes, no tensors and no pickle.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from wardround.machine import kill_group, separate_group

END_SECONDS = 10.0  # for a child to end by itself

Line = dict[str, Any]


# The parent's side

CHILDREN: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


class ChildProcess:
    """`python -m module`, and the thread that reads its lines.

    environment: variables beside our own; quiet: what it writes to standard error is dropped; log: a file
    for it instead.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] | None = None,
        *,
        quiet: bool = False,
        log: IO[bytes] | None = None,
    ) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # -P: nothing from the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else log,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
            **separate_group(),  # Ctrl-C is the parent's to handle
        )
        CHILDREN.add(self)
        self._sending = threading.Lock()
        self._answers: queue.Queue[Line | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError), self._sending:  # `receive` will say that it ended
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self, deadline: float | None = None) -> Line | None:
        """The next answer, or None when the child ended; TimeoutError past the deadline (time.monotonic)."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None
        if answer is None:
            self._answers.put(None)  # for whoever asks again
        return answer

    def ask(self, request: Mapping[str, Any]) -> Line | None:
        """One request and its answer; None when the child ended."""
        self.send(request)
        return self.receive()

    def exit_code(self) -> int:
        """Of a child that ended."""
        return self._process.wait(timeout=END_SECONDS)

    def kill(self) -> None:
        """End it, and what it started: they are a group of their own."""
        kill_group(self._process)

    def stop(self) -> None:
        """Let it end by itself, as it does without input; kill it if it does not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(timeout=END_SECONDS)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and line.endswith("\n"):  # no print during an import, no half line
                self._answers.put(json.loads(line))
        self._answers.put(None)


def kill_children() -> None:
    """End all children of this process."""
    for child in list(CHILDREN):
        child.kill()


# The child's side


def connect() -> tuple[Iterator[Line], Callable[[Mapping[str, Any]], None]]:
    """The parent's requests, until there are no more, and how to answer.

    From here on whatever a library prints goes to standard error: it must not look like an answer.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)

    def answer(value: Mapping[str, Any]) -> None:
        try:
            answers.write(json.dumps(dict(value)) + "\n")
            answers.flush()
        except OSError:  # the parent was killed: nobody reads an answer, or a complaint
            os._exit(1)

    return (json.loads(line) for line in sys.stdin), answer


def listen(requests: Iterator[Line], take: Callable[[Line], None]) -> None:
    """Pass on the parent's requests from a thread of their own.

    Where there are no more, the parent has gone, or wants this process to end: it ends at once, whatever it
    does. Files are written atomically.
    """

    def read() -> None:
        for request in requests:
            take(request)
        os._exit(0)

    threading.Thread(target=read, name="wardround-parent", daemon=True).start()
