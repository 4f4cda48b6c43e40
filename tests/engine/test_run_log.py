"""run.log: what a run said, with the time."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import yaml
from helpers import call, run, settings, spoil
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch, raises

import wardround as wr
from wardround.clients import Answer
from wardround.engine.run_log import keep_log
from wardround.errors import WardroundError
from wardround.messages import Message


def test_the_log_has_begin_rounds_and_end_and_grows_when_the_run_goes_on(tmp_path: Path) -> None:
    run(tmp_path / "run")
    wr.run(settings(tmp_path / "run", rounds=3), resume=True)
    lines = (tmp_path / "run/run.log").read_text().splitlines()

    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ", line) for line in lines)
    said = [line.split(maxsplit=2)[2].split(" ", 1)[1] for line in lines]
    assert said[0].startswith("tiny: FedAvg, from round 1 of 2; wardround ")
    assert said[1].startswith("round 1 of 2: validation dice 0.")
    assert said[3] == "done after round 2 of 2"
    assert any(" WARNING rounds was raised from 2 to 3" in line for line in lines)
    assert said[-1] == "done after round 3 of 3"


def test_a_quiet_run_keeps_its_warnings_in_the_log(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path / "run", rounds=1)))

    def break_params(answer: Answer) -> Answer:
        return replace(answer, message=Message(params=answer.message.params * float("nan")))

    spoil(monkeypatch, "east", break_params)
    _, _, err = call(monkeypatch, capsys, "train", str(path), "--quiet", "--set", "min_clients=2")

    assert err == ""
    text = (tmp_path / "run/run.log").read_text()
    assert "WARNING" in text and "refused" in text


def test_the_error_that_ends_a_run_is_in_the_log(tmp_path: Path) -> None:
    with raises(WardroundError), keep_log(tmp_path):
        raise WardroundError("round 1: too few clients.")
    with raises(ZeroDivisionError), keep_log(tmp_path):
        raise ZeroDivisionError("division by zero")

    first, second, *traceback = (tmp_path / "run.log").read_text().splitlines()
    assert first.endswith("ERROR WardroundError: round 1: too few clients.")
    assert second.endswith("ERROR ZeroDivisionError: division by zero") and "Traceback" in traceback[0]


def test_nobody_writes_to_a_log_that_was_closed(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    with keep_log(tmp_path):
        logging.getLogger("wardround.data").warning("inside")
    logging.getLogger("wardround.data").warning("outside")

    assert "inside" in (text := (tmp_path / "run.log").read_text()) and "outside" not in text
