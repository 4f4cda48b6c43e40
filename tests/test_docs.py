"""The documentation is true: links lead somewhere, commands exist, the reference is current, the example runs."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
import yaml
from helpers import call
from pydantic import BaseModel
from pytest import MonkeyPatch, fixture, mark

from wardround.cli import app
from wardround.config import Config
from wardround.methods import METHODS, OBJECTIVES
from wardround.models import MODELS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "SECURITY.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*/README.md"),
    ]
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


def without_code(page: Path) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def relative_links(page: Path) -> list[str]:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page))
    return [link for link in links if not re.match(r"[a-z]+:|#", link)]


@mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_point_to_files(page: Path) -> None:
    missing = [link for link in relative_links(page) if not (page.parent / link.partition("#")[0]).exists()]

    assert missing == []


@mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_a_page_point_to_a_heading(page: Path) -> None:
    text = without_code(page)
    missing = []
    for link in re.findall(r"\]\(([^)\s:]*#[^)\s]+)\)", text):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if target.suffix == ".md" and target.exists() and heading not in headings(target):
            missing.append(link)

    assert missing == []


def headings(page: Path) -> set[str]:
    """The names that links give a page's headings: lower case, words joined by hyphens."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# Commands


@mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_printed_commands_and_their_options_exist(page: Path) -> None:
    wrong = {}
    for line, is_whole in commands(page):
        complaint = complaint_about(line, is_whole)
        if complaint is not None:
            wrong[line] = complaint

    assert wrong == {}


@mark.parametrize(
    ("line", "complaint"),
    [
        ("wardround trian quickstart", "no command 'trian'"),
        ("wardround data chek federation.yaml", "no command 'chek'"),
        ("wardround train quickstart --round 3", "--round"),
        ("wardround export runs/mine -o out", "to"),
        ("wardround watch runs/mine runs/other", "extra argument"),
        ("wardround train configs/quickstart.yaml", "configs/quickstart.yaml is not in a wheel"),
        ("wardround train quickstart --set evaluate.evry=2", "no setting evaluate.evry"),
        ("wardround compare quickstart --methods fedavg,fedevy", "no method fedevy"),
    ],
)
def test_a_wrong_command_would_be_found(line: str, complaint: str) -> None:
    assert complaint in str(complaint_about(line, is_whole=True))


def commands(page: Path) -> list[tuple[str, bool]]:
    """The `wardround ...` lines of a page; whether each is a whole command, not a word in a sentence."""
    text = page.read_text(encoding="utf-8")
    whole = re.findall(r"^(?: {4,})?(wardround [a-z].*)$", text.replace("\\\n", " "), re.MULTILINE)
    spans = re.findall(r"`(wardround [a-z][^`\n]*)`", text)
    named = [part for span in spans for part in span.split(", then ")]
    return [(line, True) for line in whole] + [(line, False) for line in named]


def complaint_about(line: str, is_whole: bool) -> str | None:
    """What is wrong with a command; it is parsed as the command line does, and never run."""
    words = shlex.split(re.sub(r"[\[\]]", "", line), comments=True)[1:]
    words = words[: next((at for at, word in enumerate(words) if word in (">", "|", "&", "&&")), None)]
    name, command = "wardround", typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name not in command.commands:
            return f"no command '{name}'"
        command = command.commands[name]
    if not is_whole and not words:
        return None
    try:
        command.make_context(name, list(words))
    except Exception as error:  # typer's own click, or the package of that name
        if not is_whole and type(error).__name__ == "MissingParameter":
            return None
        return str(error) or type(error).__name__
    return complaint_about_values(words)


def complaint_about_values(words: list[str]) -> str | None:
    """Configurations of a clone, settings and methods that are not known."""
    for option, word in zip(["", *words], words, strict=False):
        if word.startswith("configs/"):
            return f"{word} is not in a wheel; its name is enough"
        if option == "--set" and not is_setting(word.partition("=")[0]):
            return f"no setting {word.partition('=')[0]}"
        if option == "--methods":
            unknown = [
                method for method in word.split(",") if method.lower() not in METHODS and ":" not in method
            ]
            if unknown:
                return f"no method {unknown[0]}"
    return None


def is_setting(path: str) -> bool:
    """Whether a configuration has it; `datasets` is of the papers' tables."""
    if path == "datasets":
        return True
    within: Any = Config
    for key in path.split("."):
        if not (isinstance(within, type) and issubclass(within, BaseModel)):
            return True  # settings of a method or an objective
        if key not in within.model_fields:
            return False
        within = within.model_fields[key].annotation
    return True


def test_the_configuration_reference_is_current(monkeypatch: MonkeyPatch) -> None:
    made = load(ROOT / "docs" / "make_reference.py", monkeypatch).reference()

    assert (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8") == made, f"run: {COMMAND}"


def test_the_reference_of_commands_is_current_and_every_option_has_a_meaning(
    monkeypatch: MonkeyPatch,
) -> None:
    made = load(ROOT / "docs" / "make_reference.py", monkeypatch).commands()

    assert (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8") == made, f"run: {COMMAND}"
    assert not [line for line in made.splitlines() if line.startswith("| `") and line.endswith("|  |")]


def test_every_method_has_equations_and_no_other_has() -> None:
    equations = yaml.safe_load((ROOT / "docs/methods/equations.yaml").read_text(encoding="utf-8"))

    assert set(equations) == set(METHODS.own)
    assert all(set(row) == {"what", "tex"} for rows in equations.values() for row in rows)


def test_the_readme_counts_what_there_is() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert f"all {len(METHODS.own)} methods" in text and f"{len(OBJECTIVES.own)} objectives" in text
    assert len(MODELS) == 8 and "Eight networks" in text


def test_every_page_is_in_the_contents() -> None:
    """The site is made of what docs/README.md lists; its build says the same, but takes longer."""
    listed = {
        (ROOT / "docs" / link.partition("#")[0]).resolve() for link in relative_links(ROOT / "docs/README.md")
    }

    assert [str(page) for page in ROOT.glob("docs/**/*.md") if page.resolve() not in listed] == [
        str(ROOT / "docs" / name) for name in ("README.md", "site/front.md")
    ]


def test_fragments_of_code_about_a_new_method_stand_in_a_method() -> None:
    text = (ROOT / "docs/how-to/add-a-method.md").read_text(encoding="utf-8")
    code = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("src/wardround/methods/*.py"))
    fences = re.findall(r"^```(\w*)\n(.*?)^```\n", text, re.DOTALL | re.MULTILINE)

    lines = [line for kind, part in fences if not kind for line in part.splitlines()]
    assert lines and [line for line in lines if line not in code] == []


def test_the_reference_of_federation_files_is_current_and_every_setting_has_a_meaning(
    monkeypatch: MonkeyPatch,
) -> None:
    made = load(ROOT / "docs" / "make_reference.py", monkeypatch).federation()

    assert (ROOT / "docs/reference/federation.md").read_text(encoding="utf-8") == made, f"run: {COMMAND}"
    assert not [line for line in made.splitlines() if line.startswith("| `") and line.endswith("|  |")]


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


def test_every_claim_about_security_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "explanation" / "security.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "shown by" not in line]
    claims = [row for row in rows if row.count("|") == 5]
    file, names, missing = Path(), 0, []
    for row in claims:
        shown = re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1])
        missing += [] if shown else [row]
        for name in shown:
            where, _, test = name.partition("::")
            if where:
                folder = ROOT if where.startswith("tests/") else ROOT / "tests" / "deploy"
                file = folder / where
            if not file.is_file() or (test and f"def {test}(" not in file.read_text(encoding="utf-8")):
                missing.append(name)
            names += 1

    assert not missing and len(claims) > 25 and names > 50


def test_the_example_of_a_new_method_is_the_file_itself() -> None:
    method, _ = python_blocks(ROOT / "docs/how-to/add-a-method.md")

    assert method == (ROOT / "src/wardround/methods/fedprox.py").read_text(encoding="utf-8")


def test_the_methods_page_has_the_current_tables(monkeypatch: MonkeyPatch) -> None:
    made = load(ROOT / "docs" / "make_reference.py", monkeypatch).methods_page()
    page = ROOT / "docs/methods/README.md"

    assert page.read_text(encoding="utf-8") == made, "run: python docs/make_reference.py --write"


def test_the_questions_of_data_protection_are_those_of_the_dossier(monkeypatch: MonkeyPatch) -> None:
    made = load(ROOT / "docs" / "make_reference.py", monkeypatch).protection_page()

    assert (ROOT / "docs/explanation/data-protection.md").read_text(encoding="utf-8") == made, (
        f"run: {COMMAND}"
    )


def test_the_example_of_a_new_method_passes_its_own_tests(example: ModuleType, tmp_path: Path) -> None:
    tests = {name: function for name, function in vars(example).items() if name.startswith("test_")}
    for name, function in tests.items():
        function(tmp_path / name)

    assert len(tests) == 2


def split_unequal() -> tuple[str, str]:
    """The page's part on structures and the one on channels."""
    text = (ROOT / "docs/how-to/unequal-labels.md").read_text(encoding="utf-8")
    structures, mark, channels = text.partition("## Channels that some hospitals lack")
    assert mark
    return structures, channels


def test_the_example_of_channels_runs_as_it_stands_on_its_page(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Any
) -> None:
    _, text = split_unequal()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    phantom, init, check, train, predict = re.findall(r"^    wardround (.+)$", text, re.MULTILINE)
    for command in (f"{phantom} --set data.phantom.cases=8", init):
        assert call(monkeypatch, capsys, *shlex.split(command))[0] == 0
    (printed,) = re.findall(r"```\n(# What.*?)```", text, re.DOTALL)
    assert printed in (tmp_path / "mri.yaml").read_text()
    with (tmp_path / "mri.yaml").open("a") as file:
        file.write("".join(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)))
    for command in (check, train, predict):
        code, _, error = call(monkeypatch, capsys, *shlex.split(command))
        assert code == 0, error
    facts = json.loads((tmp_path / "masks/predictions.json").read_text())["scans"]["north-001.nii.gz"]
    assert facts["absent_channels"] == ["channel_1"]


def test_the_example_of_unequal_labels_runs_as_it_stands_on_its_page(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Any
) -> None:
    text, _ = split_unequal()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    phantom, init, check, train = re.findall(r"^    wardround (.+)$", text, re.MULTILINE)
    for command in (phantom, init):
        assert call(monkeypatch, capsys, *shlex.split(command))[0] == 0
    (printed,) = re.findall(r"```\n(# Classes.*?)```", text, re.DOTALL)
    assert printed in (tmp_path / "federation.yaml").read_text()
    code, _, error = call(monkeypatch, capsys, *shlex.split(train))
    assert code == 2 and "annotates: {" in " ".join(error.split())

    (named,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    written = yaml.safe_load((tmp_path / "federation.yaml").read_text()) | yaml.safe_load(named)
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(written, sort_keys=False))
    for command in (check, train):
        code, _, error = call(monkeypatch, capsys, *shlex.split(command))
        assert code == 0, error
    rows = [line.split(",") for line in (tmp_path / "runs/unequal/cases.csv").read_text().splitlines()[1:]]
    annotates = yaml.safe_load(named)["annotates"]
    assert {(row[0], row[2]) for row in rows} == {(client, own[0]) for client, own in annotates.items()}


def test_the_example_of_unlabelled_hospitals_runs_as_it_stands_on_its_page(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Any
) -> None:
    text = (ROOT / "docs/how-to/unlabelled.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    phantom, init, train = re.findall(r"^    wardround (.+)$", text, re.MULTILINE)
    for command in (phantom, init):
        assert call(monkeypatch, capsys, *shlex.split(command))[0] == 0
    (printed,) = re.findall(r"```\n(# Clients.*?)```", text, re.DOTALL)
    written = (tmp_path / "federation.yaml").read_text()
    assert printed in written
    (tmp_path / "federation.yaml").write_text(written.replace("# unlabelled: [", "unlabelled: ["))
    code, _, error = call(monkeypatch, capsys, *shlex.split(train))
    assert code == 0, error
    rows = (tmp_path / "runs/unlabelled/cases.csv").read_text().splitlines()[1:]
    assert {row.split(",")[0] for row in rows} == {"north"}
