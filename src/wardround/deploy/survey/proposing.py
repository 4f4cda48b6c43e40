"""Proposing: classes, channels and a preparation that all hospitals can use, from what they said.

Names that differ in spelling alone (Lesion, lesion) are the same. Where one name of every hospital is left
over, these are taken for the same, a guess that hospitals must confirm. What not all have is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wardround.configuring.facts import Facts
from wardround.configuring.joining import join_fingerprints
from wardround.configuring.preparation_rules import plan_preparation
from wardround.data.fingerprint.case import ALL
from wardround.data.fingerprint.distance import join_words, quote
from wardround.data.fingerprint.measure import Fingerprint
from wardround.deploy.agreement import DataFacts
from wardround.deploy.survey.proposals import HospitalProposal, complete_prepare, spell
from wardround.deploy.survey.replies import Surveyed
from wardround.errors import ConfigError, DataError

Names = dict[str, dict[str, str]]  # hospital -> common name -> its own


@dataclass(frozen=True)
class CommonSections:
    """What is proposed to all.

    classes, channels: hospital -> common name -> its own; prepare: settings laid over each federation.yaml,
    empty where none could be chosen; guesses: what is taken for the same; left_out: hospital -> why it cannot
    take part; notes: why there is no more, a sentence each.
    """

    classes: Names = field(default_factory=dict)
    channels: Names = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)
    guesses: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def class_names(self) -> list[str]:
        return list(next(iter(self.classes.values()), {}))

    @property
    def channel_names(self) -> list[str]:
        return list(next(iter(self.channels.values()), {}))

    def propose_to(self, hospital: str, prepare: Mapping[str, Any] | None = None) -> HospitalProposal:
        """The proposal to one hospital; to one that was not surveyed, under the common names."""
        chosen = self.prepare if prepare is None else dict(prepare)
        classes = self.classes.get(hospital, {name: name for name in self.class_names})
        channels = self.channels.get(hospital, {name: name for name in self.channel_names})
        return HospitalProposal(classes=classes, channels=channels, prepare=chosen)

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> CommonSections:
        return cls(**{**plain, "guesses": tuple(plain["guesses"]), "notes": tuple(plain["notes"])})


def propose(surveyed: Mapping[str, Surveyed]) -> CommonSections:
    """What all hospitals could use; those that stand in the way are left out and named."""
    left_out = find_other_dimensions(surveyed)
    fitting = {name: one for name, one in surveyed.items() if name not in left_out}
    classes, guessed, lacking = match_names(
        {name: list(one.facts.classes) for name, one in fitting.items()}, "class"
    )
    left_out |= lacking
    fitting = {name: one for name, one in fitting.items() if name not in left_out}
    channels, more, lacking = match_channels({name: one.facts for name, one in fitting.items()})
    left_out |= lacking
    classes = {name: own for name, own in classes.items() if name not in left_out}
    found = CommonSections(classes, channels, guesses=(*guessed, *more), left_out=left_out)
    if not found.class_names:
        return CommonSections(left_out=left_out, notes=("There is no class that hospitals have in common.",))
    try:
        facts = join_surveyed(surveyed, found)
    except (DataError, ConfigError) as error:
        return CommonSections(**{**vars(found), "notes": (str(error),)})
    prepare = {choice.key.removeprefix("data.prepare."): choice.value for choice in plan_preparation(facts)}
    return CommonSections(**{**vars(found), "prepare": complete_prepare(prepare)})


def find_other_dimensions(surveyed: Mapping[str, Surveyed]) -> dict[str, str]:
    """Hospitals whose images have other dimensions than most, and why that does not fit."""
    counted = Counter(one.facts.dimensions for one in surveyed.values())
    usual = max(counted, key=lambda number: (counted[number], number), default=2)
    return {
        name: f"its images are {one.facts.dimensions}D, those of most others {usual}D"
        for name, one in surveyed.items()
        if one.facts.dimensions != usual
    }


# Names


def match_names(lists: Mapping[str, Sequence[str]], kind: str) -> tuple[Names, list[str], dict[str, str]]:
    """Common names by hospital; guesses in words; hospitals that lack what the others share, and why."""
    spelled = {name: {spell(word): word for word in words} for name, words in lists.items()}
    counts = Counter(key for own in spelled.values() for key in own)
    shared = {key for key, count in counts.items() if count == len(lists)}
    rest = {name: [key for key in own if key not in shared] for name, own in spelled.items()}
    guesses: list[str] = []
    if len(lists) > 1 and all(len(keys) == 1 for keys in rest.values()):
        words = {name: spelled[name][keys[0]] for name, keys in rest.items()}
        common = choose_word(words.values())
        for name, words_of in spelled.items():
            if spell(words[name]) != spell(common):
                words_of[spell(common)] = words_of.pop(spell(words[name]))
                guesses.append(f"{kind} {quote(words[name])} of {quote(name)} is taken for {quote(common)}")
        shared.add(spell(common))
    lacking: dict[str, str] = {}
    if not shared and counts and max(counts.values()) > 1:
        shared = {key for key, count in counts.items() if count == max(counts.values())}
        lacking = {
            name: f"it has no {kind} {join_words([quote(choose_spelling(spelled, key)) for key in wanting])}"
            for name, own in spelled.items()
            if (wanting := sorted(shared - set(own)))
        }
    orders = Counter(tuple(key for key in own if key in shared) for own in spelled.values())
    order = max(orders, key=lambda keys: (len(keys), orders[keys])) if orders else ()
    names = {
        name: {choose_spelling(spelled, key): own[key] for key in order}
        for name, own in spelled.items()
        if name not in lacking
    }
    return names, guesses, lacking


def choose_spelling(spelled: Mapping[str, Mapping[str, str]], key: str) -> str:
    """The word that most hospitals write; one that is only a guess is spelled as the common one."""
    return choose_word(own[key] for own in spelled.values() if key in own and spell(own[key]) == key)


def choose_word(words: Iterable[str]) -> str:
    counted = Counter(words)
    return min(counted, key=lambda word: (-counted[word], word != word.lower(), word))


def match_channels(facts: Mapping[str, DataFacts]) -> tuple[Names, list[str], dict[str, str]]:
    """The same of channels; unnamed ones are taken in their order. Nothing where nobody names any."""
    named = {name: list(one.channels) for name, one in facts.items() if one.channels}
    usual = Counter(one.in_channels for one in facts.values())
    if not named:
        most = max(usual, key=lambda number: usual[number], default=1)
        odd = {n: f"it has {o.in_channels} channels, most others {most}" for n, o in facts.items()}
        return {}, [], {name: why for name, why in odd.items() if facts[name].in_channels != most}
    names, guesses, lacking = match_names(named, "channel")
    common = list(next(iter(names.values()), {}))
    for name, one in facts.items():
        if one.channels:
            continue
        if one.in_channels != len(common):
            lacking[name] = f"it has {one.in_channels} channels without names, the others {len(common)}"
            continue
        names[name] = {word: f"#{number}" for number, word in enumerate(common, start=1)}
        guesses.append(f"the unnamed channels of {quote(name)} are taken for {join_words(common)}")
    return names, guesses, lacking


# Facts


def join_surveyed(surveyed: Mapping[str, Surveyed], common: CommonSections) -> Facts:
    """The facts of all that fit, for the rules of a plan."""
    fingerprints = [use_names(surveyed[name], common, name) for name in sorted(common.classes)]
    labels = {name: (number,) for number, name in enumerate(common.class_names, start=1)}
    return join_fingerprints(fingerprints, channels=common.channel_names, labels=labels)


def use_names(one: Surveyed, common: CommonSections, hospital: str) -> Fingerprint:
    """A fingerprint with the common classes and channels; all labelled together stays as it was measured."""
    found, facts = one.fingerprint, one.facts
    if not found.is_open:
        return found
    changes: dict[str, Any] = {}
    own = common.channels.get(hospital)
    if own:
        there = list(facts.channels) or [f"#{number + 1}" for number in range(facts.in_channels)]
        order = [there.index(name) for name in own.values()]
        for key in ("intensity", "contrast", "modality", "inside"):
            values = getattr(found, key)
            changes[key] = tuple(values[place] for place in order) if values else values
    alone = len(facts.classes) == 1
    classes = common.classes[hospital]
    sizes = {word: found.foreground.get(ALL if alone else name) for word, name in classes.items()}
    all_sizes = {ALL: found.foreground.get(ALL)}
    changes["foreground"] = {ALL: next(iter(sizes.values()))} if len(sizes) == 1 else {**all_sizes, **sizes}
    known = {name: word for word, name in classes.items()}
    changes["positions"] = tuple(
        pair.model_copy(update={"classes": (known[pair.classes[0]], known[pair.classes[1]])})
        for pair in found.positions
        if set(pair.classes) <= set(known)
    )
    return found.model_copy(update=changes)
