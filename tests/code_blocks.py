"""The blocks of code of the documentation.

A block is a fence, or lines indented by four. One that cannot run is followed by `<!-- not run: reason -->`,
which the site shows below it. A fence without a language is what a program prints, and is not run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


def commands(block: Block) -> list[list[str]]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


BLOCKS = [block for page in PAGES for block in blocks(page)]
CODE = [block for block in BLOCKS if block.kind in ("python", "shell")]
