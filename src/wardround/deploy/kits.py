"""Kit: the folder each participant gets, with the keys that prove who they are.

    kits/north/               kits/organiser/
      kit.json                  kit.json          which project, who, where the organiser is
      manifest.json             manifest.json     checksums of what follows, signed by the project's authority
      site.yaml                                   the hospital's own rules, never sent
      flare/                    flare/            the engine's workspace: startup/ local/ transfer/
                                admin/            what the organiser's commands prove themselves with
      state/                    state/            what wardround keeps here
                                runs/             one folder a run

Keys are for their owner only; a kit whose keys others can read is refused.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from wardround.errors import ConfigError

SCHEMA = "wardround-kit-1"
# environment variables that tell an engine's processes where things are
KIT, SITE, DATA = "WARDROUND_KIT", "WARDROUND_SITE", "WARDROUND_DATA"
Role = Literal["hospital", "organiser"]


@dataclass(frozen=True)
class Kit:
    """A participant's folder; version: of the wardround that made it; admin_port: the organiser's alone."""

    folder: Path
    name: str
    role: Role
    project: str
    project_id: str
    server: str
    port: int
    version: str
    admin_port: int | None = None

    @property
    def flare(self) -> Path:
        return self.folder / "flare"

    @property
    def startup(self) -> Path:
        return self.flare / "startup"

    @property
    def admin(self) -> Path:
        return self.folder / "admin"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def site_file(self) -> Path:
        return self.folder / "site.yaml"

    @property
    def keys(self) -> Iterator[Path]:
        """Every private key in the kit."""
        for part in (self.startup, self.admin / "startup"):
            if part.is_dir():
                yield from sorted(part.glob("*.key"))

    def as_dict(self) -> dict[str, Any]:
        """What kit.json says."""
        plain = {
            "schema": SCHEMA,
            "project": self.project,
            "project_id": self.project_id,
            "name": self.name,
            "role": self.role,
            "server": self.server,
            "port": self.port,
            "wardround": self.version,
        }
        return plain if self.admin_port is None else {**plain, "admin_port": self.admin_port}


def open_kit(path: str | Path, role: Role | None = None) -> Kit:
    """The kit in a folder; role: the one the command is for. Keys that others can read are refused."""
    folder = Path(path)
    if folder.name == "kit.json" and folder.is_file():
        folder = folder.parent
    kit = read_kit(folder.absolute())
    if role is not None and kit.role != role:
        command = "wardround server" if kit.role == "organiser" else "wardround join"
        raise ConfigError(
            f"{folder} is the {kit.role}'s kit of '{kit.name}', but this command needs the kit of "
            f"{'a hospital' if role == 'hospital' else 'the organiser'}. This kit is for: {command} {folder}"
        )
    check_private(kit)
    return kit


def read_kit(folder: Path) -> Kit:
    """kit.json and nothing else."""
    file = folder / "kit.json"
    if not folder.exists():
        raise ConfigError(
            f"{folder} does not exist. Give the folder of your kit, the one with kit.json in it."
        )
    if not file.is_file():
        inside = ", ".join(sorted(found.parent.name for found in folder.glob("*/kit.json")))
        hint = f"It holds the kits {inside}; give one of them." if inside else "It has no kit.json."
        raise ConfigError(f"{folder} is not a kit. {hint}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["schema"] != SCHEMA:
            raise ConfigError(
                f"{file} says {values['schema']!r}, this wardround reads {SCHEMA}. "
                "Use the version of wardround that the organiser uses."
            )
        keys = ("name", "role", "project", "project_id", "server", "port", "wardround")
        kit = replace(Kit(folder, *(values[key] for key in keys)), admin_port=values.get("admin_port"))
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{file} cannot be read ({reason}). Unpack the kit again.") from None
    texts = (kit.name, kit.project, kit.project_id, kit.server, kit.version)
    sound = all(isinstance(text, str) and text for text in texts) and kit.role in ("hospital", "organiser")
    ports = [kit.port] if kit.admin_port is None else [kit.port, kit.admin_port]
    if not sound or not all(type(port) is int and 1 <= port <= 65535 for port in ports):
        raise ConfigError(f"{file} has an invalid value. Unpack the kit again.")
    return kit


def check_private(kit: Kit) -> None:
    """Refuse keys that anyone but their owner may read: whoever has a key is that participant."""
    for key in kit.keys:
        mode = stat.S_IMODE(key.stat().st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"{key} is a private key that others on this machine may read (mode {mode:03o}). "
                f"Close it: chmod -R go-rwx {kit.folder}"
            )


def find_organisers_kit(path: Path | None) -> Kit:
    """The kit named, or the one nearby: WARDROUND_KIT, this folder, kits/organiser."""
    if path is not None:
        return open_kit(path, "organiser")
    if os.environ.get(KIT):
        return open_kit(os.environ[KIT], "organiser")
    for folder in (Path(), Path("organiser"), Path("kits/organiser")):
        if (folder / "kit.json").is_file():
            return open_kit(folder, "organiser")
    raise ConfigError("no organiser's kit found. Name it with --kit, for example --kit kits/organiser.")
