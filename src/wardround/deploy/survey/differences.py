"""Differences: how hospitals differ, and what does not fit, a sentence each with the names of hospitals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from wardround.data.fingerprint.distance import (
    ASPECTS,
    WORDS,
    compare,
    format_foreground,
    format_sides,
    join_words,
    quote,
)
from wardround.data.fingerprint.histogram import round_all
from wardround.data.fingerprint.measure import Fingerprint
from wardround.deploy.survey.proposing import CommonSections, use_names
from wardround.deploy.survey.replies import Surveyed
from wardround.errors import DataError


@dataclass(frozen=True)
class Deviation:
    """One way in which hospitals differ. blocks: somebody must act before one model can serve them."""

    aspect: str
    hospitals: tuple[str, ...]
    text: str
    blocks: bool = False


def list_deviations(surveyed: Mapping[str, Surveyed], common: CommonSections) -> list[Deviation]:
    """What does not fit first, then what differs."""
    found = [
        *(Deviation("left out", (name,), f"{quote(name)} does not fit: {why}.", True)
          for name, why in sorted(common.left_out.items())),
        *(Deviation("no common ground", (), note, True) for note in common.notes),
        *(Deviation("guess", (), f"A guess, for hospitals to confirm: {guess}.", True)
          for guess in common.guesses),
        *list_names(surveyed, common),
        *list_kinds(surveyed),
        *list_distances(surveyed, common),
        *list_classes(surveyed),
        *list_preparations(surveyed),
    ]  # fmt: skip
    return sorted(found, key=lambda one: not one.blocks)


def list_names(surveyed: Mapping[str, Surveyed], common: CommonSections) -> list[Deviation]:
    """Classes and channels that not all have, that are spelled or ordered in another way, and regions."""
    found = []
    for kind, plural, names in (
        ("class", "classes", common.classes),
        ("channel", "channels", common.channels),
    ):
        for hospital, own in sorted(names.items()):
            facts = surveyed[hospital].facts
            there = list(facts.classes if kind == "class" else facts.channels)
            for word in [word for word in there if word not in own.values()]:
                text = f"{kind} {quote(word)} of {quote(hospital)} is not at all hospitals, and is left out."
                found.append(Deviation(plural, (hospital,), text, True))
            renamed = [f"{quote(w)} for {quote(c)}" for c, w in own.items() if w != c and w[:1] != "#"]
            if renamed:
                text = f"{quote(hospital)} writes {plural} in another way: {join_words(renamed)}."
                found.append(Deviation(plural, (hospital,), text))
            if there and [word for word in there if word in own.values()] != list(own.values()):
                text = f"{quote(hospital)} has its {plural} in another order: {', '.join(there)}."
                found.append(Deviation(plural, (hospital,), text))
    regions = {name: str(sorted(surveyed[name].facts.regions)) for name in common.classes}
    names_differ = len({tuple(surveyed[name].facts.classes) for name in common.classes}) > 1
    if len(set(regions.values())) > 1 and not names_differ:
        text = f"regions differ: {describe_values(regions, surveyed)}."
        found.append(Deviation("regions", tuple(sorted(regions)), text, True))
    return found


def list_kinds(surveyed: Mapping[str, Surveyed]) -> list[Deviation]:
    """Hounsfield units at some, files without millimetres, hospitals that tell nothing."""
    known = {name: one for name, one in surveyed.items() if one.fingerprint.is_open}
    found = []
    few = [quote(name) for name in sorted(surveyed) if name not in known]
    if few:
        text = f"{join_words(few)} told nothing of the cases: too few patients."
        found.append(Deviation("withheld", tuple(sorted(set(surveyed) - set(known))), text))
    ct = sorted(name for name, one in known.items() if "ct" in one.fingerprint.modality)
    if ct and len(ct) < len(known):
        rest = join_words([quote(name) for name in sorted(known) if name not in ct])
        text = f"Values look like Hounsfield units (CT) at {join_words(list(map(quote, ct)))}, not at {rest}."
        found.append(Deviation("intensities", tuple(ct), text, True))
    without = sorted(name for name, one in known.items() if not one.fingerprint.has_spacing)
    if without and len(without) < len(known):
        text = f"Files of {join_words(list(map(quote, without)))} do not say millimetres, those of others do."
        found.append(Deviation("spacing", tuple(without), text))
    return found


def list_distances(surveyed: Mapping[str, Surveyed], common: CommonSections) -> list[Deviation]:
    """Aspects in which fingerprints are far apart: the farthest hospital, with everybody's figures."""
    names = [name for name in sorted(common.classes) if surveyed[name].fingerprint.is_open]
    adapted = {name: use_names(surveyed[name], common, name) for name in names}
    try:
        compared = compare(list(adapted.values()))
    except DataError as error:
        return [Deviation("comparison", (), str(error), True)]
    found = []
    for aspect, matrix in compared.distances.items():
        some, strong = ASPECTS[aspect]
        if len(names) < 2 or float(matrix.max()) < some:
            continue
        far = names[int(np.argmax(matrix.sum(axis=1)))]
        much = "much" if float(matrix.max()) >= strong else "somewhat"
        show = DESCRIBED[aspect]
        others = "; ".join(f"{name} {show(adapted[name])}" for name in names if name != far)
        title = WORDS.get(aspect, aspect)
        text = f"{quote(far)} differs {much} in {title}: {show(adapted[far])}. The others: {others}."
        text += PERCENTILES if aspect in ("brightness", "contrast") else ""
        found.append(Deviation(title, (far,), text))
    return found


def describe_levels(field: str) -> Callable[[Fingerprint], str]:
    """5th, 50th and 95th percentile of each channel, mean over cases."""

    def describe(one: Fingerprint) -> str:
        curves = [
            None if curve is None else round_all([curve.mean[place] for place in (1, 3, 5)])
            for curve in getattr(one, field)
        ]
        return ", ".join("absent" if c is None else " / ".join(f"{v:g}" for v in c) for c in curves)

    return describe


PERCENTILES = " (5th, 50th and 95th percentile of each channel, mean over cases.)"
DESCRIBED: Mapping[str, Callable[[Fingerprint], str]] = {
    "brightness": describe_levels("intensity"),
    "contrast": describe_levels("contrast"),
    "spacing": lambda one: f"{format_sides(one.spacing)} mm",
    "shape": lambda one: f"{format_sides(one.shape)} voxels",
    "foreground": format_foreground,
    "amount": lambda one: f"{one.cases} cases",
}


def list_classes(surveyed: Mapping[str, Surveyed]) -> list[Deviation]:
    """Classes that a hospital names and hardly has."""
    found = []
    for name, one in sorted(surveyed.items()):
        rare = [word for word, sizes in one.fingerprint.foreground.items() if sizes is None]
        if one.fingerprint.is_open and rare:
            words = join_words([quote(word) for word in rare])
            text = f"{words} is labelled in few or no training cases of {quote(name)}."
            found.append(Deviation("labels", (name,), text))
        elif one.fingerprint.is_open and not one.fingerprint.foreground:
            found.append(
                Deviation("labels", (name,), f"No training case of {quote(name)} has a label.", True)
            )
    return found


def list_preparations(surveyed: Mapping[str, Surveyed]) -> list[Deviation]:
    """Settings of `prepare` that differ; the proposal replaces them."""
    found = []
    every = {name: one.facts.prepare.model_dump(mode="json") for name, one in sorted(surveyed.items())}
    for key in next(iter(every.values()), {}):
        values = {name: str(settings[key]) for name, settings in every.items()}
        if len(set(values.values())) > 1:
            text = f"prepare.{key} differs: {describe_values(values, surveyed)}."
            found.append(Deviation("prepare", tuple(values), text))
    return found


def describe_values(values: Mapping[str, str], surveyed: Mapping[str, Surveyed]) -> str:
    """Each value with who has it, the most usual first."""
    counted = Counter(values.values())
    parts = []
    for value, _ in counted.most_common():
        who = join_words([name for name in sorted(values) if values[name] == value])
        parts.append(f"{value[:80]} at {who}")
    return "; ".join(parts)
