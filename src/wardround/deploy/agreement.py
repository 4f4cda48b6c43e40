"""What hospitals must agree on before one network can serve them all, and what they are asked for.

A hospital says what its cases are like, never which they are: dimensions, channels, what the labels mean,
how scans are prepared, the usual shape. The organiser holds all of them against each other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from wardround.clients import Registration
from wardround.config import Config
from wardround.config_file import parse, resolve
from wardround.data.cases import ClientData
from wardround.data.common_names import OwnNames
from wardround.data.federation import Federation, ScanSummary
from wardround.data.federation_file import PrepareSettings
from wardround.data.opening import open_federation
from wardround.data.readers.common import join_names
from wardround.data.serving.augment import DROP_CHANNELS
from wardround.data.serving.loading import federation_of
from wardround.data.settings import TRAVELLING, DataSettings
from wardround.deploy.site_file import SiteFile, find_client
from wardround.engine.networks import network_for
from wardround.errors import ClientError, ConfigError
from wardround.methods import build_method, build_objective
from wardround.params import Params

log = logging.getLogger(__name__)

SAME = {
    "dimensions": "the number of dimensions",
    "in_channels": "the number of channels",
    "num_classes": "the number of classes",
    "classes": "the classes",
    "regions": "the regions that are measured",
    "channels": "the channels",
    "prepare": "how scans are prepared",
}
MOST = 1024  # channels, classes or regions; what hospitals say must not decide how much memory is taken
LONGEST = 300  # characters of a value that a sentence repeats

Name = Annotated[str, Field(min_length=1, max_length=200)]
Values = Annotated[tuple[Annotated[int, Field(ge=-(2**31), lt=2**31)], ...], Field(max_length=MOST)]
Sides = tuple[Annotated[int, Field(ge=1, le=10**5)], ...]
Lengths = tuple[Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)], ...]


class DataFacts(BaseModel):
    """What a hospital says its cases are like, checked before it is used.

    lacks: channel -> number of its cases without it; lacking: whether it knows that some hospital lacks any.
    """

    model_config = ConfigDict(frozen=True)

    dimensions: Literal[2, 3]
    in_channels: int = Field(ge=1, le=MOST)
    num_classes: int = Field(ge=2, le=MOST)
    classes: tuple[Name, ...] = Field(max_length=MOST)
    labels: dict[Name, Values] = Field(max_length=MOST)
    regions: dict[Name, Values] = Field(min_length=1, max_length=MOST)
    channels: tuple[Name, ...] = Field(max_length=MOST)
    prepare: PrepareSettings
    patch: Sides | None
    shape: Sides | None
    spacing: tuple[Lengths, Lengths] | None
    lacks: dict[Name, Annotated[int, Field(ge=1, le=10**9)]] = Field(default_factory=dict, max_length=MOST)
    lacking: bool = False

    @model_validator(mode="after")
    def consistent(self) -> Self:
        for name in ("patch", "shape"):
            sides = getattr(self, name)
            if sides is not None and len(sides) != self.dimensions:
                raise ValueError(f"{name} has {len(sides)} sides, not {self.dimensions}")
        if self.spacing is not None and {len(sides) for sides in self.spacing} != {self.dimensions}:
            raise ValueError(f"spacing does not have {self.dimensions} dimensions")
        if not set(self.lacks) <= set(self.channels):
            raise ValueError("lacks names a channel that is not among channels")
        if any(not 0 <= value < self.num_classes for values in self.regions.values() for value in values):
            raise ValueError(f"regions name a class that is not among the {self.num_classes}")
        return self


# What the organiser asks for


def make_hospital_config(config: Config) -> dict[str, Any]:
    """The configuration as hospitals get it: no path, no machine and no splits of the organiser's."""
    plain = resolve(config)
    data, compute = config.data, plain["compute"]
    if data.federation is not None or data.hospitals:
        if data.splits is not None:
            log.warning("data.splits is not sent: every hospital splits its cases by its own rules.")
        kept = {"hospitals": True}
        kept |= {name: plain["data"][name] for name in TRAVELLING if name != "common" or data.common}
    else:
        kept = {"phantom": plain["data"]["phantom"]}
    plain["data"] = kept | {"proxy": data.proxy}  # a name: whose cases are at the organiser
    for name in ("device", "workers", "resident"):  # the hospital's own business
        compute.pop(name)
    plain["model"]["weights"] = None  # what began from a file comes with the first message
    plain["trackers"] = []
    plain["output"] = None
    del plain["limits"], plain["without"]  # what the organiser makes of replies
    return plain


def localise_config(asked: Mapping[str, Any], *, device: str, threads: int | None) -> Config:
    """The same at the hospital, checked, on its own device.

    Whatever the organiser says, no path in it is opened here: cases come from the hospital's own rules.
    """
    sections = {name: asked.get(name) for name in ("data", "model", "compute")}
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise ConfigError(f"the organiser's configuration has no section '{name}'.")
    data, model, compute = (dict(section or {}) for section in sections.values())
    if data.get("federation") is not None:
        raise ConfigError("the organiser's configuration sets data.federation, a place on its own machine.")
    if model.get("weights") is not None:
        raise ConfigError("the organiser's configuration sets model.weights, a file on its own machine.")
    compute |= {"device": device, "workers": 1}
    compute["threads"] = threads or compute.get("threads")
    mine: dict[str, Any] = {"data": data, "compute": compute, "trackers": [], "output": None}
    return parse({**asked, **mine}, "the organiser's configuration: ")


def localise_data(asked: DataSettings, site: SiteFile) -> DataSettings:
    """What a run asks of the data, for the hospital's own cases and splits."""
    splits = None if site.splits is None else site.splits.model_dump(exclude_unset=True)
    own = {"federation": site.data, "hospitals": False, "proxy": None, "splits": splits, "common": None}
    return asked.model_copy(update=own)


def open_own_federation(
    config: Config, site: SiteFile, name: str, names: OwnNames | None = None
) -> Federation:
    """The hospital's own cases under its own name: real ones, or the synthetic ones of a rehearsal.

    names: what the hospital calls the classes and channels of the run, where they have common names.
    """
    source = site.data
    if not isinstance(source, Path):
        if config.data.hospitals:
            raise ConfigError(
                f"site '{name}' has only synthetic cases, and this run asks for real ones "
                "(data: {hospitals: true})."
            )
        found = open_federation(config.data, config.seed)
        if name not in found.names:
            raise ConfigError(f"'{name}' is not among the synthetic hospitals of this run.")
        return replace(found, names=[name], counts={name: found.counts[name]})
    if not config.data.hospitals:
        raise ConfigError(
            f"this run asks for synthetic cases, but site '{name}' has real ones. For those, set data: "
            "{hospitals: true}."
        )
    settings = localise_data(config.data, site)
    inside = find_client(site, federation_of(source, settings, config.seed).names, name)
    found = federation_of(source, settings, config.seed, config.compute.resident, only=inside, names=names)
    lacks = {name: found.lacks.get(inside, {})} if found.lacks else {}  # its own, and that there are any
    renamed = replace(found, names=[name], counts={name: found.counts[inside]}, lacks=lacks)
    return replace(
        renamed,
        load_one=lambda _: found.load_one(inside),
        left_out_of=lambda _: found.left_out(inside),
        colours_of=lambda _, case: found.read_colours(inside, case),
    )


# What hospitals say


def collect_facts(federation: Federation) -> dict[str, Any]:
    """What a hospital's cases are like, as plain JSON."""
    seen = federation.summarise_scans() if federation.summarise_scans is not None else ScanSummary(None, None)
    prepare = federation.prepare or PrepareSettings(orientation=None, normalise="none")
    own = federation.lacks.get(federation.names[0], {})
    return {
        **({"lacks": dict(own), "lacking": True} if federation.lacks else {}),
        "dimensions": federation.dimensions,
        "in_channels": federation.in_channels,
        "num_classes": federation.num_classes,
        "classes": list(federation.labels),
        "labels": {name: list(values) for name, values in federation.labels.items()},
        "regions": {name: list(values) for name, values in federation.regions.items()},
        "channels": list(federation.channels),
        "prepare": prepare.model_dump(mode="json"),
        "patch": seen.patch and list(seen.patch),
        "shape": seen.shape and list(seen.shape),
        "spacing": seen.spacing and [list(side) for side in seen.spacing],
    }


def agree_on_federation(facts: Mapping[str, DataFacts], entries: Mapping[str, Registration]) -> Federation:
    """The federation the organiser sees: what all hospitals said, if they said the same."""
    first, *others = sorted(facts)
    reference = facts[first]
    for name in others:
        for key, words in SAME.items():
            left, right = getattr(reference, key), getattr(facts[name], key)
            if left != right:
                todo = "correct one federation.yaml, or set data.prepare for all."
                if key in ("in_channels", "channels"):
                    words, left, right = SAME["channels"], reference.channels, facts[name].channels
                    todo = (
                        "write the same channels in the same order in both files, all of them, and under "
                        "channels_of what the images of a hospital hold; its files stay as they are."
                    )
                raise ConfigError(
                    f"hospitals '{first}' and '{name}' differ in {words} ({key}): "
                    f"{describe_values(left, right)}. They must agree before they can train one model: {todo}"
                )
    return Federation(
        names=sorted(facts),
        counts={name: entry.num_train + entry.num_val + entry.num_test for name, entry in entries.items()},
        dimensions=reference.dimensions,
        in_channels=reference.in_channels,
        num_classes=reference.num_classes,
        regions={name: list(values) for name, values in reference.regions.items()},
        load_one=elsewhere,
        labels={name: list(values) for name, values in reference.labels.items()},
        channels=list(reference.channels),
        prepare=reference.prepare,
        summarise_scans=lambda: merge_seen([facts[name] for name in sorted(facts)]),
        lacks={name: dict(facts[name].lacks) for name in sorted(facts) if facts[name].lacks},
    )


def check_dropping(config: Config, facts: Mapping[str, DataFacts]) -> None:
    """Hospitals must all know that channels are absent somewhere, so that all drop some in training."""
    lacking = [name for name in sorted(facts) if facts[name].lacks]
    unaware = [name for name in sorted(facts) if not facts[name].lacking]
    if lacking and unaware and config.augmentation.drop_channels is None:
        raise ConfigError(
            f"hospital '{lacking[0]}' lacks {join_names(facts[lacking[0]].lacks)}, and '{unaware[0]}' does "
            "not know it. Set augmentation.drop_channels, so that all hospitals train alike: "
            f"{DROP_CHANNELS} as in other runs, or 0."
        )


def describe_values(left: Any, right: Any) -> str:
    """Two different values, of settings only those that differ."""
    if isinstance(left, BaseModel) and isinstance(right, BaseModel):
        one, other = left.model_dump(), right.model_dump()
        keys = [key for key in one if one[key] != other[key]]
        left, right = ({key: values[key] for key in keys} for values in (one, other))
    plain = (list(value) if isinstance(value, tuple) else value for value in (left, right))
    return " and ".join(str(value)[:LONGEST] for value in plain)


def check_networks(config: Config, federation: Federation, registrations: Mapping[str, Registration]) -> None:
    """Hospitals must have the network of this run: what they registered is compared with ours."""
    weightless = config.model.model_copy(update={"weights": None})
    model = network_for(config.model_copy(update={"model": weightless}), federation)
    everything = Params(model.state_dict())
    travelling = set(build_method(config).shared(model)) - set(build_objective(config).local_names(model))
    tensors = {name: everything.spec(name) for name in everything if name in travelling}
    trainable = {name for name in Params.trainable(model) if name in travelling}
    for client, entry in sorted(registrations.items()):
        odd = find_difference(tensors, entry.tensors) or next(iter(trainable ^ set(entry.trainable)), None)
        if odd is not None:
            raise ConfigError(
                f"hospital '{client}' has a different network: tensor '{odd[:LONGEST]}' differs. "
                "Install the same version of wardround, and of the network, at both ends."
            )


def find_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first name that is not the same in both."""
    return next((name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name)), None)


def elsewhere(name: str) -> ClientData:
    raise ClientError(f"the cases of '{name}' are at the hospital")


def merge_seen(facts: Sequence[DataFacts]) -> ScanSummary:
    """The scans of all hospitals: the median of their median shapes, and the widest range of spacings."""
    shapes = [entry.shape for entry in facts if entry.shape]
    shape = tuple(int(median(sides)) for sides in zip(*shapes, strict=True)) if shapes else None
    patch = next((entry.patch for entry in facts if entry.patch), None)
    spacings = [entry.spacing for entry in facts if entry.spacing]
    if not spacings:
        return ScanSummary(patch, shape)
    low = tuple(min(sides) for sides in zip(*(spacing[0] for spacing in spacings), strict=True))
    high = tuple(max(sides) for sides in zip(*(spacing[1] for spacing in spacings), strict=True))
    return ScanSummary(patch, shape, (low, high))
