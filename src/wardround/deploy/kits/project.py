"""project.yaml: who takes part in a federation, and where its organiser can be reached.

    project: polyps
    organiser: {host: organiser.example.org, port: 8002, organisation: Example}
    hospitals: [north, {name: south, organisation: South_Trust}]
    valid_days: 360

`wardround provision` makes the kits of one such file. A hospital's name here is its name everywhere: in its
certificate, in its federation.yaml, in folders and in the results.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from wardround.data.roles import NOT_HOSPITALS
from wardround.errors import ConfigError
from wardround.settings import Settings, refuse_boolean, shown
from wardround.yaml_file import read_yaml

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")
NAME_RULE = "up to 48 letters a-z, digits, - and _, with a letter or digit in front"
ORGANISATION = re.compile(r"[A-Za-z0-9_]{1,48}")
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
MOST_HOSPITALS = 1000
LONGEST_HOST = 64  # it is the common name of a certificate

# names that mean something else: to the engine, in the folder of kits, or in a run
RESERVED = frozenset({"organiser", "organizer", "server", "admin", "relay", "all", *NOT_HOSPITALS})


def check_name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError(f"'{value[:80]}' is not a valid name; use {NAME_RULE}")
    return value


def check_organisation(value: str) -> str:
    if value and not ORGANISATION.fullmatch(value):
        raise ValueError(f"'{value}' is not a valid organisation; use up to 48 letters a-z, digits and _")
    return value


def is_host(value: str) -> bool:
    """
    >>> is_host("organiser.example.org"), is_host("10.0.0.7"), is_host("10.0.0.777"), is_host("https://a.b")
    (True, True, False, False)
    """
    labels = value.split(".")
    if labels[-1].isdecimal():  # no name ends in a number, so it is meant to be an address
        try:
            return ipaddress.ip_address(value).version == 4
        except ValueError:
            return False
    return all(LABEL.fullmatch(label) for label in labels)


class Organiser(Settings):
    """The machine hospitals connect to; port: the one port that must be open on it."""

    host: str
    port: int = Field(8002, ge=1, le=65535)
    organisation: str = "organiser"

    _organisation = field_validator("organisation")(check_organisation)
    _numbers = field_validator("port", mode="before")(refuse_boolean)

    @field_validator("host")
    @classmethod
    def usable(cls, value: str) -> str:
        if len(value) > LONGEST_HOST or not is_host(value):
            raise ValueError(
                f"'{value[:80]}' is not a host; give a name like organiser.example.org or an IPv4 address, "
                f"at most {LONGEST_HOST} characters, without port or https://"
            )
        return value


class Hospital(Settings):
    """One hospital; organisation: as its certificate says it, left out the same as the name."""

    name: str
    organisation: str = ""

    _organisation = field_validator("organisation")(check_organisation)

    @model_validator(mode="before")
    @classmethod
    def short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if not isinstance(value, dict | Hospital):
            raise ValueError(
                f"{shown(value)} is not a name. Write a name, or {{name: ..., organisation: ...}}; quote one "
                "that YAML takes for something else, such as '12' or 'no'"
            )
        return value

    @field_validator("name")
    @classmethod
    def usable(cls, value: str) -> str:
        if check_name(value).lower() in RESERVED:
            raise ValueError(f"a hospital cannot be called '{value}', a reserved name")
        return value

    @property
    def certified_organisation(self) -> str:
        return self.organisation or self.name.replace("-", "_")


class Project(Settings):
    """A federation: its name, its organiser, its hospitals.

    valid_days: how long certificates made now are valid.
    """

    project: str
    organiser: Organiser
    hospitals: tuple[Hospital, ...]
    valid_days: int = Field(360, ge=1, le=3650)

    _numbers = field_validator("valid_days", mode="before")(refuse_boolean)

    @field_validator("hospitals", mode="before")
    @classmethod
    def listed(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= MOST_HOSPITALS:
            found = f"{len(value)} entries" if isinstance(value, list | tuple) else shown(value)
            raise ValueError(
                f"found {found}; give a list of 1 to {MOST_HOSPITALS} names, such as [north, south]"
            )
        return value

    _name = field_validator("project")(check_name)

    def find_organisation(self, name: str) -> str:
        """As the certificate of a hospital says it."""
        return next(one.certified_organisation for one in self.hospitals if one.name == name)

    @model_validator(mode="after")
    def different_names(self) -> Project:
        seen: dict[str, str] = {}
        for name in (hospital.name for hospital in self.hospitals):
            other = seen.setdefault(name.lower(), name)
            if other is not name:
                raise ValueError(f"hospitals '{other}' and '{name}' have the same name (case is ignored)")
        return self


def load_project(path: Path) -> Project:
    """The checked file; the first mistake is named with its key."""
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist. Write one with: wardround provision --example > {path.name}"
        )
    values = read_yaml(path, "project: my-project", largest=10**6)
    organiser = values.get("organiser")
    if isinstance(organiser, dict) and "admin_port" in organiser:
        del organiser["admin_port"]
        log.warning(f"{path}: organiser.admin_port is no longer used and was ignored; delete the line.")
    return Project.read(values, f"{path}: ")


def render_template() -> str:
    """A project.yaml to start from, each line explained."""
    return f"""\
# A federation of hospitals. Make the kits with: wardround provision project.yaml -o kits/
# Names: {NAME_RULE}.
project: my-project

organiser:
  host: organiser.example.org   # name or IPv4 address of the organiser's machine, as the hospitals see it
  port: 8002                    # the only port to open; hospitals connect to it, nobody connects to them
  organisation: Example         # letters, digits and _

hospitals:                      # a name is the same everywhere: kit, certificate, results
  - north
  - {{name: south, organisation: South_Trust}}

valid_days: 360                 # how long the certificates are valid
"""
