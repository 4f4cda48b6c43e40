"""Record: what was done to the scans of a run, kept with its model so that it can be used elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wardround.data.federation import Federation
from wardround.data.federation_file import PrepareSettings
from wardround.errors import CheckpointError
from wardround.files import parse_json, write_json

PREPARATION = "preparation.json"
FORMAT = 1
MOST_CHANNELS = 10_000


@dataclass(frozen=True)
class Preparation:
    """What a run did to its scans before the network saw them: preparation.json in the run folder.

    classes: their names, background first; labels: class -> the values that meant it in the label files;
    regions: what is measured, class numbers joined under a name; channels: names in their order, where
    given; prepare: the settings of `prepare`; patch: its size in voxels, None for whole
    images; shape: of a typical prepared scan, where known; spacing: lowest and highest voxel sides of the
    training scans in millimetres, along the prepared axes, where known; lacking: whether scans lacked
    channels in training, so that others may: absent ones are zeros in the prepared image.
    """

    dimensions: int
    in_channels: int
    classes: tuple[str, ...]
    regions: Mapping[str, tuple[int, ...]]
    channels: tuple[str, ...] = ()
    labels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prepare: Mapping[str, Any] = field(default_factory=dict)
    patch: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    spacing: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    lacking: bool = False

    @classmethod
    def of(cls, federation: Federation, *, drops_channels: bool = False) -> Preparation:
        """What a federation does to its scans, and what these were like; drops_channels: in training."""
        labels = {name: tuple(values) for name, values in federation.labels.items()}
        for number in range(len(labels) + 1, federation.num_classes):
            labels[f"class {number}"] = (number,)
        seen = federation.summarise_scans() if federation.summarise_scans is not None else None
        settings = federation.prepare or PrepareSettings(orientation=None, normalise="none")
        return cls(
            dimensions=federation.dimensions,
            in_channels=federation.in_channels,
            classes=("background", *labels),
            regions={name: tuple(classes) for name, classes in federation.regions.items()},
            channels=tuple(federation.channels),
            labels=labels,
            prepare=settings.model_dump(mode="json"),
            patch=None if seen is None else seen.patch,
            shape=None if seen is None else seen.shape,
            spacing=None if seen is None else seen.spacing,
            lacking=bool(federation.lacks) or drops_channels,
        )

    @classmethod
    def load(cls, path: Path) -> Preparation:
        try:
            plain = parse_json(path.read_text(encoding="utf-8"))
            plain.pop("format")
            for name in ("classes", "channels", "patch", "shape"):
                plain[name] = None if plain[name] is None else tuple(plain[name])
            for name in ("regions", "labels"):
                plain[name] = {key: tuple(values) for key, values in plain[name].items()}
            if plain["spacing"] is not None:
                low, high = plain["spacing"]
                plain["spacing"] = (tuple(low), tuple(high))
            found = cls(**plain)
            if found.dimensions not in (2, 3) or type(found.in_channels) is not int:
                raise ValueError("dimensions or in_channels is not one")
            if not found.classes or not 1 <= found.in_channels <= MOST_CHANNELS:
                raise ValueError(f"no classes, or not 1 to {MOST_CHANNELS} channels")
            PrepareSettings.model_validate(dict(found.prepare))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{path} cannot be used ({reason}). Copy it from the run again.") from None
        return found

    def save(self, path: Path) -> None:
        plain = {"format": FORMAT, **asdict(self)}
        if not self.lacking:
            plain.pop("lacking")
        write_json(path, plain)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def settings(self) -> PrepareSettings:
        return PrepareSettings.model_validate(dict(self.prepare))

    @property
    def values(self) -> tuple[int, ...]:
        """The value of each class in mask files: 0, then the first value it had in the label files."""
        given = [self.labels[name][0] if self.labels.get(name) else n for n, name in self.numbered]
        return (0, *given)

    @property
    def numbered(self) -> list[tuple[int, str]]:
        """Class numbers and names without the background."""
        return list(enumerate(self.classes))[1:]

    @property
    def window(self) -> tuple[int, ...] | None:
        """Voxels the network sees at once: the training patch, or the typical size of a prepared scan."""
        return self.patch or self.settings.size or self.shape
