"""Every block of code in the documentation names what exists, and some pages are typed in whole.

A block is a fence, or lines indented by four. One that cannot run is followed by `<!-- not run: reason -->`,
which the site shows below it. A fence without a language is what a program prints, and is not run.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from helpers import call
from pydantic import ValidationError

from wardround.comparison.sweep import read_sweep
from wardround.config_file import load_config
from wardround.data.federation_file import FederationFile
from wardround.deploy.site_file import SiteFile
from wardround.errors import WardroundError

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*/README.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    ]
)
SHELL = (
    "wardround",
    "pip",
    "python",
    "make",
    "cd",
    "bash",
    "jupyter",
    "EXAMPLE=",
    ".venv/bin/",
    "benchmarks/",
    "nvflare",
)
REASON = re.compile(r"\s*<!-- not run: (.+?) -->")
RUN_ELSEWHERE = {  # by name, in the test that types them in
    "docs/tutorial/first-federation.md": "test_tutorial.py",
    "docs/how-to/pacs.md": "test_tutorial.py",
    "docs/how-to/unequal-labels.md": "test_docs.py",
    "docs/how-to/unlabelled.md": "test_docs.py",
    "docs/how-to/add-a-method.md": "test_docs.py",
    "docs/how-to/python.md": "test_public_api.py",
    "docs/reference/python.md": "test_public_api.py",
}
TYPED_IN = ["docs/how-to/from-monai.md"]  # here, as they stand; a page joins the list once it was seen to run
QUICK = (
    "train",
    "compare",
    "rehearse",
)  # few rounds, where such a command names a configuration and no rounds


@dataclass(frozen=True)
class Block:
    """kind: python, yaml, json, toml, shell, or output."""

    page: str
    line: int
    kind: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    pattern = r"^```(?P<kind>\w*)\n(?P<fence>.*?)^```\n|(?<=\n\n)(?P<lines>(?: {4}[^\n]*\n)+)"
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        code = (
            match["fence"]
            if match["lines"] is None
            else re.sub("^ {4}", "", match["lines"], flags=re.MULTILINE)
        )
        kind = {"bash": "shell", "sh": "shell", "": "output"}.get(match["kind"] or "", match["kind"])
        if match["lines"] is not None:
            if is_in_list(text[: match.start()]):
                continue
            kind = "shell" if code.startswith(SHELL) else "yaml" if re.match(r"\w+: \{", code) else "output"
        reason = REASON.match(text, match.end())
        line = text.count("\n", 0, match.start()) + 1
        yield Block(str(page.relative_to(ROOT)), line, kind, code, reason[1] if reason else None)


def is_in_list(before: str) -> bool:
    return bool(re.match(r"\s*(-|\*|\d+\.) ", before.rstrip("\n").rpartition("\n")[2]))


BLOCKS = [block for page in PAGES for block in blocks(page)]
CODE = [block for block in BLOCKS if block.kind in ("python", "shell")]


def test_the_blocks_of_all_pages_are_known() -> None:
    kinds = Counter(block.kind for block in BLOCKS)
    unrun = [block for block in CODE if block.reason is not None]

    assert set(kinds) <= {"python", "yaml", "json", "toml", "shell", "output"}
    assert len(CODE) > 130 and len(unrun) / len(CODE) < 0.35, (kinds, len(unrun))


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


def commands(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


# Typed in


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader of the how-to pages has: folders of scans, a federation, runs."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(ROOT / "examples", folder / "examples")
    quick = "--set rounds=2 --set evaluate.overlays=0"
    for line in (
        "data phantom scans --set data.phantom.cases=10 --set data.phantom.size=32",
        "data init scans/north scans/south -o federation.yaml",
        f"train configs/quickstart.yaml {quick}",
        f"train configs/quickstart.yaml {quick} --set name=mine --set data.federation=federation.yaml",
        f"compare configs/quickstart.yaml --methods fedavg,local {quick} -o runs/comparison",
    ):
        subprocess.run(
            [sys.executable, "-m", "wardround", *shlex.split(line)],
            cwd=folder,
            check=True,
            capture_output=True,
        )
    for name in ("north", "south"):
        shutil.copytree(folder / "scans" / name, folder / name)
    scans = sorted((folder / "north/images").iterdir())
    shutil.copy(scans[0], folder / "scan.nii.gz")
    shutil.copytree(folder / "north/images", folder / "folder")
    shutil.copytree(folder / "south", folder / "other_hospital")
    for name in ("a", "b"):
        shutil.copytree(folder / "runs/mine", folder / "runs" / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", TYPED_IN)
def test_every_block_of_a_page_runs(
    page: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shell = [b for b in CODE if b.page == page and b.kind == "shell" and not b.reason]
    typed = [words for block in shell for words in commands(block)]
    if typed:
        shutil.copytree(request.getfixturevalue("world"), tmp_path / "here", symlinks=True)
    else:
        (tmp_path / "here").mkdir()
    if any(words[1:2] in (["train"], ["compare"], ["rehearse"]) for words in typed):
        shutil.rmtree(tmp_path / "here/runs")  # it makes its own
    if any({"north", "north/"} & set(words) for words in typed):
        (tmp_path / "here/federation.yaml").unlink()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("webbrowser.open", lambda *_: True)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in (b for b in CODE if b.page == page and b.reason is None):
        if block.kind == "python":
            exec(compile(block.text, str(block), "exec"), names)
            continue
        for words in commands(block):
            type_in(words, monkeypatch, capsys, block)


def type_in(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: Block
) -> None:
    if words[0] == "wardround":
        words = words[1 : words.index(">") if ">" in words else None]
        if (
            words[0] in QUICK
            and words[1].startswith("configs/")
            and not any("rounds=" in word for word in words)
        ):
            words += ["--set", f"rounds={10 if 'resume' in where.page else 2}"]
        code, _, said = call(monkeypatch, capsys, *words)
        assert code == 0, f"{where}: wardround {' '.join(words)}: {said}"
    elif words[0] == "cd":
        monkeypatch.chdir(words[1])
    elif words[0] in ("python", "bash"):
        place = Path(sys.executable).parent  # the commands of this environment
        env = os.environ | {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}
        words = [word.replace("/tmp/", f"{Path.cwd()}/") for word in words]
        done = subprocess.run(words, capture_output=True, text=True, env=env)
        assert done.returncode == 0, f"{where}: {done.stderr}"
    else:
        assert words[0] == "pip", f"{where}: say how to type in: {' '.join(words)}"  # installed already
