"""Text for people: what else they may have meant, sizes as they are written, a round in short."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def suggest(word: str, known: Iterable[object], prefix: str = "") -> str:
    """ " Did you mean 'x'?" for the nearest known word, capitals aside; nothing if none is near.

    >>> suggest("SCAFFOLD", ["scaffold", "fedavg"]), suggest("lr", ["learning_rate", "name"])
    (" Did you mean 'scaffold'?", " Did you mean 'learning_rate'?")
    """
    by_lower = {str(item).lower(): str(item) for item in known}
    near = [key for key in by_lower if is_short_for(word.lower(), key)]
    near = near or difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f" Did you mean '{prefix}{by_lower[near[0]]}'?" if near else ""


def is_short_for(word: str, key: str) -> bool:
    """Whether a word has the initials of a key, as `lr` has those of `learning_rate`."""
    return "_" in key and word == "".join(part[:1] for part in key.split("_"))


def format_size(sides: Iterable[float]) -> str:
    """Sides of an image, a patch or a voxel.

    >>> format_size((64, 64)), format_size((0.5, 0.5, 2.0))
    ('64x64', '0.5x0.5x2')
    """
    return "x".join(f"{side:g}" if isinstance(side, float) else str(side) for side in sides)


def format_count(count: int, what: str) -> str:
    """
    >>> format_count(1, "seed"), format_count(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_percent(share: float) -> str:
    """0.25 is 25 %."""
    return f"{100 * share:.0f} %"


def format_bytes(count: float) -> str:
    """
    >>> format_bytes(532), format_bytes(1_250_000), format_bytes(3e9)
    ('532 B', '1.2 MB', '3.0 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float) -> str:
    """Seconds for people.

    >>> [format_duration(seconds) for seconds in (0.25, 42, 600, 9000, 400_000)]
    ['0.2 s', '42 s', '10 min', '2.5 h', '4.6 days']
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def parse_size(value: Any) -> int:
    """A size in bytes, from a number or from text with a unit.

    >>> parse_size("500 MB"), parse_size("1.5GiB"), parse_size(1000)
    (500000000, 1610612736, 1000)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?\s*", str(value).lower())
    unit = None if found is None else UNITS.get(found[2] or "b")
    if found is None or unit is None:
        raise ValueError(f"it is {value!r}; give a size such as 500 MB or 2 GB, or a number of bytes")
    return int(float(found[1]) * unit)


def clipped(text: str, length: int = 24) -> str:
    """Names from elsewhere: short, one line, and never read as mathematics."""
    flat = "".join(character if character.isprintable() else "?" for character in text).replace("$", r"\$")
    return flat if len(flat) <= length else flat[: length - 1] + "…"


def describe_round(record: Mapping[str, Any]) -> str:
    """A round in short: validation score, time, and refused or lost replies."""
    parts = []
    for metric, entry in record.get("validation", {}).items():
        if metric != "loss":
            parts.append(f"validation {metric} {entry['mean']:.3f}")
            break
    parts.append(f"{record['seconds']:.1f} s")
    trouble = len(record["refused"]) + len(record["lost"])
    if trouble:
        parts.append(f"{trouble} replies refused or lost")
    return ", ".join(parts)
