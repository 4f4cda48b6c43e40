"""Reading project.yaml and site.yaml, short files that say who may do what, and sizes as they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from wardround.errors import ConfigError
from wardround.yaml_file import read_yaml

LARGEST = 1_000_000  # bytes
UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def read_settings(path: Path, example: str) -> dict[str, Any]:
    """The settings of a file. example: a line of such a file, for those who give something else."""
    size = path.stat().st_size if path.is_file() else 0
    if size > LARGEST:
        raise ConfigError(
            f"{path} is {size / 1e6:.1f} MB, too large for a file with settings like '{example}'."
        )
    return read_yaml(path, example)


def refuse_boolean(value: Any) -> Any:
    """YAML reads yes, no, on and off as true and false, and Python takes those for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"it is {str(value).lower()}; give a number")
    return value


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


def format_bytes(count: int) -> str:
    """
    >>> format_bytes(532), format_bytes(2_000_000_000)
    ('532 B', '2.0 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
