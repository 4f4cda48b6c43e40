"""Finding a ledger and reading its lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wardround.deploy.ledger.chain import NAME, LedgerError, head_path
from wardround.errors import ConfigError


def find(path: Path) -> Path:
    """The egress.jsonl that a kit, a kit's state folder, a run folder or the file itself stands for.

    A hospital's kit from which nothing has left yet has none; then it is the place where it will be.
    """
    path = Path(path)
    if not path.exists() and not head_path(path).exists():
        raise ConfigError(f"{path} does not exist. Give a kit, its state folder, or an {NAME}.")
    if not path.is_dir():
        return path
    for place in (path / "state" / NAME, path / NAME):
        if place.exists() or head_path(place).exists():
            return place
    if (path / "kit.json").exists():
        if read_role(path) == "organiser":
            raise ConfigError(
                f"{path} is the organiser's kit; hospitals keep the ledger. What reached the organiser is in "
                f"each run: {path}/runs/NAME/{NAME}"
            )
        return path / "state" / NAME
    raise ConfigError(f"{path} holds no {NAME}. Give a hospital's kit, its state folder, or a run folder.")


def read_role(kit: Path) -> str | None:
    try:
        role = json.loads((kit / "kit.json").read_text(encoding="utf-8")).get("role")
    except (OSError, ValueError, AttributeError):
        return None
    return str(role)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line, one at a time; a last one that a crash cut off is left out."""
    try:
        with Path(path).open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return
                try:
                    line = json.loads(text)
                except ValueError:
                    line = None
                if not isinstance(line, dict):
                    raise LedgerError(
                        f"{path}, line {number} cannot be read. See: wardround egress verify {path}"
                    )
                yield line
    except FileNotFoundError:
        return


def is_organisers(path: Path) -> bool:
    """Whether this is a run's plain list of what reached the organiser, which has no chain."""
    if head_path(path).exists() or not path.exists():
        return False
    with path.open("rb") as file:
        first = file.readline()
    try:
        line = json.loads(first)
    except ValueError:
        return False
    return (
        isinstance(line, dict)
        and "phase" in line
        and "client" in line
        and not {"hash", "previous"} & set(line)
    )
