"""federation.yaml: who takes part, with what data, written by `wardround data init`, edited by people.

    version: 1
    sources:                      # folders, relative to this file; a client's name where a folder is one
      - {path: polyp4, reader: centres}
    clients: [etis, kvasir]       # left out: all that have training cases
    channels: [red, green, blue]
    labels: {polyp: [1]}          # class 1 is "polyp": these values in the files; the rest is background
    regions: {polyp: [1]}         # what is measured: classes joined under a name
    splits: {ratios: [0.7, 0.1, 0.2], seed: 42}
    partition: {kind: natural}
    prepare: {size: [160, 160], normalise: zscore}

Every section has a default, so a short file is a good file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the file: unknown keys are errors, values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Section):
    """One folder (or list) of cases.

    reader: the layout, `auto` looks; client: the name all its cases get, left out where the layout has
    centres of its own; column: the column of a list that names the client.
    """

    path: Path
    reader: str = "auto"
    client: str | None = None
    column: str | None = None


class SplitSettings(Section):
    """Who is trained on, chosen by, reported.

    by: column takes the list's own split where it has one and draws for the rest; ratios draws for all;
    file reads `file`, which `wardround data split` writes and a person may edit; kfold takes fold `fold`
    of `folds`; repeated draws anew for each `repeat`. A group (patient) is never split apart.
    """

    by: Literal["column", "ratios", "file", "kfold", "repeated"] = "column"
    ratios: tuple[float, float, float] = (0.7, 0.1, 0.2)
    seed: int = 42
    file: Path | None = None
    folds: int = Field(5, ge=2, le=100)
    fold: int = Field(0, ge=0)
    repeat: int = Field(0, ge=0)


class PartitionSettings(Section):
    """How cases become clients in a simulation.

    natural: as they are; iid: dealt at random to `clients`; quantity: sizes by a power law of exponent
    `skew`; dirichlet: cases sorted by `by` (foreground size or class) dealt by a Dirichlet distribution of
    `alpha`; column: one client for each value of the list's `column`; feature: natural or iid clients whose
    images are each changed in one way (`shift`), strength `strength`.
    """

    kind: Literal["natural", "iid", "quantity", "dirichlet", "column", "feature"] = "natural"
    clients: int = Field(4, ge=2, le=100)
    skew: float = Field(1.5, gt=0)
    alpha: float = Field(0.5, gt=0)
    by: Literal["foreground", "class"] = "foreground"
    column: str | None = None
    shift: Literal["intensity", "resolution", "contrast"] = "intensity"
    strength: float = Field(0.5, ge=0, le=1)
    seed: int = 42


class PrepareSettings(Section):
    """What is done to every case once, before training.

    orientation: axes of 3D scans, null leaves them; spacing: millimetres to resample to; size: voxels to
    resize to (with spacing: to pad or crop to); crop: cut away what is empty around the body (foreground)
    first; normalise: zscore (of the whole image, or of voxels above zero: zscore_nonzero), percentile
    (`percentiles` become 0 and 1), minmax, maximum (divided by it), window (`window` centre and width, CT),
    none.
    """

    orientation: str | None = "RAS"
    spacing: tuple[float, ...] | None = None
    size: tuple[int, ...] | None = None
    crop: Literal["none", "foreground"] = "none"
    normalise: Literal["zscore", "zscore_nonzero", "percentile", "minmax", "maximum", "window", "none"] = (
        "zscore"
    )
    percentiles: tuple[float, float] = (0.5, 99.5)
    window: tuple[float, float] | None = None


class FederationFile(Section):
    """The whole file."""

    version: Literal[1] = 1
    sources: tuple[Source, ...] = Field(min_length=1)
    clients: tuple[str, ...] | None = None
    held_out: tuple[str, ...] = Field((), description="never train; only ever tested")
    channels: tuple[str, ...] = ()
    labels: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    regions: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    splits: SplitSettings = SplitSettings()
    partition: PartitionSettings = PartitionSettings()
    prepare: PrepareSettings = PrepareSettings()
    cache: Path | None = Field(
        None, description="folder of prepared cases; default .wardround-cache beside the file"
    )
    about: dict[str, Any] = Field(
        default_factory=dict, description="citation, licence: carried along, not used"
    )
