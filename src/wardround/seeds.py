"""Seeds from seeds, one for every purpose."""

from __future__ import annotations

import hashlib


def derive(seed: int, *purpose: object) -> int:
    """A 63-bit seed from the run's seed and a purpose, the same on every machine."""
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
