"""Build the documentation site into build/site: `make docs`, or python docs/make_site.py [FOLDER].

The pages are those that docs/README.md lists, as they stand; its headings are the site's sections. A dead
link and any other warning of Sphinx is an error. Made here from the code: a page for each method, the
reference of the Python names, and a page for each source file that a page links to.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_reference
import yaml
from sphinx.cmd.build import main as sphinx_build

import wardround
from wardround.methods import METHODS
from wardround.reporting.catalogue import method_card

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(!?\[[^\]\n]*\])\(([^)\s]+)\)")
CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".ipynb": "json", ".toml": "toml"}
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
EQUATIONS = yaml.safe_load((DOCS / "methods/equations.yaml").read_text(encoding="utf-8"))
BUDGETS = ROOT / "benchmarks/methods/README.md"


@dataclass(frozen=True)
class Section:
    """A heading of docs/README.md with what stands below it."""

    title: str
    text: str

    @property
    def page(self) -> str:
        return f"{self.title.lower()}/index.md"

    @property
    def lead(self) -> str:
        """Its first sentence."""
        return re.split(r"[.:]\s", self.text, maxsplit=1)[0] + "."

    @property
    def pages(self) -> list[Path]:
        targets = [(DOCS / target).resolve() for _, target in LINK.findall(self.text)]
        return [path for path in targets if path.suffix == ".md" and path != ROOT / "README.md"]


def sections() -> list[Section]:
    _, *parts = re.split(r"^## ", (DOCS / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [Section(title.strip(), text.strip()) for title, _, text in (p.partition("\n") for p in parts)]


class Site:
    """The folder of pages that Sphinx reads, while it is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: dict[Path, str] = {}  # source files that a page links to

    def write(self, place: str, text: str) -> None:
        path = self.folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def add(self, path: Path, change: Callable[[str], str] = str) -> None:
        """A page of the repository, its links turned to where things are on the site."""
        text = path.read_text(encoding="utf-8")
        self.write(place_of(path), change(self.turn_links(text, path, place_of(path))))

    def turn_links(self, text: str, path: Path, place: str) -> str:
        def turned(match: re.Match[str]) -> str:
            label, target = match.groups()
            name, _, heading = target.partition("#")
            if re.match(r"[a-z]+:", target) or not name:
                return match[0]
            there = self.locate((path.parent / name).resolve(), label)
            if there == "index.md" and heading:  # its sections are pages
                there, heading = f"{heading}/index.md", ""
            link = os.path.relpath(there, Path(place).parent)
            return f"{label}({link}{'#' + heading if heading else ''})"

        text = NOT_RUN.sub(r"{.not-run}\nNot run by our tests: \1.", text)
        parts = CODE.split(text)  # every second one is a fence, in which nothing is a link
        parts[::2] = [LINK.sub(turned, part) for part in parts[::2]]
        return "".join(parts)

    def locate(self, path: Path, label: str) -> str:
        """Where a file of the repository is on the site; pictures are copied, source files get a page."""
        name = label.strip("[]`")
        if path.parent == ROOT / "src/wardround/methods" and name in METHODS.own:
            return f"methods/{name}.md"
        if path.is_dir():
            return f"{path.name}/index.md"
        if path.suffix in (".png", ".svg"):
            target = self.folder / path.relative_to(DOCS)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
            return str(path.relative_to(DOCS))
        if path.suffix != ".md":
            return self.sources.setdefault(path, f"source/{path.relative_to(ROOT)}.md")
        return place_of(path)


def place_of(path: Path) -> str:
    """A Markdown page's place on the site."""
    if path in (ROOT / "README.md", DOCS / "README.md"):
        return "index.md"
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS)).replace("README.md", "table.md")
    here = path.relative_to(ROOT)
    return f"{here.parent}.md" if here.name == "README.md" else f"{here.stem.lower()}.md"


def toctree(places: list[str], caption: str = "", depth: int = 1) -> str:
    head = f":caption: {caption}\n" if caption else ""
    return (
        f"\n```{{toctree}}\n:hidden:\n:maxdepth: {depth}\n{head}\n"
        + "\n".join(f"/{place}" for place in places)
        + "\n```\n"
    )


def write_pages(folder: Path) -> None:
    site = Site(folder)
    for section in sections():
        for path in dict.fromkeys(section.pages):
            own = path.stem if path.parent == DOCS / "methods" and path.stem in METHODS.own else None
            site.add(path, (lambda text, own=own: around(own, text, site)) if own else str)
        listed = [place_of(path) for path in dict.fromkeys(section.pages)]
        text = site.turn_links(f"# {section.title}\n\n{section.text}\n", DOCS / "README.md", section.page)
        if section.title == "Methods":
            made = [name for name in METHODS.own if f"methods/{name}.md" not in listed]
            for name in made:
                site.write(f"methods/{name}.md", method_page(name, site))
            text += toctree(listed) + toctree([f"methods/{name}.md" for name in made], "Other methods")
        elif section.title == "Reference":
            site.write("reference/api.md", api_page())
            text += "- [Python names](/reference/api.md), from their docstrings\n"
            text += toctree([*listed, "reference/api.md", "source/index.md"])
        else:
            text += toctree(listed)
        site.write(section.page, text)
    for path, place in sorted(site.sources.items()):
        site.write(place, source_page(path))
    site.write(
        "source/index.md",
        "# Source files\n\nThose that these pages link to.\n" + toctree(sorted(site.sources.values())),
    )
    site.write("index.md", front_page(site))
    shutil.copytree(DOCS / "site/_static", folder / "_static")


def front_page(site: Site) -> str:
    text = site.turn_links(
        (DOCS / "site/front.md").read_text(encoding="utf-8"), DOCS / "site/front.md", "index.md"
    )
    doors = "\n".join(f"- [{s.title}](/{s.page})\n  {s.lead}" for s in sections()[1:])
    return text.replace("<!-- doors -->", f"{{.doors}}\n{doors}") + toctree([s.page for s in sections()])


def source_page(path: Path) -> str:
    text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
    return f"---\nnosearch: true\n---\n# `{name}`\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


# Pages of methods


def method_page(name: str, site: Site) -> str:
    kind = METHODS[name]
    module = inspect.getmodule(kind)
    assert module is not None
    _, *paragraphs = inspect.cleandoc(module.__doc__ or "").split("\n\n")
    told = [re.sub(r"(https?://\S+)", r"<\1>", plain(part)) for part in paragraphs]
    return around(name, "\n\n".join([f"# {kind.title}", make_reference.prose(kind), *told]), site)


def plain(paragraph: str) -> str:
    """A docstring's paragraph; its labelled lines (`Symbols: ...`, `Differs: ...`) as a list."""
    text = re.sub(r"(?<!\\)([<*|])", r"\\\1", paragraph)
    text = re.sub(
        r"^((?:Symbols|What [a-z ]+|Differs|Same|Beware|Assumes)):", r"\n- **\1:**", text, flags=re.MULTILINE
    )
    return text.strip().replace("\n\n- ", "\n- ")


def around(name: str, text: str, site: Site) -> str:
    """A method's text with its card and equations after the introduction; what is measured comes last."""
    head, mark, rest = text.partition("\n## ")
    formulas = "\n\n".join(f"{row['what']}:\n\n$$\n{row['tex']}\n$$" for row in EQUATIONS[name])
    settings = make_reference.choice(name, METHODS[name]).partition("\n\n")[2].partition("| setting")
    source = site.locate(Path(inspect.getfile(METHODS[name])), "")
    parts = [
        head,
        card(name),
        f"## Equations\n\n{formulas}",
        mark.strip() + " " + rest if mark else "",
        uses(name, site),
    ]
    parts += [f"## All settings\n\n{''.join(settings[1:])}" if settings[1] else "", budget_rows(name, site)]
    parts.append(
        f"The code: [`{Path(source).stem}`](/{source}); one setting a run: `method: {{name: {name}}}`."
    )
    return "\n\n".join(part for part in parts if part)


def card(name: str) -> str:
    """What `wardround methods NAME` prints, without the settings."""
    facts = {
        str(key): str(value) for key, value in method_card(name).rows if not str(key).startswith("setting")
    }
    link = facts.pop("link", "")
    if link:
        facts["paper"] = f"[{facts['paper']}]({link})"
    del facts["what it does"]
    lines = [f"| {key} | {value} |" for key, value in facts.items()]
    return "\n".join([f"| at a glance | `{name}` |", "|---|---|", *lines])


def table_rows(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The tables of a page: head and rows."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in table.splitlines()
        )
        yield head, rows


def uses(name: str, site: Site) -> str:
    """The rows of which-when.md that name the method."""
    page = DOCS / "methods/which-when.md"
    text = site.turn_links(page.read_text(encoding="utf-8"), page, "methods/which-when.md")
    found = [
        f"- **{row[0]}**: {row[1]}. {row[2]}."
        for head, rows in table_rows(text)
        if len(head) == 3
        for row in rows
        if f"`{name}`" in row[1]
    ]
    lines = "\n".join(found) or "Nothing speaks for it before the plain answer was tried."
    return f"## When to use it\n\n{lines}\n\nSee [which method when](/methods/which-when.md)."


def budget_rows(name: str, site: Site) -> str:
    """This method in the tables of all methods, beside FedAvg."""
    wanted, parts = [METHODS[name].title, "FedAvg"], []
    text = BUDGETS.read_text(encoding="utf-8")
    for title, part in re.findall(r"^## (Table \d\. .+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        commit = re.search(r"[Cc]ommit `(\w+)`", part)
        for head, rows in table_rows(part):
            kept = [
                row
                for want in dict.fromkeys(wanted)
                for row in rows
                if re.sub(r" \(the same .*\)", "", row[0]) == want
            ]
            lines = [head, ["---"] * len(head), *kept]
            shown = "\n".join("| " + " | ".join(line) + " |" for line in lines)
            parts.append(f"{title}, test Dice, commit `{commit[1] if commit else ''}`:\n\n{shown}")
    place = place_of(BUDGETS)
    note = f"One seed each, which does not rank methods: [how, and how much is noise](/{place})."
    return "\n\n".join(["## Measured at one budget", *parts, note])


# Python names


def api_page() -> str:
    """autodoc of every public name, in the order of `wardround.__all__`."""
    parts = ["# Python names\n\nAs their docstrings say it; [with examples](python.md).\n"]
    for name in wardround.__all__:
        thing: Any = getattr(wardround, name)
        if inspect.isclass(thing):
            kind = "autoexception" if issubclass(thing, Exception) else "autoclass"
        elif inspect.isfunction(thing):
            kind = "autofunction"
        else:
            continue
        members = "\n   :members:" if kind == "autoclass" else ""
        parts.append(f"## `{name}`\n\n```{{eval-rst}}\n.. {kind}:: wardround.{name}{members}\n```\n")
    return "\n".join(parts)


def build(output: Path) -> int:
    pages = output.with_name(f"{output.name}-pages")
    for folder in (pages, output):
        shutil.rmtree(folder, ignore_errors=True)
    write_pages(pages)
    return sphinx_build(
        [
            "-q",
            "-W",
            "--keep-going",
            "-c",
            str(DOCS / "site"),
            "-d",
            str(pages / ".doctrees"),
            str(pages),
            str(output),
        ]
    )


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/site"))
