"""Tables: rows of methods or clients, as Markdown, CSV, LaTeX, JSON or plain cells for the terminal.

Names of clients and cases are untrusted: each format escapes them in its own way.
"""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Interval(NamedTuple):
    """A 95 % interval; NaN where there is nothing to draw from."""

    low: float
    high: float


@dataclass(frozen=True)
class Spread:
    """A mean over seeds or folds.

    sd: None for a single one; rank: 1 the best of its column, 2 the second; num_infinite: values that were
    infinite and are not in the mean, which is marked for it.
    """

    mean: float
    sd: float | None = None
    rank: int = 0
    num_infinite: int = 0


class Flagged(float):
    """A number with a remark below its table; shown with a double dagger."""


class PValue(float):
    """A probability; small ones are shown as a bound."""


@dataclass(frozen=True)
class Table:
    """A title, column heads and rows of text or numbers; prints as Markdown.

    width: longer texts are cut in the middle where people read them (not in CSV and JSON); 0 cuts nothing.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    width: int = 0

    def heads(self) -> list[str]:
        return [one_line(column, self.width) for column in self.columns]

    def cells(self) -> list[list[str]]:
        return [[one_line(shown(value), self.width) for value in row] for row in self.rows]

    def ranks(self) -> list[list[int]]:
        """1 for the best of a column, 2 for the second, else 0; in the shape of `cells`."""
        return [[value.rank if isinstance(value, Spread) else 0 for value in row] for row in self.rows]

    def markdown(self) -> str:
        marks = ("{}", "**{}**", "<u>{}</u>")
        heads = [escaped(column) for column in self.heads()]
        rule = ["---", *["---:"] * (len(heads) - 1)]
        rows = [
            [marks[rank].format(escaped(cell)) for cell, rank in zip(row, ranks, strict=True)]
            for row, ranks in zip(self.cells(), self.ranks(), strict=True)
        ]
        body = "\n".join("| " + " | ".join(line) + " |" for line in [heads, rule, *rows])
        return f"{body}\n\n{escaped(self.caption)}" if self.caption else body

    def html(self) -> str:
        """A table for a notebook; best bold, second underlined."""
        marks = ("{}", "<b>{}</b>", "<u>{}</u>")
        rows = [
            [marks[rank].format(html.escape(cell)) for cell, rank in zip(row, ranks, strict=True)]
            for row, ranks in zip(self.cells(), self.ranks(), strict=True)
        ]
        heads = "".join(f"<th>{html.escape(head)}</th>" for head in self.heads())
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        caption = f"<p>{html.escape(self.caption)}</p>" if self.caption else ""
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{caption}"

    _repr_html_ = html

    def latex(self) -> str:
        """A table for the booktabs package; best bold, second underlined."""
        marks = ("{}", r"\textbf{{{}}}", r"\underline{{{}}}")
        rows = [
            [marks[rank].format(latex_escaped(cell)) for cell, rank in zip(row, ranks, strict=True)]
            for row, ranks in zip(self.cells(), self.ranks(), strict=True)
        ]
        lines = [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex_escaped(f'{self.title}. {self.caption}'.strip())}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}",
            r"\toprule",
            " & ".join(latex_escaped(column) for column in self.heads()) + r" \\",
            r"\midrule",
            *(unread_by_rule(" & ".join(row)) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """All digits; a spread becomes two columns, an interval too. No cell is read as a formula."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        kinds = [self._kind(number) for number in range(len(self.columns))]
        heads = [part_names(column, kind) for column, kind in zip(self.columns, kinds, strict=True)]
        writer.writerow([formula_safe(name) for names in heads for name in names])
        for row in self.rows:
            writer.writerow(
                [part for value, kind in zip(row, kinds, strict=True) for part in parts(value, kind)]
            )
        return text.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [[plain_value(value) for value in row] for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows, "caption": self.caption}

    def _kind(self, number: int) -> str:
        """What a column holds: spread (with an SD somewhere), interval, or value."""
        values = [row[number] for row in self.rows]
        if any(isinstance(value, Interval) for value in values):
            return "interval"
        if any(isinstance(value, Spread) and value.sd is not None for value in values):
            return "spread"
        return "value"

    def __str__(self) -> str:
        return self.markdown()


# One value


def shown(value: Any) -> str:
    """A value as text: numbers with three decimals."""
    if isinstance(value, Spread):
        spread = "" if value.sd is None or math.isnan(value.sd) else f" ± {shown(value.sd)}"
        return shown(value.mean) + spread + ("†" if value.num_infinite and math.isfinite(value.mean) else "")
    if isinstance(value, Interval):
        return "n/a" if math.isnan(value.low) else f"[{shown(value.low)}, {shown(value.high)}]"
    if isinstance(value, PValue) and value < 0.001:
        return "<0.001"
    if isinstance(value, Flagged):
        return f"{shown(float(value))}‡"
    if isinstance(value, float):
        return "n/a" if math.isnan(value) else "inf" if math.isinf(value) else f"{value:.3f}"
    return str(value)


def part_names(column: str, kind: str) -> list[str]:
    suffixes = {"value": [""], "spread": ["", " (SD)"], "interval": [" low", " high"]}
    return [column + suffix for suffix in suffixes[kind]]


def parts(value: Any, kind: str) -> list[Any]:
    """What a value puts into its CSV columns."""
    if kind == "interval":
        return list(value) if isinstance(value, Interval) else ["", ""]
    if isinstance(value, Spread):
        sd = "" if value.sd is None else value.sd
        return [value.mean, sd] if kind == "spread" else [value.mean]
    cell = (
        formula_safe(value) if isinstance(value, str) else float(value) if isinstance(value, float) else value
    )
    return [cell, ""] if kind == "spread" else [cell]


def plain_value(value: Any) -> Any:
    if isinstance(value, Spread):
        return dataclasses.asdict(value)
    if isinstance(value, Interval):
        return [value.low, value.high]
    return float(value) if isinstance(value, PValue | Flagged) else value


# Untrusted names


def one_line(text: str, width: int = 0) -> str:
    """Printable characters only (no line breaks, no bidirectional control characters), cut to width.

    >>> one_line("a" * 30 + "z", 12)
    'aaaaaaaa…aaz'
    """
    flat = "".join(character if character.isprintable() else " " for character in text)
    if not width or len(flat) <= width:
        return flat
    tail = max(1, width // 4)
    return f"{flat[: width - tail - 1]}…{flat[-tail:]}"


def escaped(text: str) -> str:
    """Text in a Markdown table: never a column break, HTML or a link."""
    for character in "\\|<`*":
        text = text.replace(character, "\\" + character)
    return text.replace("](", "]\\(").replace("\n", " ")


LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    "…": r"\ldots{}",
    **{character: "\\" + character for character in "&%$#_{}"},
}


def latex_escaped(text: str) -> str:
    """Text that LaTeX prints and never executes.

    >>> print(latex_escaped("50 % of a_b"))
    50 \\% of a\\_b
    """
    return "".join(LATEX.get(character, character) for character in one_line(text))


def unread_by_rule(line: str) -> str:
    """Keep a row that begins with [ or * from being read as an argument of the line above it."""
    return "{}" + line if line.startswith(("[", "*")) else line


FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")


def formula_safe(text: str) -> str:
    """Text that a spreadsheet shows rather than evaluates; `formula_read` reverses it.

    >>> formula_safe("=1+1"), formula_safe("north")
    ("'=1+1", 'north')
    """
    return "'" + text if len(text) > 1 and text.startswith(FORMULA) else text


def formula_read(text: str) -> str:
    """
    >>> formula_read(formula_safe("=1+1")), formula_read(formula_safe("'tis"))
    ('=1+1', "'tis")
    """
    return text[1:] if len(text) > 2 and text[0] == "'" and text[1] in FORMULA else text
