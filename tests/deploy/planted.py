"""Three hospitals on disk whose scans and files differ in ways that a survey must name.

north   channels t2, adc; lesion 1, gland 2; voxels of 1 x 1 x 3 mm
east    channels adc, t2; Gland 1, Lesion 2
south   as north, but voxels of 2 x 2 x 3 mm, three times as bright, and a cyst (3) in three patients
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

NAMES = ("east", "north", "south")
CASES = 14
SIDE, SLICES = 24, 8
LABELS: dict[str, dict[str, int]] = {
    "north": {"lesion": 1, "gland": 2},
    "east": {"Gland": 1, "Lesion": 2},
    "south": {"lesion": 1, "gland": 2, "cyst": 3},
}
CYSTS = 3  # patients of south


def plant(folder: Path, cases: int = CASES) -> dict[str, Path]:
    """Write the hospitals; name -> its federation.yaml."""
    return {name: plant_one(folder / name, name, cases) for name in NAMES}


def plant_one(folder: Path, name: str, cases: int) -> Path:
    generator = np.random.default_rng(len(name) + ord(name[0]))
    raw = folder / "Dataset001_Planted"
    for part in ("imagesTr", "labelsTr"):
        (raw / part).mkdir(parents=True)
    channels = ("adc", "t2") if name == "east" else ("t2", "adc")
    side = 2.0 if name == "south" else 1.0
    affine = np.diag([side, side, 3.0, 1.0])
    for number in range(cases):
        label = draw_label(name, number, generator)
        for place, channel in enumerate(channels):
            image = draw_image(label, LABELS[name], channel, generator) * (3.0 if name == "south" else 1.0)
            save(raw / "imagesTr" / f"p{number:03d}_{place:04d}.nii.gz", image.astype(np.float32), affine)
        save(raw / "labelsTr" / f"p{number:03d}.nii.gz", label, affine)
    dataset: dict[str, Any] = {
        "channel_names": {str(place): channel for place, channel in enumerate(channels)},
        "labels": {"background": 0, **LABELS[name]},
        "numTraining": cases,
        "file_ending": ".nii.gz",
    }
    (raw / "dataset.json").write_text(json.dumps(dataset))
    file = folder / "federation.yaml"
    file.write_text(
        f"version: 1\nsources: [{{path: {raw.name}, reader: nnunet, client: {name}}}]\n"
        "splits: {by: ratios, ratios: [0.6, 0.2, 0.2], seed: 1}\nprepare: {normalise: zscore}\n"
    )
    return file


def draw_label(name: str, number: int, generator: np.random.Generator) -> np.ndarray:
    values = {key.casefold(): value for key, value in LABELS[name].items()}
    label = np.zeros((SIDE, SIDE, SLICES), dtype=np.uint8)
    x, y = generator.integers(5, 9, size=2)
    label[x : x + 10, y : y + 10, 2:6] = values["gland"]
    label[x + 2 : x + 6, y + 2 : y + 6, 3:5] = values["lesion"]
    if "cyst" in values and number < CYSTS:
        label[x + 7 : x + 9, y + 7 : y + 9, 3:5] = values["cyst"]
    return label


def draw_image(
    label: np.ndarray, labels: dict[str, int], channel: str, generator: np.random.Generator
) -> np.ndarray:
    """Lesions are bright in t2 and dark in adc."""
    values = {key.casefold(): value for key, value in labels.items()}
    image = 100 + generator.normal(0, 5, label.shape)
    image[label == values["gland"]] += 40
    image[label == values["lesion"]] += 90 if channel == "t2" else -60
    image[:2] = 0
    return image


def save(path: Path, content: np.ndarray, affine: np.ndarray) -> None:
    nibabel.save(nibabel.Nifti1Image(content, affine), path)
