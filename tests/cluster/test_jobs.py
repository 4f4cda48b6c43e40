"""Jobs of a cluster tell what processes of this machine tell, and lost ones are submitted again."""

import json
from pathlib import Path
from typing import Any

from helpers import settings
from pytest import LogCaptureFixture, MonkeyPatch, fixture, raises

from comparison.here import Here
from wardround import batch
from wardround.cluster import jobs
from wardround.cluster.cell import do_cell
from wardround.cluster.jobs import ClusterJobs
from wardround.comparison.run import plan_comparison, run_grid
from wardround.errors import ConfigError

REQUEST = {"config": "a.yaml", "overrides": [], "resume": False}


class FakeCluster:
    """Remembers what it was asked; its jobs end when a test says so."""

    name = "fake"

    def __init__(self) -> None:
        self.requests: list[Path] = []
        self.ended: dict[int, str] = {}
        self.cancelled: list[int] = []
        self.is_closed = False

    def submit(self, name: str, request: Path, folder: Path) -> int:
        self.requests.append(request)
        return len(self.requests)

    def tell(self, *lines: Any) -> None:
        """What the process of the newest job writes."""
        with self.requests[-1].with_suffix(".jsonl").open("a") as file:
            file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)

    def lose(self, why: str = "node_fail") -> None:
        self.ended[len(self.requests)] = why

    def find_end(self, job: int) -> str | None:
        return self.ended.get(job)

    def describe(self, job: int) -> str:
        return f"job {job}"

    def cancel(self, job: int) -> None:
        self.cancelled.append(job)

    def close(self) -> None:
        self.is_closed = True


class SameProcess(FakeCluster):
    """Does each request at once, in this process."""

    def submit(self, name: str, request: Path, folder: Path) -> int:
        number = super().submit(name, request, folder)
        do_cell(json.loads(request.read_text()), self.tell)
        return number


@fixture(autouse=True)
def quick(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(jobs, "LATE_SECONDS", 0.0)


@fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@fixture
def engine(cluster: FakeCluster, tmp_path: Path) -> ClusterJobs:
    found = ClusterJobs(cluster, tmp_path / "jobs")
    found.begin("a", REQUEST, "cpu")
    return found


def test_rounds_and_the_end_are_passed_on_and_half_a_line_is_not(
    engine: ClusterJobs, cluster: FakeCluster
) -> None:
    assert list(engine.receive()) == []
    cluster.tell({"node": "n1", "pid": 7}, {"rounds": 0}, '{"rounds"')
    assert list(engine.receive()) == [("a", {"rounds": 0})]
    cluster.tell(": 1}\n", {"end": None})
    assert list(engine.receive()) == [("a", {"rounds": 1}), ("a", {"end": None})]
    assert not engine.running


def test_a_request_says_where_it_was_made_and_how_a_later_one_is_called(
    engine: ClusterJobs, cluster: FakeCluster, tmp_path: Path
) -> None:
    told = json.loads(cluster.requests[0].read_text())

    assert told == {**REQUEST, "working_directory": str(Path.cwd()), "next": str(tmp_path / "jobs/a-2.json")}
    engine.begin("a", REQUEST, "cpu")  # another comparison, which was killed, had made the first
    assert cluster.requests[1] == tmp_path / "jobs/a-2.json"


def test_a_lost_job_is_submitted_again_as_long_as_rounds_are_done(
    engine: ClusterJobs, cluster: FakeCluster, caplog: LogCaptureFixture
) -> None:
    for attempt in range(5):
        cluster.tell({"rounds": attempt}, {"rounds": attempt + 1})
        cluster.lose()
        assert [line for _, line in engine.receive()] == [{"rounds": attempt}, {"rounds": attempt + 1}]
    assert len(cluster.requests) == 6 and len(engine.running) == 1
    assert "a: job 1 ended without a result (node_fail); it is submitted again." in caplog.messages
    for _ in range(3):
        assert engine.running
        cluster.tell({"rounds": 5}, {"rounds": 6})  # which is not on disk when it dies
        cluster.lose("timeout")
        ends = [line for _, line in engine.receive()]
    assert len(cluster.requests) == 8 and not engine.running
    assert ends[-1] == {"end": "job 8 ended without a result (timeout)."}


def test_a_job_that_was_cancelled_by_hand_has_failed(engine: ClusterJobs, cluster: FakeCluster) -> None:
    cluster.tell({"rounds": 0})
    cluster.lose("cancelled by 1000")

    assert list(engine.receive())[-1] == (
        "a",
        {"end": "job 1 ended without a result (cancelled by 1000)."},
    )


def test_the_last_line_may_be_seen_later_than_the_end_of_the_job(
    engine: ClusterJobs, cluster: FakeCluster, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LATE_SECONDS", 60.0)
    cluster.lose("completed")
    assert list(engine.receive()) == []
    cluster.tell({"end": None})

    assert list(engine.receive()) == [("a", {"end": None})] and len(cluster.requests) == 1


def test_a_folder_that_no_node_sees_is_one_sentence(engine: ClusterJobs, cluster: FakeCluster) -> None:
    cluster.lose("failed")

    with raises(
        ConfigError, match=r"job 1 ended \(failed\) and wrote nothing into .*jobs. Every node must see"
    ):
        list(engine.receive())


def test_killing_cancels_the_jobs_that_run_and_leaves_the_cluster(
    engine: ClusterJobs, cluster: FakeCluster
) -> None:
    engine.begin("b", REQUEST, "cpu")
    cluster.tell({"end": None})
    list(engine.receive())
    engine.kill()

    assert cluster.cancelled == [1] and cluster.is_closed and not engine.running


def test_a_comparison_on_a_cluster_has_the_bytes_of_this_machine(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "ChildProcess", Here)
    monkeypatch.setattr(batch, "POLL_SECONDS", 0)
    bad = {"label": "bad", "optimizer": {"name": "sgd", "learning_rate": 1e30}, "local_epochs": 3}
    values = {
        **settings(Path("unused"), rounds=1),
        "sweep": {"methods": ["fedavg", "local", bad], "seeds": 1},
    }
    cluster = SameProcess()
    folders = []
    for name, chosen in (("here", None), ("there", cluster)):
        grid, folder = plan_comparison(values, {}, tmp_path / name)
        found = run_grid(grid, folder, jobs=None if chosen else 2, cluster=chosen)
        assert (
            list(found.failures) == ["bad-seed42"] and "the loss became NaN" in found.failures["bad-seed42"]
        )
        folders.append(folder)

    for name in ("comparison.json", "table-dice.md", "statistics.json", "cells/local-seed42/cases.csv"):
        here, there = ((folder / name).read_bytes() for folder in folders)
        assert here == there, name
    assert len(cluster.requests) == 3 and cluster.is_closed
