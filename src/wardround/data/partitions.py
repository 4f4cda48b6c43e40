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

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wardround.data.federation_file import PartitionSettings
from wardround.data.listing import SPLITS, Entry
from wardround.data.partition_shifts import assign_shifts
from wardround.data.readers.common import join_names
from wardround.data.sources import check_client_names, check_unique
from wardround.errors import ConfigError, DataError
from wardround.seeds import derive
from wardround.text import suggest

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
    units = [CaseGroup(client, group, tuple(cases)) for (client, group), cases in groups.items()]
    training = sum(unit.split == "train" for unit in units)
    if training < settings.clients:
        raise DataError(
            f"partition.clients is {settings.clients}, but the {len(entries)} cases have only {training} "
            "groups (patients) to train on, and a group is never split apart. Ask for fewer clients."
        )
    return sorted(
        units,
        key=lambda u: (
            derive(settings.seed, "partition", ascii(u.client), ascii(u.group)),
            u.client,
            u.group,
        ),
    )


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
        bins = find_rarest_classes(
            [{value for case in cases for value in case.classes} for cases in described]
        )
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
    frequency: dict[int, int] = {}
    for value in itertools.chain.from_iterable(present):
        frequency[value] = frequency.get(value, 0) + 1
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

    >>> in_one_place([("north", "1"), ("south", "1")])
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
