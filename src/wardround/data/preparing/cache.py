"""Cache: prepared cases on disk, made once, mapped into memory ever after.

    <cache>/<settings>/settings.json                     what the folder was prepared with
    <cache>/<settings>/<client>/<case>-<content>.safetensors
    <cache>/files.jsonl                                  size, times and SHA-256 of every file seen
    <cache>/locks/                                       empty files, one process a case

`settings` and `content` are hashes, of the settings and of the files' bytes: when either changes, another
file is made, and the old one is left for whoever still reads it. A file is complete from the moment it has
its name; two runs, or a `kill -9` at any time, do no harm, and the next call makes what is missing.
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
from wardround.data.preparing.prepare import prepare_case, refuse_others
from wardround.data.preparing.prepared_file import describe, files_of, save, sweep
from wardround.data.readers.image_files import read_image, read_label
from wardround.errors import DataError
from wardround.files import file_name, wait_for_lock, write_json

FORMAT = 2  # raised when the same settings would give other bytes; 2: pictures are turned upright
NUM_LOCKS = 256

Signature = tuple[int, int, int]


class CacheFolderError(DataError):
    """The cache folder itself cannot be written: no case will succeed."""


@dataclass(frozen=True)
class Recipe:
    """What decides the bytes of a prepared case, besides its files; background: see `prepare_case`."""

    prepare: PrepareSettings
    labels: Mapping[str, tuple[int, ...]]
    background: tuple[int, ...] | None = ()

    def as_dict(self) -> dict[str, Any]:
        labels = [[name, list(values)] for name, values in self.labels.items()]  # their order counts
        prepare = self.prepare.model_dump(mode="json", exclude={"slices"})  # which says what they are
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
        """Make the folder, sweep what dead processes left, and say what it is for."""
        home = self.folder / recipe.key
        with explained(self.folder):
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            home.mkdir(exist_ok=True)
            if not (home / "settings.json").exists():
                write_json(home / "settings.json", recipe.as_dict())
            sweep(home)

    def find(self, entry: Entry, recipe: Recipe, known: Known) -> Path | None:
        """The prepared file, if the case's files are known, unchanged, and were prepared before."""
        digests = [known.digest(path) for path in files_of(entry)]
        if None in digests:
            return None
        path = self.path_of(entry, recipe, content_key([digest for digest in digests if digest]))
        return path if self._usable(path, recipe) else None

    def path_of(self, entry: Entry, recipe: Recipe, content: str) -> Path:
        name = f"{file_name(entry.name)}-{content[:16]}.safetensors"
        return self.folder / recipe.key / file_name(entry.client) / name

    def _usable(self, path: Path, recipe: Recipe) -> bool:
        """Whether a whole file is there; one with label values that are no longer allowed is an error."""
        if not path.exists():
            return False
        try:
            about = describe(path)
        except DataError:
            return False
        refuse_others(about["others"], recipe.labels, recipe.background)
        return True

    def prepare(self, entry: Entry, recipe: Recipe) -> tuple[Path, dict[str, tuple[Signature, str]], float]:
        """Prepare one case, unless it is there; what its files were found to be; what share was cut off."""
        before = {str(path): (signature(path), digest_of(path)) for path in files_of(entry)}
        content = content_key([digest for _, digest in before.values()])
        target = self.path_of(entry, recipe, content)
        with self._alone(target):
            if self._usable(target, recipe):
                return target, before, 0.0
            image = read_image(entry.images)
            label = None if entry.label is None else read_label(entry.label)
            made = prepare_case(image, label, recipe.prepare, recipe.labels, background=recipe.background)
            for path in files_of(entry):
                if signature(path) != before[str(path)][0]:
                    raise DataError(f"{path} changed while it was read; try again when it is still.")
            with explained(self.folder):
                save(target, entry, made, content)
        return target, before, made.cut

    @contextlib.contextmanager
    def _alone(self, target: Path) -> Iterator[None]:
        """Wait while another process makes the same case, so that it is made once.

        A lock dies with its process. Where the file system has no locks, work may be done twice; the last
        rename wins, and both files are the same.
        """
        number = int(hashlib.sha256(target.name.encode()).hexdigest(), 16) % NUM_LOCKS
        with explained(self.folder):
            lock = (self.folder / "locks" / f"{number:03d}").open("wb")
        with lock:
            with contextlib.suppress(OSError):
                wait_for_lock(lock)
            yield


# What files are


class Known:
    """Digests of files seen before, by path; a changed size or time makes a file unknown again."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "files.jsonl"
        self._seen: dict[str, tuple[Signature, str]] = {}
        with contextlib.suppress(OSError):
            for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, TypeError):  # the last line of a killed process
                    path, size, changed, renewed, digest = json.loads(line)
                    self._seen[path] = (size, changed, renewed), digest

    def digest(self, path: Path) -> str | None:
        found = self._seen.get(str(path.absolute()))
        return found[1] if found is not None and found[0] == signature(path) else None

    def learn(self, found: Mapping[str, tuple[Signature, str]]) -> None:
        """Append; lines of two processes do not mix, since each is one small write."""
        lines = []
        for path, (seen, digest) in found.items():
            place = str(Path(path).absolute())
            if self._seen.get(place) != (seen, digest):
                self._seen[place] = seen, digest
                lines.append(json.dumps([place, *seen, digest]) + "\n")
        if lines:
            with explained(self._path.parent), self._path.open("ab") as file:
                file.write("".join(lines).encode())


def signature(path: Path) -> Signature:
    """Size and the times of the last change, of content and of anything; (0, 0, 0) if it cannot be told."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return (0, 0, 0)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def digest_of(path: Path) -> str:
    """SHA-256 of the bytes; a file that cannot be read has none, and reading it says why."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return ""


def content_key(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


# The folder


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """A folder that cannot be written to, in a sentence."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = "Free some space" if full else "Choose another folder under cache in federation.yaml"
        raise CacheFolderError(
            f"The cache folder {folder} cannot be written: {error.strerror or error}. "
            f"{todo}, then try again; what is prepared stays."
        ) from None
