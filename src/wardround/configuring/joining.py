"""Joining: from the clients' fingerprints to the facts of all cases together.

Quantiles are of all cases together, not means of the clients' quantiles. Intensities are of labelled voxels,
every case with the same weight, as nnU-Net samples them. A client with too few patients to be measured takes
part; the others decide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from wardround.configuring.facts import ChannelFacts, ClientFacts, Facts, Quantiles
from wardround.data.fingerprint.case import ALL, Modality
from wardround.data.fingerprint.distance import check_comparable, join_words, quote
from wardround.data.fingerprint.histogram import Histogram, find_intensity, find_quantile
from wardround.data.fingerprint.measure import Fingerprint
from wardround.data.fingerprint.positions import join_positions
from wardround.data.listing import Labels
from wardround.data.readers.image_files import COLOURS
from wardround.errors import DataError

NAMED: Mapping[Modality, frozenset[str]] = {  # words in the name of a channel
    "ct": frozenset({"ct", "cect", "ncct", "cta", "hu", "hounsfield"}),
    "mr": frozenset(
        {
            "mr",
            "mri",
            "t1",
            "t2",
            "t1w",
            "t2w",
            "t1c",
            "t1ce",
            "t1gd",
            "flair",
            "dwi",
            "adc",
            "swi",
            "pd",
            "bold",
        }
    ),
    "rgb": COLOURS,
}


def join_fingerprints(
    fingerprints: Sequence[Fingerprint],
    *,
    channels: Sequence[str] = (),
    labels: Labels,
    regions: Mapping[str, Sequence[int]] | None = None,
) -> Facts:
    """The facts of a federation. channels, labels, regions: as federation.yaml names them."""
    known = [one for one in fingerprints if one.is_open]
    check_comparable(known)
    check_enough(fingerprints, known)
    check_modalities(known)
    notes = [*describe_withheld(fingerprints), *describe_spacing(known)]
    joined = tuple(join_channel(known, number, channels, notes) for number in range(len(known[0].intensity)))
    axes = range(len(known[0].shape))
    own_classes = {name: (number,) for number, name in enumerate(labels, start=1)}
    extents = [one for one in known if one.foreground_extent]
    sizes = {name: join_sizes(known, name, alone=len(labels) == 1) for name in labels}
    return Facts(
        dimensions=3 if len(axes) == 3 else 2,
        channels=joined,
        classes=tuple(labels),
        regions={name: tuple(own) for name, own in (regions or own_classes).items()},
        has_spacing=all(one.has_spacing for one in known),
        spacing=tuple(join([one.spacing[axis] for one in known]) for axis in axes),
        shape=tuple(join([one.shape[axis] for one in known]) for axis in axes),
        extent=tuple(join([one.extent[axis] for one in known]) for axis in axes),
        kept=join([one.kept for one in known if one.kept is not None]).median,
        presence={name: share for name, (share, _) in sizes.items()},
        sizes={name: found for name, (_, found) in sizes.items() if found is not None},
        clients=tuple(describe_client(one) for one in fingerprints),
        foreground_extent=tuple(
            join([one.foreground_extent[axis] for one in extents]) for axis in axes if extents
        ),
        positions=join_positions((one.positions for one in known), list(labels)),
        notes=tuple(notes),
    )


def join(histograms: Sequence[Histogram]) -> Quantiles:
    low, median, high = (find_quantile(histograms, level) for level in (0.1, 0.5, 0.9))
    return Quantiles(low, median, high)


# Clients


def check_enough(fingerprints: Sequence[Fingerprint], known: Sequence[Fingerprint]) -> None:
    if not any(one.inside for one in known):
        names = join_words([f"{quote(one.client)} ({one.groups})" for one in fingerprints[:8]]) or "nobody"
        raise DataError(
            f"No client has enough patients with labelled cases to be measured: {names}. Where all "
            "cases are your own, measure with a minimum of 1; else write a configuration by hand."
        )


def check_modalities(known: Sequence[Fingerprint]) -> None:
    """Refuse clients of which some have Hounsfield units in a channel and others not."""
    for channel in range(len(known[0].modality)):
        with_units = [one.client for one in known if one.modality[channel] == "ct"]
        without = [one.client for one in known if one.modality[channel] not in ("ct", None)]
        if with_units and without:
            raise DataError(
                f"Channel {channel + 1} looks like CT in Hounsfield units at client {quote(with_units[0])} "
                f"and not at client {quote(without[0])}; one model needs the same everywhere. "
                "Leave one of them out under clients in federation.yaml, or store the same units."
            )


def describe_withheld(fingerprints: Sequence[Fingerprint]) -> list[str]:
    few = [quote(one.client) for one in fingerprints if not one.is_open]
    return (
        [f"Not measured, because of too few patients: {join_words(few)}. The others decide."] if few else []
    )


def describe_spacing(known: Sequence[Fingerprint]) -> list[str]:
    without = [quote(one.client) for one in known if not one.has_spacing]
    if not without or len(without) == len(known):
        return []
    return [
        f"Files of {join_words(without)} do not say millimetres, those of others do: spacings are not used."
    ]


def describe_client(one: Fingerprint) -> ClientFacts:
    """Of a client that is withheld, the count is the least it can be; its machine is known all the same."""
    count = one.cases if isinstance(one.cases, int) else 1
    if isinstance(one.cases, str) and one.cases.endswith("or more"):
        count = max(1, int(one.cases.split()[0]))
    if one.hardware is None:
        raise DataError(f"The fingerprint of client {quote(one.client)} does not say what it computes with.")
    device, memory, cores = one.hardware.device, one.hardware.memory, one.hardware.cores
    return ClientFacts(one.client, count, device, memory, cores, one.modality, one.is_open)


# Channels and classes


def join_channel(
    known: Sequence[Fingerprint], number: int, names: Sequence[str], notes: list[str]
) -> ChannelFacts:
    """One channel over all clients; what is guessed is added to the notes."""
    name = names[number] if number < len(names) else f"channel_{number}"
    pairs = [(one, own) for one in known if one.inside and (own := one.inside[number]) is not None]
    found, cases = [own for _, own in pairs], [count_labelled(one) for one, _ in pairs]
    if not found:
        raise DataError(
            f"No client has enough patients with labels and channel {quote(name)} to measure it. Leave it "
            "out of channels in federation.yaml, or write a configuration by hand."
        )
    low, high = find_intensity(found, cases, (0.005, 0.995))
    mean = float(np.average([one.mean for one in found], weights=cases))
    square = float(np.average([one.sd**2 + one.mean**2 for one in found], weights=cases))
    return ChannelFacts(
        name=name,
        modality=choose_modality(name, known, number, notes),
        mean=mean,
        sd=max(0.0, square - mean**2) ** 0.5,
        percentile_00_5=low,
        percentile_99_5=high,
    )


def count_labelled(one: Fingerprint) -> int:
    """Cases with anything labelled."""
    sizes = one.foreground.get(ALL)
    return 1 if sizes is None else sizes.fraction.cases


def choose_modality(name: str, known: Sequence[Fingerprint], number: int, notes: list[str]) -> Modality:
    """By the name of the channel; else by what all clients' values look like."""
    words = set(re.split(r"[^a-z0-9]+", name.casefold()))
    named = next((kind for kind, own in NAMED.items() if words & own), None)
    looks = {look for one in known if (look := one.modality[number]) is not None}
    by_values: Modality = looks.pop() if len(looks) == 1 else "other"
    if named is not None:
        if (named == "ct") != (by_values == "ct"):
            how = "do" if by_values == "ct" else "do not"
            said = (
                f"Channel {quote(name)} is taken for {named.upper()} by its name; its values {how} look like"
            )
            notes.append(f"{said} Hounsfield units.")
        return named
    if by_values == "ct":
        notes.append(
            f"Channel {quote(name)} is taken for CT by its values, which look like Hounsfield units."
        )
    elif by_values == "rgb" and number == 0:
        notes.append("The three channels are taken for colours by their values, 0 to 255.")
    return by_values


def join_sizes(known: Sequence[Fingerprint], name: str, *, alone: bool) -> tuple[float, Quantiles | None]:
    """The share of the cases that have a class, and its sizes there; alone: it is the only class."""
    own = [(one, one.foreground.get(ALL if alone else name)) for one in known]
    cases = sum(int(one.cases) for one, _ in own)
    present = [found.fraction for _, found in own if found is not None]
    share = sum(found.share * int(one.cases) for one, found in own if found is not None) / cases
    return share, join(present) if present else None
