"""Smaller experiments: a paper's table reduced by one number, or part by part.

--scale 0.1                    every part
--scale rounds=0.1,size=0.5    these parts

size      sides of images, to a multiple of 16, at least 32
cases     of each client, at least 6
rounds    at least 1
epochs    of local training, at least 1
filters   of the network's first level, at least 2
clients   that pooled cases are dealt to, at least 2
seeds     and with them random splits, at least 1
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wardround.data.listing import Entry
from wardround.errors import ConfigError
from wardround.models import ModelSettings, resolve
from wardround.seeds import derive
from wardround.text import suggest

LEAST = {"size": 32, "cases": 6, "rounds": 1, "epochs": 1, "filters": 2, "clients": 2, "seeds": 1}
STEP = 16  # sides are multiples of it: a network halves them four times
SEED = 42  # of which cases are kept
SETTINGS = {"rounds": "rounds", "epochs": "local_epochs"}


@dataclass(frozen=True)
class Scale:
    """How much of each part is kept; a part that is not named is kept whole."""

    shares: Mapping[str, float] = field(default_factory=dict)

    def count(self, part: str, number: int) -> int:
        """
        >>> Scale.parse("0.1").count("rounds", 200), Scale.parse("0.1").count("cases", 4)
        (20, 4)
        """
        return min(number, max(LEAST[part], round(number * self.shares.get(part, 1.0))))

    def size(self, sides: Sequence[int]) -> tuple[int, ...]:
        """
        >>> Scale.parse("0.1").size([384, 384]), Scale.parse("0.5").size([128, 128, 128])
        ((32, 32), (64, 64, 64))
        """
        share = self.shares.get("size", 1.0)
        if share == 1.0:
            return tuple(sides)
        return tuple(min(n, max(LEAST["size"], STEP * round(n * share / STEP))) for n in sides)

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A run with fewer rounds, epochs and filters."""
        scaled = copy.deepcopy(dict(settings))
        for part, key in SETTINGS.items():
            if part in self.shares and key in scaled:
                scaled[key] = self.count(part, scaled[key])
        if "filters" in self.shares and "model" in scaled:
            filters = resolve(ModelSettings.read(scaled["model"], "model.")).base_filters
            if filters is not None:
                scaled["model"]["base_filters"] = self.count("filters", filters)
        return scaled

    def __str__(self) -> str:
        if len(self.shares) == len(LEAST) and len(set(self.shares.values())) == 1:
            return f"{next(iter(self.shares.values())):g}"
        return ", ".join(f"{part} {share:g}" for part, share in self.shares.items())

    @classmethod
    def parse(cls, text: str) -> Scale:
        """What `--scale` says."""
        entries = [part.strip() for part in text.split(",") if part.strip()]
        if len(entries) == 1 and "=" not in entries[0]:
            return cls(dict.fromkeys(LEAST, parse_share(entries[0])))
        shares = {}
        for entry in entries:
            part, _, share = (word.strip() for word in entry.partition("="))
            if part not in LEAST:
                raise ConfigError(
                    f"--scale has no part '{part}'.{suggest(part, LEAST)} It has: {', '.join(LEAST)}."
                )
            shares[part] = parse_share(share)
        return cls(shares)


def parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"--scale is '{text}'; give a number above 0, up to 1, for all parts (0.1) or for some of them "
            "(rounds=0.1,size=0.5)."
        )
    return share


WHOLE = Scale()


# Fewer cases


def limit_clients(entries: Sequence[Entry], scale: Scale) -> list[Entry]:
    """A share of every client's cases."""
    if "cases" not in scale.shares:
        return list(entries)
    clients = dict.fromkeys(entry.client for entry in entries)
    own = {client: [entry for entry in entries if entry.client == client] for client in clients}
    return [e for cases in own.values() for e in limit(cases, scale.count("cases", len(cases)))]


def limit(entries: Sequence[Entry], count: int) -> list[Entry]:
    """About so many cases, patients kept whole; which ones, only their names decide."""
    if len(entries) <= count:
        return list(entries)
    order = sorted(
        {(entry.client, entry.group) for entry in entries},
        key=lambda key: (derive(SEED, "limit", *map(ascii, key)), key),
    )
    sizes = dict.fromkeys(order, 0)
    for entry in entries:
        sizes[entry.client, entry.group] += 1
    taken: set[tuple[str, str]] = set()
    total = 0
    for key in order:
        if total + sizes[key] <= count or not taken:
            taken.add(key)
            total += sizes[key]
    return [entry for entry in entries if (entry.client, entry.group) in taken]
