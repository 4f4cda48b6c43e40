"""Every block of code in the documentation names what exists, and is typed in by a test or says why it cannot be."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter

import pytest
import yaml
from code_blocks import BLOCKS, CODE, ROOT, Block, commands
from pydantic import ValidationError

from wardround.comparison.sweep import read_sweep
from wardround.config_file import load_config
from wardround.data.federation_file import FederationFile
from wardround.deploy.site_file import SiteFile
from wardround.errors import WardroundError


def test_the_blocks_of_all_pages_are_known() -> None:
    kinds = Counter(block.kind for block in BLOCKS)
    unrun = [block for block in CODE if block.reason is not None]

    assert set(kinds) <= {"python", "yaml", "json", "toml", "shell", "output"}
    assert len(CODE) > 130 and len(unrun) / len(CODE) < 0.25, (kinds, len(unrun))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "python"], ids=str)
def test_python_compiles(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind in ("toml", "json")], ids=str)
def test_toml_and_json_can_be_read(block: Block) -> None:
    tomllib.loads(block.text) if block.kind == "toml" else yaml.safe_load(block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "yaml"], ids=str)
def test_yaml_is_a_configuration_a_grid_a_federation_or_rules(block: Block) -> None:
    found = yaml.safe_load(block.text)
    read_sweep({"sweep": found.pop("sweep", {})} if block.reason is None else {})
    complaints = []
    for kind, read in {
        "a configuration": lambda: load_config(found),
        "a configuration for volumes": lambda: load_config(found, ["data.phantom.dimensions=3"]),
        "federation.yaml": lambda: FederationFile.model_validate(
            {"version": 1, "sources": [{"path": "a"}]} | found
        ),
        "site.yaml": lambda: SiteFile.model_validate({"data": "a"} | found),
    }.items():
        try:
            read()
            return
        except (WardroundError, ValidationError) as error:
            complaints.append(f"{kind}: {error}")
    assert block.reason, "\n".join(complaints)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind == "shell"], ids=str)
def test_what_a_command_names_is_there(block: Block) -> None:
    """Extras of pip, targets of make, scripts; tests/test_docs.py holds `wardround ...` against the command line."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(block):
        named = [name for word in words for name in re.findall(r"^wardround\[(.+)\]$", word)]
        assert all(name in extras for name in named), words
        assert words[0] != "make" or words[1] in targets, words
        script = next((word for word in words if word.startswith(("benchmarks/", "examples/"))), None)
        assert script is None or (ROOT / script).exists(), words
