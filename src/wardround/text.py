"""Words for people: what else they may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[object]) -> str:
    """' Did you mean 'x'?' for the closest known word, else nothing."""
    close = difflib.get_close_matches(word, [str(item) for item in known], n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """ " Did you mean 'x'?" for the nearest known word, capitals aside; nothing if none is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" Did you mean '{prefix}{by_lower[near[0]]}'?" if near else ""
