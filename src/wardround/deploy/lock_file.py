"""Lock files: one process at a time in a kit, a rehearsal or a run."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from wardround.errors import ConfigError
from wardround.files import try_lock


def take_lock(path: Path, *, taken: str, advice: str) -> IO[str]:
    """The locked file; closing it releases the lock.

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
