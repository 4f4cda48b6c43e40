"""Writes what a process opens, removes, starts and loads into a file; fuzz.py puts this folder on its path.

One JSON line an event: time, process, event, arguments. Only Python's own events are seen: what a library
written in C opens by itself is not.
"""

import json
import os
import sys
import time

FILES = [
    "open",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
    "os.chown",
]
STARTS = ["subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn"]
CODE = [
    "exec",
    "compile",
    "ctypes.dlopen",
    "pickle.find_class",
    "socket.bind",
    "socket.connect",
    "socket.sendto",
]
EVENTS = frozenset(["shutil.rmtree", "os.listdir", "os.scandir", *FILES, *STARTS, *CODE])


def shown(value: object) -> object:
    if hasattr(value, "co_filename"):
        return value.co_filename
    if isinstance(value, bytes):
        return value[:300].decode(errors="replace")
    return value if isinstance(value, int | None) else str(value)[:300]


def install(path: str) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def hook(event: str, arguments: tuple) -> None:
        if event in EVENTS:
            chosen = arguments[1::-1] if event == "compile" else arguments[:3]  # the file, then the source
            line = [round(time.time(), 3), os.getpid(), event, [shown(value) for value in chosen]]
            os.write(target, (json.dumps(line) + "\n").encode())

    sys.addaudithook(hook)


if os.environ.get("WARDROUND_AUDIT"):
    install(os.environ["WARDROUND_AUDIT"])
if os.environ.get("WARDROUND_HASTE") and sys.argv[:1] == ["-m"]:
    # pauses after a refusal would make 10,000 of them take hours
    from wardround.deploy import joining

    joining.RETRY_SECONDS = joining.BEAT_SECONDS = 0.002
