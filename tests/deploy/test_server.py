"""The organiser's server: runs wait their turn, and one that waits can be taken out."""

from pathlib import Path
from typing import Any

from pytest import MonkeyPatch, importorskip, raises

importorskip("grpc")

from wardround.config_file import load_config
from wardround.deploy import server as servers
from wardround.deploy.job_queue import JobQueue
from wardround.deploy.kits.kit import read_kit
from wardround.deploy.live_file import RunFailed, follow, read_live
from wardround.deploy.organising import place_at_organiser, submit
from wardround.deploy.server import OrganiserServer


class Child:
    ended = False

    def is_alive(self) -> bool:
        return not self.ended

    def exit_code(self) -> int:
        return 0


class Job:
    """A run whose process ends when it is told."""

    def __init__(self, job: str, *_: Any) -> None:
        self.child = Child()

    def tell(self, alive: dict[str, float], moving: list[str]) -> None:
        pass


def test_runs_wait_their_turn_and_one_that_waits_is_taken_out(mine: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "RunningJob", Job)
    kit = read_kit(mine / "organiser")
    queue, server = JobQueue(kit), OrganiserServer(kit, most_runs=1)
    config = load_config({"name": "x", "data": {"hospitals": True}})
    jobs = []
    monkeypatch.setattr(JobQueue, "make_id", lambda self: f"2026010100000{len(jobs)}-abcdef01")
    for name in ("first", "second", "third"):
        placed = place_at_organiser(config.model_copy(update={"name": name}), kit)
        jobs.append(submit(queue, placed, ["north"]))
    server.step()
    assert [queue.find_state(one.job) for one in jobs] == ["running", "waiting", "waiting"]
    queue.ask(jobs[1].job, "stop")
    server.step()
    facts = read_live(jobs[1].config.folder)
    assert facts is not None and facts["state"] == "stopped" and queue.list_waiting() == [jobs[2].job]
    with raises(RunFailed, match="taken out of the queue before it began"):
        follow(jobs[1].config, jobs[1].job, None, ended=lambda: None)
    server._running[jobs[0].job].child.ended = True  # type: ignore[attr-defined]
    server.step()
    server.step()
    assert [queue.find_state(one.job) for one in jobs] == ["ended", "ended", "running"]
