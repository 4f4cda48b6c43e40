"""The organiser's commands reach the server by way of files in the kit."""

import json
from pathlib import Path

from pytest import fixture, raises

from wardround.deploy.job_queue import JobQueue
from wardround.deploy.kits.kit import Kit
from wardround.deploy.processes import claim_kit
from wardround.errors import ConfigError, WardroundError


@fixture
def queue(tmp_path: Path) -> JobQueue:
    return JobQueue(Kit(tmp_path, "organiser", "organiser", "demo", "1", "localhost", 8002, "0"))


def test_a_job_waits_runs_and_ends(queue: JobQueue) -> None:
    first, second = sorted([queue.make_id(), queue.make_id()])
    for job in (first, second):
        queue.submit(job, {"names": ["north"]})
    assert queue.list_waiting() == [first, second] and queue.find_state(first) == "waiting"

    assert json.loads(queue.begin(first).read_text()) == {"names": ["north"]}

    assert queue.find_state(first) == "running" and queue.list_waiting() == [second]
    queue.ask(first, "stop")
    assert queue.is_asked(first, "stop") and not queue.is_asked(first, "abort")
    queue.finish(first)
    assert queue.find_state(first) == "ended" and not queue.is_asked(first, "stop")
    with raises(WardroundError, match="no such run"):
        queue.ask(first, "abort")


def test_only_what_submit_wrote_is_a_job(queue: JobQueue) -> None:
    queue.folder.mkdir(parents=True)
    for name in ("../x.json", "evil.json", "20260101000000-ABCDEF01.json", "20260101000000-abcdef0g.json"):
        (queue.folder / Path(name).name).write_text("{}")
    assert queue.list_waiting() == []
    with raises(ConfigError, match="not plain JSON"):
        queue.submit(queue.make_id(), {"config": object()})


def test_a_server_is_known_by_its_lock_and_says_who_is_there(queue: JobQueue) -> None:
    with raises(WardroundError, match="no server of this kit is running"):
        queue.connected()
    with claim_kit(queue.kit), raises(ConfigError, match="already running"):
        claim_kit(queue.kit)
    with claim_kit(queue.kit):
        queue.publish({"north": 3.0}, {"north": "sends a reply: 1.0 MB of 3.0 MB"})
        assert queue.is_server_running() and 3.0 <= queue.connected()["north"] < 10.0
        facts = json.loads((queue.kit.state / "server.json").read_text())
        assert set(facts) == {"heard", "transfers", "expires", "revoked"}
        assert queue.read_server()["transfers"] == {"north": "sends a reply: 1.0 MB of 3.0 MB"}
    assert not queue.is_server_running()


def test_a_new_server_forgets_the_jobs_of_one_that_was_killed(queue: JobQueue) -> None:
    job = queue.make_id()
    queue.submit(job, {})
    queue.begin(job)
    queue.clear()
    assert queue.find_state(job) == "ended"


def test_what_waits_outlives_its_server_and_knows_its_run(queue: JobQueue) -> None:
    begun, waiting = sorted([queue.make_id(), queue.make_id()])
    for job in (begun, waiting):
        queue.submit(job, {"config": {"output": f"/runs/{job}"}})
    queue.begin(begun)
    queue.clear()
    assert queue.list_waiting() == [waiting] and queue.find_state(begun) == "ended"
    assert queue.find_folder(waiting) == Path(f"/runs/{waiting}") and queue.find_folder(begun) is None
