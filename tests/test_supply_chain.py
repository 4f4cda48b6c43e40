"""tools/supply_chain.py: two builds have the same bytes, the SBOM has every package, every licence is allowed."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from pytest import MonkeyPatch, fixture, mark, raises

ROOT = Path(__file__).resolve().parents[1]


def load(name: str, monkeypatch: MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@fixture
def tools(monkeypatch: MonkeyPatch) -> ModuleType:
    return load("supply_chain", monkeypatch)


def part(name: str, *licences: Any) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "licenses": list(licences)}


def test_a_licence_is_read_from_identifier_expression_or_classifier(tools: ModuleType) -> None:
    classifier = {"license": {"name": "License :: OSI Approved :: BSD License"}}
    parts = [
        part("a", {"license": {"id": "MIT"}}),
        part("b", {"expression": "Apache-2.0 OR BSD-2-Clause"}),
        part("c", classifier),
        part("monai"),
    ]

    rows = tools.list_licences({"components": parts})

    assert [row[2] for row in rows] == ["MIT", "Apache-2.0 OR BSD-2-Clause", "BSD-3-Clause", "Apache-2.0"]
    tools.check_licences(rows)


@mark.parametrize(
    "licence", [{"license": {"id": "GPL-3.0-only"}}, {"expression": "MIT AND AGPL-3.0-only"}, {"license": {}}]
)
def test_a_licence_outside_of_the_list_is_refused_with_the_package(tools: ModuleType, licence: Any) -> None:
    with raises(SystemExit, match=r"that are not on the list .*: copyleft 1\.0"):
        tools.check_licences(tools.list_licences({"components": [part("copyleft", licence)]}))


def test_a_package_that_the_sbom_lacks_is_named_however_it_is_spelt(tools: ModuleType) -> None:
    assert tools.find_missing(
        {"components": [part("typing_extensions")]}, ["typing-extensions", "Torch"]
    ) == ["Torch"]


@mark.slow
def test_the_sbom_of_this_environment_lists_every_package_with_an_allowed_licence(
    tools: ModuleType, tmp_path: Path
) -> None:
    tools.describe_environment(sys.executable, tmp_path / "wardround")

    text = (tmp_path / "wardround.cdx.json").read_text(encoding="utf-8")
    assert '"bomFormat": "CycloneDX"' in text and "file:" not in text
    assert "torch," in (tmp_path / "wardround-licences.csv").read_text(encoding="utf-8")


@mark.slow
def test_two_builds_in_two_folders_have_the_same_bytes(
    tools: ModuleType, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    release = load("release", monkeypatch)
    release.build(tmp_path / "dist")

    assert len(tools.check_reproducible(release.build, ROOT, tmp_path / "dist")) == 2


def test_the_citation_has_the_version_of_the_project_and_its_four_papers() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = re.search(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )

    assert project is not None and found["version"] == project[1]
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert len(found["references"]) == 4
    assert all({"type", "title", "authors"} <= entry.keys() for entry in found["references"])
