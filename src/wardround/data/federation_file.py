"""federation.yaml: who takes part, with what data, written by `wardround data init`, edited by hand.

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

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from wardround.data.channels import check_channel_names
from wardround.data.readers.common import join_names
from wardround.errors import ConfigError
from wardround.files import write_text
from wardround.settings import Settings
from wardround.yaml_file import commented, dumped, read_yaml, seen_from

OPPOSITE = str.maketrans("LPI", "RAS")
BACKGROUND = ("background", "bg")  # not names of a class


def expand_home(path: Path) -> Path:
    """`~` expanded as in a shell; an unknown user stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111, Path.expanduser ends where a user is unknown


def as_list(values: Any) -> Any:
    """A number alone is a list of one."""
    return [values] if isinstance(values, int) and not isinstance(values, bool) else values


def as_colours(values: Any) -> Any:
    """Colours such as #ff0000 in lower case."""
    if not isinstance(values, dict):
        return values
    for name in values:
        if not isinstance(name, str) or not re.fullmatch("#[0-9A-Fa-f]{6}", name):
            raise ValueError(f"{name!r} is not a colour; write '#ff0000', in quotes")
    return {name.lower(): value for name, value in values.items()}


def as_names(values: Any) -> Any:
    """A name alone is a list of one."""
    return [values] if isinstance(values, str) else values


def as_slices(value: Any) -> Any:
    """An axis alone says how slices were cut."""
    return {"along": value} if isinstance(value, str) else value


Place = Annotated[Path, AfterValidator(expand_home)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(as_list)]
ByteValue = Annotated[int, Field(ge=0, le=255)]
Colours = Annotated[dict[str, ByteValue], BeforeValidator(as_colours), Field(min_length=1)]


class Source(Settings):
    """One folder (or list) of cases.

    reader: the layout, `auto` detects it, `package.module:READER` is your own; client: the name all its cases
    get, left out where the layout names centres itself; column: the column of a list that names the client;
    labels: class name -> values in the files of this source, in place of the common `labels`; a class left
    out is one that its annotators did not draw; columns: of a list, what is needed -> the column that has it,
    such as {image: scan, label: contour}; colours: of coloured masks, colour -> value, 0 for background;
    masks: where every class has a mask file of its own, name of the mask -> value; overlap: where such masks
    overlap, refuse (default) the case, or paint the later of `masks` over the earlier (later); channels: what
    the images of this source hold, in their order, where that is not what `channels` says; `-`: not used.
    """

    path: Place
    reader: str = "auto"
    client: str | None = None
    column: str | None = None
    labels: dict[str, Numbers] | None = None
    columns: dict[str, str] | None = None
    colours: Colours | None = None
    masks: dict[str, ByteValue] | None = Field(None, min_length=1)
    overlap: Literal["refuse", "later"] | None = None
    channels: Annotated[tuple[str, ...] | None, BeforeValidator(as_names)] = Field(None, min_length=1)


class SplitSettings(Settings):
    """Who is trained on, chosen by, reported.

    by: column takes the list's own split where it has one and draws for the rest; ratios draws for all;
    file reads `file`, which `wardround data split` writes and you may edit; kfold takes fold `fold`
    of `folds`, of an nnU-Net folder those of its splits_final.json; repeated draws again for each `repeat`.
    A group (patient) is never split apart.
    """

    by: Literal["column", "ratios", "file", "kfold", "repeated"] = "column"
    ratios: tuple[float, float, float] = (0.7, 0.1, 0.2)
    seed: int = 42
    file: Place | None = None
    folds: int = Field(5, ge=2, le=100)
    fold: int = Field(0, ge=0)
    repeat: int = Field(0, ge=0)


class PartitionSettings(Settings):
    """How cases become clients in a simulation.

    kind: natural leaves them as they are; iid deals them at random; quantity makes sizes that follow a power
    law of exponent `skew`; dirichlet deals cases, sorted by foreground size or class, by a Dirichlet
    distribution of `alpha`; column makes a client of each value of the list's `column`; feature changes the
    images of each client in one way (`shift`), by `strength`.
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


class SliceSettings(Settings):
    """How `wardround data slices` cut 2D images from volumes, so that `predict` can do the same.

    along: the axis; clip: the percentile of a volume above which values were cut off.
    """

    along: Literal["R", "A", "S"]
    clip: float | None = Field(None, gt=0, le=100)


class PrepareSettings(Settings):
    """What is done to every case once, before training.

    orientation: axes of 3D scans, null leaves them; spacing: millimetres to resample to; size: voxels to
    resize to (with spacing: to pad or crop to); crop: cut away what is empty around the body (foreground)
    first; normalise: zscore (of the whole image, or of voxels above zero: zscore_nonzero), percentile
    (`percentiles` become 0 and 1), minmax, maximum (divided by it), window (`window` centre and width, CT),
    ct (clipped to joint percentiles, then a z-score by joint mean and SD, as nnU-Net does), none;
    intensities: for ct, [0.5th percentile, 99.5th percentile, mean, SD] of foreground voxels of all training
    cases, a row a channel, null for a channel that is not CT and gets a zscore; slices: how 2D images were
    cut from volumes, as `wardround data slices` writes it.
    """

    orientation: str | None = "RAS"
    spacing: tuple[float, ...] | None = None
    size: tuple[int, ...] | None = None
    crop: Literal["none", "foreground"] = "none"
    normalise: Literal[
        "zscore", "zscore_nonzero", "percentile", "minmax", "maximum", "window", "ct", "none"
    ] = "zscore"
    percentiles: tuple[float, float] = (0.5, 99.5)
    window: tuple[float, float] | None = None
    intensities: tuple[tuple[float, float, float, float] | None, ...] | None = None
    slices: Annotated[SliceSettings | None, BeforeValidator(as_slices)] = None


class FederationFile(Settings):
    """The whole file."""

    version: Literal[1] = 1
    sources: tuple[Source, ...] = Field(min_length=1)
    clients: tuple[str, ...] | None = None
    held_out: tuple[str, ...] = Field((), description="never train; only ever tested")
    channels: tuple[str, ...] = ()
    channels_of: dict[str, Annotated[tuple[str, ...], BeforeValidator(as_names)]] = Field(
        default_factory=dict,
        description="client -> what its images hold, in their order, where that is not all of channels in "
        "their order; what is not named is absent there; `-` is a channel that is not used",
    )
    labels: dict[str, Numbers] = Field(default_factory=dict)
    regions: dict[str, Numbers] = Field(default_factory=dict)
    ignore: Numbers = Field(
        (),
        description="label values of voxels that nobody annotated: they count in no loss and no score",
    )
    background: Numbers = Field(
        (), description="label values of no class that are background on purpose, however few cases have them"
    )
    annotates: dict[str, Annotated[tuple[str, ...], BeforeValidator(as_names)]] = Field(
        default_factory=dict,
        description="client -> the classes, or regions outlined as a whole, that it annotates; the others "
        "count as unknown in its loss and are not scored there; a client left out annotates all",
    )
    unlabelled: Annotated[tuple[str, ...], BeforeValidator(as_names)] = Field(
        (),
        description="clients whose cases without a label train without one; elsewhere such a case is left "
        "out, since its label may have been forgotten",
    )
    labels_differ: bool = Field(
        False, description="a class that some clients do not have is meant; otherwise `train` refuses it"
    )
    splits: SplitSettings = SplitSettings()
    partition: PartitionSettings = PartitionSettings()
    prepare: PrepareSettings = PrepareSettings()
    cache: Place | None = Field(
        None, description="folder of prepared cases; default .wardround-cache beside the file"
    )
    about: dict[str, Any] = Field(
        default_factory=dict, description="citation, licence: carried along, not used"
    )


# Reading the file


def load(path: Path) -> FederationFile:
    """The checked file; the first mistake is named with its key."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist. Write one with: wardround data init FOLDER... -o {path.name}"
        )
    values = read_yaml(path)
    try:
        file = FederationFile.read(values)
        check_consistency(file)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return file


def check_consistency(file: FederationFile) -> None:
    """What types cannot express: classes share no values, regions name classes, a client has one role."""
    meaning = check_label_map(file.labels, "labels")
    everywhere = dict.fromkeys(file.background, "background") | meaning
    for number, source in enumerate(file.sources):
        own = check_label_map(source.labels or {}, f"sources.{number}.labels")
        unknown = [name for name in source.labels or () if name not in file.labels]
        if unknown:
            raise ConfigError(
                f"sources.{number}.labels names '{unknown[0]}', which labels does not; it has: "
                f"{join_names(file.labels) or 'none'}. Name every class there, in its order."
            )
        if source.labels is not None and not own:
            raise ConfigError(f"sources.{number}.labels is empty; give its classes, or leave it out.")
        everywhere = own | everywhere  # what is ignored is so at all clients
    for name, classes in file.regions.items():
        if not classes or (file.labels and not set(classes) <= set(range(1, len(file.labels) + 1))):
            raise ConfigError(
                f"regions.{name} is {list(classes)}; give class numbers from 1 to "
                f"{len(file.labels) or '...'} ({join_names(file.labels)})."
            )
    for name in ("annotates", "unlabelled", "channels_of"):
        if getattr(file, name) and file.partition.kind not in ("natural", "feature"):
            raise ConfigError(
                f"{name} names clients, but partition.kind is {file.partition.kind}, which deals the cases "
                "of all to new ones. Leave one of the two out."
            )
    for name, values, to in (("background", file.background, meaning), ("ignore", file.ignore, everywhere)):
        value = next((value for value in values if value in to), None)
        if value is not None:
            raise ConfigError(f"{name}: value {value} is '{to[value]}'. A value is one of them.")
    for name, given in (("clients", file.clients or ()), ("unlabelled", file.unlabelled)):
        both = sorted(set(given) & set(file.held_out))
        if both:
            raise ConfigError(f"'{both[0]}' is in {name} and in held_out; a client is one of them.")
    named = {f"channels_of.{client}": names for client, names in file.channels_of.items()}
    named |= {f"sources.{n}.channels": own.channels for n, own in enumerate(file.sources) if own.channels}
    check_channel_names(file.channels, named)
    check_settings(file.prepare)


def check_label_map(labels: Mapping[str, Sequence[int]], where: str) -> dict[int, str]:
    """The class of every value; two classes of one value, and background as a class, are refused."""
    meaning: dict[int, str] = {}
    for name, values in labels.items():
        if name.strip().casefold() in BACKGROUND:
            raise ConfigError(
                f"{where}.{name} is {list(values)}; background is not a class but every other value. "
                "Leave it out, and count regions from the first class that stays."
            )
        if not values or min(values) < 0:
            raise ConfigError(f"{where}.{name} is {list(values)}; give the values in the files, 0 or more.")
        for value in values:
            if meaning.setdefault(value, name) != name:
                raise ConfigError(
                    f"{where}: value {value} is both '{meaning[value]}' and '{name}'. A value has one class; "
                    "join classes under regions."
                )
    return meaning


def check_settings(settings: PrepareSettings) -> None:
    """Refuse settings with which no case could be prepared."""
    code = settings.orientation
    if code is not None and "".join(sorted(code.upper().translate(OPPOSITE))) != "ARS":
        raise ConfigError(f"prepare.orientation is '{code}'; give three letters such as RAS, or null.")
    if settings.spacing is not None and not all(0 < side < math.inf for side in settings.spacing):
        raise ConfigError(
            f"prepare.spacing is {list(settings.spacing)}; give finite numbers above 0, in millimetres."
        )
    if settings.size is not None and min(settings.size, default=0) < 1:
        raise ConfigError(f"prepare.size is {list(settings.size)}; give at least 1 voxel an axis.")
    low, high = settings.percentiles
    if not 0 <= low < high <= 100:
        raise ConfigError(f"prepare.percentiles are {low:g} and {high:g}; they rise, from 0 to 100.")
    centre, width = settings.window or (0.0, 0.0)
    if settings.normalise == "window" and not (math.isfinite(centre) and 0 < width < math.inf):
        raise ConfigError("prepare.normalise is window; give prepare.window: [centre, width], width above 0.")
    if settings.normalise == "ct" and not settings.intensities:
        raise ConfigError(
            "prepare.normalise is ct; give prepare.intensities: for each channel [0.5th percentile, "
            "99.5th percentile, mean, SD] of the training cases' foreground."
        )
    for number, row in enumerate(settings.intensities or ()):
        if row is not None and not (all(map(math.isfinite, row)) and row[0] < row[1] and row[3] > 0):
            raise ConfigError(
                f"prepare.intensities.{number} is {list(row)}; give two percentiles that rise, a mean and an "
                "SD above 0."
            )


# Writing the file

ABOUT = """\
# Who takes part, with what data. Written by `wardround data init`; made to be edited.
# Check it: wardround data check {name}    Prepare: wardround data prepare {name}
"""
COMMENTS = {
    "sources": "Folders or lists of cases, relative to this file. Readers: auto, nnunet, msd, "
    "bids, centres, table, beside.",
    "clients": "Who trains; leave it out for all that have training cases.",
    "held_out": "Never train, only ever tested: an unseen hospital.",
    "channels": "What the channels of an image show, in their order.",
    "channels_of": "What the images of a client hold, in their order, where it lacks channels.",
    "labels": "Class name: the values in the label files that mean it. Everything else is background.",
    "regions": "What is measured: class numbers (1 is the first of labels) joined under a name.",
    "ignore": "Label values of voxels that nobody annotated; they count in no loss and no score.",
    "background": "Label values of no class that are background on purpose.",
    "annotates": "Classes, or regions outlined as a whole, that a client annotates, where that is not all.",
    "unlabelled": "Clients whose cases without a label train without (mean_teacher or pseudo_labels).",
    "labels_differ": "A class that some clients do not have is meant.",
    "splits": "Cases to train on, to choose by, to report; a patient is never split apart.\n"
    "by: column (what the list says, the rest drawn), ratios, file, kfold, repeated.",
    "partition": "How cases become clients: natural (as they are), iid, quantity, dirichlet, "
    "column, feature.",
    "prepare": "Done once to every case: orientation, spacing (mm), size (voxels), crop, normalise.",
    "cache": "Where prepared cases are kept.",
    "about": "Where the data come from; carried along.",
}
ALWAYS = ("splits", "partition", "prepare")  # written even where they are the defaults, to be found


def write(
    file: FederationFile,
    path: Path,
    *,
    notes: Sequence[str] = (),
    proposed: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write the file with comments, atomically; notes become comments on top.

    proposed: settings to be confirmed, written behind a # at their place.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise ConfigError(
            f"{path} already exists and may hold edits of yours; give another name or remove it."
        )
    write_text(path, as_text(file, path, notes, proposed or {}))


def as_text(
    file: FederationFile, path: Path, notes: Sequence[str] = (), proposed: Mapping[str, Any] | None = None
) -> str:
    """The file as YAML, its paths relative to `path` where that is sensible."""
    plain = file.model_dump(mode="json", exclude_defaults=True)
    plain |= {name: short(getattr(file, name)) for name in ALWAYS}
    plain["sources"] = [
        {**source.model_dump(mode="json", exclude_none=True), "path": seen_from(source.path, path.parent)}
        for source in file.sources
    ]
    parts = [ABOUT.format(name=path.name) + "".join(commented(note) for note in notes), "version: 1\n"]
    for name in FederationFile.model_fields:
        if name in plain and name != "version":
            parts.append(commented(COMMENTS[name]) + dumped(name, plain[name]))
        elif proposed and proposed.get(name):
            said = f"{COMMENTS[name]}\nA guess from a few files. Confirm it by taking the # away:"
            parts.append(commented(said) + commented(dumped(name, proposed[name])))
    return "\n".join(parts)


@dataclass(frozen=True)
class ClientPartition:
    """How clients were made that the data did not come with. of: the data; by: the rule.

    artificial: no hospital is meant, as it may be by the column of a list.
    """

    of: str
    by: str
    artificial: bool = True

    @classmethod
    def find(cls, file: FederationFile) -> ClientPartition | None:
        """Of a federation.yaml; None where the clients are natural."""
        made, whole = file.partition, join_names([source.path.name for source in file.sources])
        rules = {
            "iid": "chance (iid)",
            "quantity": f"size (power law, skew {made.skew:g})",
            "dirichlet": f"{made.by} (dirichlet, alpha {made.alpha:g})",
            "feature": f"changed images (feature, {made.shift}, strength {made.strength:g})",
            "column": f"column '{made.column}'",
        }
        if made.kind == "natural":
            return None
        return cls(whole, rules[made.kind], artificial=made.kind != "column")

    @property
    def sentence(self) -> str:
        """
        >>> ClientPartition("heart", "chance (iid)").sentence
        'Clients are an artificial partition of heart by chance (iid), not hospitals.'
        """
        if self.artificial:
            return f"Clients are an artificial partition of {self.of} by {self.by}, not hospitals."
        return f"Clients are a partition of {self.of} by {self.by}."


def short(section: Settings) -> dict[str, Any]:
    """A section with the settings that differ from the default, and those a reader expects."""
    everything = section.model_dump(mode="json")
    shown = {"by", "ratios", "seed"} if isinstance(section, SplitSettings) else {"kind", "normalise"}
    if isinstance(section, SplitSettings) and section.by == "kfold":
        shown |= {"folds", "fold"}
    if isinstance(section, PartitionSettings) and section.kind not in ("natural", "column"):
        shown |= {"clients", "seed"}
    differ = section.model_dump(mode="json", exclude_defaults=True)
    return {name: value for name, value in everything.items() if name in differ or name in shown}
