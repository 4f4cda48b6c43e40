"""What `hospital setup` and `organiser setup` write: project.yaml, site.yaml, federation.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from wardround.data import federation_file
from wardround.data.proposing.proposal import describe, propose
from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.project import Project
from wardround.deploy.preflight import PreflightContext
from wardround.deploy.preflight.sequence import check_data, check_device
from wardround.deploy.site_file import load_site
from wardround.errors import ConfigError
from wardround.files import write_private, write_text


def write_project(path: Path, project: str, host: str, port: int, hospitals: Sequence[str]) -> Project:
    """A checked project.yaml."""
    values = {"project": project, "organiser": {"host": host, "port": port}, "hospitals": list(hospitals)}
    checked = Project.read(values, "")
    write_text(
        path,
        "# Who takes part. Made by: wardround organiser setup\n" + yaml.safe_dump(values, sort_keys=False),
    )
    return checked


def find_cases(kit: Kit) -> str | None:
    """The federation.yaml that site.yaml names, if it is there."""
    data = load_site(kit.site_file).data
    return str(data) if isinstance(data, Path) and data.exists() else None


def describe_cases(data: Path, kit: Kit) -> tuple[Path, list[str]]:
    """The federation.yaml of a hospital, made beside the kit from a folder of scans; and what was chosen.

    data: such a folder, or a federation.yaml that is there already, or a folder with one.
    """
    data = federation_file.expand_home(data).absolute()
    if data.is_dir() and (data / "federation.yaml").is_file():
        data = data / "federation.yaml"
    if not data.exists():
        raise ConfigError(f"{data} does not exist. Give the folder of your scans, or a federation.yaml.")
    if data.suffix in (".yaml", ".yml"):
        return data, [f"The cases are those of {data}."]
    path = kit.folder.with_name(f"{kit.name}.federation.yaml")
    if path.exists():
        return path, [f"{path} was there already and is kept."]
    proposal = propose([data], watch=lambda what: None)
    file = proposal.file.model_copy(update={"partition": federation_file.PartitionSettings(kind="natural")})
    said = [line for line in describe(proposal) if "partition" not in line]
    federation_file.write(file, path, notes=said, proposed=proposal.proposed)
    return path, [*said, f"Written to {path}: change there what was guessed wrongly."]


def change_site(kit: Kit, values: Mapping[str, Any]) -> None:
    """Set keys of site.yaml where they stand, with their comments; what it says of others stays."""
    text = kit.site_file.read_text(encoding="utf-8")
    for key, value in values.items():
        line = yaml.safe_dump({key: value}, width=10**6).rstrip("\n")
        before, found, after = split_at(text, key)
        text = f"{before}{line}{after}" if found else f"{text}\n{line}\n"
    old = kit.site_file.read_bytes()
    write_private(kit.site_file, text.encode())
    try:
        load_site(kit.site_file)
    except ConfigError:
        write_private(kit.site_file, old)
        raise


def split_at(text: str, key: str) -> tuple[str, str, str]:
    """What stands before the line of a key, the line, and what stands after it; no line if there is none."""
    found = re.search(rf"^{key}:.*$", text, re.MULTILINE)
    return (text, "", "") if found is None else (text[: found.start()], found[0], text[found.end() :])


def check_here(kit: Kit) -> list[str]:
    """What can be checked before there is a connection: the device, and the hospital's cases."""
    context = PreflightContext(kit)
    found = [check_device(context), check_data(context)]
    return [one if isinstance(one, str) else f"{one.found}. {one.todo}" for one in found]
