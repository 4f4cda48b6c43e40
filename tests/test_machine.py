"""Cores, memory, processes and files, here and on systems that lack some of the calls; these are faked."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pytest import MonkeyPatch

from wardround import machine
from wardround.child_process import ChildProcess
from wardround.deploy.kits.kit import check_private
from wardround.deploy.parcel_file import read_parcel, write_parcel
from wardround.deploy.wire import Parcel
from wardround.files import file_name, write_private, write_text
from wardround.storage import StoredTensors, save_tensors
from wardround.training import kernel_cache

LACKING = {  # attributes of os and signal that are not there
    "darwin": (["sched_getaffinity", "preadv", "O_BINARY"], []),
    "win32": (
        ["sched_getaffinity", "sysconf", "sysconf_names", "killpg", "getuid", "preadv", "pread", "pwrite",
         "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "setsid", "getpgid", "fork", "uname"],
        ["SIGKILL", "SIGHUP"],
    ),
}  # fmt: skip


class Without:
    """A module without some of its names; the standard library keeps them."""

    def __init__(self, module: Any, lost: list[str]) -> None:
        self._module, self._lost = module, lost

    def __getattr__(self, name: str) -> Any:
        if name in self._lost:
            raise AttributeError(name)
        return getattr(self._module, name)


@pytest.fixture(params=["linux", "darwin", "win32"])
def system(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> str:
    """This system, or what is left of it on another one."""
    name: str = request.param
    monkeypatch.setattr(sys, "platform", name)
    lost, signals = LACKING.get(name, ([], []))
    monkeypatch.setattr(machine, "os", Without(os, lost))
    monkeypatch.setattr(machine, "signal", Without(signal, signals))
    if name == "win32":
        plain = machine.separate_group
        monkeypatch.setattr(  # Linux takes no creation flags
            machine, "separate_group", lambda: {} if plain()["creationflags"] else {"creationflags": -1}
        )
    return name


# Cores and memory


def test_cores_and_memory_are_known_on_every_system(system: str) -> None:
    assert 1 <= machine.cores() <= (os.cpu_count() or 1)
    assert 0 < machine.free_memory() < machine.total_memory() <= psutil.virtual_memory().total


def test_a_control_group_limits_both(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    for name, content in (("max", "5000000"), ("current", "2000000")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(machine, "GROUP_LIMITS", [(str(tmp_path / "max"), str(tmp_path / "current"))])

    assert machine.total_memory() == 5_000_000 and machine.free_memory() == 3_000_000


# Processes


def start_sleeper(**more: Any) -> subprocess.Popen[bytes]:
    """A process that has started another one, whose id it prints."""
    code = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **more)


def test_killing_a_child_kills_what_it_started(system: str) -> None:
    with start_sleeper(**machine.separate_group()) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        machine.kill_group(process)
    deadline = time.monotonic() + 10
    while not machine.is_gone(grandchild) and psutil.Process(grandchild).status() != "zombie":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    machine.kill_group(process)  # again, without an error


def test_a_child_process_of_ours_starts_and_is_killed_on_every_system(
    system: str, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("wardround.child_process.separate_group", machine.separate_group)
    child = ChildProcess("wardround.gpu_service", quiet=True)
    child.kill()
    child.stop()

    assert not child.is_alive()


def test_a_process_is_gone_or_not_and_asking_does_not_end_it(system: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not machine.is_gone(process.pid) and not machine.is_gone(os.getpid())
        assert process.poll() is None
        machine.kill(process.pid)
        process.wait()
    assert machine.is_gone(process.pid) and not machine.is_gone(10**30)
    machine.kill(process.pid)  # nothing left to kill


def test_a_thread_can_end_its_process_as_sigterm_does(system: str) -> None:
    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.1, machine.end_this_process).start()
            for _ in range(500):
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_exit_code_is_described_where_signals_have_no_names(system: str) -> None:
    assert machine.describe_exit(3221225477) == "ended with exit code 3221225477"
    assert machine.describe_exit(-99) == "was ended by signal 99"
    assert machine.was_killed(-9) == (system != "win32") and not machine.was_killed(1)


# Files


def test_a_file_is_read_and_written_at_a_place(system: str, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_bytes(b"0123456789\r\n\x1a")
    file = machine.open_file(path, os.O_RDWR)
    try:
        place = bytearray(4)
        assert machine.read_into(file, memoryview(place), 3) == 4 and place == b"3456"
        assert machine.read_into(file, memoryview(bytearray(9)), 8) == 5
        machine.write_at(file, b"ab", 1)
    finally:
        os.close(file)
    assert path.read_bytes() == b"0ab3456789\r\n\x1a"


def test_stored_tensors_and_parcels_are_read_on_every_system(system: str, tmp_path: Path) -> None:
    save_tensors(tmp_path / "a.safetensors", {"x": torch.arange(5)}, {})
    assert StoredTensors(tmp_path / "a.safetensors")["x"].tolist() == [0, 1, 2, 3, 4]
    write_parcel(tmp_path / "parcel", Parcel({"kind": "reply"}, {"x": np.arange(3, dtype=np.float32)}))
    arrays = read_parcel(tmp_path / "parcel", 1000).arrays
    (tmp_path / "parcel").unlink()
    arrays["x"][0] = 7
    assert arrays["x"].tolist() == [7, 1, 2]


def test_a_link_is_not_opened_plainly(system: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")

    os.close(machine.open_file(tmp_path / "file", os.O_RDONLY, plainly=True))
    with pytest.raises(OSError, match="link"):
        machine.open_file(tmp_path / "link", os.O_RDONLY, plainly=True)


def test_folders_and_files_are_synced_where_that_can_be_done(
    system: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    machine.sync_folder(tmp_path)
    machine.sync_file(tmp_path / "file")

    assert len(synced) == (1 if system == "win32" else 2)


def test_a_file_that_somebody_reads_is_replaced_a_moment_later_on_windows(
    system: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    plain, refused = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        if len(refused) < 3:
            refused.append(target)
            raise PermissionError(13, "used by another process")
        return plain(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    if system != "win32":
        with pytest.raises(PermissionError):
            write_text(tmp_path / "live.json", "{}")
        return
    write_text(tmp_path / "live.json", "{}")
    assert (tmp_path / "live.json").read_text() == "{}" and len(refused) == 3
    monkeypatch.setattr(machine, "REPLACE_SECONDS", 0.0)
    refused.clear()
    with pytest.raises(PermissionError):
        write_text(tmp_path / "live.json", "{}")


def test_a_second_name_is_a_copy_where_the_file_system_has_none(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    (tmp_path / "a").write_text("x")
    machine.link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")
    with pytest.raises(FileExistsError):
        machine.link(tmp_path / "a", tmp_path / "b")
    monkeypatch.setattr(os, "link", refuse)
    machine.link(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c").read_text() == "x" and not (tmp_path / "a").samefile(tmp_path / "c")


def test_permission_bits_are_asked_for_where_there_are_any(system: str, tmp_path: Path) -> None:
    write_private(tmp_path / "key", b"secret")
    assert machine.others_may(tmp_path / "key", 0o077) == 0
    (tmp_path / "key").chmod(0o644)
    assert machine.others_may(tmp_path / "key", 0o077) == (0 if system == "win32" else 0o044)
    kit: Any = SimpleNamespace(
        folder=tmp_path, state=tmp_path / "state", site_file=tmp_path / "site.yaml", own_key=tmp_path / "key",
        next_key=tmp_path / "next",
    )  # fmt: skip
    if system == "win32":
        check_private(kit)
    else:
        with pytest.raises(Exception, match="others on this machine may read"):
            check_private(kit)


def test_compiled_kernels_are_kept_on_every_system(
    system: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.delenv("WARDROUND_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    folder = tmp_path / ("local" if system == "win32" else "xdg") / "wardround" / "kernels"

    assert kernel_cache.locate() == folder and kernel_cache.claim(folder) is None


@pytest.mark.parametrize("name", ["con", "NUL", "lpt1", "aux.nii", "north."])
def test_no_file_has_a_name_that_windows_reserves(name: str) -> None:
    assert file_name(name) != name and not machine.is_reserved(file_name(name))


def test_ordinary_names_stay_as_they_are() -> None:
    assert [file_name(name) for name in ("north", "console", "com10", "a.b")] == [
        "north", "console", "com10", "a.b",
    ]  # fmt: skip


# The terminal


def test_a_pipe_of_windows_takes_every_letter(system: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252" if system == "win32" else "utf-8")
    machine.write_utf8(stream)
    stream.write("θ ≥ 0")
    stream.flush()

    assert stream.buffer.getvalue().decode() == "θ ≥ 0"  # type: ignore[attr-defined]
