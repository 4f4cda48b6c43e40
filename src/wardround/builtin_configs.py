"""The configurations that come with wardround, found by name: quick starts, papers' tables.

One copy of each: `configs/` of the repository, which the wheel holds as `wardround/configs`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from wardround.errors import ConfigError
from wardround.text import suggest
from wardround.yaml_file import read_yaml

PACKAGED = Path(__file__).parent / "configs"  # in an installed wheel
CHECKOUT = Path(__file__).parents[2] / "configs"  # in the repository
COMPARISON = "compare-"


@dataclass(frozen=True)
class BuiltinConfig:
    """A configuration of the package. command: how it is run; about: one sentence."""

    name: str
    path: Path
    command: str
    about: str


def find_folder() -> Path:
    """Where the files are: in the installed package, else in the repository."""
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


def list_paths() -> dict[str, Path]:
    """Every file by its name: runs, comparisons, methods, papers' tables, Table 2 before Table 10."""
    return {path.stem: path for path in sorted(find_folder().rglob("*.yaml"), key=_order)}


def _order(path: Path) -> tuple[str, bool, list[str]]:
    words = [part.zfill(3) if part.isdigit() else part for part in re.split(r"(\d+)", path.stem)]
    return path.parent.name, path.stem.startswith(COMPARISON), words


def list_configs() -> list[BuiltinConfig]:
    return [describe(name) for name in list_paths()]


def describe(name: str) -> BuiltinConfig:
    """One of them; its sentence is `about`, or the file's first line."""
    path = require(name)
    values = read_yaml(path)
    if "about" in values:
        return BuiltinConfig(name, path, f"wardround papers run {name} --data FOLDER", values["about"])
    about = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    command = f"compare {name.removeprefix(COMPARISON)}" if "sweep" in values else f"train {name}"
    return BuiltinConfig(name, path, f"wardround {command}", about)


def require(name: str) -> Path:
    """The file of a name, which must be known."""
    known = list_paths()
    if name not in known:
        raise ConfigError(
            f"'{name}' is not a configuration of wardround.{suggest(name, known)} List all: wardround configs"
        )
    return known[name]


def find_config(source: str | Path) -> Path:
    """The file that a path or a name stands for.

    What is here under exactly that name is a path, as ever. A file of the same name with .yaml would be easy
    to mistake for ours, or ours for it, so that is refused.
    """
    path = Path(source)
    ours = None if path.suffix or path.name != str(source) or path.exists() else list_paths().get(path.name)
    if ours is None:
        return path
    for own in (path.with_suffix(".yaml"), path.with_suffix(".yml")):
        if own.exists():
            raise ConfigError(
                f"'{source}' is a configuration of wardround, and {own} is here too. Write {own} for yours, "
                "or give it another name."
            )
    return ours


def find_comparison(source: str | Path) -> Path:
    """The same for a comparison of which nothing else is said: NAME may stand for compare-NAME."""
    path = find_config(source)
    paired = list_paths().get(f"{COMPARISON}{path.stem}")
    return paired if paired is not None and path != Path(source) else path
