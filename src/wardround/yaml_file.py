"""Reading YAML files that people write: settings of a run, federation.yaml, project.yaml, site.yaml.

Plain YAML takes the last of two equal keys without a word: a setting that is written down and does not hold.
Here it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from wardround.errors import ConfigError


class PlainLoader(yaml.SafeLoader):
    """The safe loader, which also reads 1e-3 as a number (plain YAML 1.1 takes it for text)."""


PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_yaml(path: Path, example: str = "rounds: 10") -> dict[str, Any]:
    """The settings of a file. example: a line of such a file, for those who give something else."""
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
        for key, line, before in repeated_keys(root):
            raise ConfigError(
                f"{path}, line {line}: {key} is set before, in line {before}. Keep one of them."
            )
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
                nodes.append(value)
