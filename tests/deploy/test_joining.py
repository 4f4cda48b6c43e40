"""A hospital takes part: requests in, replies out, processes that end are started again."""

import hashlib
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

from pytest import MonkeyPatch, fixture, importorskip, raises

importorskip("grpc")

from wardround.deploy import joining, limits
from wardround.deploy.joining import Joining, WorkerEnded
from wardround.deploy.kits.enrolment import revoke
from wardround.deploy.kits.kit import Kit, read_kit
from wardround.deploy.mailbox import Letter
from wardround.deploy.rpc import server as servers
from wardround.deploy.rpc.client import Connection
from wardround.deploy.rpc.requests import Request
from wardround.deploy.rpc.server import HospitalServer, RequestFile
from wardround.deploy.rpc.service import Transfer, read_chunks
from wardround.errors import ConfigError, WardroundError


class Worker:
    """Answers with the request backwards; endings: how often it dies first; may_answer: until then it works.

    model: what it leaves beside its reply for the organiser not to send.
    """

    endings = 0
    model = b""
    may_answer = threading.Event()
    made: ClassVar[list[Any]] = []

    def __init__(self, kit: Any, environment: Any) -> None:
        self.alive = True
        Worker.made.append(self)

    def answer(
        self, request: Path, largest: int, seconds: float | None, is_wanted: Callable[[], bool]
    ) -> tuple[Path | None, str]:
        assert Worker.may_answer.wait(20)
        if Worker.endings:
            Worker.endings -= 1
            self.alive = False
            raise WorkerEnded("its process ended (exit code -9)")
        request.with_suffix(".model").write_bytes(Worker.model)
        reply = request.with_suffix(".reply")
        reply.write_bytes(request.read_bytes()[::-1])
        return reply, ""

    def is_alive(self) -> bool:
        return self.alive

    def end(self) -> None:
        self.alive = False


class Federation:
    """A server, and one hospital that takes part in a thread."""

    def __init__(self, kits: Path, folder: Path) -> None:
        self.folder = folder
        (folder / "exchange").mkdir()
        self.server = HospitalServer(read_kit(kits / "organiser"), folder / "exchange")
        self.server.start()
        self.said: list[str] = []
        self.hospital = Joining(read_kit(kits / "north"), {}, self.said.append)
        self.error: Exception | None = None
        self.hospital.__enter__()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.hospital.serve()
        except ConfigError as error:
            self.error = error

    def ask(self, job: str, content: bytes, head: int = 0) -> bytes | None:
        """head: bytes before numbers, whose SHA-256 is announced; 0 announces none."""
        mailbox = self.server._jobs.get(job) or self.server.open_job(job)
        path = self.folder / "request"
        path.write_bytes(content)
        file = RequestFile(path, 10**6, head, hashlib.sha256(content[head:]).hexdigest() if head else "")
        self.server.post(job, Letter("north", file, time.monotonic() + 30))
        _, found = mailbox.take(20)
        self.strays = mailbox.take_strays()
        return None if found is None else found.read_bytes()

    def close(self) -> None:
        self.server.stop()
        self.hospital.__exit__(None, None, None)


@fixture
def federation(mine: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Federation]:
    monkeypatch.setattr(joining, "WorkerProcess", Worker)
    monkeypatch.setattr(joining, "BEAT_SECONDS", 0.1)
    Worker.endings, Worker.made, Worker.model = 0, [], b""
    Worker.may_answer.set()
    made = Federation(mine, tmp_path)
    yield made
    made.close()


def test_each_run_has_a_process_until_it_is_over(federation: Federation) -> None:
    assert federation.ask("first", b"abc") == b"cba"
    assert federation.ask("first", b"abcd") == b"dcba"
    assert federation.ask("second", b"x") == b"x"
    assert len(Worker.made) == 2 and all(worker.alive for worker in Worker.made)
    federation.server.close_job("first")
    deadline = time.monotonic() + 10
    while Worker.made[0].alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [worker.alive for worker in Worker.made] == [False, True]
    assert "connected to localhost" in federation.said[0]
    assert list((federation.hospital.kit.state / "exchange").iterdir()) == []


def test_a_model_that_the_hospital_built_itself_is_not_sent(
    federation: Federation, monkeypatch: MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []

    def read(path: Path, start: int, end: int) -> Iterator[bytes]:
        sent.append((start, end))
        return read_chunks(path, start, end)

    monkeypatch.setattr(servers, "read_chunks", read)
    Worker.model = random.Random(7).randbytes(limits.CHUNK_BYTES)
    federation.ask("first", b"register")
    for content in (b"head" + Worker.model, b"more" + Worker.model[::-1]):  # the same numbers, and others
        assert federation.ask("first", content, head=4) == content[::-1]
    assert (0, 4) in sent and sent[-1] == (0, len(content))


def test_a_process_that_ends_is_started_again_with_the_same_request(federation: Federation) -> None:
    Worker.endings = 2
    assert federation.ask("first", b"abc") == b"cba" and len(Worker.made) == 3
    Worker.endings = 3
    assert federation.ask("first", b"abc") is None
    assert federation.strays == [("north", "failed: its process ended (exit code -9)")]
    assert federation.ask("first", b"abc") == b"cba"


def test_a_server_with_many_runs_does_not_make_a_hospital_start_many_processes(
    federation: Federation,
) -> None:
    for number in range(6):
        assert federation.ask(f"run-{number}", b"abc") == b"cba"
    assert [worker.alive for worker in Worker.made] == [False, False, True, True, True, True]

    Worker.may_answer.clear()
    boxes = [federation.server.open_job(f"run-{number}") for number in range(2, 8)]
    for number in range(2, 8):
        post = Letter("north", RequestFile(federation.folder / "request", 1000), time.monotonic() + 30)
        federation.server.post(f"run-{number}", post)
    refused = [box.take(20) for box in boxes[4:]]
    assert [reply for _, reply in refused] == [None, None] and len(Worker.made) == 6
    assert "at most 4 runs at the same time" in boxes[5].take_strays()[0][1]
    Worker.may_answer.set()
    assert all(box.take(20)[1] is not None for box in boxes[:4])


def test_a_request_that_is_being_answered_is_not_taken_twice(mine: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "WorkerProcess", Worker)
    Worker.made = []
    Worker.may_answer.clear()
    with Joining(read_kit(mine / "north"), {}) as hospital:
        hospital._connection = Connection(hospital.kit)
        paths = [hospital.kit.state / "exchange" / f"{number}.request" for number in range(20)]
        for path in paths:
            path.touch()
            hospital._take(Request("job", "the-same", path))
        assert [path.exists() for path in paths] == [True] + 19 * [False]
        answering = [thread for thread in threading.enumerate() if thread.name == "wardround-answer"]
        assert len(answering) == 1 and list(hospital._held) == ["the-same"]
        hospital._ended.set()
        Worker.may_answer.set()
        answering[0].join(10)


def test_a_request_larger_than_the_rules_allow_is_declined_at_once(federation: Federation) -> None:
    federation.hospital._largest = 100
    assert federation.ask("first", bytes(101)) is None
    assert "may have at most 100 B (largest_message" in federation.strays[0][1]
    assert Worker.made == [] and federation.ask("first", b"abc") == b"cba"


def test_a_second_process_with_the_kit_is_refused_and_the_first_is_told(
    federation: Federation, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    assert federation.ask("first", b"abc") == b"cba"
    monkeypatch.setattr(joining, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(joining, "IN_USE_SECONDS", 0.5)
    copy = read_kit(Path(shutil.copytree(federation.hospital.kit.folder, tmp_path / "copy")))
    said: list[str] = []
    with Joining(copy, {}, said.append) as second, raises(WardroundError, match="as 'north'.*was copied"):
        second.serve()
    assert said == ["refused: another process takes part as 'north' with this kit; trying for 0 s"]
    wait_until(lambda: "the organiser refused a second process as 'north'" in federation.said[-1])
    assert federation.ask("first", b"abc") == b"cba" and federation.error is None


def test_a_hospital_whose_kit_was_revoked_ends_and_says_why(federation: Federation, mine: Path) -> None:
    assert federation.ask("first", b"abc") == b"cba"
    revoke(mine, "north")
    federation.server.callers.refresh()
    federation.thread.join(20)
    assert str(federation.error) == (
        "the organiser refuses this kit: the certificate of 'north' was revoked."
    )


def test_a_connection_that_does_not_come_goes_and_comes_back_is_told(
    federation: Federation, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "RETRY_SECONDS", 0.1)
    assert federation.ask("first", b"abc") == b"cba"
    federation.server.stop()
    wait_until(lambda: len(federation.said) == 2)
    federation.server = HospitalServer(federation.server._kit, federation.folder / "exchange")
    federation.server.start()
    wait_until(lambda: len(federation.said) == 3)
    assert [line.partition(" to ")[0] for line in federation.said] == [
        "connected",
        "connection lost",
        "connected",
    ]
    assert federation.ask("first", b"abc") == b"cba"


def wait_until(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not claim():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def test_a_kit_takes_part_once_on_a_machine(federation: Federation) -> None:
    with raises(ConfigError, match="already running on this machine"):
        Joining(federation.hospital.kit, {}).__enter__()


class Child:
    """A process that answers when it is let; seen: the requests that reached it."""

    def __init__(self, *_: object, **__: object) -> None:
        self.seen: list[str] = []
        self.go = threading.Event()

    def is_alive(self) -> bool:
        return True

    def send(self, line: dict[str, str]) -> None:
        self.seen.append(line["request"])
        self.line = line

    def receive(self, deadline: float | None = None) -> dict[str, str]:
        self.go.wait(20)
        Path(self.line["reply"]).write_bytes(b"done")
        return {"reply": self.line["reply"]}


def test_a_request_that_was_overtaken_while_it_waited_is_left(
    copy_of: Callable[[str], Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "ChildProcess", Child)
    kit = copy_of("north")
    hospital = Joining(kit, {})
    sent: list[str] = []
    monkeypatch.setattr(Joining, "_send", lambda self, request, reply, failed: sent.append(request.letter))
    for letter in ("1", "2", "3"):
        path = tmp_path / f"{letter}.request"
        path.write_bytes(b"")
        hospital._take(Request("job", letter, path))
        if letter == "1":  # it is being answered when the others come
            wait_until(lambda: bool(hospital._workers) and bool(child_of(hospital).seen))
    child_of(hospital).go.set()
    wait_until(lambda: not hospital._held)
    assert sent == ["1", "3"] and [Path(path).stem for path in child_of(hospital).seen] == ["1", "3"]


def child_of(hospital: Joining) -> Child:
    return cast(Child, hospital._workers["job"]._child)


def test_a_hospital_that_leaves_starts_no_process_again(
    copy_of: Callable[[str], Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    made: list[Child] = []

    class DyingChild(Child):
        """Ends when it is killed; a process that ended is otherwise started again."""

        def __init__(self, *_: object, **__: object) -> None:
            super().__init__()
            made.append(self)

        def receive(self, deadline: float | None = None) -> Any:
            self.go.wait(20)

        def exit_code(self) -> int:
            return -9

        def kill(self) -> None:
            self.go.set()

    monkeypatch.setattr(joining, "ChildProcess", DyingChild)
    path = tmp_path / "1.request"
    path.write_bytes(b"")
    with Joining(copy_of("north"), {}) as hospital:
        hospital._take(Request("job", "1", path))
        wait_until(lambda: bool(made) and bool(made[0].seen))
    wait_until(lambda: not hospital._held)
    assert len(made) == 1


def test_a_transfer_that_takes_a_while_is_told_of_with_the_time_that_is_left(
    monkeypatch: MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "PACE_SECONDS", (0.0, 60.0))
    said: list[str] = []
    pace, transfer = joining.TransferReporter("a request arrives", said.append), Transfer(4_000_000)
    for _ in transfer.count(bytes(1_000_000) for _ in range(4)):
        time.sleep(0.01)
        pace.tell(transfer)
    assert len(said) == 1
    assert re.fullmatch(r"a request arrives: 1.0 MB of 4.0 MB, about [\d.]+ s left", said[0])
