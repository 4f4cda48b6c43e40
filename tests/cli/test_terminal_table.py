"""Tables at 80 and 100 columns: nothing is broken, and what is left out is named."""

import io
import math

from pytest import mark
from rich.console import Console

from wardround.cli.terminal_table import choose_widths, draw_table
from wardround.tables import Interval, Spread, Table


def drawn(table: Table, width: int, where: str = "See table.csv.") -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    draw_table(console, table, where=where)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def wide_table() -> Table:
    columns = ["method", "mean", "SD between clients", "worst client", "weighted mean", "north", "south"]
    value = Spread(0.8125, 0.0312)
    rows = [[name, *[value] * (len(columns) - 1)] for name in ("fedavg", "adaptive_weights")]
    return Table("Scores", columns, rows, "A caption.")


@mark.parametrize(("width", "left_out"), [(80, ["weighted mean", "north", "south"]), (100, ["south"])])
def test_a_number_is_whole_or_its_column_is_named_below_the_table(width: int, left_out: list[str]) -> None:
    lines = drawn(wide_table(), width)
    row = next(line for line in lines if "fedavg" in line)
    shown = row.count("0.812 ± 0.031")
    told = " ".join(lines[-2:])

    assert max(map(len, lines)) <= width and shown == 6 - len(left_out)
    assert f"Not shown, for lack of width: {', '.join(left_out)}. See table.csv." in told
    assert any("adaptive_weights" in line for line in lines)


def test_a_wide_terminal_leaves_nothing_out() -> None:
    lines = drawn(wide_table(), 160)

    assert "Not shown" not in "".join(lines) and lines[-1] == "A caption."


def test_sentences_are_wrapped_between_words() -> None:
    said = "a federated average with a proximal term that keeps clients near the server"
    lines = drawn(Table("", ["name", "what it does"], [["fedprox", said]]), 40)
    words = " ".join(lines).replace("│", " ").split()

    assert max(map(len, lines)) <= 40 and set(said.split()) <= set(words)


def test_intervals_are_numbers_and_are_not_wrapped() -> None:
    rows = [["north", Interval(-0.5, 0.25), 12], ["south", Interval(math.nan, math.nan), 1]]
    lines = drawn(Table("", ["client", "95 % interval", "n"], rows), 40)

    assert any("[-0.500, 0.250]" in line for line in lines) and any("n/a" in line for line in lines)


def test_markup_in_names_is_text() -> None:
    assert any("[bold]x[/]" in line for line in drawn(Table("[t]", ["client"], [["[bold]x[/]"]]), 60))


def test_the_first_column_stays_at_any_width() -> None:
    assert choose_widths([["client", "a" * 90], ["n", "1"]], [False, True], 20) == {0: 16}


def test_structures_are_headings_between_the_rows() -> None:
    rows = [["a", "rim", 1], ["b", "rim", 2], ["a", "optic_cup", 3]]
    lines = drawn(Table("", ["client", "structure", "n"], rows), 60)

    assert [line[0] for line in lines].count("├") == 1
    assert [line.split()[1] for line in lines if line[0] == "│"] == ["rim", "a", "b", "optic_cup", "a"]
