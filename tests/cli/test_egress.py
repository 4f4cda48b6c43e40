"""wardround egress: what left a hospital as a person reads it, and whether that list is whole."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from helpers import call as called
from pytest import CaptureFixture, MonkeyPatch, fixture, mark

from wardround.deploy.ledger import Ledger, head_path
from wardround.files import write_json

NOON = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def entry(run: str, name: str, round: int, task: str, **more: Any) -> dict[str, Any]:
    tensors = {"params/conv.weight": [2, 3]} if task == "train" else {}
    return {
        "run": run,
        "name": name,
        "round": round,
        "task": task,
        "tensors": tensors,
        "types": dict.fromkeys(tensors, "float32"),
        "bytes": 1500 if tensors else 400,
        "sha256": "0" * 64,
        "scalars": {"loss/total": 0.123456} if tensors else {"cases": "3 entries"},
        **more,
    }


@fixture
def kit(tmp_path: Path) -> Path:
    """A hospital's kit from which five messages left, in two runs."""
    folder = tmp_path / "north"
    write_json(folder / "kit.json", {"role": "hospital"})
    book = Ledger(folder / "state" / "egress.jsonl", clock=lambda: NOON)
    for line in (
        entry("a1", "polyps", 1, "train"),
        entry("a1", "polyps", 1, "evaluate"),
        entry("a1", "polyps", 2, "train"),
        entry("b2", "prostate", 0, "register", refused="method 'moon' is not allowed", scalars={}),
        entry("b2", "prostate", 1, "score", failure="the task failed", scalars={}),
    ):
        book.add(line)
    return folder


def call(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return called(monkeypatch, capsys, "egress", *arguments)


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its two lines of headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_show_lists_every_message_with_its_numbers_or_its_sentence(
    kit: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, "show", str(kit))

    assert code == 0
    assert rows(out) == [
        ["2026-03-01 12:00:00", "polyps", "1", "train", "1", "1.5 kB", "loss/total 0.1235"],
        ["2026-03-01 12:00:00", "polyps", "1", "evaluate", "0", "400 B", "cases 3 entries"],
        ["2026-03-01 12:00:00", "polyps", "2", "train", "1", "1.5 kB", "loss/total 0.1235"],
        ["2026-03-01 12:00:00", "prostate", "0", "register", "0", "400 B", "refused: method 'moon' is not allowed"],
        ["2026-03-01 12:00:00", "prostate", "1", "score", "0", "400 B", "failure: the task failed"],
    ]  # fmt: skip


def test_show_json_is_every_line_as_the_ledger_has_it(
    kit: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    _, out, err = call(monkeypatch, capsys, "show", str(kit), "--json")

    stored = (kit / "state" / "egress.jsonl").read_text().splitlines()
    assert json.loads(out) == [json.loads(line) for line in stored] and err == ""


@mark.parametrize(
    ("options", "numbers"),
    [
        (["--run", "polyps"], [1, 2, 3]),
        (["--run", "b2"], [4, 5]),
        (["--run", "p*"], [1, 2, 3, 4, 5]),
        (["--task", "train"], [1, 3]),
        (["--last", "2"], [4, 5]),
        (["--task", "train", "--last", "1"], [3]),
        (["--run", "b2", "--task", "train"], []),
    ],
)
def test_show_chooses_by_run_task_and_number(
    kit: Path, options: list[str], numbers: list[int], monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    _, out, _ = call(monkeypatch, capsys, "show", str(kit), *options, "--json")

    assert [line["number"] for line in json.loads(out)] == numbers


def test_show_says_so_when_nothing_fits_or_nothing_has_left(
    kit: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    write_json(tmp_path / "south" / "kit.json", {"role": "hospital"})

    assert call(monkeypatch, capsys, "show", str(kit), "--run", "x")[:2] == (
        0,
        "No message matches.\n",
    )
    assert call(monkeypatch, capsys, "show", str(tmp_path / "south"))[:2] == (0, "Nothing has left yet.\n")


@mark.parametrize("place", ["", "state", "state/egress.jsonl"])
def test_a_kit_its_state_folder_and_the_file_mean_the_same(
    kit: Path, place: str, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, "verify", str(kit / place))

    assert code == 0
    assert f"{kit / 'state' / 'egress.jsonl'}: 5 lines, unbroken." in out
    assert json.loads((head_path(kit / "state" / "egress.jsonl")).read_text())["hash"] in out


def test_verify_names_the_line_that_was_changed_and_exits_with_1(
    kit: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    path = kit / "state" / "egress.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"bytes":400', '"bytes":4')
    path.write_text("".join(lines))

    code, out, err = call(monkeypatch, capsys, "verify", str(kit))
    as_json = call(monkeypatch, capsys, "verify", str(kit), "--json")

    assert code == 1 and out == ""
    assert err == f"broken {path}: line 2 was edited: its content does not match its hash.\n"
    verdict = json.loads(as_json[1])
    assert as_json[0] == 1 and as_json[2] == ""
    assert (verdict["ok"], verdict["line"], verdict["what"]) == (False, 2, "edited")


def test_verify_notices_lines_cut_off_at_the_end(
    kit: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    path = kit / "state" / "egress.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))

    code, _, err = call(monkeypatch, capsys, "verify", str(kit))

    assert code == 1 and "cut off before line 5" in err


def test_a_run_folders_list_is_shown_by_client_and_has_no_chain_to_verify(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    line = {
        "time": "2026-03-01T12:00:00+00:00",
        "client": "north",
        "phase": "round",
        "round": 0,
        "task": "train",
        "tensors": {"conv.weight": [2, 3]},
        "bytes": 24,
        "scalars": {},
    }
    (tmp_path / "egress.jsonl").write_text(json.dumps(line) + "\n")

    _, out, _ = call(monkeypatch, capsys, "show", str(tmp_path))
    code, _, err = call(monkeypatch, capsys, "verify", str(tmp_path))

    assert rows(out) == [["2026-03-01 12:00:00", "north", "0", "train", "1", "24 B", ""]]
    assert "| client |" in out
    assert code == 2 and "has no chain to verify" in err


@mark.parametrize("command", ["show", "verify"])
def test_a_missing_place_is_one_sentence_and_exit_code_2(
    command: str, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    missing, empty = tmp_path / "nowhere", tmp_path / "empty"
    empty.mkdir()

    assert call(monkeypatch, capsys, command, str(missing)) == (
        2,
        "",
        f"error {missing} does not exist. Give a kit, its state folder, or an egress.jsonl.\n",
    )
    code, _, err = call(monkeypatch, capsys, command, str(empty))
    assert code == 2 and "holds no egress.jsonl" in err


def test_the_organisers_kit_says_where_to_look_instead(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    write_json(tmp_path / "kit.json", {"role": "organiser"})

    code, _, err = call(monkeypatch, capsys, "show", str(tmp_path))

    assert code == 2 and "hospitals keep the ledger" in err


def test_lines_that_wardround_did_not_write_are_said_without_a_traceback(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    file = tmp_path / "egress.jsonl"
    file.write_text('{"tensors": 5, "bytes": "x", "scalars": [1], "hash": "0"}\n')

    code, out, err = call(monkeypatch, capsys, "show", str(file))

    assert (code, out) == (1, "") and "has a line that wardround did not write" in err


def test_showing_and_what_status_needs_import_neither_torch_nor_the_engine(tmp_path: Path) -> None:
    Ledger(tmp_path / "egress.jsonl").add({"run": "a", "round": 1, "task": "train", "bytes": 7})
    code = (
        "import sys\n"
        "from wardround.cli import app\n"
        "from wardround.deploy import live_file\n"
        "from wardround.deploy import processes\n"
        "from wardround.deploy.preflight import connection, kit\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "sys.exit(str({'torch', 'nvflare'} & set(sys.modules) or ''))\n"
    )
    arguments = [sys.executable, "-c", code, "egress", "show", str(tmp_path)]

    done = subprocess.run(arguments, capture_output=True, text=True)

    assert "train" in done.stdout and done.stderr.strip() == ""
