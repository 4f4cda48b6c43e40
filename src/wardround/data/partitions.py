"""Partitions: how the cases of some data set become the clients of a simulation.

natural   as they are
iid       groups dealt at random, every client as many cases
quantity  client k gets a share proportional to k^-skew (power law): the first has the most
dirichlet groups sorted into bins (quartiles of foreground size, or the rarest class they hold); each bin is
          dealt by shares drawn from a Dirichlet distribution: a small alpha gives each client its own mix
column    one client for each value of a column of the list
feature   natural clients (a single one is dealt iid first), each with a shift of its own on its images

A group (patient) never goes to two clients. Splits the list fixed stay with their cases and are dealt each by
itself, so that every client has cases to train on. Groups are drawn by their names, as in `splits`.
"""

from __future__ import annotations

import io
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.federation_file import PartitionSettings
from wardround.data.listing import SPLITS, Entry
from wardround.data.readers.common import join_names
from wardround.data.sources import check_client_names, check_unique
from wardround.errors import ConfigError, DataError
from wardround.files import write_bytes
from wardround.seeds import derive
from wardround.tables import Table
from wardround.text import clipped, suggest

MOST_CLIENTS = 100
# Groups a client gets where there are enough; without fixed splits all of them count as train.
LEAST_GROUPS = {"train": 3, "val": 1, "test": 1}


@dataclass(frozen=True)
class Description:
    """What a label shows. foreground: fraction of the image, or volume; classes: those present."""

    foreground: float
    classes: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class CaseGroup:
    """A group of one client, dealt as a whole; split: where the list puts it, else train, for it may be."""

    client: str
    group: str
    cases: tuple[Entry, ...]

    @property
    def split(self) -> str:
        return next((case.split for case in self.cases if case.split is not None), "train")


Describe = Callable[[Entry], Description]
Shares = NDArray[np.float64]  # of the clients, together 1


def partition(
    entries: Sequence[Entry],
    settings: PartitionSettings,
    describe: Describe,
    *,
    held_out: Collection[str] = (),
) -> list[Entry]:
    """The cases with their new clients, sorted by client and name.

    describe: asked once a case, and only for a dirichlet partition; held_out: clients that stay as they are.
    """
    ours = [entry for entry in entries if entry.client not in held_out]
    divided = divide(ours, settings, describe)
    for name in sorted({entry.client for entry in divided} & set(held_out)):
        raise DataError(f"The held-out client '{name}' has the name of a client made here; rename it.")
    together = [*divided, *(entry for entry in entries if entry.client in held_out)]
    check_unique(together)
    return sorted(together, key=lambda entry: (entry.client, entry.name))


def divide(entries: Sequence[Entry], settings: PartitionSettings, describe: Describe) -> list[Entry]:
    if settings.kind == "natural":
        return list(entries)
    if settings.kind == "column":
        return partition_by_column(entries, settings.column)
    if settings.kind == "feature":
        natural = len({entry.client for entry in entries}) > 1
        return assign_shifts(entries if natural else deal_evenly(entries, settings), settings)
    if settings.kind == "iid":
        return deal_evenly(entries, settings)
    units = group_cases(entries, settings)
    if settings.kind == "quantity":
        return move_cases(entries, deal(units, {"": power_law(settings, len(units))}))
    bins = bin_groups(units, settings, describe)
    shares = {name: dirichlet(settings, name) for name in sorted(set(bins))}
    return move_cases(entries, deal(units, shares, bins))


def deal_evenly(entries: Sequence[Entry], settings: PartitionSettings) -> list[Entry]:
    even = np.full(settings.clients, 1 / settings.clients)
    return move_cases(entries, deal(group_cases(entries, settings), {"": even}))


# Dealing groups to clients


def group_cases(entries: Sequence[Entry], settings: PartitionSettings) -> list[CaseGroup]:
    """The groups in an order that only the seed and their names decide; too few of them are refused."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.client, entry.group), []).append(entry)
    order = sorted(groups, key=lambda key: (derive(settings.seed, "partition", *map(ascii, key)), key))
    units = [CaseGroup(*key, tuple(groups[key])) for key in order]
    training = sum(unit.split == "train" for unit in units)
    if training < settings.clients:
        raise DataError(
            f"partition.clients is {settings.clients}, but the {len(entries)} cases have only {training} "
            "groups (patients) to train on, and a group is never split apart. Ask for fewer clients."
        )
    return units


def power_law(settings: PartitionSettings, num_units: int) -> Shares:
    """Shares proportional to k^-skew, k from 1, on top of what every client gets."""
    law = np.arange(1, settings.clients + 1, dtype=np.float64) ** -settings.skew
    floor = min(LEAST_GROUPS["train"], num_units // settings.clients) / num_units
    return np.asarray(floor + (1 - floor * settings.clients) * law / law.sum())


def dirichlet(settings: PartitionSettings, bin_name: str) -> Shares:
    """The clients' shares of one bin."""
    random = np.random.default_rng(derive(settings.seed, "partition", "dirichlet", bin_name))
    alpha = max(settings.alpha, 1e-3)  # below, one client has all anyway, and the numbers run out
    return random.dirichlet(np.full(settings.clients, alpha))


def bin_groups(units: Sequence[CaseGroup], settings: PartitionSettings, describe: Describe) -> list[str]:
    """The bin of each unit; an unlabelled case has no foreground."""
    described = [[describe_case(case, describe) for case in unit.cases] for unit in units]
    if settings.by == "foreground":
        bins = assign_quartiles([float(np.mean([case.foreground for case in cases])) for cases in described])
        wish, other = "the same foreground size", "by: class"
    else:
        bins = find_rarest_classes([{v for case in cases for v in case.classes} for cases in described])
        wish, other = "the same classes", "by: foreground"
    if len(set(bins)) < 2:
        raise DataError(
            f"All groups have {wish}, so a dirichlet partition cannot tell them apart; "
            f"try partition {other}, or kind: quantity."
        )
    return bins


def describe_case(entry: Entry, describe: Describe) -> Description:
    return describe(entry) if entry.label is not None else Description(0.0)


def assign_quartiles(values: Sequence[float]) -> list[str]:
    """q1 (the smallest) to q4; equal values share a quartile."""
    edges = np.quantile(values, (0.25, 0.5, 0.75))
    return [f"q{1 + int(np.searchsorted(edges, value, side='left'))}" for value in values]


def find_rarest_classes(present: Sequence[Collection[int]]) -> list[str]:
    """Of the classes each unit holds, the one that fewest units hold; "none" for no class."""
    frequency = Counter(itertools.chain.from_iterable(present))
    return [
        f"class {min(values, key=lambda value: (frequency[value], value))}" if values else "none"
        for values in present
    ]


def deal(
    units: Sequence[CaseGroup], shares: Mapping[str, Shares], bins: Sequence[str] | None = None
) -> dict[tuple[str, str], int]:
    """(client, group) -> number of the new client, from 0.

    Each unit goes where most cases of its bin and split are still lacking, so shares are met as closely as
    whole groups allow; then clients that have too few groups get some from those with most.
    """
    names = bins or [""] * len(units)
    lacking = {(name, split): np.zeros_like(share) for name, share in shares.items() for split in SPLITS}
    for unit, name in zip(units, names, strict=True):
        lacking[name, unit.split] += len(unit.cases) * shares[name]
    clients = len(next(iter(shares.values())))
    dealt: dict[str, list[list[CaseGroup]]] = {split: [[] for _ in range(clients)] for split in SPLITS}
    total = np.zeros(clients)
    for unit, name in zip(units, names, strict=True):
        wish = lacking[name, unit.split]
        best = np.lexsort((np.arange(clients), total, -wish.round(6)))[0]  # ties: who has least so far
        wish[best] -= len(unit.cases)
        total[best] += len(unit.cases)
        dealt[unit.split][best].append(unit)
    for split, hands in dealt.items():
        fill(hands, min(LEAST_GROUPS[split], sum(map(len, hands)) // clients))
    return {
        (unit.client, unit.group): number
        for hands in dealt.values()
        for number, hand in enumerate(hands)
        for unit in hand
    }


def fill(hands: Sequence[list[CaseGroup]], least: int) -> None:
    """Move units from the longest hand to the shortest until none has fewer than `least`."""
    while len(shortest := min(hands, key=len)) < least:
        shortest.append(max(hands, key=len).pop())


def move_cases(entries: Sequence[Entry], numbers: Mapping[tuple[str, str], int]) -> list[Entry]:
    """The cases at clients client-01, client-02, ..."""
    width = max(2, len(str(1 + max(numbers.values()))))
    clients = [f"client-{1 + numbers[entry.client, entry.group]:0{width}d}" for entry in entries]
    return [replace(e, client=client) for e, client in zip(make_names_unique(entries), clients, strict=True)]


def make_names_unique(entries: Sequence[Entry]) -> list[Entry]:
    """Names and groups that stay different when clients are mixed: with their client in front if need be."""
    names = make_unique({(entry.client, entry.name) for entry in entries})
    groups = make_unique({(entry.client, entry.group) for entry in entries})
    return [replace(e, name=names[e.client, e.name], group=groups[e.client, e.group]) for e in entries]


def make_unique(words: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(client, word) -> a word that no other has.

    >>> make_unique([("north", "1"), ("south", "1")])
    {('north', '1'): 'north_1', ('south', '1'): 'south_1'}
    """
    found = {(client, word): word for client, word in words}
    for gap in itertools.count(1):
        if len(set(found.values())) == len(found):
            break
        found = {(client, word): f"{client}{'_' * gap}{word}" for client, word in words}
    return found


def partition_by_column(entries: Sequence[Entry], column: str | None) -> list[Entry]:
    """One client for each value; groups that have two are refused."""
    known = sorted({name for entry in entries for name in entry.columns})
    if column is None:
        raise ConfigError(
            "partition.kind is column; name one in partition.column. "
            f"There are: {join_names(known, 20) or 'none; write a list with columns'}."
        )
    key = column if column in known else column.lower()  # readers store heads in lower case
    if key not in known:
        raise ConfigError(
            f"partition.column is '{column}', which no list has.{suggest(column, known)} "
            f"There are: {join_names(known, 20) or 'none; write a list with columns'}."
        )
    value_of: dict[tuple[str, str], str] = {}
    for entry in entries:
        value = entry.columns.get(key, "")
        if not value:
            raise DataError(f"{entry.where} has no value in column '{column}', which partition.column names.")
        if value_of.setdefault((entry.client, entry.group), value) != value:
            raise DataError(
                f"client '{entry.client}', group '{entry.group}' has '{value_of[entry.client, entry.group]}' "
                f"and '{value}' in column '{column}', but a group goes to one client. Take another column."
            )
    values = sorted(set(value_of.values()))
    if not 2 <= len(values) <= MOST_CLIENTS:
        raise DataError(
            f"Column '{column}' has {len(values)} different values ({join_names(values)}); "
            f"a partition needs 2 to {MOST_CLIENTS}."
        )
    check_client_names(values)
    clients = [value_of[entry.client, entry.group] for entry in entries]
    return [replace(e, client=client) for e, client in zip(make_names_unique(entries), clients, strict=True)]


# Shifts of a feature partition: the images of each client as another scanner would store them


def assign_shifts(entries: Sequence[Entry], settings: PartitionSettings) -> list[Entry]:
    """The cases with their client's shift, as JSON, in column `shift`."""
    clients = sorted({entry.client for entry in entries})
    shifts = {
        client: json.dumps(make_shift(settings.shift, settings.strength, number / (len(clients) - 1)))
        for number, client in enumerate(clients)
    }
    return [replace(e, columns={**e.columns, "shift": shifts[e.client]}) for e in entries]


def make_shift(kind: str, strength: float, place: float) -> dict[str, Any]:
    """The shift of the client at a place from 0 (the first) to 1 (the last); strength 0 changes nothing.

    Intensity goes from dark to bright and its bias field from one corner to the other, contrast from low
    gamma to high: a client in the middle is unchanged. Resolution goes from full down to a quarter.
    """
    amount = strength * (2 * place - 1)
    if kind == "intensity":
        values = {"scale": 2.0**amount, "offset": 0.5 * amount, "bias": 0.5 * amount}
    elif kind == "contrast":
        values = {"gamma": 2.5**amount}
    else:
        values = {"factor": 1 + 3 * strength * place}
    return {"kind": kind, **{name: round(value, 6) for name, value in values.items()}}


def read_shift(entry: Entry) -> dict[str, Any] | None:
    """The shift a feature partition gave a case; None for none (or for a list's own column of that name)."""
    try:
        shift = json.loads(entry.columns.get("shift", "null"))
    except (ValueError, RecursionError):
        return None
    return shift if isinstance(shift, dict) and shift.get("kind") in SHIFTS else None


def apply_shift(image: Tensor, shift: Mapping[str, Any]) -> Tensor:
    """The image as this client's scanner would have stored it, (C, *spatial) -> (C, *spatial).

    Measured by the image's own range and spread, so it does the same before and after scaling. Apply it to
    the prepared image: normalising afterwards would take scale and offset out again.
    """
    if shift.get("kind") not in SHIFTS:
        raise DataError(f"The shift {shift.get('kind')!r} is unknown; there are {', '.join(SHIFTS)}.")
    return SHIFTS[shift["kind"]](image, shift)


def shift_intensity(image: Tensor, shift: Mapping[str, Any]) -> Tensor:
    """Brightness above the darkest voxel times scale and a tilted bias field, plus offset in SDs."""
    scale, offset, bias = (float(shift[name]) for name in ("scale", "offset", "bias"))
    if (scale, offset, bias) == (1.0, 0.0, 0.0):
        return image
    axes = tuple(range(1, image.ndim))
    low, spread = image.amin(axes, keepdim=True), image.std(axes, correction=0, keepdim=True)
    ramps = [torch.linspace(-1, 1, size, device=image.device, dtype=image.dtype) for size in image.shape[1:]]
    ramps = [ramp if len(ramp) > 1 else ramp * 0 for ramp in ramps]
    field = torch.stack(torch.meshgrid(*ramps, indexing="ij")).mean(0)  # (*spatial)
    return (image - low) * scale * (bias * field).exp() + low + offset * spread


def shift_contrast(image: Tensor, shift: Mapping[str, Any]) -> Tensor:
    """Gamma between the darkest and the brightest voxel of each channel; above 1 darkens the middle."""
    gamma = float(shift["gamma"])
    axes = tuple(range(1, image.ndim))
    low, high = image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)
    if gamma == 1.0:
        return image
    width = torch.where(high > low, high - low, 1.0)
    return torch.where(high > low, ((image - low) / width) ** gamma * width + low, image)


def shift_resolution(image: Tensor, shift: Mapping[str, Any]) -> Tensor:
    """Averaged over blocks of `factor` voxels along each axis, then interpolated back."""
    factor = float(shift["factor"])
    if factor == 1.0:
        return image
    shape = image.shape[1:]
    small = F.interpolate(image[None], size=[max(1, round(size / factor)) for size in shape], mode="area")
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(shape)]
    return F.interpolate(small, size=list(shape), mode=mode, align_corners=False)[0]


SHIFTS = {"intensity": shift_intensity, "contrast": shift_contrast, "resolution": shift_resolution}


# Summary: a table of the clients, and a figure


def summarise(entries: Iterable[Entry], describe: Describe | None = None) -> Table:
    """One row a client: cases, groups, splits where they are known, median foreground where asked."""
    clients = group_by_client(entries)
    rows = []
    for client, cases in clients.items():
        row: list[Any] = [client, len(cases), len({case.group for case in cases})]
        row += [sum(case.split == split for case in cases) for split in SPLITS]
        if describe is not None:
            row.append(float(np.median([describe_case(case, describe).foreground for case in cases])))
        rows.append(row)
    heads = ["client", "cases", "groups", *SPLITS, *(["foreground (median)"] if describe else [])]
    total = sum(len(cases) for cases in clients.values())
    return Table("Clients", heads, rows, f"{total} cases at {len(clients)} clients.", width=40)


def group_by_client(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    clients: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.client, entry.name)):
        clients.setdefault(entry.client, []).append(entry)
    return clients


COLOURS = ("#2f6f9f", "#7fb7d8", "#f2b880", "#d1603d", "#8f6bb3", "#5a9e6f", "#b8b8b8")


def draw(entries: Sequence[Entry], describe: Describe | None, path: Path) -> None:
    """Stacked bars of each client's cases: by split, by quartile of foreground size, and by class."""
    from matplotlib.figure import Figure

    clients = group_by_client(entries)
    ordered = [case for cases in clients.values() for case in cases]
    panels = {"split": [case.split or "not yet split" for case in ordered]}
    if describe is not None:
        described = [describe_case(case, describe) for case in ordered]
        sizes = assign_quartiles([d.foreground for d in described])
        panels["foreground size, quartiles of all cases"] = sizes
        panels["rarest class in the case"] = find_rarest_classes([d.classes for d in described])
    panels = {title: kinds for title, kinds in panels.items() if title == "split" or len(set(kinds)) > 1}
    figure = Figure(figsize=(max(6.0, 2.6 + 0.2 * len(clients)), 2.4 * len(panels) + 0.9), dpi=110)
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for axis, (title, kinds) in zip(axes, panels.items(), strict=True):
        stack_bars(axis, clients, kinds, title)
    many = sum(min(len(name), 24) + 2 for name in clients) > 70  # characters that fit side by side
    axes[-1].set_xlim(-0.6, len(clients) - 0.4)
    names = [clipped(name) for name in clients]
    turn, fontsize = (90, 7) if many else (0, 9)
    axes[-1].set_xticks(range(len(clients)), names, rotation=turn, fontsize=fontsize)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path, margin: float = 0.0) -> None:
    """Write a figure as PNG, whole or not at all; margin: share of its height left free below."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name may be written in any script
        figure.tight_layout(rect=(0, margin, 1, 1))
        figure.savefig(content, format="png")
    write_bytes(Path(path), content.getvalue())


def stack_bars(axis: Any, clients: Mapping[str, Sequence[Entry]], kinds: Sequence[str], title: str) -> None:
    """One bar a client; kinds: of all cases, client after client."""
    place = iter(kinds)
    own = [[next(place) for _ in cases] for cases in clients.values()]
    order = [*SPLITS, *sorted(set(kinds) - set(SPLITS))]
    base = np.zeros(len(own))
    for number, kind in enumerate(kind for kind in order if kind in kinds):
        height = np.array([cases.count(kind) for cases in own])
        axis.bar(range(len(own)), height, bottom=base, color=COLOURS[number % len(COLOURS)], label=kind)
        base += height
    axis.set_ylabel("cases")
    axis.set_title(title, fontsize=10, loc="left")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, reverse=True)
    axis.spines[["top", "right"]].set_visible(False)
