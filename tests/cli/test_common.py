"""What all commands share: help by purpose, -h, completion."""

import os
import subprocess
import sys

from helpers import call
from pytest import CaptureFixture, MonkeyPatch, mark
from typer.main import get_command

from wardround.cli import app
from wardround.cli.common import PANELS


def test_every_command_stands_in_one_panel() -> None:
    placed = [name for names in PANELS.values() for name in names]

    assert sorted(placed) == sorted(get_command(app).commands)  # type: ignore[attr-defined]


@mark.parametrize("words", [["-h"], ["train", "-h"], ["data", "init", "-h"]])
def test_h_is_help_everywhere(
    words: list[str], monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, *words)

    assert code == 0 and "Usage:" in out


def test_help_lists_the_panels_in_their_order(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    _, out, _ = call(monkeypatch, capsys, "--help")

    places = [out.index(f"─ {title} ─") for title in PANELS]
    assert places == sorted(places)
    assert out.index("─ First steps ─") < out.index("│ train ") < out.index("─ Data ─") < out.index("│ data ")


def test_a_shell_completes_commands() -> None:
    code = "import sys; sys.argv = ['wardround']; from wardround.cli import main; main()"
    asked = {"_WARDROUND_COMPLETE": "complete_bash", "COMP_WORDS": "wardround prov", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True
    )

    assert done.stdout.split() == ["provision"]
