"""Synthetic data sets in the true layout of a card: file names, formats, channels and label values.

    write_dataset(load_preset("polyp"), folder, {"kvasir": 8}, (32, 32))

What the files show are the synthetic heads of `data.phantom`; that they are read as the published set would
be is the point. Every layout starts from the card's own example of a path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wardround.data.datasets.preset import DatasetPart, DatasetPreset, Values, fill
from wardround.data.phantom.cases import PhantomScan, PhantomSettings, make_hospital, make_scan
from wardround.errors import DataError
from wardround.seeds import derive

THIN = 8  # slices of a volume that is cut into slices
MSD_CASE = re.compile(r"imagesTr/([A-Za-z]+_)(\d+)\.nii\.gz")
Labels = NDArray[np.uint8]


def write_dataset(card: DatasetPreset, folder: Path, clients: Mapping[str, int], size: Sequence[int]) -> None:
    """Write cases of a data set; clients: as the card calls them, with their numbers of cases.

    size: of the images; a card of volumes for which two sides are given gets thin ones.
    """
    sides = [*size, THIN] if len(size) < card.dimensions else list(size)
    seed = derive(42, card.name)  # no scan is in two sets
    for number, (client, count) in enumerate(clients.items()):
        settings = PhantomSettings(
            hospitals=number + 1,
            dimensions=card.dimensions,
            size=[max(16, side) for side in sides],
            channels=len(card.channels),
        )
        hospital = replace(make_hospital(settings, number, seed), empty=0.0)  # all have a lesion
        scans = (make_scan(settings, hospital, case, seed) for case in range(1, count + 1))
        if card.reader == "msd":
            write_task(card, folder, scans)
        else:
            write_part(card, folder, client, scans)


# Sets that are found by the names of their files


def write_part(card: DatasetPreset, folder: Path, client: str, scans: Iterator[PhantomScan]) -> None:
    part, words = find_part(card, client)
    for number, scan in enumerate(scans):
        own = rename(words, "case", name_case(part, words, number))
        write_images(scan, [folder / fill(template, own) for template in part.images])
        write_label(to_values(scan, card.values_of(part)), folder / fill(choose_label(part), own))


def find_part(card: DatasetPreset, client: str) -> tuple[DatasetPart, dict[str, str]]:
    """The first layout of a client, and the groups of its example path, as this client has them.

    The name of the card stands for all its clients: the example's own.
    """
    for part in card.parts:
        words = read_example(part)
        group = re.fullmatch(r"(.*)\{(\w+)\}(.*)", part.client)
        if part.client == client or client == card.name:
            return part, words
        said = next((said for said, name in part.names.items() if name == client), client)
        if group is not None and said.startswith(group[1]) and said.endswith(group[3]):
            own = rename(words, group[2], said[len(group[1]) : len(said) - len(group[3])])
            if part.pattern.fullmatch(own["at"] + fill(part.images[0], own)):
                return part, own
    raise DataError(f"The card of {card.name} has no example path for client '{client}'.")


def read_example(part: DatasetPart) -> dict[str, str]:
    """The groups of the image's path that the card gives as an example."""
    match = part.pattern.fullmatch(part.expects.split(" and ")[0])
    if match is None:
        raise DataError(f"The example '{part.expects}' is not found by its own pattern, {part.find}.")
    return {name: value or "" for name, value in match.groupdict().items()}


def choose_label(part: DatasetPart) -> str:
    """The template of the label that the card gives as an example, else the first."""
    words, example = read_example(part), part.expects.partition(" and ")[2]
    found = (label for label in part.label if (words["at"] + fill(label, words)).endswith(example))
    return next(found, part.label[0]) if example else part.label[0]


def rename(words: Mapping[str, str], group: str, value: str) -> dict[str, str]:
    """The groups with one of them changed, also where others contain it: a folder named after its case."""
    before = words[group]
    return {name: text.replace(before, value) if before else text for name, text in words.items()}


def name_case(part: DatasetPart, words: Mapping[str, str], number: int) -> str:
    """The name of a case, numbered from 0 as the set numbers its own; frames go from video to video."""
    if part.sequences:
        return str(part.sequences[number % len(part.sequences)] + number // len(part.sequences))
    if part.run is not None:
        return str(1 + number * part.run)
    case, patient = words["case"], words.get("patient", "")
    if patient and patient in case and patient != case:
        return case.replace(patient, f"{number + 1:0{len(patient)}d}")
    digits = list(re.finditer(r"\d+", case))
    if not digits:
        return f"{case}{number + 1:03d}"
    start, end = digits[-1].span()
    return f"{case[:start]}{number + 1:0{end - start}d}{case[end:]}"


# Tasks of the Medical Segmentation Decathlon


def write_task(card: DatasetPreset, folder: Path, scans: Iterator[PhantomScan]) -> None:
    example = MSD_CASE.search(card.layout)
    if example is None:
        raise DataError(f"The card of {card.name} shows no case of imagesTr.")
    home = folder / card.folders[0]
    pairs = []
    for number, scan in enumerate(scans, start=1):
        name = f"{example[1]}{number:0{len(example[2])}d}.nii.gz"
        write_images(scan, [home / "imagesTr" / name])
        write_label(to_values(scan, card.labels), home / "labelsTr" / name)
        pairs.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    facts = {
        "name": card.folders[0],
        "modality": {str(number): name for number, name in enumerate(card.channels)},
        "labels": {"0": "background"}
        | {str(value): name for name, values in card.labels.items() for value in values},
        "training": pairs,
    }
    (home / "dataset.json").write_text(json.dumps(facts), encoding="utf-8")


# Files


def to_values(scan: PhantomScan, values: Values) -> Labels:
    """The label with the values of a set: the lesion, cut into as many parts as there are classes."""
    taken = [own[0] for own in values.values()]
    result = np.full(scan.label.shape, 0 if 0 not in taken else 255, dtype=np.uint8)
    for value, part in zip(taken, np.array_split(np.flatnonzero(scan.label), len(taken)), strict=True):
        result.flat[part] = value
    return result


def write_images(scan: PhantomScan, paths: Sequence[Path]) -> None:
    """One file for every channel, or one for all."""
    image = scan.image
    if len(paths) == 1:
        save(np.moveaxis(image, 0, -1) if len(image) > 1 else image[0], paths[0])
        return
    for channel, path in zip(image, paths, strict=True):
        save(channel, path)


def write_label(label: Labels, path: Path) -> None:
    save(label, path, is_label=True)


def save(values: NDArray[Any], path: Path, *, is_label: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith((".nii", ".nii.gz")):
        tools: Any = nibabel
        tools.save(tools.Nifti1Image(values, np.eye(4)), path)
        return
    if not is_label:
        values = np.rint(values * (255 / max(1, int(values.max())))).astype(np.uint8)
    Image.fromarray(values).save(path)
