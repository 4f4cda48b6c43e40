"""Facts of a case: what checking needs to know of its files, each opened once.

A scan of a hundred megabytes becomes a few hundred bytes: shape, place, range, label values, and a digest
of its pixels. They are kept in memory by path, size and modification time, so a second check is free.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wardround.data.listing import Entry, Watch, map_cases
from wardround.data.readers.image_files import Volume, read_image
from wardround.data.readers.label_files import read_case_label
from wardround.errors import DataError

NUM_SAMPLED = 8_192  # voxels of a channel sampled for its quantiles
MOST_VALUES = 64  # different label values remembered
MOST_REMEMBERED = 200_000  # cases


@dataclass(frozen=True)
class ImageFacts:
    """shape: of the spatial axes; low, high, typical: a channel each; scale: from the 0.5th to the 99.5th
    percentile of the widest channel; num_bad: NaN or infinite voxels, and then there are no ranges;
    digest: of the decoded pixels, equal for equal images whatever their compression."""

    shape: tuple[int, ...]
    channels: int
    spacing: tuple[float, ...]
    affine: NDArray[np.float64] | None
    num_bad: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    typical: tuple[float, ...]
    scale: float
    digest: str

    @property
    def constant(self) -> list[int]:
        """Channels that hold one value only."""
        return [number for number, (a, b) in enumerate(zip(self.low, self.high, strict=True)) if a == b]


@dataclass(frozen=True)
class LabelFacts:
    """values: how many voxels have each, the first MOST_VALUES of num_values; placed: see `Volume`."""

    shape: tuple[int, ...]
    affine: NDArray[np.float64] | None
    values: Mapping[int, int]
    num_values: int
    digest: str
    placed: bool = False


@dataclass(frozen=True)
class CaseFacts:
    """What the files of a case hold; troubles: (code, sentence) for those that could not be read."""

    image: ImageFacts | None = None
    label: LabelFacts | None = None
    troubles: tuple[tuple[str, str], ...] = ()


def gather_facts(entries: Sequence[Entry], *, jobs: int = 1, watch: Watch | None = None) -> list[CaseFacts]:
    """The facts of every case, in order; `jobs` threads, since unpacking and NumPy let others run."""
    # Set once for all threads: readers quieten warnings for themselves, which threads cannot each undo.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(map_cases(read_facts, entries, jobs, watch))


# One case

Key = tuple[str | tuple[str, int, int, int], ...]
_remembered: dict[Key, CaseFacts] = {}


def read_facts(entry: Entry) -> CaseFacts:
    """The facts of a case, from memory where its files are as they were. Troubles are never remembered:
    a permission may change without a trace on the file."""
    key = make_key(entry)
    known = _remembered.get(key) if key is not None else None
    if known is not None:
        return known
    facts = open_case(entry)
    if key is not None and not facts.troubles:
        remember(key, facts)
    return facts


def remember(key: Key, facts: CaseFacts) -> None:
    """Keep the facts of a case, for whoever asks next."""
    if len(_remembered) >= MOST_REMEMBERED:
        _remembered.clear()
    _remembered[key] = facts


def read_and_remember(entry: Entry) -> tuple[Volume, Volume | None]:
    """The image and label of a case, for more than its facts, which are remembered."""
    key = make_key(entry)
    image, label = read_image(entry.images), read_case_label(entry)
    if key is not None and key not in _remembered:
        remember(key, CaseFacts(measure_image(image), None if label is None else measure_label(label)))
    return image, label


def make_key(entry: Entry) -> Key | None:
    """Path, size, time and number of each file; None where one cannot be asked."""
    try:
        found = [(str(path), path.stat()) for path in entry.files]
    except (OSError, ValueError):
        return None
    files = ((path, stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in found)
    return (*files, *entry.coding_text)


def open_case(entry: Entry) -> CaseFacts:
    troubles: list[tuple[str, str]] = []
    image, label = None, None
    try:
        image = measure_image(read_image(entry.images))
    except Exception as error:  # a file can be broken in ways no reader foresaw; the others go on
        code = classify_file(entry.images) or "unreadable"
        troubles.append((code, describe_error(error, entry.images[:1])))
    try:
        found = read_case_label(entry)
        label = None if found is None else measure_label(found)
    except Exception as error:
        troubles.append((classify_label(entry), describe_error(error, entry.label_files[:1])))
    return CaseFacts(image, label, tuple(troubles))


def describe_error(error: Exception, paths: Sequence[Path]) -> str:
    if isinstance(error, DataError):
        return str(error)
    where = paths[0] if paths else "The image"
    return f"{where} cannot be read: {type(error).__name__} {error}".rstrip(" .") + "."


def classify_file(paths: Sequence[Path]) -> str | None:
    """`missing` or `empty`, where that is all there is to say."""
    for path in paths:
        try:
            if path.stat().st_size == 0 and path.is_file():
                return "empty"
        except FileNotFoundError:
            return "missing"
        except (OSError, ValueError):
            return None
    return None


def classify_label(entry: Entry) -> str:
    """Why a label was refused: its file, or its values, if the same file opens as an image."""
    known = classify_file(entry.label_files)
    if known is not None or entry.coding is not None:
        return known or "unreadable"
    try:
        values = read_image(entry.label_files).data
    except DataError:
        return "unreadable"
    with np.errstate(invalid="ignore"):
        whole = bool((np.abs(values - np.rint(values)) <= 1e-4).all())
    return "unreadable" if whole else "not_whole"


def measure_image(volume: Volume) -> ImageFacts:
    flat = volume.data.reshape(volume.channels, -1)
    with np.errstate(invalid="ignore"):
        # NaN and infinity survive min and max, so a good image needs no mask of its own size.
        low, high = flat.min(axis=1), flat.max(axis=1)
    good = bool(np.isfinite(low).all() and np.isfinite(high).all())
    num_bad = 0 if good else int(flat.size - np.isfinite(flat).sum())
    step = flat.shape[1] // NUM_SAMPLED | 1  # odd, so that it does not walk down one column
    sample = flat[:, ::step].astype(np.float64)
    ends = np.percentile(sample, (0.5, 99.5), axis=1) if good else np.zeros((2, 1))
    return ImageFacts(
        shape=volume.spatial,
        channels=volume.channels,
        spacing=tuple(float(side) for side in volume.spacing),
        affine=volume.affine,
        num_bad=num_bad,
        low=tuple(low.tolist()) if good else (),
        high=tuple(high.tolist()) if good else (),
        typical=tuple(median_above_minimum(channel) for channel in sample) if good else (),
        scale=float((ends[1] - ends[0]).max()),
        digest=hash_pixels(volume),
    )


def median_above_minimum(values: NDArray[np.float64]) -> float:
    """The median without the background, which has the lowest value."""
    above = values[values > values.min()]
    return float(np.median(above if above.size else values))


def measure_label(volume: Volume) -> LabelFacts:
    flat = volume.data.reshape(-1)
    if int(flat.min()) >= 0 and int(flat.max()) < 65_536:
        counts = np.bincount(flat)
        values = np.flatnonzero(counts)
        numbers = counts[values]
    else:
        values, numbers = np.unique(flat, return_counts=True)
    pairs = zip(values[:MOST_VALUES].tolist(), numbers[:MOST_VALUES].tolist(), strict=True)
    digest = hash_pixels(volume)
    return LabelFacts(volume.spatial, volume.affine, dict(pairs), len(values), digest, volume.placed)


def hash_pixels(volume: Volume) -> str:
    data = np.ascontiguousarray(volume.data)
    found = hashlib.sha256(repr((data.shape, data.dtype.str)).encode())
    found.update(data.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
