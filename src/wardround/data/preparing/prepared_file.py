"""One prepared case as a safetensors file: written atomically, memory-mapped when loaded.

image                (C, *spatial) float32
label                (*spatial) uint8 classes; absent for an unlabelled case
foreground.<class>   (N, dims) int32: up to 2,000 of its voxels, where patches are centred
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
from wardround.data.preparing.prepare import PreparedCase, list_values
from wardround.errors import DataError
from wardround.storage import tensor_parts

MAX_FOREGROUND = 2000
STALE_SECONDS = 24 * 3600.0  # a partial file of another machine is abandoned after that


@dataclass(frozen=True)
class LoadedCase:
    """A prepared case, its tensors mapped from the file.

    foreground: class -> some of its voxels (N, dims); metadata: name, client, spacing, geometry, shape,
    sources, num_voxels of each class, others (label values that became background), has_label. An unlabelled
    case has an empty label.
    """

    case: Case
    foreground: Mapping[int, Tensor]
    metadata: Mapping[str, Any]


def list_files(entry: Entry) -> list[Path]:
    return [*entry.images, *([] if entry.label is None else [entry.label])]


def save(target: Path, entry: Entry, made: PreparedCase, content: str) -> None:
    """Write a prepared case atomically, even if the disk is full or the power fails."""
    tensors = {"image": made.image}
    counts: dict[str, int] = {}
    if made.label is not None:
        tensors["label"] = made.label
        draw = np.random.default_rng(int(content[:16], 16))
        for value, voxels in sample_foreground(made.label.numpy(), draw):
            counts[str(value)] = voxels[0]
            tensors[f"foreground.{value}"] = torch.from_numpy(voxels[1])
    metadata = {
        "name": entry.name,
        "client": entry.client,
        "spacing": list(made.spacing),
        "shape": list(made.image.shape),
        "geometry": made.geometry,
        "sources": [path.name for path in list_files(entry)],
        "content": content,
        "num_voxels": counts,
        "others": list(made.others),
        "has_label": made.label is not None,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{os.getpid()}-{secrets.token_hex(4)}-{socket.gethostname()}.partial")
    try:
        with partial.open("wb") as file:
            for part in tensor_parts(tensors, {"wardround": json.dumps(metadata)}):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sample_foreground(
    label: NDArray[np.uint8], draw: np.random.Generator
) -> Iterator[tuple[int, tuple[int, NDArray[np.int32]]]]:
    """Yield each class, its number of voxels, and the places of some of them (N, dims), in file order."""
    flat = label.reshape(-1)
    for value in list_values(flat):
        if value == 0:
            continue
        places = np.flatnonzero(flat == value)
        count = len(places)
        if count > MAX_FOREGROUND:
            places = np.sort(draw.choice(places, MAX_FOREGROUND, replace=False))
        voxels = np.stack(np.unravel_index(places, label.shape), axis=1)
        yield value, (count, voxels.astype(np.int32))


def load(path: Path) -> LoadedCase:
    """Map a prepared case; its voxels are read from the file when they are used."""
    with open_prepared(path) as file:
        metadata = read_metadata(file, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        label = tensors.pop("label", torch.zeros(0, dtype=torch.uint8))
        case = Case(metadata["name"], tensors.pop("image"), label, tuple(metadata["spacing"]))
        places = {int(name.removeprefix("foreground.")): tensor for name, tensor in tensors.items()}
    return LoadedCase(case, dict(sorted(places.items())), metadata)


def describe(path: Path) -> dict[str, Any]:
    """The metadata of a prepared file, without its voxels; a truncated one is a DataError."""
    with open_prepared(path) as file:
        return read_metadata(file, path)


@contextlib.contextmanager
def open_prepared(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, KeyError) as error:
        raise DataError(
            f"{path} is not a complete prepared case ({error}); delete it, or prepare again."
        ) from None


def read_metadata(file: Any, path: Path) -> dict[str, Any]:
    try:
        metadata: dict[str, Any] = json.loads(file.metadata()["wardround"])
        return metadata
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path} is not a prepared case of wardround; prepare again.") from None


def remove_stale(home: Path) -> None:
    """Remove partial files whose process has ended."""
    for partial in home.glob("*/.*.partial"):
        pid, _, rest = partial.name[1:].partition("-")
        here = rest.endswith(f"-{socket.gethostname()}.partial") and pid.isdecimal()
        with contextlib.suppress(OSError):
            if (here and is_gone(int(pid))) or time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink()


def is_gone(pid: int) -> bool:
    """Whether no process has this id."""
    try:
        os.kill(pid, 0)  # signal 0 only asks
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
