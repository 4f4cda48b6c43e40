"""Compiled kernels, kept between runs in one folder of the user: <cache>/kernels.

    triton/       our own kernels (`models/instance_norm_kernels.py`) and inductor's
    inductor/     compiled networks; wardround/ in it has the seconds each took to compile, and to load

<cache> is WARDROUND_CACHE, or wardround/ in the user's cache folder (XDG_CACHE_HOME or ~/.cache; Windows:
LOCALAPPDATA). Triton and inductor know themselves for which version and GPU a kernel was made.
`wardround cache` shows the folder and clears it. Code is loaded from it, so nobody else may write there; it
is no setting of a run, because a run may come from another party.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from wardround.files import write_json
from wardround.machine import belongs_to_somebody_else, find_cache, others_may

log = logging.getLogger(__name__)

VARIABLES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
LOADING_SHARE = 0.25  # of the seconds a compilation took, until loading was timed


def locate() -> Path:
    """Where kernels are kept."""
    own = os.environ.get("WARDROUND_CACHE")
    if own:
        return Path(own).expanduser().absolute() / "kernels"
    return find_cache() / "wardround" / "kernels"


def use() -> Path:
    """Let Triton and inductor keep their kernels in our folder, unless variables of theirs name another.

    A folder that cannot be used is replaced by an empty one for the length of this process.
    """
    folder = locate()
    reason = claim(folder)
    if reason is not None and not set(VARIABLES) <= os.environ.keys():
        folder = Path(tempfile.mkdtemp(prefix="wardround-kernels-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        log.warning("%s %s, so compiled kernels are not kept after this run", locate(), reason)
    for variable, name in VARIABLES.items():
        os.environ.setdefault(variable, str(folder / name))
    return folder


def claim(folder: Path) -> str | None:
    """Make the folder if need be, for us alone; why it cannot be used, or None."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            return "is a link"
        if belongs_to_somebody_else(found):
            return "belongs to somebody else"
        if others_may(folder, 0o022):
            return "can be written by others"
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    return None if os.access(folder, os.W_OK | os.X_OK) else "cannot be written"


# What compiling a network took


def record_seconds(network: str, seconds: float) -> None:
    """Note what compiling a network took, or loading it where it was compiled before."""
    known = read_seconds(network)
    known["loading" if "compiling" in known else "compiling"] = round(seconds, 2)
    with contextlib.suppress(OSError):
        write_json(mark_path(network), known)


def loading_seconds(network: str) -> float | None:
    """About what loading a compiled network takes; None where it is not compiled yet."""
    known = read_seconds(network)
    if "loading" in known:
        return known["loading"]
    return LOADING_SHARE * known["compiling"] if "compiling" in known else None


def read_seconds(network: str) -> dict[str, float]:
    try:
        known = json.loads(mark_path(network).read_text(encoding="ascii"))
        return {key: float(known[key]) for key in ("compiling", "loading") if key in known}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def mark_path(network: str) -> Path:
    """Beside the compiled network, wherever that is, so that clearing one clears the other."""
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or locate() / "inductor"
    return Path(inductor) / "wardround" / f"{network}.json"


# For the user


def measure(folder: Path) -> tuple[int, int]:
    """Files and bytes in the folder."""
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a run goes on
                sizes.append((Path(place) / name).lstat().st_size)
    return len(sizes), sum(sizes)


def clear(folder: Path) -> None:
    """Remove all kernels; a run that goes on compiles again what it still needs."""
    for name in VARIABLES.values():
        shutil.rmtree(folder / name, ignore_errors=True)
