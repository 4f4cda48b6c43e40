"""Atomic writes, JSON, locks, safe file names. No tensors, so quick to import."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor

from wardround.errors import ConfigError
from wardround.machine import is_gone, is_reserved, replace_file


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the path as the user did."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{path} cannot be written: {reason}. Choose another place.") from None


def try_lock(file: IO[Any] | int) -> bool:
    """Take the lock of an open file if it is free; it is held as long as the file is open."""
    return lock_descriptor(file if isinstance(file, int) else file.fileno(), blocking=False)


def take_lock(path: Path, *, taken: str, advice: str) -> IO[str]:
    """Open and lock a file, for one process at a time; closing it releases the lock.

    taken: what to say where another process holds it; advice: what to do where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}). {advice}") from None
    if not try_lock(file):
        file.close()
        raise ConfigError(taken)
    return file


def wait_for_lock(file: IO[Any] | int, seconds: float = math.inf) -> bool:
    """Wait for the lock of an open file; False if another process still holds it after `seconds`."""
    deadline = time.monotonic() + seconds
    while not try_lock(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that another process sees whole or not at all."""
    write_parts(path, [content])


def write_parts(
    path: Path, parts: Iterable[bytes | memoryview], *, durable: bool = True, private: bool = False
) -> None:
    """Write a file from its parts, whole or not at all; durable: even after a power cut; private: for its
    owner's eyes alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        if private:
            partial.touch(0o600)
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        replace_file(partial, path)
    except BaseException as error:  # Ctrl-C too
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say which file
        raise


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes the target, a new or empty one, when all is written.

    What processes that were killed left beside it is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        number = left.name.split(".")[-2]
        if number.isdecimal() and is_gone(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def compute_sha256(path: Path, start: int = 0) -> str:
    """SHA-256 of a file from a byte on."""
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_private(path: Path, content: bytes) -> None:
    """Write a file that its owner alone can read, at no moment anybody else."""
    write_parts(path, [content], private=True)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(jsonable(value), indent=2, ensure_ascii=False) + "\n")


def parse_json(text: str | bytes | bytearray) -> Any:
    """A JSON value; what nests too deep is a ValueError, as any other damage."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def jsonable(value: Any) -> Any:
    """Plain JSON values; NaN and infinities become the strings "nan", "inf", "-inf"."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Path):
        return str(value)
    return value


def file_name(name: str) -> str:
    """A safe file name for any client or case name; different names never collide.

    >>> file_name("north"), file_name("../etc")
    ('north', '___etc-f7f9121f')
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) and not is_reserved(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:48] + "-" + digest
