"""Kit: the folder each participant gets, with the keys that prove who they are.

    kits/north/               kits/organiser/
      kit.json                  kit.json          which project, who, where the organiser is
      manifest.json             manifest.json     checksums of what is signed by the project's authority
      README.txt                README.txt
      site.yaml                                   the hospital's own rules, never sent
      keys/                     keys/             own.crt, own.key, authority.crt
      state/                    state/            what wardround keeps here
      logs/                     logs/             log files of its processes
                                runs/             one folder a run
                                survey/           what hospitals said of their cases

Keys are for their owner only; a kit whose key others can read, or that others can change, is refused. Nothing
in a kit is code: no module is imported from it and no part of it is put on a path.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from wardround.errors import ConfigError
from wardround.machine import others_may
from wardround.text import clipped

ORGANISER = "organiser"  # its kit's name
SCHEMA, OLDER = "wardround-kit-2", "wardround-kit-1"
LARGEST = 10_000  # bytes of kit.json
EVERYWHERE, LOOPBACK = "0.0.0.0", "127.0.0.1"
SIGNED = ("README.txt", "keys/authority.crt", "keys/own.crt", "kit.json")  # what the manifest names
# environment variables that tell an engine's processes where things are
KIT, SITE, DATA = "WARDROUND_KIT", "WARDROUND_SITE", "WARDROUND_DATA"
Role = Literal["hospital", "organiser"]


@dataclass(frozen=True)
class Kit:
    """A participant's folder; version: of the wardround that made it; listen: the organiser's alone."""

    folder: Path
    name: str
    role: Role
    project: str
    project_id: str
    server: str
    port: int
    version: str
    listen: str | None = None

    @property
    def own_certificate(self) -> Path:
        return self.folder / "keys" / "own.crt"

    @property
    def own_key(self) -> Path:
        return self.folder / "keys" / "own.key"

    @property
    def next_key(self) -> Path:
        """The key whose certificate has not come yet, if there is one."""
        return self.state / "next.key"

    @property
    def request(self) -> Path:
        """The signing request, beside the kit."""
        return self.folder.with_name(f"{self.name}.request.json")

    @property
    def answer(self) -> Path:
        """Where the organiser's answer to it is put."""
        return self.folder.with_name(f"{self.name}.certificate.json")

    @property
    def authority(self) -> Path:
        """The certificate of the project's authority."""
        return self.folder / "keys" / "authority.crt"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def survey(self) -> Path:
        """The organiser's last survey."""
        return self.folder / "survey"

    @property
    def site_file(self) -> Path:
        return self.folder / "site.yaml"

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
        return plain if self.listen is None else {**plain, "listen": self.listen}


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
        with file.open("rb") as opened:
            values = json.loads(opened.read(LARGEST))
        if values["schema"] == OLDER:
            raise ConfigError(
                f"{folder} was made by an older version of wardround. The organiser makes it again, with the "
                "same authority: move it away, then run wardround provision PROJECT --renew "
                f"{clipped(str(values.get('name', folder.name)), 48)}"
            )
        if values["schema"] != SCHEMA:
            raise ConfigError(
                f"{file} says {values['schema']!r}, this wardround reads {SCHEMA}. "
                "Use the version of wardround that the organiser uses."
            )
        keys = ("name", "role", "project", "project_id", "server", "port", "wardround")
        kit = replace(Kit(folder, *(values[key] for key in keys)), listen=values.get("listen"))
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{file} cannot be read ({reason}). Unpack the kit again.") from None
    texts = (kit.name, kit.project, kit.project_id, kit.server, kit.version)
    listens = {"hospital": (None,), "organiser": (EVERYWHERE, LOOPBACK)}
    if (
        not all(isinstance(text, str) and text.isprintable() and text for text in texts)
        or not isinstance(kit.role, str)
        or kit.listen not in listens.get(kit.role, ())
        or type(kit.port) is not int
        or not 1 <= kit.port <= 65535
    ):
        raise ConfigError(f"{file} has an invalid value. Unpack the kit again.")
    return kit


def check_private(kit: Kit) -> None:
    """Refuse a key that anyone but its owner may read, and a kit that others may change.

    Whoever has a key is that participant; whoever can write site.yaml makes the hospital's rules.
    """
    parts = (kit.folder, kit.folder / "keys", kit.state, kit.site_file, kit.folder / "kit.json")
    keys = (kit.own_key, kit.next_key)
    refused = [(key, 0o077, "is a private key that others on this machine may read") for key in keys]
    refused += [(part, 0o022, "can be changed by others on this machine") for part in parts]
    for path, bits, sentence in refused:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if others_may(path, bits):
                mode = others_may(path, 0o777)
                raise ConfigError(
                    f"{path} {sentence} (mode {mode:03o}). Close it: chmod -R go-rwx {kit.folder}"
                )


def make_private(folder: Path) -> None:
    """Folders 0700, files 0600."""
    folder.chmod(0o700)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


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
