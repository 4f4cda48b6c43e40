import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pytest import CaptureFixture, MonkeyPatch, fixture, raises

from wardround import child_process
from wardround.child_process import ChildProcess

CHILD = """
import os, sys, time
from wardround.child_process import connect

requests, answer = connect()
print("a library's greeting")
os.system("echo and one from outside Python")
for request in requests:
    if request.get("exit") is not None:
        sys.exit(request["exit"])
    if "half" in request:
        os.write(3, b'{"half')
    time.sleep(request.get("sleep", 0))
    answer({"double": 2 * request.get("number", 0), "setting": os.environ.get("SETTING")})
    if "then" in request:
        answer({"then": request["then"]})
time.sleep(float(os.environ.get("LINGER", 0)))
"""


@fixture
def child(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[ChildProcess]:
    (tmp_path / "kind_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    child = ChildProcess("kind_child", {"SETTING": "ours"})
    yield child
    child.stop()


def test_every_request_is_answered_and_prints_are_not_answers(child: ChildProcess) -> None:
    assert child.ask({"number": 2}) == {"double": 4, "setting": "ours"}
    child.send({"number": 3, "then": "ä"})
    assert child.receive(time.monotonic() + 60) == {"double": 6, "setting": "ours"}
    assert child.receive() == {"then": "ä"}
    assert child.is_alive()
    child.stop()
    assert not child.is_alive() and child.exit_code() == 0


def test_past_the_deadline_it_is_a_timeout_and_the_child_goes_on(child: ChildProcess) -> None:
    child.ask({})  # it has started
    child.send({"sleep": 0.3, "number": 1})
    with raises(TimeoutError):
        child.receive(time.monotonic() + 0.01)
    assert child.receive() == {"double": 2, "setting": "ours"}


def test_a_child_that_ends_says_so_as_often_as_one_asks(child: ChildProcess) -> None:
    assert child.ask({"exit": 3}) is None
    assert child.exit_code() == 3 and not child.is_alive()
    assert child.ask({"number": 1}) is None and child.receive(time.monotonic()) is None


def test_half_a_line_of_a_killed_child_is_not_an_answer(child: ChildProcess) -> None:
    child.ask({})
    child.send({"half": True, "sleep": 60})
    time.sleep(0.1)
    os.kill(child.pid, signal.SIGKILL)
    assert child.receive() is None and child.exit_code() == -signal.SIGKILL


def test_what_a_child_prints_goes_to_standard_error_unless_it_is_quiet(
    tmp_path: Path, monkeypatch: MonkeyPatch, capfd: CaptureFixture[str]
) -> None:
    (tmp_path / "printing_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    for quiet in (True, False):
        child = ChildProcess("printing_child", quiet=quiet)
        child.ask({})
        child.stop()
        printed = capfd.readouterr()
        assert ("greeting" in printed.err and "outside Python" in printed.err) is not quiet
        assert printed.out == ""


def test_a_child_that_does_not_end_by_itself_is_killed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "lingering_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child_process, "END_SECONDS", 0.2)
    child = ChildProcess("lingering_child", {"LINGER": "60"}, quiet=True)
    child.ask({})
    child.stop()
    assert not child.is_alive() and child.exit_code() == -signal.SIGKILL


def test_a_module_that_is_not_there_is_a_child_that_ended(capfd: CaptureFixture[str]) -> None:
    child = ChildProcess("no_such_module", quiet=True)
    assert child.ask({}) is None and child.exit_code() == 1
    child.stop()
    assert capfd.readouterr().err == ""
    assert "no_such_module" not in sys.modules


def test_a_child_whose_parent_was_killed_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "kind_child.py").write_text(CHILD)
    parent = (
        "import os, signal\n"
        "from wardround.child_process import ChildProcess\n"
        "child = ChildProcess('kind_child')\n"
        "child.ask({'number': 1})\n"
        "child.send({'number': 2, 'sleep': 0.3})\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with (tmp_path / "said.txt").open("w") as said:
        done = subprocess.run(
            [sys.executable, "-c", parent], env=environment, stderr=said, stdout=subprocess.PIPE, text=True
        )
    deadline = time.monotonic() + 20
    while Path(f"/proc/{int(done.stdout)}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.05)

    assert "Error" not in (tmp_path / "said.txt").read_text()
