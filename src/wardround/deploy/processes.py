"""FLARE's processes: started, watched, started again, and ended without a trace.

    wardround server | join          the supervisor: Processes below
      '-- this module as a program   FLARE's server or client, in a session of its own
            '-- FLARE's job process  one for each job, in yet another session

Sessions keep a Ctrl-C at the terminal from reaching the children before the supervisor has decided what
to do. The price is that nothing ends a child when its parent dies; so every process watches its parent
and leaves within a second or two (`end_with_parent`). A signal bound to the parent's death
(PR_SET_PDEATHSIG) would be wrong here: it follows the thread that started the child, not the process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, Literal

from wardround.deploy.kits import KIT, SITE
from wardround.errors import ConfigError, WardroundError
from wardround.files import take_lock

Role = Literal["server", "client"]
Say = Callable[[str], None]
HEARTBEAT_SECONDS = 2  # FLARE waits in steps of two seconds
PARENT = "WARDROUND_PARENT"
GRACE_SECONDS = 3.0
LONGEST_PAUSE = 30.0
HEALTHY_SECONDS = 60.0
# Large blocks go back to the system when freed; otherwise the C library keeps whole models for later.
STEADY_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "8388608",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "MALLOC_ARENA_MAX": "2",
}


# Watching the parent


def end_with_parent() -> None:
    """End this process, and what it started, as soon as its parent is gone.

    The parent left its process id in the environment: one that died while this process was still
    starting is noticed too.
    """
    parent = int(os.environ.get(PARENT) or os.getppid())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        end(_list_descendants(os.getpid()))
        os._exit(1)

    threading.Thread(target=watch, name="wardround-parent", daemon=True).start()


# Ending processes


def _list_descendants(pid: int) -> list[Any]:
    """Every process below this one."""
    import psutil

    try:
        children: list[Any] = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return children


def _find_processes(kit: Path) -> list[Any]:
    """Processes that carry this kit in their environment, whoever their parent is by now."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(KIT) == str(kit) and PARENT in process.environ()
        except (psutil.Error, OSError):  # another user's, or just gone
            continue
        if marked and process.pid != os.getpid():
            found.append(process)
    return found


def end(processes: Iterable[Any]) -> None:
    """Kill processes at once."""
    import psutil

    remaining = list(processes)
    _signal(remaining, signal.SIGKILL)
    psutil.wait_procs(remaining, timeout=GRACE_SECONDS)


def _signal(processes: Iterable[Any], number: signal.Signals) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            process.send_signal(number)


# The supervisor


class Processes:
    """FLARE's server or client of one kit, as long as the `with` block lasts.

    again: start it again when it ends by itself (a hospital); otherwise its end shows in `ended`.
    say: receives one line for every event. check: called when the kit is locked and before
    anything is started; it raises where starting would fail.
    """

    def __init__(
        self,
        kit: Path,
        role: Role,
        *,
        site: Path | None = None,
        again: bool = False,
        say: Say = lambda line: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.kit = kit.resolve()
        self.role = role
        self.site = site.resolve() if site else None
        self.again = again
        self.say = say
        self.check = check
        self.log = self.kit / "flare" / f"{role}.log"
        self.ended = threading.Event()
        self.child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._asked: float | None = None  # when it was asked to end
        self._lock_file: IO[str] | None = None
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Processes:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        if not (self.kit / "flare" / "startup").is_dir():
            raise ConfigError(f"{self.kit} has no flare/startup folder. Unpack the kit again.")
        self._lock()
        end(_find_processes(self.kit))  # what a supervisor that was killed may have left a moment ago
        try:
            self.check()
            self._launch()
        except BaseException:
            self._unlock()
            raise
        self._watcher = threading.Thread(target=self._watch, name="wardround-supervisor", daemon=True)
        self._watcher.start()

    def ask_to_end(self) -> None:
        """The first half of `stop`: several can be asked first and then end in parallel."""
        if self._asked is None:
            self._asked = time.monotonic()
            self._stopping.set()
            if self._watcher is not None:
                self._watcher.join(timeout=GRACE_SECONDS)
            _signal(self._tree(), signal.SIGTERM)

    def stop(self) -> None:
        """End everything of this kit; safe to call more than once."""
        self.ask_to_end()
        if self.child is not None:
            import psutil

            left = GRACE_SECONDS - (time.monotonic() - (self._asked or 0.0))
            _, remaining = psutil.wait_procs(self._tree(), timeout=max(0.0, left))
            end(remaining)
            with contextlib.suppress(subprocess.TimeoutExpired):  # only if the kernel holds it
                self.child.wait(timeout=GRACE_SECONDS)
        end(_find_processes(self.kit))
        self._unlock()

    def _tree(self) -> list[Any]:
        import psutil

        if self.child is None:
            return []
        try:
            return [psutil.Process(self.child.pid), *_list_descendants(self.child.pid)]
        except psutil.Error:
            return []

    def _lock(self) -> None:
        """One supervisor for each kit: two would displace each other for ever."""
        self._lock_file = take_lock(
            self.kit / "state" / "process.lock",
            taken=f"{self.kit}: this kit is already running on this machine. Stop that one first.",
            advice=f"{self.kit / 'state'} must be a folder that this account may write into.",
        )

    def _unlock(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def _launch(self) -> None:
        environment = {**STEADY_MEMORY, **os.environ, KIT: str(self.kit), PARENT: str(os.getpid())}
        if self.site:
            environment[SITE] = str(self.site)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", __name__, self.role, str(self.kit / "flare")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _watch(self) -> None:
        """Wait for the end of the child; restart it after a pause that grows while it keeps ending."""
        pause = 1.0
        while not self._stopping.is_set() and self.child is not None:
            began = time.monotonic()
            while not self._stopping.wait(0.2):
                if self.child.poll() is not None:
                    break
            if self._stopping.is_set():
                return
            end(_find_processes(self.kit))  # job processes that outlived it
            name = "server" if self.role == "server" else "connection to the organiser"
            if not self.again:
                self.say(f"the {name} ended (exit code {self.child.returncode}); see {self.log}")
                self.ended.set()
                return
            if time.monotonic() - began > HEALTHY_SECONDS:
                pause = 1.0
            self.say(
                f"the {name} ended (exit code {self.child.returncode}); starting it again in {pause:.0f} s; "
                f"see {self.log}"
            )
            if self._stopping.wait(pause):
                return
            pause = min(2 * pause, LONGEST_PAUSE)
            self._launch()


# Waiting


def free_ports(count: int) -> list[int]:
    """Different free ports of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def is_port_open(host: str, port: int, timeout: float = 1.0) -> bool:
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return True
    except OSError:
        return False


def wait_for_port(host: str, port: int, seconds: float, processes: Processes | None = None) -> None:
    """Until something listens; a server that ended meanwhile is an error at once."""
    deadline = time.monotonic() + seconds
    while not is_port_open(host, port):
        if processes is not None and processes.ended.is_set():
            raise WardroundError(f"the server ended while starting. Its log: {processes.log}")
        if time.monotonic() > deadline:
            log = f" The server's log: {processes.log}" if processes is not None else ""
            raise WardroundError(f"{host}:{port} did not open within {seconds:.0f} s.{log}")
        time.sleep(0.1)


def wait_for_hospitals(
    connected: Callable[[], Iterable[str]],
    expected: Iterable[str],
    seconds: float,
    say: Say = lambda line: None,
    at_least: int | None = None,
) -> list[str]:
    """Until the expected hospitals are there, or the time is up and at least so many are (all of them)."""
    wanted = set(expected)
    enough = len(wanted) if at_least is None else at_least
    deadline = time.monotonic() + seconds
    told: set[str] = set()
    while True:
        here = wanted & set(connected())
        missing = wanted - here
        if not missing:
            return sorted(here)
        if missing != told:
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + deadline - time.monotonic()))
            say(f"waiting for {', '.join(sorted(missing))} until {until}")
            told = missing
        if time.monotonic() > deadline:
            if len(here) >= enough:
                return sorted(here)
            raise WardroundError(
                f"only {len(here)} of {enough} hospitals connected within {seconds:.0f} s; "
                f"missing: {', '.join(sorted(missing))}. Is `wardround join` running there?"
            )
        time.sleep(0.5)


# The program that FLARE runs in


def main() -> int:
    """FLARE's server or client, with our watcher beside it."""
    parser = argparse.ArgumentParser(description="FLARE's server or client of a kit; started by wardround.")
    parser.add_argument("role", choices=["server", "client"])
    parser.add_argument("flare", type=Path, help="the kit's flare folder")
    chosen = parser.parse_args()
    end_with_parent()
    os.environ[PARENT] = str(os.getpid())  # for the job processes FLARE starts
    arguments = argparse.Namespace(
        workspace=str(chosen.flare), local_rank=0, set=["secure_train=true", "config_folder=config"]
    )
    from nvflare.fuel.f3.mpm import MainProcessMonitor

    if chosen.role == "server":
        from nvflare.private.fed.app.server import server_train as program

        arguments.fed_server = "fed_server.json"
        arguments.set += ["org=wardround"]
    else:
        from nvflare.private.fed.app.client import client_train as program

        client = json.loads((chosen.flare / "startup" / "fed_client.json").read_text())["client"]
        arguments.fed_client = "fed_client.json"
        beat = f"heart_beat_interval={HEARTBEAT_SECONDS}"
        arguments.set += [f"uid={client['fqsn']}", "org=wardround", beat]
    code = MainProcessMonitor.run(main_func=program.main, run_dir=arguments.workspace, args=arguments)
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
