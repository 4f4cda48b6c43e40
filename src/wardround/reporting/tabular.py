"""Tables one can sort by click or keyboard; the best of a column is bold, the second underlined."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wardround.reporting.charts import format_number
from wardround.reporting.html import Html, hidden, join, name, tag
from wardround.tables import Interval, Spread, Table, shown


@dataclass(frozen=True)
class NumberCell:
    """A number with its own way to be written."""

    text: str
    value: float

    def __str__(self) -> str:
        return self.text


MARKS = {1: ("strong", "best"), 2: ("u", "second")}


def table_html(table: Table, *, fixed: Collection[str] = (), sortable: bool = True) -> Html:
    """A table of a run or comparison. fixed: first cells of rows that sum up and stay at the end."""
    ranks = table.ranks()
    most = len(fixed) * (len({row[1] for row in table.rows}) if "structure" in table.columns[1:2] else 1)
    body: list[Html] = []
    foot: list[Html] = []
    for row, row_ranks in zip(table.rows, ranks, strict=True):
        target = foot if row and row[0] in fixed and len(foot) < most else body
        target.append(draw_row(row, row_ranks, table.width))
    many = sortable and len(body) > 1
    numeric = [any(is_number(row[place]) for row in table.rows) for place in range(len(table.columns))]
    heads = [
        draw_heading(column, table.width, sortable=many, numeric=numeric[place])
        for place, column in enumerate(table.columns)
    ]
    title = tag("caption", tag("span", table.title, class_="table-title"))
    parts = [title, tag("thead", tag("tr", heads)), tag("tbody", body)]
    if foot:
        parts.append(tag("tfoot", foot))
    whole = tag("table", parts, class_="sortable" if many else None)
    framed = tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=table.title)
    note = tag("p", table.caption, class_="table-note") if table.caption else None
    return tag("div", framed, note, class_="table")


def draw_heading(column: str, width: int, *, sortable: bool, numeric: bool) -> Html:
    label = name(column, width or 40)
    content = tag("button", label, tag("span", class_="arrow", aria_hidden="true"), type="button")
    look = {"class_": "number" if numeric else None, "aria_sort": "none" if sortable else None}
    return tag("th", content if sortable else label, scope="col", **look)


def draw_row(row: Sequence[Any], ranks: Sequence[int], width: int) -> Html:
    cells = [tag("th", name(shown(row[0]), width or 40), scope="row", data_v=sort_key(row[0]))]
    for value, rank in zip(row[1:], ranks[1:], strict=True):
        text = draw_cell(value, width)
        if rank:
            element, said = MARKS[rank]
            text = tag(element, text, hidden(f" ({said})"))
        cells.append(tag("td", text, class_="number" if is_number(value) else None, data_v=sort_key(value)))
    return tag("tr", cells)


def draw_cell(value: Any, width: int) -> Html | str:
    """A number (the SD behind it smaller), or a name from elsewhere."""
    if isinstance(value, Spread) and " ± " in shown(value):
        mean, _, sd = shown(value).partition(" ± ")
        return join(mean, tag("span", f" ± {sd}", class_="sd"))
    return shown(value) if is_number(value) or value == "" else name(shown(value), width or 60)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | NumberCell | Spread | Interval)


def sort_key(value: Any) -> str | None:
    """What a cell is sorted by; None sorts by its text, NaN last."""
    if isinstance(value, Spread):
        value = value.mean
    if isinstance(value, Interval):
        value = value.low
    if isinstance(value, NumberCell):
        value = value.value
    if not isinstance(value, int | float):
        return None
    return "" if math.isnan(value) else repr(float(value))


def facts_table(title: str, rows: Sequence[tuple[str, Any]]) -> Html:
    """Two columns: what, and what it is."""
    lines = [tag("tr", tag("th", key, scope="row"), tag("td", value)) for key, value in rows]
    return tag("table", tag("caption", title, class_="unseen"), tag("tbody", lines), class_="facts")


def plain_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    note: str = "",
    fixed: Collection[str] = (),
) -> Html:
    """A table of numbers and names that are not scores: floats with as many digits as they need."""
    filled = [[NumberCell(format_number(v), v) if isinstance(v, float) else v for v in row] for row in rows]
    return table_html(Table(title, columns, filled, note), fixed=fixed)


def in_words(value: Any) -> str:
    """A value of a file without brackets and quotes.

    >>> in_words({"device": "cpu", "chances": {"noise": 0.1, "blur": 0.2}}), in_words([1.0, 2.0])
    ('device cpu, chances (noise 0.1, blur 0.2)', '1.0, 2.0')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {in_nested_words(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(in_nested_words, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return str(value)


def in_nested_words(value: Any) -> str:
    return f"({in_words(value)})" if isinstance(value, Mapping | list) and value else in_words(value)
