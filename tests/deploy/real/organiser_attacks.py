"""A modified organiser's server and what it says to a real `wardround join`; attacks.py runs it."""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from common import Command, Failed, since, until
from hostile import HostileServer
from parcels import HOSTILE_REQUESTS, Bomb, read_reply
from stage import NAMES, LogTail, Stage, files_of

from wardround.deploy.joining import MOST_WORKERS
from wardround.deploy.rpc.service import encode


def attack_as_organiser(stage: Stage) -> None:
    """`north` is the real one, with rules; its server says anything."""
    hospitals, checks = stage.hospitals, stage.checks
    join = hospitals.joined["north"]
    kit = hospitals.kit("north")
    allowed = kit.site_file.read_text()
    kit.site_file.write_text("data: phantom\ndevice: cpu\ntasks: [train, evaluate]\nmin_cases: 10\n")
    join_log = kit.logs / "join-calls.log"

    def look() -> list[dict[str, tuple[int, int]]]:
        """Files that the hospital has no business with, and those of its kit."""
        others = (*(f"kits/{name}" for name in NAMES), *NAMES, "server", "submit")
        return [files_of(hospitals.folder, *others), files_of(kit.folder, "state", "logs")]

    with HostileServer(stage.organiser, "north") as server:
        until(lambda: server.num_waits, 60, "the hospital comes to the other server")
        before = look()
        tail_of_worker = LogTail(kit.logs / "worker.log")
        for name, stream, words in HOSTILE_STREAMS:
            tail, began = LogTail(join_log), time.monotonic()
            server.send(stream)
            try:
                line = until(partial(tail.lines, words), 45, f"{name}: {words}")[0]
                checks.check(join.is_running, f"stream: {name}", said=line[24:150], seconds=since(began))
            except Failed as error:
                checks.check(False, f"stream: {name}", said=str(error), log=tail.lines()[-2:])
        for name, make, words in HOSTILE_REQUESTS:
            began = time.monotonic()
            info, content = server.ask(make(hospitals.folder, stage.mark))
            said = str(info.get("failed") or read_reply(content, hospitals.folder))
            holds = words in said and join.is_running and not stage.mark.exists()
            checks.check(holds, f"request: {name}", said=said[:150], seconds=since(began))
        pile_up(stage, server, join)
        say_anything(stage, server, join)
        same = before == look()
        checks.check(same, "no file was written or changed outside the hospital's state and logs")
        refused = tail_of_worker.lines("refused")
        checks.check(bool(refused), "the hospital's log names the refusals", lines=len(refused))
    kit.site_file.write_text(allowed)


def endless() -> Iterator[bytes]:
    """A request of 100 kB in single bytes, two a second."""
    yield encode({"job": "job", "letter": "trickle", "bytes": 10**5})
    while True:
        yield b"x"
        time.sleep(0.5)


def said_of(num_bytes: Any, *chunks: bytes, **more: Any) -> Any:
    return lambda: [
        encode({"job": "job", "letter": secrets.token_hex(8), "bytes": num_bytes, **more}),
        *chunks,
    ]


HOSTILE_STREAMS: list[tuple[str, Any, str]] = [
    ("announces 4 GB", said_of(4 * 2**30), "refused: the request has 4.3 GB"),
    ("announces 5 GB", said_of(5 * 10**9), "from 0 to"),
    ("announces a negative number", said_of(-1), "from 0 to"),
    ("announces a text", said_of("10"), "from 0 to"),
    ("sends more than it announced", said_of(10, b"x" * 2**20), "more than the 10 bytes"),
    ("sends less than it announced", said_of(10**6, b"x"), "less than were announced"),
    ("a chunk of 8 MB", said_of(8 * 2**20, b"x" * 8 * 2**20), "waiting for a request"),
    ("garbage instead of a description", lambda: [secrets.token_bytes(5000)], "not JSON"),
    ("nested brackets", lambda: [b"[" * 9999], "not JSON"),
    ("a description of 1 MB", lambda: [b" " * 2**20], "at most 10,000"),
    ("nothing at all", list, "not JSON"),
    ("a path as the run", said_of(10, b"x" * 10, job="../\x00"), "'job' is not text"),
    ("a letter of 200 characters", said_of(10, b"x" * 10, letter="x" * 200), "'letter' is not text"),
    ("an endless trickle", endless, "waiting for a request"),
]


def pile_up(stage: Stage, server: HostileServer, join: Command) -> None:
    """Sixty runs at once, and one letter a hundred times."""
    content = HOSTILE_REQUESTS[0][1](stage.hospitals.folder, stage.mark)
    server.jobs = [f"run-{number}" for number in range(60)]
    for job in server.jobs:
        server.post(content, job=job)
    most = watch_workers(stage, server, 60)
    stage.checks.check(
        most <= MOST_WORKERS + 1 and join.is_running, "60 runs at once", processes=most, allowed=MOST_WORKERS
    )
    server.jobs = []
    for _ in range(100):
        server.post(content, letter="same")
    most = watch_workers(stage, server, 1)
    exchange = stage.hospitals.kit("north").state / "exchange"
    stage.checks.check(
        most <= MOST_WORKERS + 1 and len(list(exchange.iterdir())) <= 20,
        "one letter 100 times",
        processes=most,
    )


def watch_workers(stage: Stage, server: HostileServer, answers: int, seconds: float = 90) -> int:
    """The most processes that train, until so many answers came."""
    most, came, deadline = 0, 0, time.monotonic() + seconds
    while came < answers and time.monotonic() < deadline:
        most = max(most, len(stage.hospitals.job_processes("north")))
        while not server.answers.empty():
            server.answers.get()
            came += 1
        time.sleep(0.05)
    return most


def say_anything(stage: Stage, server: HostileServer, join: Command) -> None:
    """Hostile answers to the two small calls."""
    log = LogTail(stage.hospitals.kit("north").logs / "join-calls.log")
    answers = [b"", b"[]", b"{", b"\xff" * 100, pickle.dumps(Bomb(stage.mark)), b'{"jobs": 3}', b'{"jobs": [' + b'"x",' * 2000 + b'"x"]}',
               b'{"jobs": [{"deploy": "x"}]}', b" " * 10**6]  # fmt: skip
    for answer in answers:
        server.beat = server.hello = answer
        time.sleep(2.5)
    server.beat = server.hello = None
    beats = server.num_beats
    until(lambda: server.num_beats > beats + 1, 30, "the hospital goes on")
    said = len(log.lines("does not answer"))
    stage.checks.check(
        join.is_running and said > 0, f"{len(answers)} hostile answers to Beat and Hello", logged=said
    )
