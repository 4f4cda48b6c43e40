"""live.json: Ctrl-C while a run is followed is heard whenever it comes, and the run in progress is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import config

from wardround.deploy import live_file
from wardround.deploy.kits.kit import Kit
from wardround.deploy.organising import Submission
from wardround.errors import WardroundError


class Server:
    """Answers as the queue of a server does."""

    def __init__(self, live: Path) -> None:
        self.live, self.asked = live, 0

    def ask(self, job: str, what: str) -> None:
        assert (job, what) == ("job", "stop")
        self.asked += 1
        write(self.live, state="stopped", round=1, task="train")

    def is_server_running(self) -> bool:
        return True

    def find_state(self, job: str) -> str:
        return "running"


def write(live: Path, **facts: Any) -> None:
    live.parent.mkdir(parents=True, exist_ok=True)
    live.write_text(json.dumps({"job": "job", **facts}))


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(live_file, "LOOK_SECONDS", 0.01)
    return tmp_path / "run" / "live.json"


def submission(live: Path) -> tuple[Submission, Server]:
    server = Server(live)
    followed = Submission(server, config(live.parent), "job")  # type: ignore[arg-type]
    followed.stop()
    return followed, server


def test_a_round_that_goes_on_is_finished(live: Path) -> None:
    write(live, state="waiting", round=1, task="train")
    followed, server = submission(live)
    assert followed.follow(None) == "stopped" and server.asked == 1


@pytest.mark.parametrize("facts", [None, {"state": "starting"}, {"state": "waiting", "task": "register"}])
def test_before_the_first_round_there_is_nothing_to_finish(live: Path, facts: dict[str, Any] | None) -> None:
    if facts is not None:
        write(live, **facts)
    followed, server = submission(live)
    with pytest.raises(KeyboardInterrupt):
        followed.follow(None)
    assert server.asked == 0


def test_a_run_that_is_being_resumed_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(tmp_path, "organiser", "organiser", "demo", "1", "localhost", 8002, "0")
    file = kit.runs / "first" / "live.json"
    write(file, state="waiting", job="killed")  # as its server left it
    asked: list[str] = []

    def is_known(job: str) -> bool:
        asked.append(job)
        if len(asked) == 3:
            write(file, state="queued", job="resumed")
        return job == "resumed"

    monkeypatch.setattr(live_file, "LOOK_SECONDS", 0.01)
    name, facts = live_file.find_running(kit, None, is_known)
    assert (name, facts["job"]) == ("first", "resumed")
    monkeypatch.setattr(live_file, "RESUME_SECONDS", 0.05)
    with pytest.raises(WardroundError, match="run 'first' is not in progress"):
        live_file.find_running(kit, "first", lambda job: False)
