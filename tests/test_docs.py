"""The documentation is true: links lead somewhere, the reference is current, the example runs."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from pytest import MonkeyPatch, fixture, mark

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")]
)
COMMAND = "python docs/make_reference.py --write"


def load(path: Path, monkeypatch: MonkeyPatch) -> ModuleType:
    """A Python file outside the package as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def relative_links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in links if not re.match(r"[a-z]+:|#", link)]


@mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_point_to_files(page: Path) -> None:
    missing = [link for link in relative_links(page) if not (page.parent / link.partition("#")[0]).exists()]

    assert missing == []


def test_the_configuration_reference_is_current(monkeypatch: MonkeyPatch) -> None:
    made = load(ROOT / "docs" / "make_reference.py", monkeypatch).reference()

    assert (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8") == made, f"run: {COMMAND}"


def test_every_setting_of_a_run_has_a_meaning(monkeypatch: MonkeyPatch) -> None:
    made = load(ROOT / "docs" / "make_reference.py", monkeypatch).reference()
    settings = made.partition("## Methods")[0]

    assert [line for line in settings.splitlines() if line.endswith("|  |")] == []


@fixture
def example(tmp_path: Path, monkeypatch: MonkeyPatch) -> ModuleType:
    """The test that docs/how-to/add-a-method.md shows, as a module."""
    _, test = python_blocks(ROOT / "docs/how-to/add-a-method.md")
    (tmp_path / "documented_test.py").write_text(test, encoding="utf-8")
    return load(tmp_path / "documented_test.py", monkeypatch)


def test_the_example_of_a_new_method_is_the_file_itself() -> None:
    method, _ = python_blocks(ROOT / "docs/how-to/add-a-method.md")

    assert method == (ROOT / "src/wardround/methods/fedprox.py").read_text(encoding="utf-8")


def test_the_methods_page_has_the_current_tables(monkeypatch: MonkeyPatch) -> None:
    made = load(ROOT / "docs" / "make_reference.py", monkeypatch).methods_page()
    page = ROOT / "docs/methods/README.md"

    assert page.read_text(encoding="utf-8") == made, "run: python docs/make_reference.py --write"


def test_the_example_of_a_new_method_passes_its_own_tests(example: ModuleType, tmp_path: Path) -> None:
    tests = {name: function for name, function in vars(example).items() if name.startswith("test_")}
    for name, function in tests.items():
        function(tmp_path / name)

    assert len(tests) == 2
