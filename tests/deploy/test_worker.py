"""The hospital's process for one run."""

import threading
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch, fixture, importorskip, raises

importorskip("grpc")

from wardround.child_process import ChildProcess
from wardround.deploy import worker
from wardround.deploy.joining import WorkerProcess
from wardround.deploy.kits.kit import KIT, read_kit
from wardround.deploy.kits.signing import site_identity
from wardround.deploy.worker import HospitalWorker, check
from wardround.errors import WardroundError

Lines = list[dict[str, Any]]


@fixture
def lines() -> Lines:
    return []


def test_cases_that_are_not_the_hospitals_are_told_before_it_connects(mine: Path, lines: Lines) -> None:
    check(mine / "north", lines.append)
    (mine / "north" / "site.yaml").write_text("data: there.yaml\n")
    check(mine / "north", lines.append)

    assert "synthetic cases" in lines[0]["ready"] and lines[0]["largest"] > 10**6
    assert "there.yaml" in lines[1]["wrong"]


def test_a_file_that_is_no_request_is_a_failure_in_one_sentence(
    mine: Path, tmp_path: Path, lines: Lines, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv(KIT, str(mine / "north"))
    request, reply = tmp_path / "a.request", tmp_path / "a.reply"
    request.write_bytes(b"no parcel at all")
    about = {"request": str(request), "reply": str(reply), "largest": 10**6}

    HospitalWorker(lines.append, dict).answer(about)

    assert "could not be read" in lines[0]["failed"] and not reply.exists()


def test_a_site_that_breaks_tells_no_secrets(
    mine: Path, tmp_path: Path, lines: Lines, monkeypatch: MonkeyPatch
) -> None:
    def breaks(sign: object) -> None:
        raise RuntimeError("/data/secret")

    monkeypatch.setattr(worker, "open_site", breaks)
    HospitalWorker(lines.append, dict).answer({"request": str(tmp_path / "a"), "reply": "", "largest": 1})

    assert lines == [{"failed": "its process could not answer (RuntimeError)"}]


def test_what_has_to_be_signed_goes_to_the_process_that_has_the_key(
    mine: Path, lines: Lines, monkeypatch: MonkeyPatch
) -> None:
    kit = read_kit(mine / "north")
    join = WorkerProcess.__new__(WorkerProcess)  # without the process it would start
    join._kit = kit
    answering = HospitalWorker(lines.append, lambda: join._sign(lines[-1]))
    kit.own_key.rename(kit.own_key.with_name("elsewhere"))

    with raises(WardroundError, match="key cannot sign: .*own.key"):
        answering.sign(b"statement")
    kit.own_key.with_name("elsewhere").rename(kit.own_key)
    identity = site_identity(kit, answering.sign)
    signature = identity.sign(b"statement")

    site_identity(read_kit(mine / "south")).verify("north", identity.certificate, signature, b"statement")
    assert lines[-1] == {"sign": "c3RhdGVtZW50"}


def test_a_process_of_its_own_gets_signatures_while_it_answers(
    kits: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """The pipes as they are: the child asks for a signature, then answers the request with it."""
    (tmp_path / "asking.py").write_text(ASKING)
    monkeypatch.syspath_prepend(str(tmp_path))
    kit = read_kit(kits / "north")
    join = WorkerProcess.__new__(WorkerProcess)
    join._kit, join._turn, join._child = kit, threading.Lock(), ChildProcess("asking")
    try:
        reply, _ = join.answer(tmp_path / "a.request", 10, 30.0, lambda: True)
    finally:
        join._child.stop()

    assert reply is not None
    identity = site_identity(kit)
    identity.verify("north", identity.certificate, reply.read_bytes(), b"statement")


ASKING = """
import base64
from pathlib import Path
from wardround.child_process import connect

requests, send = connect()
line = next(requests)
send({"sign": base64.b64encode(b"statement").decode()})
Path(line["reply"]).write_bytes(base64.b64decode(next(requests)["signature"]))
send({"reply": line["reply"]})
next(requests, None)
"""
