import json
import os
import signal
from pathlib import Path
from typing import Any

from helpers import Watcher, run, settings
from pytest import LogCaptureFixture, raises

import wardround as wr
from wardround.engine.transports.local import Worker, Workers
from wardround.engine.transports.placement import deal
from wardround.errors import WardroundError

TWO = {"threads": 1, "workers": 2}


def test_work_is_dealt_evenly_and_the_same_way_for_any_order() -> None:
    sizes = {"a": 10, "b": 9, "c": 2, "d": 1, "e": 0}

    hands = deal(sizes, 2)

    assert hands == deal(dict(reversed(sizes.items())), 2) == [["a", "d", "e"], ["b", "c"]]
    assert deal(sizes, 9) == [["a"], ["b"], ["c"], ["d"], ["e"]]


def test_a_worker_that_dies_loses_its_clients_for_one_round_and_comes_back(
    tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    killed = []

    class Killer(Watcher):
        def on_progress(self, client: str, step: int, steps: int) -> None:
            if self.round == 2 and not killed:
                killed.append(client)
                worker = next(w for w in Worker.all if client in w.names)  # type: ignore[attr-defined]
                os.kill(worker.child.pid, signal.SIGKILL)

    Worker.all = []  # type: ignore[attr-defined]
    start = Worker.start

    def remember(self: Worker) -> None:
        if self not in Worker.all:  # type: ignore[attr-defined]
            Worker.all.append(self)  # type: ignore[attr-defined]
        start(self)

    Worker.start = remember  # type: ignore[method-assign]
    try:
        # long enough local training that a progress line comes before the answer
        result = wr.run(settings(tmp_path / "run", rounds=3, compute=TWO, local_epochs=40), listener=Killer())
    finally:
        Worker.start = start  # type: ignore[method-assign]
        del Worker.all  # type: ignore[attr-defined]

    lost = result.records[1]["lost"]
    assert killed and all("worker process ended with exit code -9" in reason for reason in lost.values())
    assert f"train/{killed[0]}" in lost
    assert result.records[2]["lost"] == {} and set(result.records[2]["weights"]) == {"east", "north", "south"}


def test_a_client_beyond_its_deadline_is_lost_by_name(tmp_path: Path) -> None:
    with raises(WardroundError, match=r"no answer to 'train' within the deadline of 0.2 s"):
        run(tmp_path / "run", compute=TWO, deadline=0.2, local_epochs=2000, retries=0, rounds=1)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "exchange").mkdir()
    bad: dict[str, Any] = {"method": {"name": "nothing"}}
    (tmp_path / "config.yaml").write_text(json.dumps(bad))
    workers = Workers(
        tmp_path / "config.yaml",
        tmp_path,
        tmp_path / "exchange",
        {"north": 1, "east": 1},
        ["cpu", "cpu"],
        threads=1,
        deadline=9,
    )
    try:
        with raises(WardroundError, match="worker 0 could not start: .*method.name is 'nothing'"):
            workers.register()
    finally:
        workers.close()
