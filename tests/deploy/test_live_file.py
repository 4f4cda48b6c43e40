"""Ctrl-C while a run at hospitals is followed: heard whenever it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import config

from wardround.deploy import live_file
from wardround.deploy.organising import Submission
from wardround.errors import WardroundError


class Server:
    """Answers as a session does; the first `deaf` requests to stop are not heard."""

    def __init__(self, live: Path, deaf: int = 0) -> None:
        self.live, self.deaf, self.asked = live, deaf, 0

    def command(self, job: str, topic: str) -> dict[str, Any]:
        assert (job, topic) == ("job", "stop")
        self.asked += 1
        if self.asked <= self.deaf:
            raise WardroundError("the server is busy")
        write(self.live, state="stopped", round=1, task="train")
        return {}

    def job_state(self, job: str) -> str:
        return "RUNNING"


def write(live: Path, **facts: Any) -> None:
    live.parent.mkdir(parents=True, exist_ok=True)
    live.write_text(json.dumps({"job": "job", **facts}))


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(live_file, "LOOK_SECONDS", 0.01)
    return tmp_path / "run" / "live.json"


def submission(live: Path, **how: Any) -> tuple[Submission, Server]:
    server = Server(live, **how)
    followed = Submission(server, config(live.parent), "job")  # type: ignore[arg-type]
    followed.stop()
    return followed, server


def test_a_round_that_goes_on_is_finished(live: Path) -> None:
    write(live, state="waiting", round=1, task="train")
    followed, server = submission(live)
    assert followed.follow(None) == "stopped" and server.asked == 1


def test_a_request_that_was_not_heard_is_repeated(live: Path) -> None:
    write(live, state="waiting", round=1, task="train")
    followed, server = submission(live, deaf=3)
    assert followed.follow(None) == "stopped" and server.asked == 4


@pytest.mark.parametrize("facts", [None, {"state": "starting"}, {"state": "waiting", "task": "register"}])
def test_before_the_first_round_there_is_nothing_to_finish(live: Path, facts: dict[str, Any] | None) -> None:
    if facts is not None:
        write(live, **facts)
    followed, server = submission(live)
    with pytest.raises(KeyboardInterrupt):
        followed.follow(None)
    assert server.asked == 0
