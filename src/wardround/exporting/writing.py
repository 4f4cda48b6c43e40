"""A folder that is complete or absent: written under another name, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wardround.errors import ConfigError

CARD = "MODEL_CARD.md"


def check_place(out: Path, run: Path, *, overwrite: bool) -> None:
    """Refuse a folder whose replacement would lose something."""
    if out.suffix.lower() in (".onnx", ".pt", ".pth", ".zip", ".safetensors"):
        raise ConfigError(f"{out} looks like a file; give a folder for the model and its card.")
    if run.resolve() == out.resolve() or out.resolve() in run.resolve().parents:
        raise ConfigError(f"{out} contains the run itself; export into another folder.")
    if not (out.exists() or out.is_symlink()):
        return
    if not out.is_dir() or out.is_symlink():
        raise ConfigError(f"{out} is not a folder; choose another.")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{out} exists. Add --overwrite to replace it, or choose another folder.")
    if not (out / CARD).is_file():
        raise ConfigError(
            f"{out} is not an export of wardround (it has no {CARD}) and is not replaced; choose another "
            "folder."
        )


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` on success and is removed on failure."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    former = out.with_name(f".{out.name}.{os.getpid()}.former")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from None
    try:
        yield partial
        if out.exists():
            out.rename(former)
        partial.rename(out)
    except BaseException:
        if former.exists() and not out.exists():
            former.rename(out)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)
