"""Processes of a kit: one at a time on a machine, their log files, and how they end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import IO, Literal

from wardround.child_process import kill_children
from wardround.deploy.kits.kit import Kit
from wardround.errors import WardroundError
from wardround.files import take_lock
from wardround.machine import end_this_process, replace_file, separate_group

Role = Literal["server", "join"]
Say = Callable[[str], None]
LOCK = "process.lock"  # in state/
ENDS_WITH_INPUT = "WARDROUND_ENDS_WITH_INPUT"  # environment: end when standard input is closed
GRACE_SECONDS = 5.0
LOG_BYTES = 5_000_000
# Large blocks go back to the system when freed; otherwise the C library keeps whole models for later.
STEADY_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "8388608",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "MALLOC_ARENA_MAX": "2",
}


def claim_kit(kit: Kit) -> IO[str]:
    """One process for each kit on a machine: two would displace each other for ever."""
    return take_lock(
        kit.state / LOCK,
        taken=f"{kit.folder}: this kit is already running on this machine. Stop that one first.",
        advice=f"{kit.state} must be a folder that this account may write into.",
    )


def open_log(kit: Kit, name: str) -> IO[bytes]:
    """A log file of the kit, to append to; one that has grown large is put aside first."""
    kit.logs.mkdir(parents=True, exist_ok=True)
    path = kit.logs / f"{name}.log"
    if path.exists() and path.stat().st_size > LOG_BYTES:
        replace_file(path, path.with_suffix(".log.1"))
    return path.open("ab")


# A command of a kit, started by another process


class KitProcess:
    """`wardround server KIT` or `wardround join KIT`, as long as the `with` block lasts.

    It ends with this process, however that ends: its standard input is then closed.
    """

    def __init__(self, kit: Kit, role: Role) -> None:
        self.log = kit.logs / f"{role}.log"
        environment = {**STEADY_MEMORY, **os.environ, ENDS_WITH_INPUT: "1", "COLUMNS": "200"}
        with open_log(kit, role) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "wardround", role, str(kit.folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                **separate_group(),  # Ctrl-C is for the process that started it
            )

    def __enter__(self) -> KitProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask_to_end(self) -> None:
        """The first half of `stop`: several can be asked first and then end in parallel."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def stop(self) -> None:
        """End it; safe to call more than once."""
        self.ask_to_end()
        try:
            self._process.wait(timeout=GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def end_with_input() -> None:
    """End this process like a Ctrl-C when its standard input is closed, if it was started that way."""
    if not os.environ.pop(ENDS_WITH_INPUT, ""):
        return

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 1024):
                pass
        end_this_process()

    threading.Thread(target=watch, name="wardround-parent", daemon=True).start()


def end_after(seconds: float) -> None:
    """End this process and its children after so long, if it has not ended by itself."""

    def end() -> None:
        kill_children()
        os._exit(130)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


# Waiting


def free_ports(count: int) -> list[int]:
    """Different free ports of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def is_port_open(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def wait_for_port(host: str, port: int, seconds: float, server: KitProcess | None = None) -> None:
    """Until something listens; a server that ended meanwhile is an error at once."""
    deadline = time.monotonic() + seconds
    while not is_port_open(host, port):
        if server is not None and not server.is_alive():
            raise WardroundError(f"the server ended while starting. Its log: {server.log}")
        if time.monotonic() > deadline:
            log = f" The server's log: {server.log}" if server is not None else ""
            raise WardroundError(f"{host}:{port} did not open within {seconds:.0f} s.{log}")
        time.sleep(0.1)


def wait_for_hospitals(
    connected: Callable[[], Iterable[str]],
    expected: Iterable[str],
    seconds: float,
    say: Say,
) -> None:
    """Until the expected hospitals are there."""
    wanted = set(expected)
    deadline = time.monotonic() + seconds
    told: set[str] = set()
    while True:
        missing = wanted - set(connected())
        if not missing:
            return
        if missing != told:
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + deadline - time.monotonic()))
            say(f"waiting for {', '.join(sorted(missing))} until {until}")
            told = missing
        if time.monotonic() > deadline:
            raise WardroundError(
                f"only {len(wanted) - len(missing)} of {len(wanted)} hospitals connected within "
                f"{seconds:.0f} s; missing: {', '.join(sorted(missing))}. Is `wardround join` running there?"
            )
        time.sleep(0.5)
