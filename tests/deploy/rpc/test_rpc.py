"""The channel to hospitals: who may call what, and that nothing else is answered."""

import hashlib
import logging
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pytest import LogCaptureFixture, MonkeyPatch, TempPathFactory, fixture, importorskip, mark, raises

importorskip("grpc")

import grpc
import psutil

from wardround.deploy import limits
from wardround.deploy.kits.authority import Authority
from wardround.deploy.kits.enrolment import revoke
from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.project import Project
from wardround.deploy.kits.provisioning import provision, put_certificate
from wardround.deploy.mailbox import Letter
from wardround.deploy.rpc import callers
from wardround.deploy.rpc import client as clients
from wardround.deploy.rpc import server as servers
from wardround.deploy.rpc.client import CallRefused, Connection, KitInUse, KitRefused, NoConnection
from wardround.deploy.rpc.replies import Announced, Replies, ReplyFile, ReplyRefused
from wardround.deploy.rpc.requests import Requests
from wardround.deploy.rpc.server import HospitalServer, RequestFile
from wardround.deploy.rpc.service import (
    INSTANCE,
    METHODS,
    PREFLIGHT,
    MessageError,
    Transfer,
    decode,
    encode,
    read_chunks,
    read_count,
    read_text,
)


def project_kits(folder: Path, *hospitals: str, port: int | None = None) -> dict[str, Kit]:
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
    organiser = {"host": "localhost", "port": port}
    project = Project.model_validate({"project": "rpc", "organiser": organiser, "hospitals": list(hospitals)})
    return {kit.name: kit for kit in provision(project, folder, bind="127.0.0.1")}


def calling(
    kit: Kit | None, method: str, content: bytes, *, trusts: Kit | None = None, seconds: float = 5.0
) -> Any:
    """A call of any method with a kit's certificate, or without one."""
    pair = () if kit is None else (kit.own_key.read_bytes(), kit.own_certificate.read_bytes())
    believed = trusts or kit
    assert believed is not None
    credentials = grpc.ssl_channel_credentials(believed.authority.read_bytes(), *pair)
    with grpc.secure_channel(f"localhost:{believed.port}", credentials) as channel:
        return channel.unary_unary(method)(content, timeout=seconds, metadata=[(INSTANCE, PREFLIGHT)])


@fixture(scope="module")
def kits(tmp_path_factory: TempPathFactory) -> dict[str, Kit]:
    return project_kits(tmp_path_factory.mktemp("rpc"), "north", "south")


@fixture
def server(kits: dict[str, Kit], tmp_path: Path) -> Iterator[HospitalServer]:
    with serving(kits["organiser"], tmp_path) as running:
        yield running


@contextmanager
def serving(kit: Kit, folder: Path) -> Iterator[HospitalServer]:
    (folder / "exchange").mkdir()
    running = HospitalServer(kit, folder / "exchange")
    running.start()
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def connected(kit: Kit) -> Iterator[Connection]:
    connection = Connection(kit)
    try:
        connection.hello()
        yield connection
    finally:
        connection.close()


def post(
    server: HospitalServer, folder: Path, hospital: str = "north", job: str = "job-1", **more: Any
) -> Letter[RequestFile]:
    """A request of 3 MiB, or of the given content, for a hospital."""
    path = folder / f"{hospital}-{job}.request"
    path.write_bytes(more.get("content", b"abc" * 2**20))
    letter = Letter(
        hospital, RequestFile(path, more.get("limit", 10**7)), time.monotonic() + more.get("seconds", 60)
    )
    server.post(job, letter)
    return letter


def left(folder: Path) -> list[Path]:
    """Replies on the organiser's disk."""
    return list(folder.glob("exchange/*/*"))


def test_a_request_reaches_its_hospital_alone_and_the_reply_comes_back(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path
) -> None:
    mailbox = server.open_job("job-1")
    letter = post(server, tmp_path)
    with connected(kits["north"]) as north:
        request = north.wait([], tmp_path, 10**7)
        assert request is not None and (request.job, request.letter) == ("job-1", letter.id)
        assert request.path.read_bytes() == b"abc" * 2**20
        reply = tmp_path / "reply"
        reply.write_bytes(b"xyz" * 2**19)
        north.answer(request, reply)

    found, path = mailbox.take(5)
    assert found is letter and path is not None and path.read_bytes() == reply.read_bytes()
    assert set(server.alive()) == {"north"} and mailbox.take_strays() == []


def test_a_letter_that_is_held_is_not_sent_again_and_a_new_process_gets_it(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "WAIT_SECONDS", 0.3)
    server.open_job("job-1")
    letter = post(server, tmp_path)
    with connected(kits["north"]) as north, connected(kits["south"]) as south:
        assert south.wait([], tmp_path, 10**7) is None
        assert north.wait([letter.id], tmp_path, 10**7) is None
        request = north.wait([], tmp_path, 10**7)
    assert request is not None and request.letter == letter.id


def test_there_are_four_methods_and_an_unknown_one_is_logged_with_the_callers_name(
    server: HospitalServer, kits: dict[str, Kit], caplog: LogCaptureFixture
) -> None:
    assert METHODS == ("Hello", "Beat", "Wait", "Answer")
    foreign = [
        "/wardround.Hospitals/Shell",
        "/wardround.Hospitals/",
        "/wardround.Organiser/Beat",
        "/admin/sys.shell",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.health.v1.Health/Check",
    ]
    for method in foreign:
        with raises(grpc.RpcError) as refused:
            calling(kits["north"], method, b"{}")
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == len(foreign) and all("CN=north" in line for line in said)


def test_a_call_without_a_hospitals_certificate_of_this_project_is_refused(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path
) -> None:
    others = project_kits(tmp_path / "other", "north", port=kits["north"].port)
    organiser = kits["organiser"]
    for who in (others["north"], organiser, None):
        with raises(grpc.RpcError) as refused:
            calling(who, "/wardround.Hospitals/Hello", b"{}", trusts=kits["north"], seconds=2)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE  # of TLS itself


def test_a_process_says_hello_first_and_a_second_one_is_refused_until_the_first_is_gone(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "LEASE_SECONDS", 0.5)
    first, second = Connection(kits["north"]), Connection(kits["north"])
    with raises(NoConnection, match="say hello first"):
        first.beat()
    first.hello()
    assert first.beat() == [] and not first.has_double
    for call in (second.hello, second.beat, lambda: second.wait([], tmp_path, 100)):
        with raises(KitInUse):
            call()
    assert first.beat() == [] and first.has_double
    assert "north: a second process with the same kit was refused" in server.callers.refresh()[0]
    assert first.beat() == [] and not first.has_double and server.callers.refresh() == []
    waiting = threading.Thread(target=suppressed, args=(lambda: first.wait([], tmp_path, 100),))
    waiting.start()  # an open call is a sign of life, however long it lasts
    time.sleep(0.8)
    with raises(KitInUse):
        second.hello()
    first.close()
    waiting.join(10)
    time.sleep(0.6)
    second.hello()
    assert second.beat() == [] and not second.has_double  # the one that was refused is itself


def suppressed(call: Any) -> None:
    with suppress(NoConnection):
        call()


def test_a_revoked_kit_is_refused_by_name_and_its_connection_closed_and_no_other(
    tmp_path: Path, kits: dict[str, Kit]
) -> None:
    folder = tmp_path / "kits"
    own = project_kits(folder, "north", "south")
    with serving(own["organiser"], tmp_path) as server, connected(own["south"]) as south:
        north = Connection(own["north"])
        north.hello()
        ended = threading.Event()

        def wait() -> None:
            with suppress(NoConnection, KitRefused):
                north.wait([], tmp_path, 100)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.3)
        revoke(folder, "north")
        assert server.callers.refresh() == ["north: its certificate was revoked; its connection is closed"]
        assert ended.wait(5) and set(server.alive()) == {"south"}
        with raises((KitRefused, NoConnection)):
            north.beat()
        with raises(KitRefused, match="the certificate of 'north' was revoked"):
            north.hello()
        assert len(count_connections(own["organiser"])) == 2
        server.callers.refresh()
        wait_until(lambda: len(count_connections(own["organiser"])) == 1)
        south.beat()
        north.close()


def test_a_certificate_that_expires_during_a_connection_is_refused_from_then_on(
    tmp_path: Path, kits: dict[str, Kit]
) -> None:
    folder = tmp_path / "kits"
    own = project_kits(folder, "north")
    authority, seconds = Authority.load(folder / ".authority"), timedelta(seconds=3)
    issued = authority.issue("north", "x", role="hospital", valid=seconds, start=datetime.now(UTC))
    put_certificate(own["north"], *issued, authority)
    with serving(own["organiser"], tmp_path) as server, connected(own["north"]) as north:
        north.beat()
        assert server.callers.expires()["north"] < datetime.now(UTC) + seconds
        time.sleep(4)
        with raises(KitRefused, match="the certificate of 'north' expired on 20"):
            north.beat()
        assert server.alive() == {}


def count_connections(kit: Kit) -> list[Any]:
    """Of this process as a server."""
    found = psutil.Process().net_connections("tcp")
    return [one for one in found if one.laddr.port == kit.port and one.status == psutil.CONN_ESTABLISHED]


def wait_until(claim: Any) -> None:
    deadline = time.monotonic() + 10
    while not claim():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def test_preflight_displaces_nobody(server: HospitalServer, kits: dict[str, Kit]) -> None:
    with connected(kits["north"]) as north:
        looking = Connection(kits["north"], "preflight")
        facts = looking.hello()
        assert abs(facts["time"] - time.time()) < 5 and facts["project"] == kits["north"].project_id
        with raises(KitInUse):
            looking.beat()
        north.beat()


def test_replies_that_are_not_wanted_are_refused_by_name(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path
) -> None:
    mailbox = server.open_job("job-1")
    letter = post(server, tmp_path, limit=100)
    reply = tmp_path / "reply"
    reply.write_bytes(b"x" * 101)
    with connected(kits["north"]) as north, connected(kits["south"]) as south:
        request = north.wait([], tmp_path, 10**7)
        assert request is not None
        with raises(CallRefused, match="not wanted"):
            south.answer(request, reply)
        with raises(CallRefused, match="at most 100 bytes"):
            north.answer(request, reply)
        with raises(CallRefused, match="not wanted"):
            north.answer(request, reply)
        server.close_job("job-1")
        with raises(CallRefused, match="not in progress"):
            north.answer(request, reply)
    assert mailbox.take_strays() == [
        ("south", "foreign: a reply to a request made to 'north'"),
        ("north", "too large: a reply of 101 bytes"),
        ("north", "duplicate: this request was answered before"),
    ]
    assert mailbox.take(1) == (letter, None) and left(tmp_path) == []


@mark.parametrize("sent", [b"x" * 50, b"x" * 200], ids=["less", "more"])
def test_a_reply_of_another_size_than_announced_leaves_no_file(
    sent: bytes, server: HospitalServer, kits: dict[str, Kit], tmp_path: Path
) -> None:
    mailbox = server.open_job("job-1")
    letter = post(server, tmp_path)
    with connected(kits["north"]) as north:
        call = north._channel.stream_unary("/wardround.Hospitals/Answer")
        first = encode({"job": "job-1", "letter": letter.id, "bytes": 100})
        with raises(grpc.RpcError) as refused:
            call(iter([first, sent]), metadata=north._metadata, timeout=5)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "announced" in refused.value.details()
    assert len(mailbox) == 1 and left(tmp_path) == []


def test_a_reply_that_stalls_ends_with_its_letter(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path
) -> None:
    mailbox = server.open_job("job-1")
    letter = post(server, tmp_path)
    stalled = threading.Event()

    def parts() -> Iterator[bytes]:
        yield encode({"job": "job-1", "letter": letter.id, "bytes": 100})
        yield b"x"
        stalled.wait(10)

    with connected(kits["north"]) as north:
        call = north._channel.stream_unary("/wardround.Hospitals/Answer")
        future = call.future(parts(), metadata=north._metadata, timeout=20)
        deadline = time.monotonic() + 5
        while not left(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.02)
        mailbox.close(letter.id)
        with raises(grpc.RpcError):
            future.result(timeout=5)
        stalled.set()
        deadline = time.monotonic() + 5  # the server's thread ends a moment after the call
        while left(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert left(tmp_path) == []


def test_one_hospital_cannot_take_all_calls(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CALLS_OF_ONE", 2)
    with connected(kits["north"]) as north, connected(kits["south"]) as south:
        waiting = [threading.Thread(target=north.wait, args=([], tmp_path, 100)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        time.sleep(0.3)
        with raises(CallRefused, match="too many calls"):
            north.beat()
        assert south.beat() == []
        server.stop()
        for thread in waiting:
            thread.join(5)


def test_calls_that_send_nothing_count_against_their_hospital(
    server: HospitalServer, kits: dict[str, Kit], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CALLS_OF_ONE", 2)
    silence = threading.Event()

    def nothing() -> Iterator[bytes]:
        silence.wait(10)
        yield from ()

    with connected(kits["north"]) as north, connected(kits["south"]) as south:
        calls = [
            north._channel.stream_unary(f"/wardround.Hospitals/{method}").future(
                nothing(), metadata=north._metadata, timeout=10
            )
            for method in ("Hello", "Beat", "Answer", "Shell")
        ]
        deadline = time.monotonic() + 5
        while not (done := [call for call in calls[:3] if call.done()]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [call.code() for call in done] == [
            grpc.StatusCode.RESOURCE_EXHAUSTED
        ]  # of whichever came last
        with raises(grpc.RpcError) as unknown:
            calls[3].result()
        assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with raises(CallRefused, match="too many calls"):
            north.beat()
        assert south.beat() == []
        silence.set()


def test_a_message_that_grpc_refuses_is_logged_with_the_callers_name(
    server: HospitalServer, kits: dict[str, Kit], caplog: LogCaptureFixture
) -> None:
    for method in METHODS:
        with raises(grpc.RpcError) as refused:
            calling(kits["north"], f"/wardround.Hospitals/{method}", b" " * 2_000_000)
        assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAUTHENTICATED)
    said = (
        "ended before all of it was received",
        "refused: a message that is not JSON",
    )  # whichever is first
    assert any(f"north: Hello {words}" in caplog.text for words in said)


def test_connections_that_prove_nothing_are_capped_and_dropped(
    kits: dict[str, Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    changed = {"grpc.max_allowed_incoming_connections": 20, "grpc.server_handshake_timeout_ms": 1000}
    monkeypatch.setattr(servers, "OPTIONS", list((dict(servers.OPTIONS) | changed).items()))
    organiser = kits["organiser"]
    with serving(organiser, tmp_path):
        idle = [socket.create_connection(("127.0.0.1", organiser.port)) for _ in range(60)]
        for connection in idle:
            connection.settimeout(5)
            assert connection.recv(1) == b""  # closed by the server
            connection.close()
        with connected(kits["north"]) as north:
            assert north.beat() == []


def test_a_request_from_a_server_that_lies_is_bounded(kits: dict[str, Kit], tmp_path: Path) -> None:
    def receive(info: dict[str, Any], chunks: Iterator[bytes], folder: Path, largest: int) -> Any:
        return Requests(folder, largest).receive(info, chunks)

    about: dict[str, Any] = {"job": "j", "letter": "l"}
    with raises(MessageError, match="has 101 B, .* at most 100 B"):
        receive({**about, "bytes": 101}, iter([]), tmp_path, 100)
    with raises(MessageError, match="'bytes' is not a number"):
        receive({**about, "bytes": 4 * 2**30 + 1}, iter([]), tmp_path, 100)
    with raises(MessageError, match="more than the 3 bytes"):
        receive({**about, "bytes": 3}, iter([b"ab", b"cd"]), tmp_path, 100)
    with raises(MessageError, match="less than were announced"):
        receive({**about, "bytes": 3}, iter([b"ab"]), tmp_path, 100)
    with raises(MessageError, match="'job' is not text"):
        receive({**about, "job": "a\n" * 9, "bytes": 3}, iter([]), tmp_path, 100)
    assert receive({}, iter([]), tmp_path, 100) is None and list(tmp_path.iterdir()) == []


@mark.parametrize("slowest", [10**6, 10**9], ids=["slow", "too slow"])
def test_a_large_request_may_take_its_time_but_not_any_time(
    slowest: int, server: HospitalServer, kits: dict[str, Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def slow(path: Path, start: int, end: int) -> Iterator[bytes]:
        for chunk in read_chunks(path, start, end):
            time.sleep(0.1)
            yield chunk

    monkeypatch.setattr(servers, "read_chunks", slow)
    for name, value in (("WAIT_SECONDS", 0.3), ("CALL_SECONDS", 0.3), ("SLOWEST", slowest)):
        monkeypatch.setattr(clients, name, value)
    server.open_job("job-1")
    post(server, tmp_path)
    north = Connection(kits["north"])
    north.hello(5)
    if slowest == 10**6:
        assert north.wait([], tmp_path, 10**7) is not None
    else:
        with raises(NoConnection):
            north.wait([], tmp_path, 10**7)
    north.close()


@mark.parametrize(
    "content", [b"", b"[]", b"1", b"nul", b"\xff", b"[" * 9999, b"{" * 9999, b'"' + b"x" * 10_000 + b'"']
)
def test_what_is_not_a_small_json_object_is_refused(content: bytes) -> None:
    with raises(MessageError):
        decode(content)


def test_fields_have_types_and_limits() -> None:
    assert read_text({"a": "b"}, "a") == "b" and read_count({"a": 3}, "a", 3) == 3
    for value in (None, 3, "x" * 101, "a\x00b"):
        with raises(MessageError):
            read_text({"a": value}, "a")
    for number in (None, True, -1, 4, 2.0, "3"):
        with raises(MessageError):
            read_count({"a": number}, "a", 3)


# What a broken connection costs


def numbers(seed: int, size: int = 2**20) -> bytes:
    return random.Random(seed).randbytes(size)


def post_model(server: HospitalServer, folder: Path, head: bytes, model: bytes) -> Letter[RequestFile]:
    path = folder / f"{secrets.token_hex(4)}.file"
    path.write_bytes(head + model)
    content = RequestFile(path, 10**7, len(head), hashlib.sha256(model).hexdigest())
    letter = Letter("north", content, time.monotonic() + 60)
    server.post("job-1", letter)
    return letter


class Watched:
    """Counts what is sent, and breaks the connection after so many pieces."""

    before_break: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, monkeypatch: MonkeyPatch, module: Any, breaks_after: int = 10**9) -> None:
        self.num_bytes, self.breaks_after = 0, breaks_after
        monkeypatch.setattr(module, "read_chunks", self.read)

    def read(self, path: Path, *places: int) -> Iterator[bytes]:
        for count, chunk in enumerate(read_chunks(path, *places)):
            if count == self.breaks_after:
                self.breaks_after = 10**9
                self.before_break()
                raise RuntimeError("the connection breaks")
            self.num_bytes += len(chunk)
            yield chunk


def test_a_request_continues_where_its_connection_broke(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, servers, breaks_after=3)
    server.open_job("job-1")
    post_model(server, tmp_path, b"head" * 20, numbers(1))
    with connected(kits["north"]) as north:
        with raises(NoConnection):
            north.wait([], tmp_path, 10**7)
        request = north.wait([], tmp_path, 10**7)
    assert request is not None and request.path.read_bytes() == b"head" * 20 + numbers(1)
    assert watched.num_bytes <= 2**20 + 80 + limits.CHUNK_BYTES  # not 1.75 times


def test_a_model_that_is_here_does_not_come_again(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, servers)
    mailbox = server.open_job("job-1")
    with connected(kits["north"]) as north:
        for head, seed, sent in ((b"evaluate", 1, 2**20 + 8), (b"train", 1, 5), (b"evaluate", 2, 2**20 + 8)):
            letter = post_model(server, tmp_path, head, numbers(seed))
            watched.num_bytes = 0
            request = north.wait([], tmp_path, 10**7)
            assert request is not None and request.path.read_bytes() == head + numbers(seed)
            assert watched.num_bytes == sent
            request.path.unlink()
            mailbox.close(letter.id)
        for seed in (3, 4):
            letter = post_model(server, tmp_path, b"train", numbers(seed))
            assert north.wait([], tmp_path, 10**7) is not None
            mailbox.close(letter.id)
    assert len(list(tmp_path.glob("*.kept"))) == 2


def test_a_model_that_was_made_here_does_not_come(tmp_path: Path) -> None:
    requests, made, sha256 = (
        Requests(tmp_path, 10**7),
        tmp_path / "made",
        hashlib.sha256(numbers(1)).hexdigest(),
    )
    about = {"job": "j", "letter": "l", "bytes": 2**20 + 4, "head": 4, "sha256": sha256}
    made.write_bytes(numbers(1))
    requests.add(made)
    made.unlink()
    assert (
        requests.receive(about, iter([b"head"])) is None
    )  # offered before it was added: it is asked for anew
    assert requests.describe() == {"known": [sha256]}
    request = requests.receive({**about, "until": 4}, iter([b"head"]))
    assert request is not None and request.path.read_bytes() == b"head" + numbers(1)

    (tmp_path / f"{sha256}.kept").write_bytes(numbers(2))
    with raises(MessageError, match="SHA-256"):
        requests.receive({**about, "until": 4}, iter([b"head"]))
    made.write_bytes(b"too small to be worth it")
    requests.add(made)
    assert requests.describe() == {"known": []}


def test_a_reply_continues_where_its_connection_broke(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, clients, breaks_after=3)

    def arrive() -> None:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and sum(path.stat().st_size for path in left(tmp_path)) < 2**19:
            time.sleep(0.01)

    watched.before_break = arrive  # two pieces of four are there
    mailbox = server.open_job("job-1")
    post(server, tmp_path, content=b"a request")
    reply = tmp_path / "reply"
    reply.write_bytes(numbers(5))
    with connected(kits["north"]) as north:
        request = north.wait([], tmp_path, 10**7)
        assert request is not None
        with raises(NoConnection):
            north.answer(request, reply)
        north.answer(request, reply, again=True)
    _, path = mailbox.take(5)
    assert path is not None and path.read_bytes() == numbers(5) and left(tmp_path) == [path]
    assert watched.num_bytes <= 2**20 + limits.CHUNK_BYTES  # of 1.75 times as much


def test_a_part_of_another_reply_is_not_continued_and_goes_with_its_letter(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"abc"
        raise grpc.RpcError

    replies, announced = Replies(), Announced(5, "a" * 64)
    reply = ReplyFile(tmp_path / "one", announced, None, Transfer(5))
    with raises(grpc.RpcError):
        replies.receive("letter", reply, 0, broken())
    assert replies.find_start("letter", announced) == 3
    assert replies.find_start("letter", Announced(5, "b" * 64)) == replies.find_start("x", announced) == 0
    with raises(ReplyRefused, match="SHA-256"):
        replies.receive("letter", ReplyFile(tmp_path / "two", announced, None, Transfer(5)), 3, iter([b"de"]))
    with raises(grpc.RpcError):
        replies.receive("letter", ReplyFile(tmp_path / "three", announced, None, Transfer(5)), 0, broken())
    assert replies.find_start("letter", announced) == 3
    replies.end("letter")
    assert list(tmp_path.iterdir()) == []


def test_a_reply_that_does_not_move_loses_its_place_and_keeps_its_part(
    server: HospitalServer, kits: dict[str, Kit], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.2)
    server.open_job("job-1")
    letter = post(server, tmp_path)
    facts = {"job": "job-1", "letter": letter.id, "bytes": 100, "sha256": "0" * 64}
    silence = threading.Event()

    def parts() -> Iterator[bytes]:
        yield encode(facts)
        yield b"x" * 10
        silence.wait(10)

    with connected(kits["north"]) as north:
        call = north._channel.stream_unary("/wardround.Hospitals/Answer")
        future = call.future(parts(), metadata=north._metadata, timeout=20)
        deadline = time.monotonic() + 5
        while not future.done() and time.monotonic() < deadline:
            time.sleep(0.1)
            server.replies.end_stalled()
        assert future.done() and left(tmp_path)
        assert north._ask("Answer", {**facts, "ask": True}, 5) == {"from": 10}
        silence.set()


@mark.parametrize(
    "asked",
    [
        {"known": ["a" * 64] * (limits.KNOWN + 1)},
        {"known": "a"},
        {"part": 3},
        {"part": "a", "here": -1},
        {"part": "a"},
    ],
)
def test_what_a_hospital_says_it_has_is_bounded(
    asked: dict[str, Any], server: HospitalServer, kits: dict[str, Kit]
) -> None:
    with connected(kits["north"]) as north:
        call = north._channel.unary_stream("/wardround.Hospitals/Wait")
        with raises(grpc.RpcError) as refused:
            next(call(encode({"held": [], **asked}), metadata=north._metadata, timeout=5))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_numbers_that_are_not_as_announced_are_refused_and_not_kept(tmp_path: Path) -> None:
    requests = Requests(tmp_path, 10**7)
    about = {"job": "j", "letter": "l", "bytes": 6, "head": 2, "sha256": hashlib.sha256(b"cdef").hexdigest()}
    with raises(MessageError, match="SHA-256"):
        requests.receive(about, iter([b"abcdex"]))
    for lie, words in (
        ({"until": 2}, "not all is to come"),
        ({"from": 3}, "begins after what is here"),
        ({"head": 7}, "'head' is not a number"),
        ({"sha256": "../x"}, "'sha256' is not a SHA-256"),
    ):
        with raises(MessageError, match=words):
            requests.receive({**about, **lie}, iter([b"ab"]))
    assert list(tmp_path.iterdir()) == [] and requests.describe() == {"known": []}
