"""Cache: prepared cases on disk, made once and then memory-mapped.

    <cache>/<settings>/settings.json                     what the folder was prepared with
    <cache>/<settings>/<client>/<case>-<content>.safetensors
    <cache>/files.jsonl                                  size, times and SHA-256 of every source file
    <cache>/locks/                                       lock files, so that one process prepares a case
    <cache>/.gitignore                                   keeps all of it out of the user's repository

`settings` and `content` are hashes, of the settings and of the files' bytes: when either changes, another
file is made, and the old one stays for runs that still read it. Files are written atomically: two runs at
once, or a `kill -9` at any time, do no harm, and the next call prepares what is missing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wardround.data.cases import Case
from wardround.data.federation_file import PrepareSettings
from wardround.data.listing import Entry, Labels
from wardround.data.preparing.prepare import PreparedCase, check_values, list_values, prepare_case
from wardround.data.readers.image_files import read_image
from wardround.data.readers.label_files import read_case_label
from wardround.errors import DataError
from wardround.files import compute_sha256, file_name, wait_for_lock, write_json, write_text
from wardround.machine import is_gone, replace_file
from wardround.storage import tensor_parts

FORMAT = 2  # raised when the same settings would give other bytes; 2: pictures follow their EXIF orientation
OWN = frozenset({"locks", "clients", "files.jsonl", "labels.json"})  # beside a folder for each settings
NUM_LOCKS = 256
MAX_FOREGROUND = 2000
STALE_SECONDS = 24 * 3600.0  # a partial file of another machine is abandoned after that

Signature = tuple[int, int, int]


class CacheFolderError(DataError):
    """The cache folder itself cannot be written: no case will succeed."""


@dataclass(frozen=True)
class Recipe:
    """All that decides the bytes of a prepared case, besides its files; background: see `prepare_case`.

    ignore: values of voxels to be ignored, which get the label above the last class.
    """

    prepare: PrepareSettings
    labels: Labels
    background: tuple[int, ...] | None = ()
    ignore: tuple[int, ...] = ()

    @property
    def stored(self) -> Labels:
        """What the stored labels tell apart, in their order."""
        return {**self.labels, "": self.ignore} if self.ignore else self.labels

    def as_dict(self) -> dict[str, Any]:
        labels = [[name, list(values)] for name, values in self.stored.items()]  # their order counts
        prepare = self.prepare.model_dump(mode="json", exclude={"slices"})  # their origin does not count
        return {"format": FORMAT, "prepare": prepare, "labels": labels}

    def of_case(self, entry: Entry) -> Recipe:
        """The same with the label map of the case's source, where it has one."""
        return self if entry.labels is None else replace(self, labels=entry.labels)

    @property
    def key(self) -> str:
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


class Cache:
    """A folder of prepared cases; it may be shared by runs, and deleted at any time between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def open(self, recipe: Recipe) -> None:
        """Create the folder, note its settings, and remove what dead processes left."""
        home = self.folder / recipe.key
        with explain_write_errors(self.folder):
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            if not (self.folder / ".gitignore").exists() and holds_cache_alone(self.folder):
                write_text(self.folder / ".gitignore", "*\n")
            home.mkdir(exist_ok=True)
            if not (home / "settings.json").exists():
                write_json(home / "settings.json", recipe.as_dict())
            remove_stale(home)

    def find(self, entry: Entry, recipe: Recipe, known: DigestIndex) -> Path | None:
        """The prepared file of a case whose files are known and unchanged; None if it has to be made."""
        recipe = recipe.of_case(entry)
        digests = [known.get(path) for path in entry.files]
        if None in digests:
            return None
        path = self.locate(entry, recipe, hash_contents([*filter(None, digests), *entry.coding_text]))
        return path if self._is_usable(path, recipe) else None

    def locate(self, entry: Entry, recipe: Recipe, content: str) -> Path:
        name = f"{file_name(entry.name)}-{content[:16]}.safetensors"
        return self.folder / recipe.key / file_name(entry.client) / name

    def _is_usable(self, path: Path, recipe: Recipe) -> bool:
        """Whether a complete file exists; label values that are no longer allowed are an error."""
        if not path.exists():
            return False
        try:
            metadata = describe(path)
        except DataError:
            return False
        check_values(metadata["others"], recipe.labels, recipe.background)
        return True

    def prepare(self, entry: Entry, recipe: Recipe) -> tuple[Path, dict[str, tuple[Signature, str]], float]:
        """Prepare one case unless it exists: its path, signatures and digests of its files, share cut off."""
        recipe = recipe.of_case(entry)
        before = {str(path): (stat_signature(path), hash_file(path)) for path in entry.files}
        content = hash_contents([*(digest for _, digest in before.values()), *entry.coding_text])
        target = self.locate(entry, recipe, content)
        with self._lock_case(target):
            if self._is_usable(target, recipe):
                return target, before, 0.0
            image = read_image(entry.images)
            label = read_case_label(entry)
            made = prepare_case(
                image, label, recipe.prepare, recipe.stored, background=recipe.background, places=entry.places
            )
            for path in entry.files:
                if stat_signature(path) != before[str(path)][0]:
                    raise DataError(f"{path} changed while it was read; try again when nothing writes to it.")
            with explain_write_errors(self.folder):
                save(target, entry, made, content)
        return target, before, made.cut

    @contextlib.contextmanager
    def _lock_case(self, target: Path) -> Iterator[None]:
        """Wait while another process prepares the same case.

        A lock ends with its process. Where the file system has no locks, work may be done twice; the last
        rename wins, and both files are the same.
        """
        number = int(hashlib.sha256(target.name.encode()).hexdigest(), 16) % NUM_LOCKS
        with explain_write_errors(self.folder):
            lock = (self.folder / "locks" / f"{number:03d}").open("wb")
        with lock:
            with contextlib.suppress(OSError):
                wait_for_lock(lock)
            yield


def holds_cache_alone(folder: Path) -> bool:
    """Whether nothing of a user's is in the folder, as where `cache: .` is chosen."""
    return all(path.name in OWN or (path / "settings.json").exists() for path in folder.iterdir())


# Source files


class DigestIndex:
    """SHA-256 digests of source files by path; a file whose size or times changed is hashed again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "files.jsonl"
        self._known: dict[str, tuple[Signature, str]] = {}
        with contextlib.suppress(OSError):
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, TypeError):  # the last line of a killed process
                    path, size, changed, renewed, digest = json.loads(line)
                    self._known[path] = (size, changed, renewed), digest

    def get(self, path: Path) -> str | None:
        found = self._known.get(str(path.absolute()))
        return found[1] if found is not None and found[0] == stat_signature(path) else None

    def add(self, found: Mapping[str, tuple[Signature, str]]) -> None:
        """Append to the index; lines of two processes do not mix, since each is one small write."""
        lines = []
        for path, (signature, digest) in found.items():
            place = str(Path(path).absolute())
            if self._known.get(place) != (signature, digest):
                self._known[place] = signature, digest
                lines.append(json.dumps([place, *signature, digest]) + "\n")
        if lines:
            with explain_write_errors(self._path.parent), self._path.open("ab") as file:
                file.write("".join(lines).encode())


def stat_signature(path: Path) -> Signature:
    """Size and times of the last change of content and of metadata; (0, 0, 0) if unknown."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return (0, 0, 0)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def hash_file(path: Path) -> str:
    """SHA-256 of the bytes; "" for a file that cannot be read, since reading it later says why."""
    try:
        return compute_sha256(path) if path.is_file() else ""
    except (OSError, ValueError):
        return ""


def hash_contents(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


# The folder


@contextlib.contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError into a sentence that names the folder and what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = "Free some space" if full else "Choose another folder under cache in federation.yaml"
        raise CacheFolderError(
            f"The cache folder {folder} cannot be written: {error.strerror or error}. "
            f"{todo}, then try again; cases already prepared are kept."
        ) from None


# One prepared case: a safetensors file, memory-mapped when loaded


@dataclass(frozen=True)
class LoadedCase:
    """A prepared case, its tensors mapped from the file.

    case: image (C, *spatial) float32 and label (*spatial) uint8, empty for an unlabelled case; foreground:
    class -> up to 2,000 of its voxels (N, dims) int32, where patches are centred; metadata: JSON with name,
    client, spacing, geometry, shape, sources, content, num_voxels of each class, others (label values that
    became background), has_label.
    """

    case: Case
    foreground: Mapping[int, Tensor]
    metadata: Mapping[str, Any]


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
        "sources": [path.name for path in entry.files],
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
        replace_file(partial, target)
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
    for partial in [*home.glob(".*.partial"), *home.glob("*/.*.partial")]:
        pid, _, rest = partial.name.removeprefix(".settings.json").removeprefix(".").partition("-")
        here = pid.isdecimal() and (
            partial.parent == home or rest.endswith(f"-{socket.gethostname()}.partial")
        )
        with contextlib.suppress(OSError):
            if (here and is_gone(int(pid))) or time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink()
