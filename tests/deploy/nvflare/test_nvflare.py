"""The FLARE adapter without FLARE's processes; one slow test runs a job in FLARE's simulator."""

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import config, run

pytest.importorskip("nvflare")

import nvflare
from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ConfigVarName, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.server_engine_spec import ServerEngineSpec
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.wf_comm_spec import WFCommSpec

from wardround.config_file import load_config
from wardround.deploy import limits
from wardround.deploy.ledger import verify
from wardround.deploy.mailbox import Letter
from wardround.deploy.nvflare import shareable
from wardround.deploy.nvflare.channel import MOST_HELD, SILENT_SECONDS, FlareChannel, JobEnded
from wardround.deploy.nvflare.controller import WardroundController
from wardround.deploy.nvflare.executor import WardroundExecutor
from wardround.deploy.nvflare.job import (
    ARGUMENTS,
    CONTROLLER,
    EXECUTOR,
    LETTER,
    POLL_SECONDS,
    TASK,
    make_client_config,
    make_server_config,
    place_on_server,
    read_arguments,
    write_job,
)
from wardround.deploy.nvflare.shareable import from_shareable, to_shareable
from wardround.deploy.wire import Parcel
from wardround.errors import ConfigError

CTX = FLContext()


def parcel(**header: object) -> Parcel:
    return Parcel({"task": "train", **header}, {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})


def same(one: Parcel, other: Parcel) -> None:
    assert one.header == other.header
    assert list(one.arrays) == list(other.arrays)
    for name, array in one.arrays.items():
        assert array.dtype == other.arrays[name].dtype
        np.testing.assert_array_equal(array, other.arrays[name], strict=True)


# What the adapter needs of FLARE. Its public interface is `nvflare.apis`; all else is named here, with why.

INTERNALS = {
    "nvflare.fuel.utils.msg_root_utils.delete_msg_root": "drops the arrays of a letter that is closed; FLARE "
    "has no public way, and would keep a model of each hospital until the deadline",
}
# Text that FLARE's own processes say or read, and where; none of it is declared anywhere.
SAID = {
    "private/fed/server/server_runner.py": (
        "if rc in self.ABORT_RETURN_CODES:",  # emptied, or one hospital's reply ends everybody's job
        '_report_client_active("syncRunner"',  # how a job process that starts is known
        "communicator.client_is_active(",
    ),
    "private/fed/client/fed_client.py": (
        "fire_event(EventType.BEFORE_PULL_TASK, self.handlers",  # when an executor waits for its letter
    ),
    "private/fed/client/client_runner.py": (
        "default_task_fetch_interval",
        "task_check_interval",
        "job_heartbeat_interval",
    ),
}
COMMUNICATOR = (
    "initialize_run", "finalize_run", "process_task_request", "process_task_check", "process_submission",
    "client_is_active", "process_dead_client_report", "get_client_disconnect_time", "handle_exception",
    "check_tasks", "cancel_all_tasks", "get_num_standing_tasks",
)  # fmt: skip


def list_imports() -> dict[str, set[str]]:
    """What each module of the adapter takes from FLARE."""
    folder = Path(str(shareable.__file__)).parent
    found: dict[str, set[str]] = {}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("nvflare"):
                found.setdefault(path.name, set()).update(f"{node.module}.{name.name}" for name in node.names)
    return found


def test_the_adapter_uses_flares_public_interface_but_for_what_is_named() -> None:
    taken = set().union(*list_imports().values())
    assert {name for name in taken if not name.startswith("nvflare.apis.")} == set(INTERNALS)
    for name in taken:
        module, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(module), member), name


def test_flare_still_says_and_reads_what_the_adapter_relies_on() -> None:
    folder = Path(str(nvflare.__file__)).parent
    for file, words in SAID.items():
        text = (folder / file).read_text(encoding="utf-8")
        for word in words:
            assert word in text, f"{file} of nvflare {nvflare.__version__} has no {word}"
    sizes = make_server_config() | make_client_config()
    assert f"np_{ConfigVarName.DOWNLOAD_CHUNK_SIZE}" in sizes


def test_flares_runner_calls_a_communicator_as_the_channel_answers() -> None:
    for name in COMMUNICATOR:
        theirs = inspect.signature(getattr(WFCommSpec, name)).parameters
        ours = inspect.signature(getattr(FlareChannel, name)).parameters
        assert list(ours) == list(theirs), name
    for name in ("register_aux_message_handler", "register_app_command", "sync_clients_from_main_process"):
        assert hasattr(ServerEngineSpec, name), name


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
        lambda plan, pieces: plan[0].update(shape=[2**30] * 9),
        lambda plan, pieces: plan[0].update(shape=[-2, -3]),
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
def worker() -> WardroundExecutor:
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


def start(name: str) -> WardroundExecutor:
    made, context = WardroundExecutor(), FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
    made.handle_event(EventType.START_RUN, context)
    return made


def test_clients_of_one_machine_have_rules_and_memory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, cases in (("north", 3), ("east", 5)):
        (tmp_path / f"{name}.yaml").write_text(f"data: phantom\nmin_cases: {cases}\n")
    monkeypatch.setenv("WARDROUND_SITE", str(tmp_path / "{site}.yaml"))
    monkeypatch.setenv("WARDROUND_STATE", str(tmp_path / "state"))
    north, east = start("north")._site, start("east")._site
    assert north is not None and east is not None
    assert (north.name, north._site.min_cases, east._site.min_cases) == ("north", 3, 5)
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"north", "east"}
    assert (tmp_path / "state" / "north").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("missing", ["WARDROUND_SITE", "WARDROUND_STATE"])
def test_a_client_without_rules_refuses_in_one_sentence(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WARDROUND_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("WARDROUND_STATE", str(tmp_path))
    monkeypatch.delenv(missing)
    made = start("north")
    [record] = caplog.records
    assert record.getMessage().startswith(f"wardround takes no part in this job: {missing} is not set.")
    assert record.exc_info is None
    answer = made.execute(TASK, to_shareable(parcel()), CTX, None)
    assert answer.get_return_code() == ReturnCode.EXECUTION_EXCEPTION


# The job


def write_tiny(folder: Path, *names: str, **changes: object) -> Path:
    write_job(folder / "job", config(folder / "run", **changes), names or ("north", "east"))
    return folder / "job"


def test_the_run_is_in_the_servers_app_alone_and_no_code_travels(tmp_path: Path) -> None:
    job = write_tiny(tmp_path)
    files = {str(path.relative_to(job)) for path in job.rglob("*") if path.is_file()}
    assert files == {
        "meta.json",
        "server/config/config_fed_server.json",
        f"server/config/{ARGUMENTS}",
        "client/config/config_fed_client.json",
    }
    server = json.loads((job / "server/config/config_fed_server.json").read_text())
    hospital = json.loads((job / "client/config/config_fed_client.json").read_text())
    assert server["workflows"][0]["path"] == CONTROLLER
    assert hospital["executors"][0]["executor"]["path"] == EXECUTOR
    meta = json.loads((job / "meta.json").read_text())
    assert meta["deploy_map"] == {"server": ["server"], "client": ["north", "east"]}
    arguments = read_arguments(job / "server")
    assert (arguments["names"], arguments["resume"]) == (["north", "east"], False)
    assert load_config(arguments["config"]).folder == tmp_path / "run"


def test_flare_accepts_the_job(tmp_path: Path) -> None:
    from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
    from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

    job = write_tiny(tmp_path)
    valid, error, meta = JobMetaValidator().validate("job", zip_directory_to_bytes("", str(job)))
    assert valid, error
    assert "byoc" not in meta


def test_a_job_that_cannot_run_is_refused_when_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        write_tiny(tmp_path, "north", "north")
    with pytest.raises(ConfigError, match="name for the server"):
        write_tiny(tmp_path, "server")
    with pytest.raises(ConfigError, match="min_clients is 2"):
        write_tiny(tmp_path, "north", min_clients=2)
    with pytest.raises(ConfigError, match="pools all cases"):
        write_tiny(tmp_path, method={"name": "centralised"})
    assert not (tmp_path / "job").exists()
    write_tiny(tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        write_tiny(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"names": "a", "resume": false, "config": {}}', '{"names": []}']
)
def test_a_job_from_elsewhere_is_refused(text: str, tmp_path: Path) -> None:
    job = write_tiny(tmp_path)
    (job / "server/config" / ARGUMENTS).write_text(text)
    with pytest.raises(ConfigError, match="wardround flare-job"):
        read_arguments(job / "server")


def test_paths_are_those_of_the_servers_machine(tmp_path: Path) -> None:
    tiny = config(tmp_path / "run")
    assert place_on_server(tiny, Path("/srv/run")).folder == Path("/srv/run")
    with pytest.raises(ConfigError, match="output is 'runs/x'"):
        place_on_server(tiny, Path("runs/x"))
    with pytest.raises(ConfigError, match="Name it with --output"):
        place_on_server(tiny.model_copy(update={"output": None}), None)


def test_cases_of_a_federation_file_stay_at_the_hospitals(tmp_path: Path) -> None:
    real = {"federation": "centres/federation.yaml", "patch": [32, 32]}
    placed = place_on_server(config(tmp_path / "run", data=real), None)
    assert placed.data.hospitals
    assert (placed.data.federation, placed.data.patch) == (None, (32, 32))


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
        channel.mailbox._heard["north"] = time.monotonic() - SILENT_SECONDS - 1
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


def test_a_turn_to_send_is_lent_and_ends_for_a_hospital_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SLOT_SECONDS", 0.2)
    mailbox = FlareChannel().mailbox
    letters = [Letter(name, parcel(), soon(60)) for name in ("north", "south")]
    mailbox.post(letters)
    north, south = (letter.id for letter in letters)
    assert mailbox.may_send(north) and not mailbox.may_send(south)
    time.sleep(0.3)
    mailbox.note_alive("north")
    assert mailbox.may_send(south) and not mailbox.may_send(north)


def test_a_hospital_that_waits_hears_of_its_letter_and_of_the_end() -> None:
    channel, answers = FlareChannel(), []
    mailbox = channel.mailbox

    def wait() -> None:
        answers.append(mailbox.wait_for_letter("north", 60))

    thread = in_thread(wait)
    mailbox.post([Letter("south", parcel(), soon(60))])
    assert not mailbox.wait_for_letter("north", 0.05)
    mailbox.post([Letter("north", parcel(), soon(60))])
    thread.join()
    assert answers == [True] and mailbox.wait_for_letter("north", 60)
    mailbox.close_all()
    thread = in_thread(wait)
    channel.finalize_run(CTX)
    thread.join()
    assert answers == [True, False] and mailbox._held == 0


def test_no_more_hospitals_are_held_than_leave_flare_threads_to_work_with() -> None:
    mailbox = FlareChannel().mailbox
    mailbox._held = MOST_HELD
    began = time.monotonic()
    assert not mailbox.wait_for_letter("north", 60) and time.monotonic() - began < 5
    mailbox.post([Letter("north", parcel(), soon(60))])
    assert mailbox.wait_for_letter("north", 60)


class Engine:
    """The engine of a hospital, which passes on what it is asked; answers: return codes of the server."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), list[str]()

    def send_aux_request(self, *, targets, topic, **_):
        self.asked.append(topic)
        return {target: make_reply(self.answers.pop(0)) for target in targets}


def test_a_hospital_asks_for_a_letter_before_it_pulls_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("wardround.deploy.nvflare.executor.time.sleep", slept.append)
    engine = Engine(ReturnCode.OK, ReturnCode.SERVER_NOT_READY)
    monkeypatch.setattr(FLContext, "get_engine", lambda self: engine)
    WardroundExecutor().handle_event(EventType.BEFORE_PULL_TASK, FLContext())
    assert engine.asked == [LETTER] and not slept
    WardroundExecutor().handle_event(EventType.BEFORE_PULL_TASK, FLContext())
    assert len(slept) == 1 and 0 < slept[0] <= POLL_SECONDS  # the server did not hold it


def test_an_exchange_ends_when_nobody_is_there() -> None:
    channel = FlareChannel()
    channel.mailbox._heard["north"] = time.monotonic() - 30
    began = time.monotonic()
    assert list(channel.exchange({"north": parcel()}, soon(60), absent_after=20)) == []
    assert time.monotonic() - began < 5


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


def test_stop_reaches_an_experiment_that_begins_later() -> None:
    made = WardroundController()
    assert made._command("wardround.status", None, CTX) == {"alive": {}, "stopping": False}
    assert made._command("wardround.stop", {}, CTX)["stopping"]

    class Experiment:
        stop_requested = False

    experiment = Experiment()
    made._begin(experiment)
    assert experiment.stop_requested


# In FLARE

SIMULATOR = """
import sys
from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner
if __name__ == "__main__":
    job, workspace, clients = sys.argv[1:]
    sys.exit(SimulatorRunner(job, workspace=workspace, clients=clients, n_clients=2, threads=2).run())
"""


@pytest.mark.slow
def test_a_job_in_flares_simulator_gives_the_bytes_of_train(tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": 24}}
    expected = run(tmp_path / "alone", data=data).params_sha256
    job = write_tiny(tmp_path, data=data, deadline=120.0)
    (tmp_path / "workspace" / "local").mkdir(parents=True)
    allowed = {"class_allow_list": [CONTROLLER, EXECUTOR]}
    (tmp_path / "workspace" / "local" / "resources.json").write_text(json.dumps(allowed))
    (tmp_path / "site.yaml").write_text("data: phantom\ntasks: [all]\n")
    (tmp_path / "simulate.py").write_text(SIMULATOR)
    done = subprocess.run(
        [sys.executable, "simulate.py", str(job), str(tmp_path / "workspace"), "north,east"],
        cwd=tmp_path,
        env={
            **os.environ,
            "WARDROUND_SITE": str(tmp_path / "site.yaml"),
            "WARDROUND_STATE": str(tmp_path / "state"),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["params_sha256"] == expected
    for name in ("north", "east"):
        assert verify(tmp_path / "state" / name / "egress.jsonl").ok
