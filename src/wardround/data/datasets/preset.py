"""What a data-set preset says: one YAML file each, beside this one, checked when it is read.

    name, title, modality, cite, licence, get      what it is, whose it is, where it is
    layout, channels, labels, regions, clients     what the files look like and mean
    parts                                          how to find the cases (or reader: msd)
    splits, partition, held_out, prepare, papers   what to train on, and what the papers did
    notes, unverified                              what to know, and what could not be verified

A part finds its cases by one regular expression on paths such as `BraTS2021_00000/BraTS2021_00000_t1.nii.gz`,
seen from any folder; its named groups fill the templates for channels, label, client and patient.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from wardround.data.federation_file import PartitionSettings, PrepareSettings, SplitSettings
from wardround.errors import ConfigError
from wardround.settings import Settings
from wardround.text import suggest
from wardround.yaml_file import read_yaml

FOLDER = Path(__file__).parent
ANYWHERE = "(?P<at>(?:[^/]+/)*?)"  # the folders above what a part describes
Values = dict[str, tuple[int, ...]]


class DatasetPart(Settings):
    """Some clients of a data set, found by the names of their files.

    find: regular expression for the first channel's path, its groups are used below (`case` is needed);
    images: one template a channel; label: templates, the first that exists; more: regular expression for
    further masks of a case (BUSI has some), CASE standing for its name; client, name, group: templates;
    names: what a client is called instead; columns: groups that are carried along with a case; labels: the
    values in this part's files, where they differ from the preset's; grey: whether masks are pictures with
    values between; sequences: first frame of every video, for the group `frame`; run: frames a group, where
    the videos are not known; expects: an example path, for messages.
    """

    client: str
    find: str
    images: tuple[str, ...] = Field(min_length=1)
    label: tuple[str, ...] = Field(min_length=1)
    more: str | None = None
    name: str = "{case}"
    group: str | None = None
    names: dict[str, str] = Field(default_factory=dict)
    columns: tuple[str, ...] = ()
    labels: Values | None = None
    grey: bool = False
    sequences: tuple[int, ...] = ()
    run: int | None = Field(None, ge=1)
    expects: str

    @field_validator("find", "more")
    @classmethod
    def compiles(cls, value: str | None) -> str | None:
        if value is not None:
            re.compile(value)
        return value

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(ANYWHERE + self.find)


class DatasetPreset(Settings):
    """One data set (or a few that papers use together)."""

    name: str
    title: str
    modality: str
    dimensions: Literal[2, 3]
    cases: str
    cite: tuple[str, ...] = Field(min_length=1)
    licence: str
    get: tuple[str, ...] = Field(min_length=1)
    layout: str
    clients: str
    channels: tuple[str, ...] = ()
    labels: Values = Field(default_factory=dict)
    regions: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    reader: Literal["parts", "msd"] = "parts"
    folders: tuple[str, ...] = ()
    parts: tuple[DatasetPart, ...] = ()
    splits: SplitSettings = SplitSettings()
    partition: PartitionSettings = PartitionSettings()
    held_out: tuple[str, ...] = ()
    prepare: PrepareSettings = PrepareSettings()
    papers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @model_validator(mode="after")
    def makes_sense(self) -> Self:
        if (self.reader == "parts") != bool(self.parts):
            raise ValueError("parts are needed where the reader is parts, and only there")
        for part in self.parts:
            if len(part.images) not in (1, len(self.channels)):
                have = f"{part.client} has {len(part.images)} files"
                raise ValueError(f"{have} for {len(self.channels)} channels")
            if part.labels is not None and set(part.labels) != set(self.labels):
                raise ValueError(f"{part.client} has other classes than the preset")
        unknown = {name for names in self.regions.values() for name in names} - set(self.labels)
        if unknown:
            raise ValueError(f"regions name no class: {', '.join(sorted(unknown))}")
        return self

    @property
    def numbered_regions(self) -> dict[str, tuple[int, ...]]:
        """Regions by class number, as federation.yaml has them."""
        order = list(self.labels)
        return {name: tuple(order.index(c) + 1 for c in classes) for name, classes in self.regions.items()}

    def values_of(self, part: DatasetPart) -> Values:
        return self.labels if part.labels is None else part.labels

    @property
    def needs_labels(self) -> bool:
        """Whether `write_labels` makes a difference: grey masks, several a case, values that disagree."""
        return any(part.grey or part.more or part.labels is not None for part in self.parts)


def list_presets() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


@cache
def load_preset(name: str) -> DatasetPreset:
    """The preset of that name; an unknown one is answered with the nearest."""
    if name not in list_presets():
        raise ConfigError(
            f"'{name}' is not a data set.{suggest(name, list_presets())} List all: wardround datasets"
        )
    file = FOLDER / f"{name}.yaml"
    preset = DatasetPreset.read(read_yaml(file), f"{file}: ")
    if preset.name != name:
        raise ConfigError(f"{file}: name is '{preset.name}'; call it '{name}', as the file.")
    return preset
