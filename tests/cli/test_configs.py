"""`wardround configs` lists, shows and copies; errors of other commands lead there."""

from __future__ import annotations

import json
from pathlib import Path

from helpers import call
from pytest import CaptureFixture, MonkeyPatch, mark

from wardround.builtin_configs import require
from wardround.config_file import load_config


def test_configs_are_listed_shown_and_copied(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(monkeypatch, capsys, "configs", "--json")
    assert code == 0 and json.loads(out)[0]["command"] == "wardround train quickstart"
    assert call(monkeypatch, capsys, "configs", "show", "quickstart")[1] == require("quickstart").read_text()

    assert call(monkeypatch, capsys, "configs", "copy", "quickstart")[0] == 0
    assert load_config("my-quickstart.yaml") == load_config("quickstart")
    code, _, err = call(monkeypatch, capsys, "configs", "copy", "quickstart")
    assert code == 2 and "exists already" in err
    assert call(monkeypatch, capsys, "configs", "copy", "quickstart", "-o", "other.yaml")[0] == 0


@mark.parametrize(
    "words", [("train", "quikstart"), ("compare", "quikstart"), ("configs", "show", "quikstart")]
)
def test_a_misspelt_name_gets_a_suggestion(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(monkeypatch, capsys, *words)

    assert code == 2 and "Did you mean 'quickstart'?" in err and "wardround configs" in err
