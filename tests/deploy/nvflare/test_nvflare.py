"""The FLARE adapter without its processes; one slow test starts them all."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nvflare")

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from wardround.deploy import mailbox, processes
from wardround.deploy.nvflare import controller, executor, rejoin, session, shareable
from wardround.deploy.nvflare.channel import FlareChannel, JobEnded
from wardround.deploy.nvflare.controller import WardroundController
from wardround.deploy.nvflare.executor import WardroundExecutor
from wardround.deploy.nvflare.job import ARGUMENTS, CONTROLLER, EXECUTOR, TASK, read_arguments, write_job
from wardround.deploy.nvflare.shareable import from_shareable, to_shareable
from wardround.deploy.wire import Parcel
from wardround.errors import ConfigError, WardroundError

CTX = FLContext()


def parcel(**header: object) -> Parcel:
    return Parcel({"task": "train", **header}, {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})


def same(one: Parcel, other: Parcel) -> None:
    assert one.header == other.header
    assert list(one.arrays) == list(other.arrays)
    for name, array in one.arrays.items():
        assert array.dtype == other.arrays[name].dtype
        np.testing.assert_array_equal(array, other.arrays[name], strict=True)


# Parcels as FLARE's objects


def test_a_parcel_comes_back_from_flare_as_it_was() -> None:
    arrays = {
        "matrix": np.arange(6.0).reshape(2, 3),
        "number": np.array(3, dtype=np.int64),
        "nothing": np.zeros((0, 3), np.float32),
        "turned": np.arange(6, dtype=np.uint16).reshape(2, 3).T,
        "bytes": np.arange(5, dtype=np.uint8),
    }
    sent = Parcel({"a": 1, "inf": float("inf"), "text": "{not} a [template]"}, arrays)
    same(from_shareable(to_shareable(sent)), sent)


def test_a_large_array_travels_in_pieces_that_are_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shareable, "CHUNK_BYTES", 40)
    array = np.arange(33, dtype=np.float32).reshape(3, 11)
    pieces, plan = shareable.split_arrays({"w": array})
    assert [piece.size for piece in pieces.values()] == [10, 10, 10, 3]
    assert all(np.shares_memory(piece, array) for piece in pieces.values())
    np.testing.assert_array_equal(shareable.join_arrays(pieces, plan)["w"], array, strict=True)


def test_a_parcel_without_arrays_travels() -> None:
    same(from_shareable(to_shareable(Parcel({"a": 1}, {}))), Parcel({"a": 1}, {}))


@pytest.mark.parametrize(
    "change",
    [
        lambda plan, pieces: plan[0].update(shape=[7]),
        lambda plan, pieces: plan[0].update(shape=[10**12, 10**12]),
        lambda plan, pieces: plan[0].update(shape=[10**12] * 5000),
        lambda plan, pieces: plan[0].update(shape=["3", "11"]),
        lambda plan, pieces: plan[0].update(pieces=["9"]),
        lambda plan, pieces: plan[0].update(pieces=[]),
        lambda plan, pieces: plan[0].pop("name"),
        lambda plan, pieces: pieces.update(more=np.zeros(1)),
    ],
)
def test_pieces_that_do_not_fit_are_no_parcel(change) -> None:
    pieces, plan = shareable.split_arrays(parcel().arrays)
    change(plan, pieces)
    with pytest.raises((ValueError, LookupError)):
        shareable.join_arrays(pieces, plan)


def test_foreign_content_is_a_value_error() -> None:
    for content in (Shareable(), to_shareable(parcel()), make_reply(ReturnCode.OK)):
        if "DXO" in content:
            content["DXO"] = b"\x80\x04 a pickle"
        elif content:
            content.clear()
        with pytest.raises(ValueError):
            from_shareable(content)


def test_emptying_keeps_flares_labels() -> None:
    content = to_shareable(parcel())
    content.set_header("task_id", "7")
    shareable.clear_content(content)
    assert content.get_header("task_id") == "7"
    with pytest.raises(ValueError):
        from_shareable(content)


# The hospital's side


class Site:
    def answer(self, request: Parcel) -> Parcel:
        if request.header.get("break"):
            raise RuntimeError("secret path /data/patient-7")
        return Parcel({**request.header, "kind": "reply"}, request.arrays)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> WardroundExecutor:
    monkeypatch.setattr(executor, "end_with_parent", lambda: None)
    made = WardroundExecutor()
    made._site = Site()
    return made


def test_the_executor_hands_requests_to_the_site(worker: WardroundExecutor) -> None:
    answer = worker.execute(TASK, to_shareable(parcel()), CTX, None)
    same(from_shareable(answer), parcel(kind="reply"))


def test_the_executor_never_raises_and_tells_no_secrets(worker: WardroundExecutor) -> None:
    answer = worker.execute(TASK, to_shareable(parcel(**{"break": True})), CTX, None)
    assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "patient" not in str(answer)
    assert worker.execute(TASK, Shareable(), CTX, None).get_return_code() != ReturnCode.OK


# The job


def test_a_job_names_classes_and_carries_no_code(tmp_path: Path) -> None:
    args = {"config": {"name": "{x} $y"}, "names": ["north"], "resume": False}
    job = write_job(tmp_path, name="my run", args=args)
    files = {str(path.relative_to(job)) for path in job.rglob("*") if path.is_file()}
    assert files == {
        "meta.json",
        "app/config/config_fed_server.json",
        "app/config/config_fed_client.json",
        f"app/config/{ARGUMENTS}",
    }
    server = json.loads((job / "app/config/config_fed_server.json").read_text())
    hospital = json.loads((job / "app/config/config_fed_client.json").read_text())
    assert server["workflows"][0]["path"] == CONTROLLER
    assert hospital["executors"][0]["executor"]["path"] == EXECUTOR
    assert json.loads((job / "meta.json").read_text())["deploy_map"] == {"app": ["@ALL"]}
    assert read_arguments(job / "app", tmp_path) == args
    assert not any("north" in path.read_text() for path in job.rglob("*.json"))  # it goes to everybody


def test_a_job_from_elsewhere_is_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path, name="run", args={})
    (job / "app/config" / ARGUMENTS).write_text('{"number": "../../secret"}')
    with pytest.raises(ConfigError, match="not written by wardround submit"):
        read_arguments(job / "app", tmp_path)


def test_arguments_that_are_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain JSON"):
        write_job(tmp_path, name="run", args={"path": tmp_path})


def test_the_named_classes_exist() -> None:
    assert f"{WardroundController.__module__}.WardroundController" == CONTROLLER
    assert f"{WardroundExecutor.__module__}.WardroundExecutor" == EXECUTOR


# The channel


class Hospital:
    """A hospital's process as the channel sees it: asks for a task, checks it, submits."""

    def __init__(self, channel: FlareChannel, name: str) -> None:
        self.channel, self.client = channel, Client(name, f"token-{name}")

    def fetch(self) -> tuple[str, Parcel] | None:
        name, letter, shareable = self.channel.process_task_request(self.client, CTX)
        return (letter, from_shareable(shareable)) if name else None

    def wait(self) -> tuple[str, Parcel]:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (got := self.fetch()) is not None:
                return got
            time.sleep(0.005)
        raise AssertionError("no task came")

    def submit(self, letter: str, reply: Parcel) -> None:
        self.channel.process_submission(self.client, TASK, letter, to_shareable(reply), CTX)

    def answer(self) -> None:
        letter, request = self.wait()
        self.submit(letter, Parcel({**request.header, "by": self.client.name}, request.arrays))


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def soon(seconds: float) -> float:
    return time.monotonic() + seconds


def test_replies_come_as_they_arrive() -> None:
    channel = FlareChannel()
    north, south = Hospital(channel, "north"), Hospital(channel, "south")
    exchange = channel.exchange({"north": parcel(n=1), "south": parcel(n=2)}, soon(60))
    first = in_thread(south.answer)
    name, reply = next(exchange)
    first.join()
    assert (name, reply.header) == ("south", {"task": "train", "n": 2, "by": "south"})
    second = in_thread(north.answer)
    assert [name for name, _ in exchange] == ["north"]
    second.join()
    assert channel.strays() == []
    assert north.fetch() is None


def test_a_hospital_that_was_restarted_gets_its_request_again() -> None:
    channel = FlareChannel()
    north = Hospital(channel, "north")
    got = []

    def twice() -> None:
        got.append(north.wait()[0])
        got.append(north.wait()[0])
        north.submit(got[1], parcel())

    thread = in_thread(twice)
    assert [name for name, _ in channel.exchange({"north": parcel()}, soon(60))] == ["north"]
    thread.join()
    assert got[0] == got[1]


def test_the_deadline_ends_an_exchange_and_a_late_reply_is_told_once() -> None:
    channel = FlareChannel()
    north = Hospital(channel, "north")
    got = []
    thread = in_thread(lambda: got.append(north.wait()))
    assert list(channel.exchange({"north": parcel(), "south": parcel()}, soon(1))) == []
    thread.join()
    letter = got[0][0]
    assert north.fetch() is None
    assert channel.process_task_check(letter, CTX) is None
    assert channel.process_task_check(letter, CTX) is None
    north.submit(letter, parcel())
    [(name, why)] = channel.strays()
    assert name == "north"
    assert why.startswith("late")
    assert channel.strays() == []


def test_duplicate_foreign_and_unknown_replies_are_refused_and_told() -> None:
    channel = FlareChannel()
    north, south = Hospital(channel, "north"), Hospital(channel, "south")
    got = []

    def work() -> None:
        letter, _ = north.wait()
        got.append(letter)
        south.submit(letter, parcel(by="a stranger"))
        north.submit(letter, parcel(by="north"))
        north.submit(letter, parcel(by="north again"))
        south.submit("0" * 32, parcel())

    thread = in_thread(work)
    replies = [reply.header["by"] for _, reply in channel.exchange({"north": parcel()}, soon(60))]
    thread.join()
    assert replies == ["north"]
    whys = [(name, why.split(":")[0]) for name, why in channel.strays()]
    assert whys == [("south", "foreign"), ("north", "duplicate"), ("south", "unknown")]


def test_an_engine_error_or_unreadable_reply_ends_the_wait_for_that_hospital() -> None:
    channel = FlareChannel()
    north, south = Hospital(channel, "north"), Hospital(channel, "south")

    def work() -> None:
        letter, _ = north.wait()
        channel.process_submission(north.client, TASK, letter, make_reply(ReturnCode.TASK_UNKNOWN), CTX)
        letter, _ = south.wait()
        channel.process_submission(south.client, TASK, letter, Shareable(), CTX)

    thread = in_thread(work)
    began = time.monotonic()
    assert list(channel.exchange({"north": parcel(), "south": parcel()}, soon(30))) == []
    assert time.monotonic() - began < 20
    thread.join()
    assert [why.split(":")[0] for _, why in channel.strays()] == ["failed", "unreadable"]


def test_flare_keeps_nothing_of_a_reply() -> None:
    channel = FlareChannel()
    north = Hospital(channel, "north")
    result = to_shareable(parcel())

    def work() -> None:
        letter, _ = north.wait()
        channel.process_submission(north.client, TASK, letter, result, CTX)

    thread = in_thread(work)
    [(_, reply)] = channel.exchange({"north": parcel()}, soon(60))
    thread.join()
    assert "w" in reply.arrays
    with pytest.raises(ValueError):
        from_shareable(result)


def test_an_exchange_that_is_given_up_drops_its_replies() -> None:
    channel = FlareChannel()
    north, south = Hospital(channel, "north"), Hospital(channel, "south")
    exchange = channel.exchange({"north": parcel(), "south": parcel()}, soon(60))
    threads = [in_thread(north.answer), in_thread(south.answer)]
    next(exchange)
    for thread in threads:
        thread.join()
    exchange.close()
    assert len(channel.strays()) == 1
    assert channel.mailbox._arrived.empty()
    assert channel.get_num_standing_tasks() == 0


def test_large_replies_take_turns_and_nobody_waits_for_the_dead() -> None:
    channel = FlareChannel()
    north, south = Hospital(channel, "north"), Hospital(channel, "south")
    letters = {}

    def work() -> None:
        letters["north"], letters["south"] = north.wait()[0], south.wait()[0]
        assert channel.mailbox.may_send(letters["north"])
        assert channel.mailbox.may_send(letters["north"])
        assert not channel.mailbox.may_send(letters["south"])
        channel.mailbox._heard["north"] = time.monotonic() - mailbox.SILENT_SECONDS - 1
        assert channel.mailbox.may_send(letters["south"])
        channel.mailbox._heard["north"] = time.monotonic()
        assert not channel.mailbox.may_send(letters["north"])
        south.submit(letters["south"], parcel())
        assert channel.mailbox.may_send(letters["north"])
        north.submit(letters["north"], parcel())
        letters["done"] = "yes"

    thread = in_thread(work)
    names = [name for name, _ in channel.exchange({"north": parcel(), "south": parcel()}, soon(60))]
    thread.join()
    assert names == ["south", "north"]
    assert letters["done"] == "yes"
    assert channel.mailbox.may_send("gone")


def test_signs_of_life_and_newcomers() -> None:
    asked = []
    channel = FlareChannel(refresh=lambda: asked.append(1))
    channel.client_is_active("north", "getTask", CTX)
    assert set(channel.alive()) == {"north"}
    assert channel.alive()["north"] < 60
    list(channel.exchange({"north": parcel()}, soon(0)))
    assert len(asked) == 1
    channel.client_is_active("south", "syncRunner", CTX)
    list(channel.exchange({"north": parcel()}, soon(0.5)))
    assert len(asked) == 2


def test_a_job_that_is_ended_stops_the_wait() -> None:
    channel = FlareChannel(ended=lambda: True)
    with pytest.raises(JobEnded, match="resume"):
        list(channel.exchange({"north": parcel()}, soon(30)))


def test_a_list_of_hospitals_that_cannot_be_renewed_is_no_reason_to_stop() -> None:
    def refuse() -> None:
        raise RuntimeError("busy")

    assert list(FlareChannel(refresh=refuse).exchange({"north": parcel()}, soon(0))) == []


def test_stop_reaches_an_experiment_that_begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "end_with_parent", lambda: None)
    made = WardroundController()
    assert made._command("wardround.status", None, CTX) == {"alive": {}, "stopping": False}
    assert made._command("wardround.stop", {}, CTX)["stopping"]

    class Experiment:
        stop_requested = False

    experiment = Experiment()
    made._begin(experiment)
    assert experiment.stop_requested


# Processes


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    child = (
        "from wardround.deploy.processes import end_with_parent; import time; end_with_parent(); "
        "print('ready', flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys\n"
        "os.environ['WARDROUND_PARENT'] = str(os.getpid())\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, "
        "start_new_session=True)\n"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    import psutil

    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.1)


def test_a_kit_runs_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.Processes, "_launch", lambda self: None)
    (tmp_path / "flare" / "startup").mkdir(parents=True)
    with processes.Processes(tmp_path, "client"), pytest.raises(ConfigError, match="already running"):
        processes.Processes(tmp_path, "client").start()
    with processes.Processes(tmp_path, "client"):
        pass


def test_something_that_is_no_kit_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no flare/startup folder"):
        processes.Processes(tmp_path, "server").start()


def test_a_process_that_ends_is_started_again_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flare" / "startup").mkdir(parents=True)
    launched = []

    def launch(self: processes.Processes) -> None:
        launched.append(time.monotonic())
        self.child = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(7)"])

    monkeypatch.setattr(processes.Processes, "_launch", launch)
    said = []
    with processes.Processes(tmp_path, "client", again=True, say=said.append):
        deadline = time.monotonic() + 60
        while len(launched) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert len(launched) >= 2
    assert "exit code 7" in said[0]
    assert "again in 1 s" in said[0]


def test_a_server_that_ended_is_said_at_once(tmp_path: Path) -> None:
    made = processes.Processes(tmp_path, "server")
    made.ended.set()
    with pytest.raises(WardroundError, match="ended while starting"):
        processes.wait_for_port("127.0.0.1", 1, 30, made)
    with pytest.raises(WardroundError, match="did not open within 0 s"):
        processes.wait_for_port("127.0.0.1", 1, 0)


def test_waiting_for_hospitals_says_for_whom() -> None:
    said = []
    assert processes.wait_for_hospitals(lambda: {"north": 0.1, "x": 1}, ["north"], 5, said.append) == [
        "north"
    ]
    assert said == []
    with pytest.raises(WardroundError, match=r"only 1 of 2 hospitals .* missing: south"):
        processes.wait_for_hospitals(lambda: ["north"], ["north", "south"], 0, said.append)
    assert said[0].startswith("waiting for south until ")
    assert processes.wait_for_hospitals(lambda: ["north"], ["north", "south"], 0, at_least=1) == ["north"]


# The organiser's line


def test_a_session_without_the_admin_part_or_a_server_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="organiser's kit"):
        session.Session(tmp_path)
    with pytest.raises(WardroundError, match="another project"), session._explained("host:1"):
        raise type("AuthenticationError", (Exception,), {})("no")
    with pytest.raises(WardroundError, match="wardround server"), session._explained("host:1"):
        raise type("NoConnection", (Exception,), {})("no")


# Hospitals that come back


class Reply:
    def __init__(self, body: object) -> None:
        self.body = body

    def get_header(self, key: str, default: object = None) -> object:
        return default


class Job:
    job_id, run_aborted = "job-1", False

    def __init__(self) -> None:
        self.meta: dict[object, object] = {}

    def get_application(self, name: str, fl_ctx: FLContext) -> bytes:
        return b"the app"


class Engine:
    """Stands for FLARE's server: one running job, and hospitals that say what they run."""

    def __init__(self, running: list[str]) -> None:
        self.lock = threading.Lock()
        self.job = Job()
        self.old, self.new = Client("north", "old"), Client("north", "new")
        self.run_processes = {}
        self.run_processes["job-1"] = {rejoin.RunProcessKey.PARTICIPANTS: {"old": self.old}}
        self.job_runner = type("Runner", (), {"running_jobs": {"job-1": self.job}})()
        self.server = self
        self.admin_server = self
        self.running = running
        self.sent: list[str] = []
        self.started: list[str] = []

    def get_client_from_name(self, name: str) -> Client:
        return self.new

    def send_requests_and_get_reply_dict(self, requests, timeout_secs: float):
        [(token, message)] = requests.items()
        self.sent.append(message.topic)
        state = {"running_jobs": [{"job_id": job} for job in self.running]}
        return {token: Reply(json.dumps(state))}

    def new_context(self) -> FLContext:
        return FLContext()

    def check_client_resources(self, job: Job, needs: dict, fl_ctx: FLContext) -> dict:
        return dict.fromkeys(needs, (True, "slot"))

    def start_client_job(self, job: Job, sites: dict, fl_ctx: FLContext) -> list:
        self.started += sites
        return []


@pytest.fixture
def no_security(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejoin, "set_message_security_data", lambda message, job, fl_ctx: None)


def looked_after(engine: Engine) -> Engine:
    component = rejoin.RejoinMonitor()
    component._engine = engine
    component._look_after("north")
    return engine


def test_a_returned_hospital_gets_the_job_under_its_new_token(no_security: None) -> None:
    engine = looked_after(Engine(running=[]))
    assert engine.started == ["north"]
    assert engine.run_processes["job-1"][rejoin.RunProcessKey.PARTICIPANTS] == {"new": engine.new}


def test_a_hospital_that_runs_the_job_is_left_alone(no_security: None) -> None:
    engine = looked_after(Engine(running=["job-1"]))
    assert engine.started == []
    assert len(engine.sent) == 1


def test_a_job_that_is_over_is_not_started_again(no_security: None) -> None:
    engine = Engine(running=[])
    engine.run_processes["job-1"][rejoin.RunProcessKey.PROCESS_FINISHED] = True
    assert looked_after(engine).started == []
    engine = Engine(running=[])
    engine.job.run_aborted = True
    assert looked_after(engine).started == []


def test_environment_names_the_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flare" / "startup").mkdir(parents=True)
    seen = {}

    class Child:
        pid, returncode = os.getpid(), 0

    def start(command: list[str], **options: object) -> Child:
        seen.update(options["env"])
        return Child()

    monkeypatch.setattr(subprocess, "Popen", start)
    processes.Processes(tmp_path, "client", site=tmp_path / "site.yaml")._launch()
    assert seen[processes.KIT] == str(tmp_path)
    assert seen[processes.SITE] == str(tmp_path / "site.yaml")
    assert seen[processes.PARENT] == str(os.getpid())


# Everything at once


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of what the engine uses to talk
def test_server_and_hospitals_start_come_back_and_leave_nothing(kits: Path, tmp_path: Path) -> None:
    import psutil

    folder = Path(shutil.copytree(kits, tmp_path / "kits"))
    port = json.loads((folder / "organiser" / "kit.json").read_text())["port"]
    with ExitStack() as stack:
        server = stack.enter_context(processes.Processes(folder / "organiser", "server"))
        north = stack.enter_context(processes.Processes(folder / "north", "client", again=True))
        stack.enter_context(processes.Processes(folder / "south", "client", again=True))
        processes.wait_for_port("127.0.0.1", port, 60, server)
        line = stack.enter_context(session.Session(folder / "organiser"))
        processes.wait_for_hospitals(line.connected, ["north", "south"], 60)
        with pytest.raises(WardroundError):
            line.command("no-such-job", "status")
        assert north.child is not None
        first = north.child.pid
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 90
        while north.child.pid == first or line.connected()["north"] > 3:
            assert time.monotonic() < deadline, "north did not come back"
            time.sleep(0.2)
        pids = [process.child.pid for process in (server, north) if process.child is not None]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert processes._find_processes((folder / "north").resolve()) == []
