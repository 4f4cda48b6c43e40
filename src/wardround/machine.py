"""This machine: its cores and memory, and every call that Linux, macOS and Windows do not share.

No other module asks which system it runs on, or uses what only one of them has; `tests/test_architecture.py`
has the list.
"""

from __future__ import annotations

import _thread
import contextlib
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TextIO

import psutil

GROUP_LIMITS = (  # of a control group: what it allows, what it uses
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

RUNS_AT_ONCE = "WARDROUND_RUNS_AT_ONCE"
REPLACE_SECONDS = 5.0  # Windows: another process has the file open, as a reader for a moment
RESERVED = {"con", "prn", "aux", "nul", *(f"{name}{n}" for name in ("com", "lpt") for n in range(1, 10))}


def is_windows() -> bool:
    return sys.platform == "win32"


# Cores and memory


def cores() -> int:
    """Processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows


def runs_at_once() -> int:
    """Runs that share this process's GPU, its own included; who starts them says so."""
    text = os.environ.get(RUNS_AT_ONCE, "")
    return max(1, int(text)) if text.isdecimal() else 1


def free_memory() -> int:
    """Bytes this process may still take: what the machine has free, or its control group allows."""
    free = [int(psutil.virtual_memory().available)]
    for limit, used in ((read_text(Path(a)), read_text(Path(b))) for a, b in GROUP_LIMITS):
        if limit.isdecimal() and used.isdecimal():
            free.append(max(0, int(limit) - int(used)))
    return min(free)


def total_memory() -> int:
    """Bytes this machine has, or its control group allows; unlike free memory it does not change, so that a
    resumed run makes the same choices."""
    limits = [read_text(Path(limit)) for limit, _ in GROUP_LIMITS]
    most = int(psutil.virtual_memory().total)
    return min([most, *(int(limit) for limit in limits if limit.isdecimal())])


def read_text(path: Path) -> str:
    """A small file of the system, or nothing where it is not there."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


# Processes


def separate_group() -> dict[str, Any]:
    """Arguments of `subprocess.Popen` for a child that a Ctrl-C in the terminal does not reach."""
    if is_windows():
        return {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200)}
    return {"start_new_session": True}


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a child that has a group of its own, and what it started."""
    if process.poll() is None:
        with contextlib.suppress(OSError, psutil.Error):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:  # Windows knows no groups to kill
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
    process.kill()
    process.wait()


def kill(pid: int) -> None:
    with contextlib.suppress(psutil.Error, OverflowError):
        psutil.Process(pid).kill()


def is_gone(pid: int) -> bool:
    """Whether no process has this id."""
    try:
        return not psutil.pid_exists(pid)
    except OverflowError:
        return False


def end_this_process() -> None:
    """End it as SIGTERM does, from any of its threads."""
    if is_windows():  # there SIGTERM ends a process at once, handlers or not
        _thread.interrupt_main()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def describe_exit(code: int) -> str:
    """How a child ended, by its exit code.

    >>> describe_exit(-9), describe_exit(3)
    ('was ended by SIGKILL', 'ended with exit code 3')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def was_killed(code: int) -> bool:
    """Whether the exit code is that of a child which the system killed, as when memory is short."""
    return hasattr(signal, "SIGKILL") and code == -signal.SIGKILL


# Files


def open_file(path: Path, flags: int, mode: int = 0o777, *, plainly: bool = False) -> int:
    """`os.open` of bytes, not text; plainly: not through a link, and without waiting for a pipe."""
    flags |= getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    if plainly:
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():
            raise OSError(0, "it is a link", str(path))
    return os.open(path, flags, mode)


def read_into(file: int, place: memoryview, start: int) -> int:
    """Fill a buffer from a place in a file; how many bytes came, fewer at its end. For one thread a file."""
    done, count = 0, 1
    while count and done < len(place):  # one call reads at most 2 GiB
        if hasattr(os, "preadv"):
            count = os.preadv(file, [place[done:]], start + done)
        else:
            os.lseek(file, start + done, os.SEEK_SET)
            piece = os.read(file, min(len(place) - done, 1 << 26))
            count = len(piece)
            place[done : done + count] = piece
        done += count
    return done


def write_at(file: int, content: bytes, start: int) -> None:
    """Write all of it at a place in a file; for one thread a file."""
    os.lseek(file, start, os.SEEK_SET)
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def sync_folder(folder: Path) -> None:
    """Sync a new file's directory entry to disk; Windows does so itself."""
    if is_windows():
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_file(path: Path) -> None:
    """Bring a file that was written before to the disk."""
    with path.open("r+b" if is_windows() else "rb") as file:  # Windows syncs what may be written alone
        os.fsync(file.fileno())


def replace_file(source: Path, target: Path) -> None:
    """Give a file another's name, and wait a moment where Windows says that somebody reads that one."""
    deadline = time.monotonic() + REPLACE_SECONDS
    while True:
        try:
            source.replace(target)
            return
        except PermissionError:
            if not is_windows() or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def link(source: Path, target: Path) -> None:
    """A second name of a file; a copy where the file system has no such names."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def map_privately(file: Any, size: int) -> mmap.mmap | bytearray:
    """The content of an open file, to be changed here alone; its name may go meanwhile."""
    if is_windows():  # a mapped file cannot be deleted there
        file.seek(0)
        return bytearray(file.read(size))
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own, reached over no network."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def others_may(path: Path, bits: int) -> int:
    """Which of these permission bits a path has; none on Windows, where access lists decide instead."""
    return 0 if is_windows() else stat.S_IMODE(path.stat().st_mode) & bits


def belongs_to_somebody_else(facts: os.stat_result) -> bool:
    return hasattr(os, "getuid") and facts.st_uid != os.getuid()


def is_reserved(name: str) -> bool:
    """Whether Windows takes a file name for a device, or changes it.

    >>> is_reserved("aux"), is_reserved("NUL.txt"), is_reserved("north."), is_reserved("north")
    (True, True, True, False)
    """
    return name.endswith(".") or name.partition(".")[0].lower() in RESERVED


def find_cache() -> Path:
    """The user's folder for what can be made again."""
    if is_windows() and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


# The terminal


def write_utf8(*streams: TextIO) -> None:
    """Let output hold any letter; a pipe of Windows takes those of one country."""
    for stream in streams:
        if is_windows() and hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
