"""Splits: which cases train, validate and test; by group, so that none leaks.

A group is a patient (or video) of one client and always stays whole. Groups are drawn by their names:
(seed, client, group) decides who comes first, so that another client, another order of the list or a
new patient does not reshuffle the others.

`write_splits` and `read_splits` keep splits as JSON you may edit:

    {"north": {"train": ["p01", "p02"], "val": ["p03"], "test": ["p04"]}}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wardround.data.federation_file import SplitSettings
from wardround.data.listing import FOLD, SPLITS, Entry
from wardround.data.readers.common import join_names, read_text
from wardround.errors import ConfigError, DataError
from wardround.files import write_json
from wardround.seeds import derive
from wardround.text import suggest

log = logging.getLogger(__name__)

ENOUGH_GROUPS = 1000  # to choose from; with more, a closer sum is not worth the time
Groups = dict[str, list[Entry]]  # group -> its cases
Splits = dict[str, dict[str, list[str]]]  # client -> split -> names of its cases


def assign(
    entries: Sequence[Entry], settings: SplitSettings, base: Path, *, held_out: Collection[str] = ()
) -> list[Entry]:
    """Every case with its split, in the order given; base: the folder `settings.file` is relative to.

    held_out: clients that are only ever tested, whatever the settings say.
    """
    check_settings(settings)
    placed = {(entry.client, entry.name): "test" for entry in entries if entry.client in held_out}
    ours = [entry for entry in entries if entry.client not in held_out]
    if settings.by == "file" and settings.file is not None:
        placed |= from_file(ours, base / settings.file)
    else:
        clients: dict[str, list[Entry]] = {}
        for entry in ours:
            clients.setdefault(entry.client, []).append(entry)
        for client, cases in clients.items():
            placed |= divide(client, cases, settings)
        if settings.by == "kfold" and "test" not in placed.values():
            log.warning(
                "Fold %d of %d has no case to test: clients have fewer patients. Take fewer splits.folds.",
                settings.fold, settings.folds,
            )  # fmt: skip
    return [replace(entry, split=placed[entry.client, entry.name]) for entry in entries]


def check_settings(settings: SplitSettings) -> None:
    """Refuse what types cannot express."""
    ratios = settings.ratios
    if not all(0 <= ratio <= 1 for ratio in ratios) or ratios[0] == 0 or abs(sum(ratios) - 1) > 1e-6:
        raise ConfigError(
            f"splits.ratios is {list(ratios)}; give shares of train, val and test that add up to 1, "
            "train above 0."
        )
    if settings.by == "kfold" and settings.fold >= settings.folds:
        raise ConfigError(
            f"splits.fold is {settings.fold}; with {settings.folds} folds it goes from 0 to "
            f"{settings.folds - 1}."
        )
    for name, by in (("fold", "kfold"), ("repeat", "repeated")):
        if getattr(settings, name) and settings.by != by:
            raise ConfigError(
                f"splits.{name} is {getattr(settings, name)}, but splits.by is {settings.by}, which always "
                f"splits alike. Set splits.by: {by}, or leave splits.{name} out."
            )
    if settings.by == "file" and settings.file is None:
        raise ConfigError("splits.by is file, but splits.file names none. Write one: wardround data split")


# One client


def divide(client: str, entries: Sequence[Entry], settings: SplitSettings) -> dict[tuple[str, str], str]:
    """(client, case) -> split for all cases of one client."""
    groups = order_groups(client, entries, settings)
    placed = read_fixed(client, groups) if settings.by == "column" else {}
    # Unlabelled cases cannot judge a model: they train, where they may (`unlabelled` of federation.yaml).
    labelled = {name: cases for name, cases in groups.items() if any(case.label for case in cases)}
    placed = {name: "train" for name in groups if name not in labelled} | placed
    if settings.by == "kfold":
        placed |= split_fold(labelled, settings)
    else:
        placed |= split_by_ratios(labelled, settings.ratios, placed)
    return {(client, case.name): placed[name] for name, cases in groups.items() for case in cases}


def order_groups(client: str, entries: Sequence[Entry], settings: SplitSettings) -> Groups:
    """The client's groups in an order that only the seed and the names decide."""
    groups: Groups = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    seed = settings.seed + (settings.repeat if settings.by == "repeated" else 0)
    # ascii: a name from a list may hold half a character, which cannot be encoded
    order = sorted(groups, key=lambda group: (derive(seed, "split", ascii(client), ascii(group)), group))
    return {group: groups[group] for group in order}


def read_fixed(client: str, groups: Groups) -> dict[str, str]:
    """Group -> split where the list says it; all cases of a group follow."""
    placed = {}
    for group, cases in groups.items():
        said = sorted({case.split for case in cases if case.split is not None}, key=SPLITS.index)
        if len(said) > 1:
            raise DataError(
                f"client '{client}': the list puts group '{group}' in {' and '.join(said)}, which would leak "
                "from one to the other. Correct the list, or draw again with splits.by: ratios."
            )
        if said:
            placed[group] = said[0]
    return placed


def split_by_ratios(groups: Groups, ratios: Sequence[float], placed: Mapping[str, str]) -> dict[str, str]:
    """Split of the groups that have none yet, so that all together come close to the ratios.

    The list's own test cases count: a client that brings more than its share of them gets no further one.
    From three groups on every split with a share has one; of two, one trains and one is tested.
    """
    sizes = {group: len(cases) for group, cases in groups.items()}
    have = {split: sum(sizes[g] for g in groups if placed.get(g) == split) for split in SPLITS}
    free = {group: size for group, size in sizes.items() if group not in placed}
    lacking = {s: max(0.0, r * sum(sizes.values()) - have[s]) for s, r in zip(SPLITS, ratios, strict=True)}
    scale = sum(free.values()) / (sum(lacking.values()) or 1)
    wanted = {split: cases * scale for split, cases in lacking.items()}
    needed = [s for s in ("train", "test", "val") if not have[s] and ratios[SPLITS.index(s)] > 0][: len(free)]
    return draw(free, wanted, needed)


def draw(sizes: Mapping[str, int], wanted: Mapping[str, float], needed: Sequence[str]) -> dict[str, str]:
    """Whole groups to test, then to val, each as close to the wanted number of cases as they allow.

    sizes: cases of each group, in drawing order; needed: splits that must not stay empty. The largest group
    trains where train needs one: one long video makes a poor test.
    """
    kept = max(sizes, key=lambda group: sizes[group]) if "train" in needed else None
    free = {group: size for group, size in sizes.items() if group != kept}
    placed = dict.fromkeys(sizes, "train")
    for split, after in (("test", ["val"]), ("val", [])):
        waiting = len(set(after) & set(needed))
        for group in choose_closest(free, wanted[split], some=split in needed, leave=waiting):
            placed[group] = split
            del free[group]
    return placed


def choose_closest(sizes: Mapping[str, int], target: float, *, some: bool, leave: int) -> list[str]:
    """Groups whose cases add up as close to the target as possible, early ones first.

    some: at least one group; leave: so many groups are not taken.
    """
    order = list(sizes)
    if len(order) <= leave:
        return []
    chosen = find_subset(order, sizes, target, some=some)
    if len(chosen) > len(order) - leave:
        smallest = sorted(order, key=lambda group: sizes[group])[:leave]
        chosen = find_subset([group for group in order if group not in smallest], sizes, target, some=some)
    return chosen


def find_subset(order: Sequence[str], sizes: Mapping[str, int], target: float, *, some: bool) -> list[str]:
    """Subset sum: bit s of `reached[i]` says whether some of the first i groups have s cases together."""
    reached = [1]
    total, aim = 0, max(round(target), int(some))
    for group in order:
        if reached[-1] >> aim & 1 or (len(reached) > ENOUGH_GROUPS and total > 2 * aim):
            break
        total += sizes[group]
        reached.append(reached[-1] | reached[-1] << sizes[group])
    sums = (s for s in range(int(some), total + 1) if reached[-1] >> s & 1)
    left = min(sums, key=lambda s: (abs(s - target), s))
    chosen = []
    for place in range(len(reached) - 1, 0, -1):  # backwards: a group is taken only where the sum needs it
        if not reached[place - 1] >> left & 1:
            chosen.append(order[place - 1])
            left -= sizes[order[place - 1]]
    return chosen[::-1]


def split_fold(groups: Groups, settings: SplitSettings) -> dict[str, str]:
    """Fold `fold` is test, of the following folds as many groups as the ratio asks are val, the rest trains.

    A client with fewer groups than folds has no test cases in the last folds; a single group always trains.
    """
    given = read_folds(groups)
    if given:
        chosen = [group for group, fold in given.items() if fold == str(settings.fold)]
        fixed = [group for group, cases in groups.items() if any(case.split == "test" for case in cases)]
        if fixed:  # test cases of their own: the fold validates, as in nnU-Net
            placed = dict.fromkeys(groups, "train") | dict.fromkeys(chosen, "val")
            return placed | dict.fromkeys(fixed, "test")
        test, order = chosen, [group for group in groups if group not in chosen]
    elif len(groups) < 2:
        return dict.fromkeys(groups, "train")
    else:
        folds = balance_folds(groups, settings.folds)
        rotated = folds[settings.fold :] + folds[: settings.fold]
        test, order = rotated[0], [group for fold in rotated[1:] for group in fold]
    rest = {group: len(groups[group]) for group in order}
    share = settings.ratios[1]
    wanted = share * sum(len(cases) for cases in groups.values())
    val = choose_closest(rest, wanted, some=share > 0, leave=1) if share > 0 else []
    return {**dict.fromkeys(rest, "train"), **dict.fromkeys(val, "val"), **dict.fromkeys(test, "test")}


def read_folds(groups: Groups) -> dict[str, str]:
    """Group -> its fold in nnU-Net's splits_final.json; empty where there is no such file."""
    told = {group: cases[0].columns.get(FOLD, "") for group, cases in groups.items()}
    return told if any(told.values()) else {}


def balance_folds(groups: Groups, folds: int) -> list[list[str]]:
    """Each group in one fold, folds of about as many cases: large groups first, each to the smallest fold."""
    dealt: list[list[str]] = [[] for _ in range(folds)]
    cases = [0] * folds
    for group in sorted(groups, key=lambda group: -len(groups[group])):
        fold = min(range(folds), key=lambda number: cases[number])
        dealt[fold].append(group)
        cases[fold] += len(groups[group])
    return dealt


# The file


def write_splits(entries: Iterable[Entry], path: Path) -> None:
    """Write the splits as JSON, sorted; an existing file is replaced atomically."""
    splits: Splits = {}
    for entry in sorted(entries, key=lambda entry: (entry.client, entry.name)):
        if entry.split is None:
            raise DataError(f"{entry.where} has no split yet; assign splits before writing them.")
        splits.setdefault(entry.client, {split: [] for split in SPLITS})[entry.split].append(entry.name)
    write_json(Path(path), splits)


def read_splits(path: Path) -> Splits:
    """The splits of a file, its form checked; `assign` compares them with the cases."""
    path = Path(path)
    try:
        content = json.loads(read_text(path), object_pairs_hook=refuse_repeats)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a file of splits ({error}).") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a file of splits: client: {{train: [...], val: [...], test: [...]}}.")
    return {client: check_client(path, client, splits) for client, splits in content.items()}


def refuse_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names occur once; the usual reader would silently keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' is there twice")
    return found


def check_client(path: Path, client: str, splits: Any) -> dict[str, list[str]]:
    """One client's part of the file, with all three splits."""
    where = f"{path}, client '{client}'"
    if not isinstance(splits, dict):
        raise DataError(f"{where}: give train, val and test, each a list of cases.")
    home: dict[str, str] = {}
    for split, cases in splits.items():
        if split not in SPLITS:
            raise DataError(
                f"{where}: '{split}' is not a split.{suggest(split, SPLITS)} Take train, val or test."
            )
        if not isinstance(cases, list) or not all(isinstance(case, str) for case in cases):
            raise DataError(f"{where}: {split} is not a list of case names.")
        for case in cases:
            if case in home:
                both = f"twice in {split}" if home[case] == split else f"in {home[case]} and in {split}"
                raise DataError(f"{where}: case '{case}' is {both}; keep one of them.")
            home[case] = split
    return {split: list(splits.get(split, [])) for split in SPLITS}


def from_file(entries: Sequence[Entry], path: Path) -> dict[tuple[str, str], str]:
    """(client, case) -> split as the file says; it must list every case, and no other.

    Clients of the file that do not take part are ignored, so that one file serves several federations.
    """
    splits = read_splits(path)
    home = {
        (client, case): split
        for client, parts in splits.items()
        for split, cases in parts.items()
        for case in cases
    }
    have = {(entry.client, entry.name) for entry in entries}
    taking_part = {client for client, _ in have}
    unknown = sorted(key for key in home if key[0] in taking_part and key not in have)
    if unknown:
        client = unknown[0][0]
        raise DataError(
            f"{path}: client '{client}' has no case {quote_cases(unknown, client)}."
            f"{suggest(unknown[0][1], [name for c, name in have if c == client])} Take it out of the file."
        )
    missing = sorted(have - set(home))
    if missing:
        client = missing[0][0]
        raise DataError(
            f"{path}: client '{client}', case {quote_cases(missing, client)} is in no split. "
            "Add it to one, or write the file again with: wardround data split"
        )
    check_groups(entries, home, path)
    return home


def quote_cases(keys: Sequence[tuple[str, str]], client: str) -> str:
    return join_names([f"'{case}'" for who, case in keys if who == client])


def check_groups(entries: Sequence[Entry], home: Mapping[tuple[str, str], str], path: Path) -> None:
    """Refuse a file that splits a group apart."""
    first: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        other = first.setdefault((entry.client, entry.group), entry)
        here, there = home[entry.client, entry.name], home[other.client, other.name]
        if here != there:
            raise DataError(
                f"{path}: client '{entry.client}', group '{entry.group}' is split apart: case '{other.name}' "
                f"is in {there}, case '{entry.name}' in {here}. Put all its cases in one split."
            )
