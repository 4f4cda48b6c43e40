"""Cache: prepared cases on disk, made once and then memory-mapped.

    <cache>/<settings>/settings.json                     what the folder was prepared with
    <cache>/<settings>/<client>/<case>-<content>.safetensors
    <cache>/files.jsonl                                  size, times and SHA-256 of every source file
    <cache>/locks/                                       lock files, so that one process prepares a case

`settings` and `content` are hashes, of the settings and of the files' bytes: when either changes, another
file is made, and the old one stays for runs that still read it. Files are written atomically: two runs at
once, or a `kill -9` at any time, do no harm, and the next call prepares what is missing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.data.federation_file import PrepareSettings
from wardround.data.listing import Entry
from wardround.data.preparing.prepare import check_values, prepare_case
from wardround.data.preparing.prepared_file import describe, list_files, remove_stale, save
from wardround.data.readers.image_files import read_image, read_label
from wardround.errors import DataError
from wardround.files import file_name, wait_for_lock, write_json

FORMAT = 2  # raised when the same settings would give other bytes; 2: pictures follow their EXIF orientation
NUM_LOCKS = 256

Signature = tuple[int, int, int]


class CacheFolderError(DataError):
    """The cache folder itself cannot be written: no case will succeed."""


@dataclass(frozen=True)
class Recipe:
    """All that decides the bytes of a prepared case, besides its files; background: see `prepare_case`."""

    prepare: PrepareSettings
    labels: Mapping[str, tuple[int, ...]]
    background: tuple[int, ...] | None = ()

    def as_dict(self) -> dict[str, Any]:
        labels = [[name, list(values)] for name, values in self.labels.items()]  # their order counts
        prepare = self.prepare.model_dump(mode="json", exclude={"slices"})  # their origin does not count
        return {"format": FORMAT, "prepare": prepare, "labels": labels}

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
            home.mkdir(exist_ok=True)
            if not (home / "settings.json").exists():
                write_json(home / "settings.json", recipe.as_dict())
            remove_stale(home)

    def find(self, entry: Entry, recipe: Recipe, known: DigestIndex) -> Path | None:
        """The prepared file of a case whose files are known and unchanged; None if it has to be made."""
        digests = [known.get(path) for path in list_files(entry)]
        if None in digests:
            return None
        path = self.locate(entry, recipe, hash_contents([digest for digest in digests if digest]))
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
        before = {str(path): (stat_signature(path), hash_file(path)) for path in list_files(entry)}
        content = hash_contents([digest for _, digest in before.values()])
        target = self.locate(entry, recipe, content)
        with self._lock_case(target):
            if self._is_usable(target, recipe):
                return target, before, 0.0
            image = read_image(entry.images)
            label = None if entry.label is None else read_label(entry.label)
            made = prepare_case(image, label, recipe.prepare, recipe.labels, background=recipe.background)
            for path in list_files(entry):
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
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
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
