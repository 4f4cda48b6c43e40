"""One prepared case as a file: safetensors, whole or absent, mapped into memory when loaded.

image                (C, *spatial) float32
label                (*spatial) uint8 classes; absent for a case nobody drew
foreground.<class>   (N, dims) int32: up to 2,000 of its voxels, for patches around them
metadata             JSON: name, client, spacing, shape, geometry, sources, content, num_voxels, others
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wardround.data.cases import Case
from wardround.data.listing import Entry
from wardround.data.preparing.prepare import Prepared, present
from wardround.errors import DataError
from wardround.storage import tensor_parts

MAX_FOREGROUND = 2000
STALE_SECONDS = 24 * 3600.0  # after that a half-written file of another machine has no writer


@dataclass(frozen=True)
class Loaded:
    """A prepared case, its tensors mapped from the file.

    foreground: class -> some of its voxels (N, dims); about: name, client, spacing, geometry, shape, sources,
    num_voxels of each class, others (label values that became background), has_label. A case nobody drew has
    an empty label.
    """

    case: Case
    foreground: Mapping[int, Tensor]
    about: Mapping[str, Any]


def files_of(entry: Entry) -> list[Path]:
    return [*entry.images, *([] if entry.label is None else [entry.label])]


def save(target: Path, entry: Entry, made: Prepared, content: str) -> None:
    """Write a prepared case, whole or not at all, even if the disk is full or the power fails."""
    tensors = {"image": made.image}
    counts: dict[str, int] = {}
    if made.label is not None:
        tensors["label"] = made.label
        draw = np.random.default_rng(int(content[:16], 16))
        for value, voxels in foreground(made.label.numpy(), draw):
            counts[str(value)] = voxels[0]
            tensors[f"foreground.{value}"] = torch.from_numpy(voxels[1])
    about = {
        "name": entry.name,
        "client": entry.client,
        "spacing": list(made.spacing),
        "shape": list(made.image.shape),
        "geometry": made.geometry,
        "sources": [path.name for path in files_of(entry)],
        "content": content,
        "num_voxels": counts,
        "others": list(made.others),
        "has_label": made.label is not None,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{os.getpid()}-{secrets.token_hex(4)}-{socket.gethostname()}.partial")
    try:
        with partial.open("wb") as file:
            for part in tensor_parts(tensors, {"wardround": json.dumps(about)}):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def foreground(
    label: NDArray[np.uint8], draw: np.random.Generator
) -> Iterator[tuple[int, tuple[int, NDArray[np.int32]]]]:
    """Each class, how many voxels it has, and where some of them are (N, dims), in file order."""
    flat = label.reshape(-1)
    for value in present(flat):
        if value == 0:
            continue
        places = np.flatnonzero(flat == value)
        count = len(places)
        if count > MAX_FOREGROUND:
            places = np.sort(draw.choice(places, MAX_FOREGROUND, replace=False))
        voxels = np.stack(np.unravel_index(places, label.shape), axis=1)
        yield value, (count, voxels.astype(np.int32))


def load(path: Path) -> Loaded:
    """A prepared case; its voxels are read from the file when they are looked at."""
    with opened(path) as file:
        about = about_of(file, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        label = tensors.pop("label", torch.zeros(0, dtype=torch.uint8))
        case = Case(about["name"], tensors.pop("image"), label, tuple(about["spacing"]))
        places = {int(name.removeprefix("foreground.")): tensor for name, tensor in tensors.items()}
    return Loaded(case, dict(sorted(places.items())), about)


def describe(path: Path) -> dict[str, Any]:
    """What a prepared file says of itself, without its voxels; a truncated one is a DataError."""
    with opened(path) as file:
        return about_of(file, path)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, KeyError) as error:
        raise DataError(
            f"{path} is not a whole prepared case ({error}); delete it, or prepare again."
        ) from None


def about_of(file: Any, path: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads(file.metadata()["wardround"])
        return about
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path} is no prepared case of wardround; prepare again.") from None


def sweep(home: Path) -> None:
    """Remove half-written files whose writer is gone."""
    for partial in home.glob("*/.*.partial"):
        pid, _, rest = partial.name[1:].partition("-")
        here = rest.endswith(f"-{socket.gethostname()}.partial") and pid.isdecimal()
        with contextlib.suppress(OSError):
            if (here and gone(int(pid))) or time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink()


def gone(pid: int) -> bool:
    """Whether no process has this number."""
    try:
        os.kill(pid, 0)  # asks, and does nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
