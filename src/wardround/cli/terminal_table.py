"""Tables on a terminal: columns that do not fit are left out and named; no word or number is broken."""

from __future__ import annotations

from collections.abc import Sequence
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
STRUCTURE = "structure"


def draw_table(console: Console, table: Any, *, where: str = WIDER) -> None:
    """Print a table of `wardround.tables`; where: a sentence on where columns are that do not fit.

    Structures become headings between the rows, which takes less room than a column.
    """
    group = list(table.columns).index(STRUCTURE) if STRUCTURE in table.columns[1:] else None
    heads, cells, ranks = table.heads(), table.cells(), table.ranks()
    fixed = [is_fixed([row[place] for row in table.rows]) for place in range(len(heads))]
    places = [place for place in range(len(heads)) if place != group]
    columns = [[heads[place], *(row[place] for row in cells)] for place in places]
    columns[0] += [] if group is None else [row[group] for row in cells]
    chosen = choose_widths(columns, [fixed[place] for place in places], console.width)
    widths = {places[number]: width for number, width in chosen.items()}
    grid = RichTable()
    for place, width in widths.items():
        side = "right" if place and fixed[place] else "left"
        grid.add_column(escape(heads[place]), justify=side, overflow="fold", width=width)  # type: ignore[arg-type]
    before = None
    for row, marks in zip(cells, ranks, strict=True):
        if group is not None and row[group] != before:
            grid.add_section()
            grid.add_row(f"[italic]{escape(row[group])}[/]")
            before = row[group]
        grid.add_row(*(MARKS[marks[place]].format(escape(row[place])) for place in widths))
    for text in (table.title, grid, table.caption):
        if text:
            console.print(Text(text) if isinstance(text, str) else Padding(text, 0, expand=False))
    left_out = [heads[place] for place in places if place not in widths]
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
