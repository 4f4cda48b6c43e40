"""Tables say the same in every form, and hostile names stay text."""

import csv
import io
import json
import math
import re

from pytest import mark

from wardround.tables import Interval, PValue, Spread, Table, escaped, formula_read, formula_safe, one_line

HOSTILE = [
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "=cmd|' /C calc'!A0",
    "a | b \\| c",
    "quotes \" and ' and `",
    "\\input{/etc/passwd} $x$ %",
    "x" * 300,
    "\u202eevil\u2066",
    "מרכז رفوي",
    "[link](javascript:alert(1))",
    "line\nbreak\ttab",
]


def table(name: str = "north") -> Table:
    rows = [
        [name, Spread(0.9123, 0.0102, 1), Interval(0.9, 0.95), PValue(0.0004)],
        ["fedavg", Spread(0.9, 0.02, 2), "reference", ""],
    ]
    return Table("title", ["method", name, "95 % interval", "p"], rows, "a caption", 40)


def test_markdown_marks_the_best_and_the_second() -> None:
    assert table().markdown().splitlines()[2:4] == [
        "| north | **0.912 ± 0.010** | [0.900, 0.950] | \\<0.001 |",
        "| fedavg | <u>0.900 ± 0.020</u> | reference |  |",
    ]


def test_latex_is_booktabs_with_the_same_marks() -> None:
    latex = table().latex()

    assert r"north & \textbf{0.912 $\pm$ 0.010} & [0.900, 0.950] & \textless{}0.001 \\" in latex
    assert r"fedavg & \underline{0.900 $\pm$ 0.020} & reference &  \\" in latex
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"95 \% interval", r"\caption{title. a caption}"):
        assert part in latex


@mark.parametrize("name", ["[5cm] north", "*north"])
def test_a_name_is_no_argument_of_the_latex_rule_above_it(name: str) -> None:
    assert f"\\midrule\n{{}}{name} &" in table(name).latex()


def test_csv_has_all_digits_and_a_column_for_each_number() -> None:
    first, second, third = csv.reader(io.StringIO(table().csv()))

    assert first == ["method", "north", "north (SD)", "95 % interval low", "95 % interval high", "p"]
    assert second == ["north", "0.9123", "0.0102", "0.9", "0.95", "0.0004"]
    assert third == ["fedavg", "0.9", "0.02", "", "", ""]


def test_json_keeps_means_spreads_and_ranks() -> None:
    row = json.loads(json.dumps(table().as_dict()))["rows"][0]

    assert row[1] == {"mean": 0.9123, "sd": 0.0102, "rank": 1, "num_infinite": 0}
    assert row[2:] == [[0.9, 0.95], 0.0004]


def test_a_mean_without_its_infinite_values_is_marked() -> None:
    shown = Table("t", ["a"], [[Spread(3.0, None, 0, 2)], [Spread(math.inf, None, 0, 2)], [Spread(math.nan)]])

    assert shown.cells() == [["3.000†"], ["inf"], ["n/a"]]


@mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_one_cell_of_markdown(name: str) -> None:
    lines = table(name).markdown().splitlines()

    assert len(lines) == 6
    for line in lines[:4]:
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 5  # four cells
        assert not re.search(r"(?<!\\)<script", line) and not re.search(r"\]\(", line)


@mark.parametrize("name", HOSTILE)
def test_hostile_names_are_never_latex_commands(name: str) -> None:
    latex = table(name).latex()
    commands = set(re.findall(r"\\([a-zA-Z]+)", latex))

    assert commands <= {
        "begin", "centering", "caption", "toprule", "midrule", "bottomrule", "end", "textbf", "underline", "pm",
        "textless", "textgreater", "textbackslash", "textbar", "textquotedbl", "ldots",
    }  # fmt: skip
    assert len(latex.splitlines()) == 12


@mark.parametrize("name", HOSTILE)
def test_hostile_names_are_no_formulas_and_come_back_from_csv(name: str) -> None:
    rows = list(csv.reader(io.StringIO(table(name).csv(), newline="")))

    assert not rows[1][0].startswith(("=", "+", "-", "@"))
    assert formula_read(rows[1][0]) == name
    assert formula_read(formula_safe(formula_safe(name))) == formula_safe(name)


def test_text_is_cut_in_the_middle_and_has_no_direction_marks() -> None:
    assert len(one_line("x" * 300, 40)) == 40
    assert one_line("\u202eabc") == " abc"
    assert one_line("מרכז") == "מרכז"


def test_plain_words_are_not_changed() -> None:
    assert escaped("surface_dice (mm), 95 % [a]") == "surface_dice (mm), 95 % [a]"
    assert formula_safe("-") == "-" and formula_safe("") == ""
