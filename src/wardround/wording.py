"""Words for people: what else they may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[object]) -> str:
    """' Did you mean 'x'?' for the closest known word, else nothing."""
    close = difflib.get_close_matches(word, [str(item) for item in known], n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
