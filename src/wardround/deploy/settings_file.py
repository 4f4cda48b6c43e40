"""Reading project.yaml and site.yaml: short files that say who may do what.

A file too large to be one is not parsed at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wardround.errors import ConfigError
from wardround.yaml_file import read_yaml

LARGEST = 1_000_000  # bytes


def read_settings(path: Path, example: str) -> dict[str, Any]:
    """The settings of a file. example: a line of such a file, for those who give something else."""
    size = path.stat().st_size if path.is_file() else 0
    if size > LARGEST:
        raise ConfigError(
            f"{path} has {size / 1e6:.1f} MB, too large for a file with settings like '{example}'."
        )
    return read_yaml(path, example)


def refuse_boolean(value: Any) -> Any:
    """YAML reads yes, no, on and off as true and false, and Python takes those for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"it is {str(value).lower()}; give a number")
    return value
