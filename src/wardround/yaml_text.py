"""YAML for people: short collections on one line, comments above sections, paths relative to the file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml


class PlainDumper(yaml.SafeDumper):
    """Quotes a name like 1e3, which `yaml_file.PlainLoader` would otherwise read as a number."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


PlainDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def dumped(name: str, value: Any) -> str:
    """One key: collections of plain values on one line, everything else below each other."""
    style = None if isinstance(value, dict | list) else False
    return yaml.dump(
        {name: value},
        Dumper=PlainDumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
        default_flow_style=style,
    )


def commented(text: str) -> str:
    """Each line behind a #; a name with a line break in it cannot leave the comment."""
    plain = ("".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines())
    return "".join(f"# {line}\n" for line in plain)


def seen_from(target: Path, folder: Path) -> str:
    """A path relative to a folder, where they share more than the root of the disk; else absolute."""
    if not target.is_absolute():
        return target.as_posix()
    here = folder.resolve()
    shared = os.path.commonpath([here, target]) if target.anchor == here.anchor else target.anchor
    if Path(shared) == Path(target.anchor):
        return target.as_posix()
    relative = Path(os.path.relpath(target, here))
    found = Path(os.path.normpath(here / relative))  # `here` has no links, and need not be there yet
    return relative.as_posix() if found.exists() and found.samefile(target) else target.as_posix()
