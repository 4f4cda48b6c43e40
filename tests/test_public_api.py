"""The public interface: every name is there, documented and typed, and every block of its reference page runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from pytest import MonkeyPatch

import wardround as wr

PAGE = Path(__file__).parents[1] / "docs/reference/python.md"


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
    space: dict[str, object] = {}

    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, str(PAGE), "exec"), space)

    assert not [name for name in wr.__all__ if name not in text and name != "__version__"]
