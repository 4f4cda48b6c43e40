"""Private keys: with a passphrase they open for whoever knows it, and for nobody else."""

import os
from collections.abc import Iterator
from pathlib import Path

from pytest import MonkeyPatch, fixture, importorskip, raises

importorskip("cryptography")

from wardround.deploy.kits import private_key
from wardround.deploy.kits.private_key import (
    PASSPHRASE,
    PASSPHRASE_FILE,
    ask_new_passphrase,
    encode_key,
    load_key,
    make_key,
    read_pem,
)
from wardround.errors import ConfigError

SECRET = b"correct horse"


@fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    private_key.ask_passphrase.cache_clear()
    private_key.read_environment.cache_clear()


@fixture
def locked(tmp_path: Path) -> Path:
    path = tmp_path / "own.key"
    path.write_bytes(encode_key(make_key(), SECRET))
    return path


def test_a_key_without_a_passphrase_is_read_as_it_is(tmp_path: Path) -> None:
    path, key = tmp_path / "own.key", make_key()
    path.write_bytes(encode_key(key))
    assert load_key(path).private_numbers() == key.private_numbers() and read_pem(path) == path.read_bytes()


def test_a_passphrase_comes_from_a_file_or_a_variable_that_no_child_inherits(
    locked: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in locked.read_bytes()
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    for name, value in ((PASSPHRASE, SECRET.decode()), (PASSPHRASE_FILE, str(tmp_path / "secret"))):
        monkeypatch.setenv(name, value)
        assert b"BEGIN RSA PRIVATE KEY" in read_pem(locked)
        assert name not in os.environ
        private_key.ask_passphrase.cache_clear()
        private_key.read_environment.cache_clear()


def test_a_wrong_or_missing_passphrase_is_said_without_repeating_it(
    locked: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with raises(ConfigError, match="has a passphrase. Start this on a terminal.*PASSPHRASE_FILE=FILE"):
        load_key(locked)
    private_key.read_environment.cache_clear()
    monkeypatch.setenv(PASSPHRASE, "staple")
    with raises(ConfigError, match="the passphrase of .*own.key is wrong") as told:
        load_key(locked)
    assert "staple" not in str(told.value)


def test_the_terminal_is_asked_once_and_a_new_passphrase_twice(
    locked: Path, monkeypatch: MonkeyPatch
) -> None:
    asked: list[str] = []
    answers = iter(["correct horse", "battery staple", "battery stable", "short", "short"])

    def ask(prompt: str) -> str:
        asked.append(prompt)
        return next(answers)

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", ask)
    assert load_key(locked).private_numbers() == load_key(locked).private_numbers() and len(asked) == 1
    with raises(ConfigError, match="the two passphrases differ"):
        ask_new_passphrase(locked)
    with raises(ConfigError, match="8 to 1000 characters; this one has 5"):
        ask_new_passphrase(locked)


def test_a_file_that_is_not_there_or_empty_is_named(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, words in (("nowhere", "No such file"), ("empty", "which is empty")):
        monkeypatch.setenv(PASSPHRASE_FILE, str(tmp_path / name))
        with raises(ConfigError, match=words):
            private_key.read_environment()
