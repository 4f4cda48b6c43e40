"""What the data of an output folder are made of, so that its finished runs never stand for other data.

    <out>/<federation>.json    the folders given with --data, and how much of their images and cases is kept

A run's settings name only the federation.yaml in its output folder, which is written anew for every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wardround.errors import ConfigError
from wardround.files import file_name, parse_json, write_json
from wardround.papers.scaling import Scale

PARTS = ("size", "cases", "clients")  # of a scale, those that change data


def check_origin(out: Path, name: str, places: Sequence[str], scale: Scale) -> None:
    """Refuse a folder whose federation of this name was made of other data, or of another part of them."""
    path = find_note(out, name)
    if path.exists() and (before := parse_json(path.read_text(encoding="utf-8"))) != describe(places, scale):
        raise ConfigError(
            f"{out.parent} has runs on other data: '{name}' was made with --data "
            f"{', '.join(before['data'])}, or with another --scale. Choose another output folder with -o, or "
            "remove this one."
        )


def note_origin(out: Path, name: str, places: Sequence[str], scale: Scale) -> None:
    write_json(find_note(out, name), describe(places, scale))


def describe(places: Sequence[str], scale: Scale) -> dict[str, Any]:
    return {"data": list(places), "scale": {part: scale.shares.get(part, 1.0) for part in PARTS}}


def find_note(out: Path, name: str) -> Path:
    return out / f"{file_name(name)}.json"
