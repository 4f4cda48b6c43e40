"""Ray as we speak to it, with a stand-in for the library."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest import MonkeyPatch, raises

from wardround.cluster import ray
from wardround.cluster.ray import RayCluster, run_process
from wardround.errors import ConfigError


class TaskCancelledError(Exception): ...


class WorkerCrashedError(Exception): ...


class FakeRay:
    """A task is what it was given; `results` has what became of it."""

    exceptions = SimpleNamespace(TaskCancelledError=TaskCancelledError)

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.results: dict[str, Any] = {}
        self.is_running = False

    def is_initialized(self) -> bool:
        return self.is_running

    def init(self, address: str, **_: Any) -> None:
        if address == "nowhere:1":
            raise ConnectionError("no answer\nfrom there")
        self.calls.append(address)

    def remote(self, function: Any) -> Any:
        assert function is run_process

        def options(**chosen: Any) -> Any:
            self.calls.append(chosen)
            return SimpleNamespace(remote=lambda text: text)

        return SimpleNamespace(options=options)

    def wait(self, jobs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return [job for job in jobs if job in self.results], []

    def get(self, job: str) -> Any:
        if isinstance(self.results[job], Exception):
            raise self.results[job]
        return self.results[job]

    def cancel(self, job: str, force: bool) -> None:
        self.calls.append(("cancel", job, force))

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_task_carries_a_path_and_is_not_repeated_by_ray() -> None:
    library = FakeRay()
    cluster = RayCluster(library, {"num_gpus": 1.0})
    job = cluster.submit("fedavg-seed42", Path("/shared/a-1.json"), Path("/shared"))

    assert library.calls == [
        "auto", {"name": "fedavg-seed42", "max_retries": 0, "num_cpus": 1.0, "num_gpus": 1.0},
    ]  # fmt: skip
    assert job == "/shared/a-1.json" and cluster.find_end(job) is None
    for result, end in [
        ("exit code -9 on n1", "exit code -9 on n1"),
        (WorkerCrashedError("long\ntext"), "WorkerCrashedError"),
        (TaskCancelledError(), "cancelled"),
    ]:
        library.results[job] = result
        assert cluster.find_end(job) == end
    cluster.cancel(job)
    cluster.close()
    assert library.calls[-2:] == [("cancel", job, True), "shutdown"]


def test_a_connection_of_the_user_is_used_and_left_open() -> None:
    library = FakeRay()
    library.is_running = True
    RayCluster(library, {}).close()

    assert library.calls == []


def test_a_cluster_that_does_not_answer_is_one_sentence() -> None:
    with raises(ConfigError, match="Ray cannot be reached .no answer from there.. Start this on a node"):
        RayCluster(FakeRay(), {"address": "nowhere:1"})


def test_how_a_process_ended_is_told_in_words(monkeypatch: MonkeyPatch) -> None:
    def command(request: str) -> list[str]:
        return [sys.executable, "-c", f"import sys; print('no'); sys.exit('does not see {request}')"]

    monkeypatch.setattr(ray, "cell_command", command)
    told = run_process("/shared/a.json")

    assert told.startswith("exit code 1 on ") and told.endswith(": does not see /shared/a.json")
