"""Tables on a terminal: columns that do not fit are left out and named; no word or number is broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

MARKS = ("{}", "[bold]{}[/]", "[underline]{}[/]")
LONGEST_WORD = 30  # a path or an address may be broken, to be seen at all
NARROW_PROSE = 12  # sentences are not squeezed into less
WIDER = "A wider terminal shows them, and so does a pipe (| cat)."
GROUP = "structure"  # a rule is drawn where the value of this column changes


def draw_table(console: Console, table: Any, *, where: str = WIDER) -> None:
    """Print a table of `wardround.tables`; where: a sentence on where columns are that do not fit."""
    heads, cells = table.heads(), table.cells()
    fixed = [is_fixed([row[place] for row in table.rows]) for place in range(len(heads))]
    columns = [[head, *(row[place] for row in cells)] for place, head in enumerate(heads)]
    widths = choose_widths(columns, fixed, console.width)
    grid = RichTable()
    for place, width in widths.items():
        side = "right" if place and fixed[place] else "left"
        grid.add_column(escape(heads[place]), justify=side, overflow="fold", width=width)  # type: ignore[arg-type]
    starts = find_groups(table)
    for number, (row, ranks) in enumerate(zip(cells, table.ranks(), strict=True)):
        if number in starts:
            grid.add_section()
        grid.add_row(*(MARKS[ranks[place]].format(escape(row[place])) for place in widths))
    for text in (table.title, grid, table.caption):
        if text:
            console.print(Text(text) if isinstance(text, str) else Padding(text, 0, expand=False))
    left_out = [head for place, head in enumerate(heads) if place not in widths]
    if left_out:
        console.print(Text(f"Not shown, for lack of width: {', '.join(left_out)}. {where}"))


def is_fixed(values: Sequence[Any]) -> bool:
    """Whether a column has numbers, which are kept in one piece; texts may be wrapped between words."""
    return any(not isinstance(value, str) for value in values)


def choose_widths(columns: Sequence[Sequence[str]], fixed: Sequence[bool], room: int) -> dict[int, int]:
    """The columns that fit, from the left, and their widths. columns: heading and cells of each.

    >>> columns = [["method", "fedavg"], ["mean", "0.512 ± 0.020"], ["north", "0.4"]]
    >>> choose_widths(columns, [False, True, True], 28)
    {0: 6, 1: 13}
    """
    least = [measure_least(column, is_number) for column, is_number in zip(columns, fixed, strict=True)]
    kept = len(columns)
    while kept > 1 and sum(least[:kept]) + 3 * kept + 1 > room:
        kept -= 1
    widths = [min(width, max(1, room - 4)) for width in least[:kept]]
    spare = room - sum(widths) - 3 * kept - 1
    wanted = [max(map(len, column)) for column in columns[:kept]]
    for place in sorted(range(kept), key=lambda place: wanted[place] - widths[place]):
        more = max(0, min(wanted[place] - widths[place], spare))
        widths[place] += more
        spare -= more
    return dict(enumerate(widths))


def measure_least(column: Sequence[str], is_number: bool) -> int:
    """The least width of a column in which neither its heading nor a cell is broken."""
    head, *cells = column
    words = [min(len(word), LONGEST_WORD) for word in head.split()]
    if is_number:
        return max([*words, *map(len, cells)], default=1)
    longest = max(map(len, cells), default=0)
    words += [min(len(word), LONGEST_WORD) for cell in cells for word in cell.split()]
    return max([*words, min(longest, NARROW_PROSE)], default=1)


def find_groups(table: Any) -> set[int]:
    """Rows that begin another structure."""
    if GROUP not in table.columns[1:]:
        return set()
    place = list(table.columns).index(GROUP)

    def changes() -> Iterator[int]:
        for number, (before, after) in enumerate(zip(table.rows, table.rows[1:], strict=False), start=1):
            if before[place] != after[place]:
                yield number

    return set(changes())
