"""10,000 random and mutated messages to every method and every process: nothing else is read, written or run.

    python tests/deploy/real/fuzz.py [--only server,hospital,job] [--keep]

server: Hello, Beat, Wait and Answer, called with a valid kit, while four hospitals train; hospital: answers to
the calls of a real `wardround join`, and requests for the process below it; job: replies that a run's process
reads. Audit hooks in all of these processes list what is opened, removed, started and loaded. Five minutes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import common
from common import Beside, Checks, Deployment, Failed, settings, since, trained, until
from hostile import Caller, HostileServer
from parcels import as_file, request, sealed

import wardround
from wardround.deploy.rpc.service import METHODS, encode
from wardround.deploy.wire import Parcel

COUNT = 10_000
NAMES = ["east", "north", "south", "west"]
ROGUE, WAITING = "hospital-05", "hospital-06"
HERE = Path(__file__).parent
PATHS = [
    "../../../etc/passwd",
    "/etc/shadow",
    "..",
    "\x00",
    "~/.ssh/id_rsa",
    "file:///etc/passwd",
    "|touch x",
    "$(touch x)",
]
VALUES: list[Any] = [*PATHS, None, True, -1, 2**63, 10**400, 1e308, "", "x" * 5000, [], {}, [[]] * 50, {"a": {"a": {}}},
                     "os:system", "__import__('os').system('touch x')", "\ud800", "!!python/object/apply:os.system [x]"]  # fmt: skip


class Mutator:
    """Random bytes and mutations of valid ones, the same in every run of the script."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self) -> Any:
        return self.random.choice(VALUES)

    def fields(self, info: dict[str, Any]) -> dict[str, Any]:
        """Other values under known and unknown keys."""
        changed = dict(info)
        for _ in range(self.random.randint(1, 3)):
            key = self.random.choice(
                [*info, "job", "letter", "bytes", "held", "jobs", "failed", "path", "code"]
            )
            if self.random.random() < 0.2:
                changed.pop(key, None)
            else:
                changed[key] = self.value()
        return changed

    def content(self, content: bytes) -> bytes:
        """Bits flipped, pieces cut, doubled and put in; or nothing but chance."""
        draw, spoilt = self.random, bytearray(content)
        match draw.randrange(6):
            case 0:
                return draw.randbytes(draw.choice([0, 1, 7, 100, 3000]))
            case 1:
                return content[: draw.randrange(len(content) + 1)]
            case 2:
                start = draw.randrange(len(content) + 1)
                return content[:start] + draw.randbytes(draw.randrange(1, 50)) + content[start:]
            case 3:
                return content + content
            case _:
                for _ in range(draw.randint(1, 8)):
                    place = draw.randrange(min(len(spoilt), 2000)) if spoilt else 0
                    if spoilt:
                        spoilt[place] ^= 1 << draw.randrange(8)
                return bytes(spoilt)

    def message(self, info: dict[str, Any]) -> bytes:
        if self.random.random() < 0.5:
            return self.content(encode(info))
        return json.dumps(self.fields(info)).encode()

    def parcel(self, parcel: Parcel, folder: Path) -> bytes:
        """A file: bytes mutated, or a header with other values whose SHA-256 fits."""
        if self.random.random() < 0.4:
            return self.content(as_file(parcel, folder))
        header = dict(parcel.header)
        key = self.random.choice(list(header))
        inner = header[key]
        if isinstance(inner, dict) and inner and self.random.random() < 0.7:
            header[key] = self.nested(inner)
        else:
            header[key] = self.value()
        try:
            return as_file(sealed(Parcel(header, parcel.arrays)), folder)
        except (ValueError, TypeError, RecursionError, OverflowError):
            return self.content(as_file(parcel, folder))

    def nested(self, values: dict[str, Any]) -> dict[str, Any]:
        key = self.random.choice(list(values))
        inner = values[key]
        deeper = isinstance(inner, dict) and inner and self.random.random() < 0.8
        return {**values, key: self.nested(inner) if deeper else self.value()}


# The server


def fuzz_server(checks: Checks, hospitals: Deployment) -> None:
    """Four methods, each from a thread of its own, with a valid certificate."""
    said: dict[str, Counter[str]] = {method: Counter() for method in METHODS}
    valid: dict[str, dict[str, Any]] = {
        "Hello": {"wardround": "0.1.0"},
        "Beat": {},
        "Wait": {"held": ["0" * 32]},
        "Answer": {"job": "20260101000000-00000000", "letter": "0" * 32, "bytes": 10},
    }
    instance = "f" * 32
    kits = {method: hospitals.kit(WAITING if method == "Wait" else ROGUE) for method in METHODS}
    for kit in kits.values():
        with Caller(kit, instance) as caller:
            caller.hello()

    def work(method: str) -> None:
        mutate, metadata = Mutator(hash(METHODS.index(method))), (("wardround-instance", instance),)
        with Caller(kits[method], instance) as caller:
            while said[method].total() < COUNT:
                info = dict(valid[method])
                if method == "Wait" and mutate.random.random() < 0.97:
                    info = {"held": 7}  # a valid one waits, and few may at the same time
                if method == "Answer":
                    running = [path.stem for path in (hospitals.organiser / "state/queue").glob("*.running")]
                    letters = [
                        path.stem for path in (hospitals.organiser / "state/exchange").glob("*/*.request")
                    ]
                    info |= {"job": running[0]} if running and mutate.random.random() < 0.5 else {}
                    info |= {"letter": letters[0]} if letters and mutate.random.random() < 0.5 else {}
                messages = [mutate.message(info)]
                if method == "Answer" and mutate.random.random() < 0.7:
                    messages += [mutate.content(b"x" * 10) for _ in range(mutate.random.randint(0, 3))]
                other = (("wardround-instance", mutate.random.choice(["", "preflight", "../x", "g" * 500])),)
                chosen = other if mutate.random.random() < 0.05 else metadata
                seconds = 0.02 if method == "Wait" else 5.0
                found = caller.call(method, *messages, seconds=seconds, metadata=chosen)
                if found.code == "RESOURCE_EXHAUSTED" and "calls" in found.text:
                    time.sleep(0.01)  # refused before it was read: does not count
                    continue
                said[method][found.code] += 1

    began = time.monotonic()
    threads = [threading.Thread(target=work, args=(method,)) for method in METHODS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for method, codes in said.items():
        accepted = {"OK", "DEADLINE_EXCEEDED"} if method != "Answer" else set()
        others = (
            set(codes)
            - accepted
            - {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "UNAUTHENTICATED"}
        )
        checks.check(not others, f"server, {method}: {codes.total():,} messages", **codes)
    checks.note(f"the server: {since(began)} s")
    heard = max(age for name, age in hospitals.heard().items() if name in NAMES)
    checks.check(heard < 5, "the server works", others_heard=round(heard, 1))


# The hospital


def fuzz_hospital(checks: Checks, hospitals: Deployment) -> None:
    """A hostile server: what is said of requests, requests, and the answers to Hello and Beat."""
    mutate = Mutator(99)
    join = hospitals.joined["north"]
    sent: Counter[str] = Counter()
    base = [request(task) for task in ("register", "train", "evaluate", "calibrate")]
    with HostileServer(hospitals.kit("organiser"), "north") as server:
        server.jobs = ["job", "other"]  # their processes stay
        until(lambda: server.num_waits, 60, "the hospital comes")
        began = time.monotonic()
        while sent["request"] < COUNT:
            content = mutate.parcel(mutate.random.choice(base), hospitals.folder)
            server.post(content, job=mutate.random.choice(["job", "other"]))
            sent["request"] += 1  # one at a time: a request that a newer one overtakes gets no answer
            until(lambda: server.answers.qsize() >= sent["request"], 120, "a request is answered", 0.001)
            if sent["request"] % 1000 == 0:
                checks.note(f"{sent['request']:,} requests, {since(began)} s")
        answers: Counter[str] = Counter()
        while not server.answers.empty():
            info, _ = server.answers.get()
            answers["failed" if "failed" in info else "reply"] += 1
        checks.check(
            join.is_running and answers.total() == COUNT,
            f"hospital and its process: {COUNT:,} requests",
            seconds=since(began),
            **answers,
        )
        began = time.monotonic()
        while sent["stream"] < COUNT:
            info = {"job": "job", "letter": "0" * 32, "bytes": 10}
            chunks = [mutate.content(b"x" * 10) for _ in range(mutate.random.randint(0, 3))]
            server.send(partial(list, [mutate.message(info), *chunks]))
            sent["stream"] += 1
            until(lambda: server.queued < 20, 120, "the hospital goes on", 0.002)
        checks.check(join.is_running, f"hospital: {COUNT:,} descriptions of requests", seconds=since(began))
        began, beats = time.monotonic(), server.num_beats + server.num_hellos
        stop = threading.Event()

        def vary() -> None:
            while not stop.is_set():
                server.beat = mutate.message({"jobs": ["job"]})
                server.hello = mutate.message({"time": 1.0, "wardround": "0", "project": "x"})
                time.sleep(0.0005)

        varying = threading.Thread(target=vary)
        varying.start()
        until(
            lambda: server.num_beats + server.num_hellos - beats >= 2 * COUNT or since(began) > 120,
            130,
            "beats",
            0.1,
        )
        stop.set()
        varying.join()
        num = server.num_beats + server.num_hellos - beats
        checks.check(
            join.is_running and num >= COUNT,
            f"hospital: {num:,} answers to Beat and Hello",
            beats=server.num_beats,
            hellos=server.num_hellos,
            seconds=since(began),
        )
        server.beat = server.hello = None
        waits = server.num_waits
        until(lambda: server.num_waits > waits + 1, 60, "the hospital works")
    workers = hospitals.job_processes("north")
    checks.check(len(workers) <= 5, "processes of the hospital stay few", processes=len(workers))


# The run's process


JOB = """
import sys, time
from pathlib import Path
from collections import Counter
sys.path.insert(0, {here!r})
from fuzz import Mutator, read_as_run
print(read_as_run(Path({folder!r}), {count}))
"""


def read_as_run(folder: Path, count: int) -> str:
    """Mutated replies through the channel of a run's process and the checks of its messages."""
    import torch

    from wardround.deploy.run_process import PipeChannel
    from wardround.deploy.wire import ParcelError, pack, unpack
    from wardround.messages import Message
    from wardround.params import Params

    about: dict[str, Any] = {"run": "r", "request": "f" * 32, "client": "north", "task": "train", "round": 0}
    params = Params({"a": torch.ones(4, 3), "b": torch.zeros(2)})
    honest = pack(
        Message(params, scalars={"n": 1.0}), kind="reply", more={"num_examples": 3, "loss": {}}, **about
    )
    mutate, ends = Mutator(5), Counter[str]()

    def send(line: Any) -> None:
        if "post" in line:
            path = folder / f"{line['post']['letter']}.reply"
            path.write_bytes(mutate.parcel(honest, folder))
            channel.take({"letter": line["post"]["letter"], "hospital": "north", "path": str(path)})

    channel = PipeChannel(folder, send)
    began = time.time()  # everything is imported
    expected = {name: params.spec(name) for name in params}
    for _ in range(count):
        found = list(channel.exchange({"north": honest}, time.monotonic() + 10))
        if not found:
            ends["unreadable"] += 1
            continue
        try:
            unpack(found[0][1], kind="reply", **about, largest=10**6, unpacked=10**6, expected=expected)
            ends["taken"] += 1
        except ParcelError:
            ends["refused"] += 1
    return json.dumps([began, ends])


def fuzz_job(checks: Checks, hospitals: Deployment) -> float:
    """Returns when its start-up was over."""
    folder = hospitals.organiser / "state" / "job-exchange"
    folder.mkdir()
    began = time.monotonic()
    code = JOB.format(here=str(HERE), folder=str(folder), count=COUNT)
    environment = {**common.ENVIRONMENT, "WARDROUND_AUDIT": str(hospitals.folder / "audit" / "job")}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"the process ended: {done.stderr[-500:]}")
    moment, ends = json.loads(done.stdout.splitlines()[-1])
    holds = sum(ends.values()) == COUNT
    checks.check(holds, f"run's process: {COUNT:,} replies", seconds=since(began), **ends)
    folder.rmdir()  # nothing is left in it
    return float(moment)


# What the hooks saw


ROOTS = tuple({sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(Path(wardround.__file__).parents[1]),
               str(Path(sys.prefix).resolve()), str(HERE), "/usr/lib", "/lib", "/proc", "/sys", "/etc/localtime"})  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Processes of ours; a run notes the machine's and its own version when it begins.
OURS = ("wardround.deploy.worker", "wardround.deploy.run_process", "['uname', '-p']", "'rev-parse', 'HEAD']")


def events_of(log: Path, start: float, end: float = math.inf) -> Iterator[tuple[str, list[Any]]]:
    for line in log.read_text(errors="replace").splitlines():
        try:
            moment, _, event, arguments = json.loads(line)
        except ValueError:
            continue
        if start <= moment < end:
            yield event, arguments


@cache
def own_source() -> str:
    return "\n".join(path.read_text() for path in Path(wardround.__file__).parent.rglob("*.py"))


# When a process that trains starts: Python tries the folder for temporary files, PyTorch makes one of its own.
STARTING = re.compile(rf"{re.escape(tempfile.gettempdir())}/([a-z0-9_]{{8}}|torchinductor_\w+)")


def judge(event: str, arguments: list[Any], kit: Path, usual: set[tuple[Any, ...]]) -> str | None:
    """What an event was outside of; None where it belongs. usual: code that honest processes compile."""
    own = tuple(str(kit / name) for name in ("state", "logs", "runs"))
    path = os.path.normpath(str(arguments[0])) if arguments else ""
    if event == "compile" and path.startswith("<"):
        is_shown = path == "<unknown>" and str(arguments[1]) in own_source()  # a line of a traceback of ours
        return None if tuple(arguments) in usual or is_shown else f"{event} {arguments}"
    if event in ("exec", "compile", "ctypes.dlopen"):
        inside = path.startswith((*ROOTS, "<")) or path in ("None", ".")  # what is in <> was compiled before
        return None if inside else f"{event} {path}"
    if event == "subprocess.Popen":
        return None if any(words in str(arguments[1]) for words in OURS) else f"{event} {arguments[:2]}"
    if event == "os.fork" or event.startswith(
        ("os.system", "os.exec", "os.posix", "pickle", "socket", "pty")
    ):
        return f"{event} {arguments}"
    writes = (
        event != "open" or bool(int(arguments[2] or 0) & WRITES)
        if event not in ("os.listdir", "os.scandir")
        else False
    )
    if not path.startswith("/"):
        return None if path.isdigit() else f"{event} {path}"
    if path.startswith(own) or path == os.devnull or STARTING.fullmatch(path):
        return None
    if not writes and (path.startswith((*ROOTS, str(kit))) or path in (*sys.path, str(Path.cwd()))):
        return None
    return f"{event}{' for writing' if writes and event == 'open' else ''} {path}"


def read_hooks(checks: Checks, hospitals: Deployment, start: float, job_start: float) -> None:
    logs = sorted((hospitals.folder / "audit").iterdir())
    honest = [log for log in logs if log.name in ("east", "south", "west")]
    usual = {
        tuple(arguments) for log in honest for event, arguments in events_of(log, 0) if event == "compile"
    }
    starts = {log: job_start if log.name == "job" else start for log in logs}
    for log in logs:
        before = events_of(log, 0, starts[log])
        usual |= {tuple(arguments) for event, arguments in before if event == "compile"}
    for log in logs:
        kit = hospitals.kits / ("organiser" if log.name in ("server", "job") else log.name)
        kinds, outside = Counter[str](), Counter[str]()
        for event, arguments in events_of(log, starts[log]):
            kinds[event] += 1
            found = judge(event, arguments, kit, usual)
            if found is not None:
                outside[found] += 1
        checks.check(not outside, f"hooks of {log.name}: nothing outside", **kinds)
        for what, count in outside.most_common(12):
            checks.note(f"    {count} x {what[:200]}")


def audited(hospitals: Deployment, name: str, start: Callable[[], Any]) -> Any:
    """Start a command with the hooks in it."""
    extra = {"WARDROUND_AUDIT": str(hospitals.folder / "audit" / name)}
    if name == "north":
        extra["WARDROUND_HASTE"] = "1"
    before = dict(common.ENVIRONMENT)
    common.ENVIRONMENT.update(extra)
    try:
        return start()
    finally:
        common.ENVIRONMENT.clear()
        common.ENVIRONMENT.update(before)


def main() -> None:
    beside = settings("beside", rounds=12, data={"phantom": {"hospitals": 4, "size": 32, "cases": 24}})
    logging.getLogger("wardround").setLevel(logging.ERROR)
    paths = [str(HERE / "audit_hook"), str(Path(wardround.__file__).parents[1])]
    common.ENVIRONMENT["PYTHONPATH"] = os.pathsep.join(paths)
    with Checks(__doc__) as checks, Deployment(NAMES, checks.options.keep, [ROGUE, WAITING]) as hospitals:
        (hospitals.folder / "audit").mkdir()
        expected = trained(hospitals.folder, beside)
        audited(hospitals, "server", hospitals.serve)
        for name in NAMES:
            audited(hospitals, name, partial(hospitals.join, name))
        hospitals.wait_connected(NAMES)
        hospitals.wait_done(hospitals.submit({**beside, "name": "before"}), "before", 900)
        start = job_start = time.time()
        if checks.wants("server"):
            with Beside(hospitals, beside) as runs, checks.part("the server"):
                fuzz_server(checks, hospitals)
            runs.check(checks, expected)
        if checks.wants("job"):
            with checks.part("the run's process"):
                job_start = fuzz_job(checks, hospitals)
        if checks.wants("hospital"):
            hospitals.server.signal(signal.SIGTERM)
            hospitals.server.wait(30)
            with checks.part("the hospital"):
                fuzz_hospital(checks, hospitals)
        read_hooks(checks, hospitals, start, job_start)


if __name__ == "__main__":
    main()
