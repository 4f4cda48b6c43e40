"""Processes of a kit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

from pytest import raises

from wardround.deploy import processes
from wardround.deploy.kits.kit import Kit
from wardround.errors import WardroundError


def test_a_command_ends_when_the_process_that_started_it_is_killed() -> None:
    child = (
        "import signal, time\n"
        "from wardround.deploy.processes import end_with_input\n"
        "end_with_input(); print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, "
        "stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, 'WARDROUND_ENDS_WITH_INPUT': '1'})\n"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_processes_with_a_network_have_no_torch() -> None:
    code = (
        "import sys\n"
        "import wardround.cli, wardround.cli.hospitals, wardround.cli.kits\n"
        "import wardround.deploy.server, wardround.deploy.joining, wardround.deploy.preflight.kit\n"
        "print(sorted({'torch', 'numpy', 'nvflare'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_server_that_ended_is_said_at_once(tmp_path: Path) -> None:
    class Ended:
        log = tmp_path / "server.log"

        def is_alive(self) -> bool:
            return False

    with raises(WardroundError, match="ended while starting"):
        processes.wait_for_port("127.0.0.1", 1, 30, cast(Any, Ended()))
    with raises(WardroundError, match="did not open within 0 s"):
        processes.wait_for_port("127.0.0.1", 1, 0)


def test_waiting_for_hospitals_says_for_whom() -> None:
    said: list[str] = []
    processes.wait_for_hospitals(lambda: {"north": 0.1, "x": 1}, ["north"], 5, said.append)
    assert said == []
    with raises(WardroundError, match=r"only 1 of 2 hospitals .* missing: south"):
        processes.wait_for_hospitals(lambda: ["north"], ["north", "south"], 0, said.append)
    assert said[0].startswith("waiting for south until ")


def test_a_log_that_has_grown_large_is_put_aside(tmp_path: Path) -> None:
    kit = Kit(tmp_path, "north", "hospital", "demo", "1", "localhost", 8002, "0")
    with processes.open_log(kit, "worker") as file:
        file.truncate(processes.LOG_BYTES + 1)
    with processes.open_log(kit, "worker") as file:
        file.write(b"new")
    assert (kit.logs / "worker.log").read_text() == "new" and (kit.logs / "worker.log.1").exists()
