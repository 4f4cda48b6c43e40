"""The hospital's ledger: chained, durable, healed after a crash, and no change goes unnoticed."""

import hashlib
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytest import LogCaptureFixture, MonkeyPatch, fixture, mark, raises

from wardround.deploy.ledger import Ledger, LedgerError, find, head_path, read, verify, writing
from wardround.deploy.ledger.writing import encode_line
from wardround.deploy.wire import pack
from wardround.errors import ConfigError
from wardround.messages import Message
from wardround.params import Params


def entry(round: int) -> dict[str, Any]:
    return {
        "run": "a1b2",
        "round": round,
        "task": "train",
        "tensors": {"params/conv.weight": [2, 3]},
        "types": {"params/conv.weight": "float32"},
        "bytes": 24 + round,
        "sha256": hashlib.sha256(str(round).encode()).hexdigest(),
        "scalars": {"loss/first": 0.5 / (round + 1), "note": "Größe"},
    }


@fixture
def path(tmp_path: Path) -> Path:
    """A ledger of eight lines."""
    place = tmp_path / "state" / "egress.jsonl"
    book = Ledger(place)
    for round in range(1, 9):
        book.add(entry(round))
    return place


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def put(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def resealed(text: str, **changes: Any) -> str:
    """A line changed by somebody who knows how its hash is formed."""
    line = json.loads(text) | changes
    line.pop("hash")
    body = encode_line(line)
    return body.decode()[:-1] + f',"hash":"{hashlib.sha256(body).hexdigest()}"}}'


# Writing


def test_every_line_is_chained_to_the_one_before_it(path: Path) -> None:
    previous = "0" * 64
    for number, line in enumerate(read(path), start=1):
        found = line.pop("hash")
        assert (line["number"], line["previous"]) == (number, previous)
        assert hashlib.sha256(encode_line(line)).hexdigest() == found
        previous = found
    assert json.loads(head_path(path).read_text()) == {"lines": 8, "hash": previous}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_parcel_becomes_a_line_that_says_all_that_left(tmp_path: Path) -> None:
    message = Message(
        params=Params({"w": torch.zeros(2, 3)}),
        extras={"control": Params({"w": torch.ones(3, dtype=torch.float64)})},
        scalars={"P": float("inf"), "cases": [{"case": "case-0001"}] * 3},
    )
    more = {"num_examples": 7, "loss": {"first": 0.5}, "failure": None, "refused": None}
    parcel = pack(
        message,
        kind="reply",
        run="a1b2",
        request="00",
        client="north",
        task="train",
        round=2,
        more=more,
    )
    book = Ledger(tmp_path / "egress.jsonl")

    line = book.append(parcel.header, parcel.num_bytes, name="prostate")

    assert line == next(read(book.path))
    assert (line["run"], line["name"], line["round"], line["task"]) == ("a1b2", "prostate", 3, "train")
    assert line["tensors"] == {"params/w": [2, 3], "extras/control/w": [3]}
    assert line["types"] == {"params/w": "float32", "extras/control/w": "float64"}
    assert line["bytes"] == parcel.num_bytes and line["sha256"] == parcel.header["sha256"]
    assert line["scalars"] == {"P": "inf", "cases": "3 entries", "loss/first": 0.5}
    assert line["facts"] == {"num_examples": 7}
    assert "refused" not in line and "failure" not in line


def test_a_refusal_that_leaves_is_written_down_too(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "egress.jsonl")
    facts = {"kind": "reply", "run": "a", "request": "0", "client": "north", "task": "train", "round": 0}
    parcel = pack(Message(), **facts, more={"refused": "quiet hours"})  # type: ignore[arg-type]
    line = book.append(parcel.header, parcel.num_bytes)
    assert line["refused"] == "quiet hours" and line["tensors"] == {}


def test_the_line_is_on_the_disk_before_anything_can_leave(path: Path, monkeypatch: MonkeyPatch) -> None:
    synced: list[int] = []
    honest = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), honest(file))[1])
    Ledger(path).add(entry(9))
    assert path.stat().st_ino in synced


def test_a_restart_continues_the_chain_and_reads_the_last_line_alone(
    path: Path, monkeypatch: MonkeyPatch
) -> None:
    put(path, ["x" * 200_000, *lines_of(path)[1:]])  # whatever stands far above is not looked at
    amount = []
    honest = os.pread
    monkeypatch.setattr(os, "pread", lambda *a: (amount.append(a[1]), honest(*a))[1])

    line = Ledger(path).add(entry(9))

    assert line["number"] == 9 and sum(amount) < 5 * writing.CHUNK


def test_lines_longer_than_a_chunk_are_found_from_behind(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "CHUNK", 16)
    book = Ledger(tmp_path / "egress.jsonl")
    for round in range(3):
        book.add(entry(round))
    assert verify(book.path).ok and Ledger(book.path).head.lines == 3


def write_many(path: Path, count: int) -> None:
    book = Ledger(path)
    for number in range(count):
        book.add(entry(number))


@mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_two_processes_never_interleave(tmp_path: Path) -> None:
    path = tmp_path / "egress.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, 40)) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert verify(path).ok  # a reader in the middle of it all
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    verdict = verify(path)
    assert verdict.ok and verdict.lines == 120


def test_waiting_for_a_lock_has_an_end(path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LOCK_SECONDS", 0.05)
    book = Ledger(path)
    with book._locked(), raises(LedgerError, match="locked by another process"):
        book.add(entry(9))


def test_a_full_disk_leaves_no_piece_of_a_line(path: Path, monkeypatch: MonkeyPatch) -> None:
    book, before = Ledger(path), path.read_bytes()
    honest = os.write

    def failing(file: int, content: Any) -> int:
        honest(file, content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", failing)
    with raises(LedgerError, match="No space left on device.*nothing leaves"):
        book.add(entry(9))
    assert path.read_bytes() == before


# After a crash


@mark.parametrize("piece", [b'{"bytes":25,"num', b"\0" * 300])
def test_a_last_line_cut_by_a_crash_is_moved_aside_and_the_chain_goes_on(
    path: Path, piece: bytes, caplog: LogCaptureFixture
) -> None:
    with path.open("ab") as file:
        file.write(piece)
    verdict = verify(path)
    assert verdict.ok and verdict.lines == 8 and "a crash cut off one more" in verdict.sentence

    with caplog.at_level(logging.WARNING):
        line = Ledger(path).add(entry(9))

    assert "ended in an incomplete line" in caplog.text
    assert line["number"] == 9 and verify(path).ok
    assert path.with_name("egress.damaged").read_bytes() == piece + b"\n"


def test_a_crash_between_the_line_and_the_head_is_healed(path: Path) -> None:
    head = head_path(path).read_text()
    Ledger(path).add(entry(9))
    head_path(path).write_text(head)
    (path.parent / ".egress.head.json.123.partial").write_text("{")

    assert verify(path).ok
    assert Ledger(path).head.lines == 9
    assert json.loads(head_path(path).read_text())["lines"] == 9
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["egress.head.json", "egress.jsonl"]


def test_a_crash_after_the_very_first_line_is_healed(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "egress.jsonl")
    book.add(entry(1))
    head_path(book.path).unlink()
    assert verify(book.path).ok and Ledger(book.path).head.lines == 1


@mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: put(path, lines_of(path)[:5]), "has 5 lines, but 8 were written"),
        (lambda path: path.unlink(), "has 0 lines, but 8 were written"),
        (lambda path: head_path(path).unlink(), "egress.head.json is missing"),
        (lambda path: head_path(path).write_text("{"), "egress.head.json is damaged"),
        (lambda path: put(path, [*lines_of(path)[:7], "{}"]), "the last line is damaged"),
    ],
)
def test_a_ledger_that_no_crash_explains_is_not_continued(
    path: Path, harm: Callable[[Path], object], words: str
) -> None:
    harm(path)
    with raises(LedgerError, match=words):
        Ledger(path).add(entry(9))


# Verifying


def edited(lines: list[str]) -> list[str]:
    return [*lines[:3], lines[3].replace('"task":"train"', '"task":"score"'), *lines[4:]]


def edited_with_a_key_twice(lines: list[str]) -> list[str]:
    return [*lines[:3], '{"bytes":1,' + lines[3][1:], *lines[4:]]


def edited_and_resealed(lines: list[str]) -> list[str]:
    return [*lines[:3], resealed(lines[3], bytes=1), *lines[4:]]


def first_edited_and_resealed(lines: list[str]) -> list[str]:
    return [resealed(lines[0], bytes=1), *lines[1:]]


def last_edited_and_resealed(lines: list[str]) -> list[str]:
    return [*lines[:7], resealed(lines[7], bytes=1)]


def last_but_one_edited_and_resealed(lines: list[str]) -> list[str]:
    return [*lines[:6], resealed(lines[6], bytes=1), lines[7]]


def one_removed(lines: list[str]) -> list[str]:
    return lines[:3] + lines[4:]


def first_removed(lines: list[str]) -> list[str]:
    return lines[2:]


def copied(lines: list[str]) -> list[str]:
    return [*lines[:6], lines[2], *lines[6:]]


def forged_and_resealed(lines: list[str]) -> list[str]:
    return [*lines[:3], resealed(lines[3], bytes=1), *lines[3:]]


def forged_of_nothing(lines: list[str]) -> list[str]:
    return [*lines[:3], resealed(lines[3], previous="f" * 64), *lines[3:]]


def forged_without_a_hash(lines: list[str]) -> list[str]:
    return [*lines[:3], '{"task":"train"}', *lines[3:]]


def forged_before_the_last(lines: list[str]) -> list[str]:
    return [*lines[:7], resealed(lines[7], bytes=1), lines[7]]


def swapped(lines: list[str]) -> list[str]:
    return [*lines[:3], lines[4], lines[3], *lines[5:]]


def moved_up(lines: list[str]) -> list[str]:
    return [*lines[:3], lines[6], *lines[3:6], lines[7]]


def moved_to_the_end(lines: list[str]) -> list[str]:
    return [*lines[:3], *lines[4:], lines[3]]


def cut(lines: list[str]) -> list[str]:
    return lines[:6]


def emptied(lines: list[str]) -> list[str]:
    return []


@mark.parametrize(
    ("harm", "what", "line"),
    [
        (edited, "edited", 4),
        (edited_with_a_key_twice, "edited", 4),
        (edited_and_resealed, "edited", 4),
        (first_edited_and_resealed, "edited", 1),
        (last_edited_and_resealed, "edited", 8),
        (last_but_one_edited_and_resealed, "edited", 7),
        (one_removed, "removed", 4),
        (first_removed, "removed", 1),
        (copied, "inserted", 7),
        (forged_and_resealed, "inserted", 4),
        (forged_of_nothing, "inserted", 4),
        (forged_without_a_hash, "inserted", 4),
        (forged_before_the_last, "inserted", 8),
        (swapped, "reordered", 4),
        (moved_up, "reordered", 4),
        (moved_to_the_end, "reordered", 4),
        (cut, "truncated", 7),
        (emptied, "truncated", 1),
    ],
)
def test_verify_names_the_first_bad_line_and_what_was_done(
    path: Path, harm: Callable[[list[str]], list[str]], what: str, line: int
) -> None:
    put(path, harm(lines_of(path)))
    verdict = verify(path)
    assert (verdict.ok, verdict.what, verdict.line) == (False, what, line), verdict.sentence
    assert verdict.lines == len(lines_of(path))
    assert f"line {line}" in verdict.sentence


def test_every_single_changed_byte_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert not verify(path).ok, place


def test_a_line_cut_in_the_middle_after_it_was_written_is_no_crash(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    verdict = verify(path)
    assert (verdict.ok, verdict.what, verdict.line) == (False, "truncated", 8)


def test_without_its_head_the_end_cannot_be_checked(path: Path) -> None:
    head_path(path).unlink()
    verdict = verify(path)
    assert not verdict.ok and verdict.what == "unsure" and "egress.head.json is missing" in verdict.sentence


def test_an_empty_ledger_is_whole(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "egress.jsonl")
    verdict = verify(book.path)
    assert verdict.ok and verdict.lines == 0 and "no lines yet" in verdict.sentence


def test_thousands_of_lines_are_verified_in_seconds(tmp_path: Path) -> None:
    path, previous = tmp_path / "egress.jsonl", "0" * 64
    with path.open("wb") as file:
        for number in range(1, 20_001):
            body = encode_line(
                {**entry(number), "number": number, "time": "2026-01-01", "previous": previous}
            )
            previous = hashlib.sha256(body).hexdigest()
            file.write(body[:-1] + f',"hash":"{previous}"}}\n'.encode())
    head_path(path).write_text(json.dumps({"lines": 20_000, "hash": previous}))
    started = time.perf_counter()
    verdict = verify(path)
    assert verdict.ok and verdict.lines == 20_000
    assert time.perf_counter() - started < 20  # a fifth of the lines; it takes well below a second


# Finding and reading


def test_a_kit_a_state_folder_and_the_file_itself_mean_the_ledger(path: Path) -> None:
    kit = path.parent.parent
    assert find(kit) == find(path.parent) == find(path) == path


def test_a_kit_from_which_nothing_left_yet_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "kit.json").write_text('{"role": "hospital"}')
    assert find(tmp_path) == tmp_path / "state" / "egress.jsonl"
    assert list(read(find(tmp_path))) == [] and verify(find(tmp_path)).ok


def test_a_deleted_ledger_is_still_found_by_its_head(path: Path) -> None:
    path.unlink()
    assert find(path.parent.parent) == path
    assert verify(path).what == "truncated"


@mark.parametrize(("kit", "words"), [('{"role": "organiser"}', "organiser's kit"), (None, "holds no egress")])
def test_other_folders_are_refused_in_a_sentence(tmp_path: Path, kit: str | None, words: str) -> None:
    if kit is not None:
        (tmp_path / "kit.json").write_text(kit)
    with raises(ConfigError, match=words):
        find(tmp_path)
    with raises(ConfigError, match="does not exist"):
        find(tmp_path / "nowhere")


def test_the_organisers_list_has_no_chain(tmp_path: Path) -> None:
    path = tmp_path / "egress.jsonl"
    path.write_text('{"time": "t", "round": 1, "phase": "round", "client": "north", "task": "train"}\n')
    assert [line["client"] for line in read(path)] == ["north"]
    with raises(ConfigError, match="organiser's list .* no chain"):
        verify(path)


def test_a_line_that_cannot_be_read_is_named(path: Path) -> None:
    put(path, [*lines_of(path)[:2], "nonsense", *lines_of(path)[3:]])
    with raises(LedgerError, match="line 3 cannot be read"):
        list(read(path))
