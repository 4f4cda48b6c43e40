"""The run's end of the pipe to the organiser's server."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytest import fixture

from wardround.deploy.parcel_file import read_parcel, write_parcel
from wardround.deploy.run_process import ConductedRun, PipeChannel
from wardround.deploy.wire import Parcel, pack
from wardround.messages import Message
from wardround.params import Params


def parcel(value: float = 1.0) -> Parcel:
    message = Message(Params({"a": torch.full((2, 3), value)}))
    about: dict[str, Any] = {"run": "r", "request": "f" * 32, "client": "north", "task": "train", "round": 0}
    return pack(message, kind="request", **about)


class Server:
    """Takes the run's lines; reply: what it says to each letter."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self.channel = PipeChannel(folder, self.take)
        self.reply: Callable[[Mapping[str, Any]], None] = lambda post: None

    def take(self, line: Mapping[str, Any]) -> None:
        self.lines.append(line)
        if "post" in line:
            self.reply(line["post"])

    def answer(self, post: Mapping[str, Any], content: bytes | None = None) -> None:
        path = Path(post["path"]).with_suffix(".reply")
        if content is None:
            write_parcel(path, parcel(2.0))
        else:
            path.write_bytes(content)
        facts = {"letter": post["letter"], "hospital": post["hospital"], "path": str(path)}
        self.channel.take(facts)


@fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_requests_become_files_and_replies_are_read_from_files(server: Server, tmp_path: Path) -> None:
    sent = {}

    def reply(post: Mapping[str, Any]) -> None:
        sent[post["hospital"]] = read_parcel(Path(post["path"]), 10**6)
        assert 0 < post["seconds"] <= 10
        server.answer(post)

    server.reply = reply
    found = dict(server.channel.exchange({"north": parcel(), "south": parcel()}, time.monotonic() + 10))

    assert set(found) == {"north", "south"} == set(sent)
    assert sent["north"].text == parcel().text
    np.testing.assert_array_equal(found["south"].arrays["params/a"], np.full((2, 3), 2.0, np.float32))
    assert list(tmp_path.iterdir()) == []  # nothing is left on the disk
    assert set(server.lines[-1]["close"]) == {line["post"]["letter"] for line in server.lines[:2]}


def test_an_unreadable_reply_a_failure_and_a_late_one_are_no_replies(server: Server, tmp_path: Path) -> None:
    posts: list[Mapping[str, Any]] = []
    server.reply = posts.append
    began = time.monotonic()

    def later() -> None:
        while len(posts) < 3:
            time.sleep(0.01)
        server.answer(posts[0], b"no parcel")
        server.channel.take({"letter": posts[1]["letter"], "hospital": posts[1]["hospital"], "path": None})

    thread = threading.Thread(target=later)
    thread.start()
    names = {"east": parcel(), "north": parcel(), "south": parcel()}
    assert list(server.channel.exchange(names, began + 1.0)) == []
    thread.join()
    server.answer(posts[2])  # after the deadline
    server.reply = server.answer
    assert len(list(server.channel.exchange({"east": parcel()}, time.monotonic() + 5))) == 1

    told = dict(server.channel.strays())
    assert told["east"].startswith("unreadable: ") and told["south"].startswith("late: ")
    assert server.channel.strays() == [] and list(tmp_path.iterdir()) == []


def test_signs_of_life_grow_old(server: Server) -> None:
    server.channel.take({"alive": {"north": 5.0}, "strays": [["east", "late"]]})
    time.sleep(0.05)
    assert 5.05 <= server.channel.alive()["north"] < 6.0
    assert server.channel.strays() == [("east", "late")]
    server.channel.take({"letter": "a", "hospital": "east", "path": None, "strays": [["east", "failed: no"]]})
    assert set(server.channel.alive()) == {"north"} and server.channel.strays() == [("east", "failed: no")]


def test_stop_reaches_an_experiment_that_begins_later(tmp_path: Path) -> None:
    class Experiment:
        stop_requested = False

    (tmp_path / "job.json").write_text("{}")
    lines: list[Any] = []
    run = ConductedRun(
        {"job": "j", "exchange": str(tmp_path), "arguments": str(tmp_path / "job.json")}, lines.append
    )
    run.take({"stop": True})
    experiment = Experiment()
    run._begin(experiment)
    assert experiment.stop_requested


def test_nobody_is_waited_for_who_is_not_heard_from_and_who_is_on_the_way_is(server: Server) -> None:
    server.reply = lambda post: None
    requests = {"east": parcel(), "north": parcel()}

    def seconds(deadline: float, absent_after: float = 20.0) -> float:
        began = time.monotonic()
        assert list(server.channel.exchange(requests, began + deadline, absent_after)) == []
        return time.monotonic() - began

    server.channel.take({"alive": {"east": 19.7, "north": 30.0}})
    assert seconds(10.0) < 3.0
    server.channel.take({"alive": {"east": 1.0, "north": 30.0}})
    assert seconds(1.0) >= 1.0
    server.channel.take({"alive": {"east": 1.0, "north": 30.0}, "moving": ["south"]})
    assert seconds(0.6) < 1.1
    server.channel.take({"alive": {"east": 1.0, "north": 30.0}, "moving": ["east"]})
    assert 1.2 <= seconds(0.6) < 2.2
