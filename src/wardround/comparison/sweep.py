"""The `sweep:` section: which values every axis of a comparison takes.

    sweep:
      methods: [fedavg, fedevi, {label: FedEvi 2, method: {name: fedevi, delta: 2}}]
      objectives: [dice, dice_bce]
      models: [unet2d]
      seeds: 3                                # or [1, 2, 3]
      folds: 5
      reference: fedavg                       # the row all others are tested against
      optimizer.learning_rate: [1e-3, 1e-2]   # any setting, by its dotted name

A name stands for a section with that name alone (`method: {name: fedevi}`); where the configuration itself
names the same method, its settings are kept. A mapping has a `label` and any settings, sections or dotted
names; each replaces what stood there, but `model` keeps stem, norm and size where the row does not say them.

What `--set` says holds in every row, also where a row replaces the section it stands in; a setting that a row
says itself is the row's. A `--set` that could not hold is refused: one that a named method does not have, or
that an axis says in every row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from wardround.config import Config
from wardround.errors import ConfigError
from wardround.methods import METHODS, OBJECTIVES
from wardround.papers.presets import change_settings, format_changes, get_dotted, label_point
from wardround.text import suggest

SECTIONS = {"methods": "method", "objectives": "objective", "models": "model"}
OWN_SETTINGS: dict[str, Mapping[str, type[Any]]] = {"method": METHODS, "objective": OBJECTIVES}
COUNTED = ("seeds", "folds")
SHORTHANDS = (*SECTIONS, *COUNTED, "reference")
SINGULAR = {
    "method": "methods",
    "objective": "objectives",
    "model": "models",
    "seed": "seeds",
    "fold": "folds",
}


@dataclass(frozen=True)
class Point:
    """One value of an axis: how it is called, and the settings it lays over the configuration."""

    label: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class SweepAxis:
    """One direction of the grid. name: methods, objectives, models, or a dotted setting."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Sweep:
    """What is compared. seeds, folds: None where the file says nothing."""

    axes: Sequence[SweepAxis] = ()
    seeds: Any = None
    folds: Any = None
    reference: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # the configuration without its sweep


def read_sweep(
    values: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Sweep:
    """The sweep of a configuration; `options` (the same keys) replace what the file says.

    A name among the options means the file's entry of that label where there is one. overrides: what --set
    says, as nested settings; `values` has it already, but a row that replaces a section would drop it.
    """
    settings = {key: copy.deepcopy(value) for key, value in values.items() if key != "sweep"}
    given = values.get("sweep") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"sweep is {given!r}; it must map settings to lists, for example methods: [fedavg]."
        )
    chosen = dict(given)
    places = {key: f"sweep.{key}" for key in given}
    for key, value in (options or {}).items():
        if value is not None:
            chosen[key] = resolve_labels(value, given.get(key)) if key in SECTIONS else value
            places[key] = f"--{key}"
    axes = [
        build_axis(str(key), value, settings, overrides or {}, places[key])
        for key, value in chosen.items()
        if key not in (*COUNTED, "reference")
    ]
    axes.sort(key=lambda entry: [*SECTIONS, entry.name].index(entry.name))  # methods first, settings last
    reference = None if chosen.get("reference") is None else str(chosen["reference"])
    seeds, folds = chosen.get("seeds"), chosen.get("folds")
    return Sweep(axes=axes, seeds=seeds, folds=folds, reference=reference, settings=settings)


def resolve_labels(names: Iterable[Any], entries: Any) -> list[Any]:
    """Names from the command line, each replaced by the file's entry of that label."""
    if isinstance(names, str | Mapping):
        names = [names]
    known = entries if isinstance(entries, list | tuple) else []
    labelled = {
        str(entry["label"]): entry for entry in known if isinstance(entry, Mapping) and "label" in entry
    }
    return [labelled.get(name, name) if isinstance(name, str) else name for name in names]


def build_axis(
    name: str, values: Any, settings: Mapping[str, Any], overrides: Mapping[str, Any], where: str
) -> SweepAxis:
    """One direction of the grid from its list. where: who asked for it, the file or an option."""
    if name in SINGULAR:
        raise ConfigError(f"{where} is not an axis. Write sweep.{SINGULAR[name]}.")
    if not isinstance(values, list | tuple) or not values:
        known = "." in name or name in Config.model_fields or name in SHORTHANDS
        hint = "" if known else suggest(name, SHORTHANDS)
        raise ConfigError(f"{where} is {values!r}; it must be a list of values.{hint}")
    if name in SECTIONS:
        names = [value for value in values if isinstance(value, str)]
        check_overrides(SECTIONS[name], names, overrides, where)
        points = [build_point(SECTIONS[name], value, settings, where) for value in values]
    else:
        points = [Point(label_point(name, value), {name: value}) for value in values]
    labels = [point.label for point in points]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"{where} has '{label}' twice. Give one of them a label of its own.")
    for key in list_dotted(overrides):
        if all(sets_key(point.changes, key) for point in points):
            raise ConfigError(f"--set {key}: {where} sets it in every row. Change it there, or drop it.")
    return SweepAxis(
        name, [replace(point, changes=merge_overrides(point.changes, overrides)) for point in points]
    )


def build_point(section: str, value: Any, settings: Mapping[str, Any], where: str) -> Point:
    if isinstance(value, str) and value:
        return Point(value, expand_name(section, value, settings))
    if (
        not isinstance(value, Mapping)
        or not isinstance(value.get("label"), str)
        or not value["label"].strip()
    ):
        raise ConfigError(
            f"{where} has {value!r}; write a name, or a mapping with a label and settings: "
            f"{{label: mine, {section}: {{name: ...}}}}. Runs are processes of their own, so code of yours "
            "is named by its import path, 'my_file:Name'."
        )
    return Point(str(value["label"]), {key: item for key, item in value.items() if key != "label"})


def expand_name(section: str, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The change a plain name stands for."""
    if section == "model":
        return {"model.name": name}  # size and norm are the same for every network
    before = settings.get(section)
    if isinstance(before, Mapping) and before.get("name") == name:
        return {}
    return {section: {"name": name}}


def apply_changes(settings: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings with changes at dotted names; a whole section is replaced, `model` merged."""
    result = copy.deepcopy(dict(settings))
    for key, value in changes.items():
        try:
            change_settings(result, str(key), copy.deepcopy(value))
        except (AttributeError, TypeError):
            raise ConfigError(f"{where}: '{key}' goes into a setting that is a single value.") from None
    return result


def describe_side_changes(rows: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """Sentences on rows that change what the table does not compare: FedBN with another norm.

    rows: label -> its settings, its changes. What every row changes is compared, and so are methods,
    objectives and the choice of a network.
    """
    changed = {label: set(list_dotted(changes)) for label, (_, changes) in rows.items()}
    common = set.intersection(*changed.values()) if changed else set()
    sentences = []
    for label, keys in changed.items():
        side = {}
        for key in sorted(keys - common - {"model.name", "datasets"}):
            value = get_dotted(rows[label][0], key)
            others = [get_dotted(rows[other][0], key) for other in rows if key not in changed[other]]
            if key.partition(".")[0] not in OWN_SETTINGS and any(value != other for other in others):
                side[key] = value
        if side:
            sentences.append(f"Row '{label}' also changes {format_changes(side)}; other rows do not.")
    return sentences


# What --set says


def check_overrides(section: str, names: Sequence[str], overrides: Mapping[str, Any], where: str) -> None:
    """Refuse what --set says of a section and the names on an axis cannot all have."""
    if not names or section not in overrides:
        return
    given = overrides[section]
    if not isinstance(given, Mapping) or "name" in given:
        key = f"{section}.name" if isinstance(given, Mapping) else section
        raise ConfigError(f"--set {key}: {where} names every {section}. Keep one of the two.")
    registry = OWN_SETTINGS.get(section, {})  # those of networks are checked with the row
    own = {name: [entry.name for entry in fields(registry[name])] for name in names if name in registry}
    for key, value in given.items():
        having = [name for name, known in own.items() if key in known]
        for name, known in own.items():
            if key in known:
                continue
            if having:
                row = f"{{label: mine, {section}: {{name: {having[0]}, {key}: {value}}}}}"
                hint = f" For {having[0]} alone, write a row in the file, under sweep: {section}s: [{row}]"
            else:
                hint = f"{suggest(key, known)} It has: {', '.join(sorted(known)) or 'none'}."
            raise ConfigError(f"--set {section}.{key}: {section} '{name}' has no setting '{key}'.{hint}")


def list_dotted(overrides: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The dotted names of nested settings.

    >>> list(list_dotted({"rounds": 3, "method": {"mu": 1}}))
    ['rounds', 'method.mu']
    """
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            yield from list_dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def sets_key(changes: Mapping[str, Any], key: str) -> bool:
    """Whether changes give a setting themselves, by its dotted name or inside a section.

    >>> changes = {"method": {"name": "fedprox"}}
    >>> sets_key(changes, "method.name"), sets_key(changes, "method.mu")
    (True, False)
    """
    for name, value in changes.items():
        inside = key.removeprefix(f"{name}.")
        if name == key or (inside != key and (not isinstance(value, Mapping) or sets_key(value, inside))):
            return True
    return False


def merge_overrides(changes: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The changes with --set inside the sections they replace; what they say themselves stays.

    >>> merge_overrides({"method": {"name": "fedprox"}}, {"method": {"mu": 1}, "rounds": 3})
    {'method': {'name': 'fedprox', 'mu': 1}}
    """
    result = dict(changes)
    for key, value in changes.items():
        given: Any = overrides
        for part in str(key).split("."):
            given = given.get(part) if isinstance(given, Mapping) else None
        if isinstance(value, Mapping) and isinstance(given, Mapping):
            inner = merge_overrides(value, given)
            result[key] = inner | {name: item for name, item in given.items() if name not in value}
    return result


# Seeds and folds


def parse_seeds(given: Any, first: int) -> list[int]:
    """A number counts from the configuration's seed; a list is taken as it is.

    >>> parse_seeds(3, 42), parse_seeds([1, 5], 42), parse_seeds(None, 42)
    ([42, 43, 44], [1, 5], [42])
    """
    if given is None:
        return [first]
    if is_count(given):
        return [first + number for number in range(given)]
    return parse_integers("seeds", given)


def parse_folds(given: Any) -> int | None:
    """How many folds there are; None for no folds."""
    if given is None:
        return None
    if is_count(given) and given >= 2:
        return int(given)
    raise ConfigError(f"folds is {given!r}; it must be a number of folds, at least 2.")


def is_count(given: Any) -> bool:
    if isinstance(given, bool) or not isinstance(given, int):
        return False
    if not 1 <= given <= 1000:
        raise ConfigError(f"{given} seeds or folds; give 1 to 1000, or a list of seeds.")
    return True


def parse_integers(what: str, given: Any) -> list[int]:
    values = list(given) if isinstance(given, list | tuple) else []
    good = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    if not values or not good or len(set(values)) < len(values):
        raise ConfigError(f"{what} is {given!r}; it must be a number, or a list of different whole numbers.")
    return values
