"""Real cases: one folder for each centre, with `images/` and `labels/`, and a list that says which is which.

    <root>/<centre>/images/<stem>.jpg | .png | .nii.gz
    <root>/<centre>/labels/<stem>.png | .nii.gz      integer class values
    <root>/index.csv                                 columns centre, stem, split (train, val or test)

Images are brought to one size and scaled by themselves; spacing follows the size, so that distances stay
in millimetres (pixels, where a file has none).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from wardround.data.cases import Case, ClientData, TensorSplit
from wardround.data.readers.image_files import upright
from wardround.errors import DataError
from wardround.settings import Settings
from wardround.text import format_size

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".nii.gz", ".nii")
SPLITS = ("train", "val", "test")


class FolderSettings(Settings):
    """Folders of one centre each, with a list of cases."""

    root: Path = Field(description="The folder that holds the centres' folders and index.csv.")
    clients: tuple[str, ...] | None = Field(
        None, description="Centres to use; left out: all with training cases."
    )
    size: tuple[int, ...] = Field(description="Size every image is brought to: two or three numbers.")
    num_classes: int = Field(2, ge=2, le=32, description="Label values, background included.")
    normalise: Literal["zscore", "maximum", "minmax"] = Field(
        "zscore", description="zscore: mean 0, SD 1 per channel; maximum: divided by it; minmax: 0 to 1."
    )
    regions: dict[str, tuple[int, ...]] | None = Field(
        None, description="What is measured: label values joined under a name. Left out: each class."
    )


class Folders:
    """The cases of a list, read when a client is loaded."""

    def __init__(self, settings: FolderSettings) -> None:
        self.settings = settings

    @cached_property
    def index(self) -> dict[str, list[tuple[str, str]]]:
        """Centre -> (stem, split) of its cases, sorted."""
        path = self.settings.root / "index.csv"
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}. It lists centre, stem and split."
            ) from None
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{path} is not a CSV file ({error}).") from None
        found: dict[str, list[tuple[str, str]]] = {}
        seen: set[tuple[str, str]] = set()
        for number, row in enumerate(rows, start=2):
            centre, stem, split = row.get("centre"), row.get("stem"), row.get("split")
            if not centre or not stem or split not in SPLITS:
                raise DataError(
                    f"{path}, line {number}: needs centre, stem and split (train, val or test), "
                    f"found {centre!r}, {stem!r}, {split!r}."
                )
            if "/" in centre or "\\" in centre or centre.startswith("."):
                raise DataError(f"{path}, line {number}: '{centre}' is not the name of a folder.")
            if (centre, stem) in seen:
                raise DataError(f"{path}, line {number}: case '{stem}' of '{centre}' is listed twice.")
            seen.add((centre, stem))
            found.setdefault(centre, []).append((stem, split))
        return {centre: sorted(cases) for centre, cases in found.items()}

    @cached_property
    def names(self) -> list[str]:
        """The clients: those asked for, or every centre that has training cases."""
        chosen = self.settings.clients
        if chosen is None:
            chosen = self._with_training_cases()
        if not chosen:
            raise DataError(f"{self.settings.root}: no centre has training cases (split train in index.csv).")
        for name in chosen:
            if name not in self.index:
                raise DataError(
                    f"{self.settings.root} has no centre '{name}'; it has {', '.join(sorted(self.index))}."
                )
        return list(chosen)

    def _with_training_cases(self) -> tuple[str, ...]:
        found = (c for c, cases in self.index.items() if any(split == "train" for _, split in cases))
        return tuple(sorted(found))

    @cached_property
    def channels(self) -> int:
        """Channels of the first image; all others must have as many."""
        name = self.names[0]
        image, _ = read_image(find(self.settings.root / name / "images", self.index[name][0][0]))
        return len(image)

    @property
    def regions(self) -> Mapping[str, tuple[int, ...]]:
        classes = range(1, self.settings.num_classes)
        return self.settings.regions or {f"class {value}": (value,) for value in classes}

    def counts(self) -> dict[str, int]:
        return {name: len(self.index[name]) for name in self.names}

    def first_images(self) -> Iterator[Path]:
        """The image file of every case."""
        for name in self.names:
            for stem, _ in self.index[name]:
                yield find(self.settings.root / name / "images", stem)

    def load(self, name: str) -> ClientData:
        cases: dict[str, list[Case]] = {split: [] for split in SPLITS}
        for stem, split in self.index[name]:
            cases[split].append(self.case(name, stem))
        return ClientData(**{split: TensorSplit.of(members) for split, members in cases.items()})

    def case(self, name: str, stem: str) -> Case:
        """One case, resized and normalised; what does not fit is named."""
        where = f"client '{name}', case '{stem}'"
        folder = self.settings.root / name
        image, spacing = read_image(find(folder / "images", stem))
        label = read_label(find(folder / "labels", stem))
        if image.shape[1:] != label.shape:
            raise DataError(f"{where}: image is {shape(image[0])} but label is {shape(label)}. Resample one.")
        if image.ndim - 1 != len(self.settings.size):
            raise DataError(
                f"{where}: image has {image.ndim - 1} dimensions, "
                f"but size has {len(self.settings.size)} numbers."
            )
        if len(image) != self.channels:
            raise DataError(f"{where}: {len(image)} channels, but the first image has {self.channels}.")
        if int(label.max()) >= self.settings.num_classes:
            raise DataError(
                f"{where}: label value {int(label.max())}, but num_classes is {self.settings.num_classes}."
            )
        size = self.settings.size
        mode = "bilinear" if len(size) == 2 else "trilinear"
        small = F.interpolate(image[None], size=size, mode=mode, antialias=mode == "bilinear")[0]
        mask = F.interpolate(label[None, None].float(), size=size, mode="nearest-exact")[0, 0]
        new = tuple(s * old / now for s, old, now in zip(spacing, label.shape, size, strict=True))
        return Case(stem, normalised(small, self.settings.normalise), mask.to(torch.uint8), new)


def find(folder: Path, stem: str) -> Path:
    """The file of a case in a folder, whatever its ending."""
    if "/" in stem or "\\" in stem or stem.startswith("."):
        raise DataError(f"{folder}: '{stem}' is not a file's stem.")
    for ending in IMAGE_ENDINGS:
        path = folder / f"{stem}{ending}"
        if path.exists():
            return path
    raise DataError(f"{folder} has no image '{stem}' ({', '.join(IMAGE_ENDINGS)}).")


def read_array(path: Path) -> tuple[Tensor, tuple[float, ...], bool]:
    """Values as stored, spacing, and whether the last axis holds channels."""
    try:
        if path.name.endswith((".nii", ".nii.gz")):
            import nibabel

            loaded: Any = nibabel.load(path)
            values = np.asarray(loaded.dataobj)
            spacing = tuple(float(side) for side in loaded.header.get_zooms()[:3])
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)), spacing, values.ndim == 4
        from PIL import Image

        with path.open("rb") as file, Image.open(file) as picture:
            values = np.asarray(upright(picture))
    except Exception as error:  # every library has errors of its own for a broken file
        raise DataError(f"{path} cannot be read: {error}.") from None
    return torch.from_numpy(values.astype(np.float32)), (1.0, 1.0), values.ndim == 3


def read_image(path: Path) -> tuple[Tensor, tuple[float, ...]]:
    """(C, *spatial) float32 and its spacing."""
    values, spacing, with_channels = read_array(path)
    image = values.movedim(-1, 0).contiguous() if with_channels else values[None]
    if not bool(torch.isfinite(image).all()):
        raise DataError(f"{path} holds NaN or infinite values.")
    return image, spacing


def read_label(path: Path) -> Tensor:
    """(*spatial) whole class values."""
    values, _, with_channels = read_array(path)
    label = values[..., 0] if with_channels else values
    if not bool(((label == label.round()) & label.isfinite()).all()) or float(label.min()) < 0:
        raise DataError(f"{path} holds label values that are not 0, 1, 2 ...")
    return label.long()


def normalised(image: Tensor, how: str) -> Tensor:
    """Intensities of one case, scaled by themselves; a constant channel becomes 0 (maximum: 1 or -1)."""
    axes = tuple(range(1, image.ndim))
    largest = image.abs().amax()
    if how == "maximum":
        return image / largest.clamp_min(1e-6)
    least = (1e-5 * largest).clamp_min(1e-12)  # below it, differences are rounding
    if how == "minmax":
        low, high = image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)
        return torch.where(high - low > least, (image - low) / (high - low).clamp_min(least), 0.0)
    deviation = image.std(axes, keepdim=True)
    centred = image - image.mean(axes, keepdim=True)
    return torch.where(deviation > least, centred / deviation.clamp_min(least), 0.0)


def shape(tensor: Tensor) -> str:
    return format_size(tensor.shape)
