"""YAML files that people read and write: settings of a run, federation.yaml, project.yaml, site.yaml.

Plain YAML takes the last of two equal keys without a word: a setting that is written down and does not hold.
Here it is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import yaml

from wardround.errors import ConfigError


class PlainLoader(yaml.SafeLoader):
    """The safe loader, which also reads 1e-3 as a number (plain YAML 1.1 takes it for text)."""


class PlainDumper(yaml.SafeDumper):
    """Quotes a name like 1e3, which `PlainLoader` would otherwise read as a number."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


for _kind in (PlainLoader, PlainDumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def read_yaml(path: Path, example: str = "rounds: 10", largest: float = inf) -> dict[str, Any]:
    """The settings of a file of at most `largest` bytes.

    example: a line of such a file, for those who give something else.
    """
    if path.is_file() and (size := path.stat().st_size) > largest:
        raise ConfigError(
            f"{path} is {size / 1e6:.1f} MB, too large for a file with settings like '{example}'."
        )
    try:
        values = loaded(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Start from configs/quickstart.yaml.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give a YAML file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f", line {place.line + 1}" if place is not None else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise ConfigError(f"{path}{line}: {problem}.") from None
    except RecursionError:
        raise ConfigError(f"{path} nests too deep for a file with settings like '{example}'.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "a plain value"
        raise ConfigError(f"{path}: expected settings like '{example}', found {kind}.")
    return values


def loaded(path: Path) -> Any:
    loader = PlainLoader(path.read_text(encoding="utf-8"))
    try:
        root = loader.get_single_node()
        for key, line, first in repeated_keys(root):
            raise ConfigError(f"{path}, line {line}: {key} is set before, in line {first}. Keep one of them.")
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def repeated_keys(root: yaml.Node | None) -> Iterator[tuple[str, int, int]]:
    """Keys that stand twice in one mapping: the key, its line, and the line before."""
    seen: set[int] = set()  # an alias leads to the same node again
    nodes = [] if root is None else [root]
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    line = key.start_mark.line + 1
                    if key.value in lines:
                        yield key.value, line, lines[key.value]
                    lines[key.value] = line
                nodes += [value, key]
        elif any("\ud800" <= letter <= "\udfff" for letter in node.value):  # written as an escape
            raise yaml.MarkedYAMLError(problem="a text is not Unicode", problem_mark=node.start_mark)
        elif "\0" in node.value:  # likewise, and no path can have it
            raise yaml.MarkedYAMLError(problem="a text holds a zero byte", problem_mark=node.start_mark)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Lay one `a.b=c` over nested settings; the value is read as YAML."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {override}: write it as key=value, for example --set rounds=3.")
    try:
        value = yaml.load(text, Loader=PlainLoader)  # noqa: S506
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: '{text}' is not a YAML value.") from None
    *path, last = key.strip().split(".")
    place = values
    for part in path:
        inner = place.get(part)
        if inner is None:
            inner = place[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: '{part}' is a single value and has no '{last}'.")
        place = inner
    place[last] = value


def dumped(name: str, value: Any, width: int = 100) -> str:
    """One key: collections of plain values on lines of about this width, all else below each other."""
    style = None if isinstance(value, dict | list) else False
    return yaml.dump(
        {name: value},
        Dumper=PlainDumper,
        sort_keys=False,
        allow_unicode=True,
        width=width,
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
