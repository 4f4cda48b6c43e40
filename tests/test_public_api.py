"""The public interface: every name is there, documented and typed; every block of its pages and the notebook run."""

from __future__ import annotations

import inspect
import json
import linecache
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture, MonkeyPatch

import wardround as wr

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/python.md"
NOTEBOOK = ROOT / "examples/notebook/wardround.ipynb"


def run_cells(cells: Sequence[str]) -> dict[str, Any]:
    """Run them one after the other as a notebook does, which keeps the source of each; what they defined."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        name = f"<cell {number}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        exec(compile(cell, name, "exec"), space)
    return space


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def test_dir_lists_the_public_names_and_each_can_be_had() -> None:
    assert dir(wr) == sorted(wr.__all__)
    for name in wr.__all__:
        assert getattr(wr, name) is not None


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = wr.trian


@pytest.mark.parametrize("name", [n for n in wr.__all__ if not n.isupper() and n != "__version__"])
def test_every_class_and_function_says_what_it_does(name: str) -> None:
    found = getattr(wr, name)

    assert inspect.getdoc(found)
    if inspect.isfunction(found):
        signature = inspect.signature(found)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_the_reference_names_everything_public_and_its_blocks_run(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    run_cells(python_blocks(PAGE))

    assert not [name for name in wr.__all__ if name not in text and name != "__version__"]


def test_every_block_of_the_page_about_python_runs(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    space = run_cells(python_blocks(ROOT / "docs/how-to/python.md"))

    printed = capsys.readouterr().out
    assert space["stored"]["method"]["name"].startswith("__main__:Softened@")
    assert "<Result first: fedavg, 3 of 3 rounds, test dice 0." in printed and "{'east': " in printed


def test_the_notebook_runs_from_top_to_bottom_and_is_stored_without_outputs(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]

    space = run_cells(["".join(cell["source"]) for cell in code])

    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert stored["nbformat"] == 4 and len({cell["id"] for cell in stored["cells"]}) == len(stored["cells"])
    assert space["result"].test.value("dice") > 0.8
