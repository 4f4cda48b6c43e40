"""Label files of one meaning for data sets whose masks cannot be used as they are.

    write_labels("fundus", Path("Fundus"), Path("fundus_labels"))

Masks that are grey pictures are cut to the nearest value, several masks of a case are joined, values that
mean different things in different sets become one class number. Images stay where they are; the list
names them.

    <out>/list.csv                       image, label, case, patient, centre and what file names say
    <out>/labels/<centre>/<case>.png     0 background, 1, 2 ... the classes of the preset
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wardround.data.datasets.preset import DatasetPart, DatasetPreset, FoundCase, find_cases, load_preset
from wardround.data.readers.image_files import read_label
from wardround.errors import ConfigError, DataError
from wardround.files import file_name, new_folder

LIST = "list.csv"
HEADS = ("image", "label", "case", "patient", "centre")


@dataclass(frozen=True)
class WrittenLabels:
    """The list, how many cases it has, and what could not be used."""

    path: Path
    num_cases: int
    notes: tuple[str, ...]


def write_labels(name: str, root: Path, out: Path) -> WrittenLabels:
    """Labels and list in a new or empty folder, which appears when complete."""
    preset = load_preset(name)
    if not preset.needs_labels:
        raise ConfigError(f"The labels of {preset.name} can be used as they are; there is nothing to write.")
    out = Path(out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists and is not an empty folder; name a new one.")
    cases, notes = find_cases(preset, root)
    with new_folder(out) as unfinished:
        rows = write_all(preset, cases, unfinished, notes)
    return WrittenLabels(out / LIST, len(rows), tuple(notes))


def write_all(
    preset: DatasetPreset,
    cases: list[FoundCase],
    folder: Path,
    notes: list[str],
) -> list[dict[str, str]]:
    """The label of every case, then the list."""
    rows = []
    for case in sorted(cases, key=lambda found: (found.entry.client, found.entry.name)):
        try:
            rows.append(write_one(preset, case, folder))
        except DataError as error:
            notes.append(f"{case.entry.where} is left out: {error}")
    if not rows:
        raise DataError(" ".join(["No label could be written.", *notes[-2:]]))
    more = sorted({head for row in rows for head in row} - set(HEADS))
    with (folder / LIST).open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*HEADS, *more], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    return rows


def write_one(preset: DatasetPreset, case: FoundCase, folder: Path) -> dict[str, str]:
    entry = case.entry
    if not case.masks:
        raise DataError("it has no mask.")
    if any(";" in str(image) for image in entry.images):
        raise DataError("its path has a semicolon, which separates channels in a list; rename the folder.")
    masks = [read_classes(preset, case.part, mask) for mask in case.masks]
    if len({mask.shape for mask in masks}) > 1:
        raise DataError("its masks have different sizes.")
    path = Path("labels") / file_name(entry.client) / f"{file_name(entry.name)}.png"
    (folder / path.parent).mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.maximum.reduce(masks)).save(folder / path)
    return {
        **entry.columns,
        "image": ";".join(str(image) for image in entry.images),
        "label": path.as_posix(),
        "case": entry.name,
        "patient": entry.group,
        "centre": entry.client,
    }


def read_classes(preset: DatasetPreset, part: DatasetPart, mask: Path) -> NDArray[np.uint8]:
    """A mask's class numbers (row, column)."""
    data: NDArray[Any] = read_label(mask).data[0]
    if data.ndim != 2:
        raise DataError(f"{mask} is not a picture of two axes.")
    numbered = enumerate(preset.values_of(part).values(), start=1)
    number = {value: index for index, own in numbered for value in own}  # value in the files -> class
    if part.grey:
        # A repacked copy may store 0 and 1, which the nearest value would make all black.
        whole = data * 255 if data.max() == 1 and list(number) == [255] else data
        data = snap_to_nearest(whole, sorted({0, 255, *number}))
    result = np.zeros(data.shape, dtype=np.uint8)
    for value, index in number.items():
        result[data == value] = index
    return result


def snap_to_nearest(data: NDArray[Any], levels: Sequence[int]) -> NDArray[Any]:
    """Every value as the nearest of some levels, which rise."""
    ordered = np.array(levels)
    between = (ordered[1:] + ordered[:-1]) / 2
    snapped: NDArray[Any] = ordered[np.searchsorted(between, data)]
    return snapped
