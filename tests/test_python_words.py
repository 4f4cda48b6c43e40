"""Errors reach Python in Python's words, and the command line in its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import call, run, settings
from pytest import CaptureFixture, MonkeyPatch

import wardround as wr
from wardround.errors import ConfigError
from wardround.python_words import COMMAND, for_python, in_python

SOURCE = Path(wr.__file__).parent


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Add --resume to continue it.", "Add resume=True to continue it."),
        ("Leave --resume out.", "Leave resume=True out."),
        (
            "continue after it with --resume --from-round 3.",
            "continue after it with resume=True, from_round=3.",
        ),
        ("Round 2 is kept; --from-round can be 1, 2.", "Round 2 is kept; from_round can be 1, 2."),
        ("resume the run with --from-round 3 or earlier.", "resume the run with from_round=3 or earlier."),
        ("use --set compute.workers=2", 'use overrides=["compute.workers=2"]'),
        ("use --set data.patch=[32,32,8].", 'use overrides=["data.patch=[32,32,8]"].'),
        ("--set rounds: write it as key=value", "overrides 'rounds': write it as key=value"),
        ("--split all evaluates them.", "split='all' evaluates them."),
        ("Without --split they are left out.", "Without split they are left out."),
        ("Leave --client out.", "Leave client out."),
        (
            "a personal model (--client north) may be better",
            "a personal model (client='north') may be better",
        ),
        ("--methods has 3; write a name", "methods has 3; write a name"),
        ("--uncertainty is mc; choose", "uncertainty is mc; choose"),
        ("Export it with --to torch or --to bundle.", "Export it with to='torch' or to='bundle'."),
        ("choose --leave-one-out or --hold-out, not both.", "choose leave_one_out or hold_out, not both."),
        ("List all: wardround methods. Write", "List all: list(wr.METHODS). Write"),
        ("'a -- b' and x--y stay", "'a -- b' and x--y stay"),
        ("Finish it: wardround train runs/a --resume", "Finish it: wardround train runs/a --resume"),
        (
            "Or wardround papers run x --data F; --set a=1",
            'Or wardround papers run x --data F; overrides=["a=1"]',
        ),
    ],
)
def test_an_option_becomes_a_keyword(said: str, words: str) -> None:
    assert in_python(said) == words


def test_no_option_is_left_in_any_message_of_the_package() -> None:
    left = []
    for path in SOURCE.rglob("*.py"):
        if not {"cli", "standalone", "deploy"} & set(path.relative_to(SOURCE).parts):
            for text in re.findall(r'"[^"\n]*\s--[a-z][^"\n]*"', path.read_text(encoding="utf-8")):
                if not COMMAND.search(text):
                    left += re.findall(r"(?<![\w-])--[a-z]+", in_python(text))

    assert not left


def test_a_cell_that_is_run_again_gets_advice_for_python(tmp_path: Path) -> None:
    run(tmp_path / "run", rounds=1)

    with pytest.raises(ConfigError) as found:
        run(tmp_path / "run", rounds=1)

    assert str(found.value) == (
        f"{tmp_path / 'run'} already holds a run. Add resume=True to continue it, overwrite=True to replace it, "
        'or overrides=["output=..."] to write elsewhere.'
    )
    with pytest.raises(ConfigError, match="from_round chooses the round that resume=True continues after"):
        wr.run(settings(tmp_path / "run"), from_round=1)


def test_the_command_line_keeps_its_options(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    run(tmp_path / "run", rounds=1)
    command = ["train", str(tmp_path / "run"), "--quiet"]

    code, _, error = call(monkeypatch, capsys, *command)

    assert code == 2 and "Add --resume to continue it" in " ".join(error.split())


def test_a_generator_says_it_while_it_goes_on() -> None:
    def yields() -> Iterator[int]:
        yield 1
        raise ConfigError("Add --overwrite to replace it.")

    found = for_python(yields)()

    assert next(found) == 1
    with pytest.raises(ConfigError, match="Add overwrite=True"):
        next(found)


def test_a_public_function_is_the_same_object_each_time_and_keeps_its_signature() -> None:
    assert wr.run is wr.run and wr.run.__name__ == "run" and wr.run.__module__ == "wardround.api"
