"""Which cases stand side by side."""

from pathlib import Path
from typing import Any

import numpy as np

from wardround.comparison.runs import ClientFiles, Records, Run
from wardround.engine.judging.pictures import Picture
from wardround.reporting.panels import collect_panel


def picture(name: str, size: int = 2) -> Picture:
    layer = np.ones((1, size, size), dtype=np.uint8)
    return Picture(name, layer, layer, layer, layer)


def run_with(**panels: Any) -> list[Run]:
    run = Run(Path("run"), "a", {}, {}, Records(), {})
    run.files = {client: ClientFiles(panel=panel) for client, panel in panels.items()}
    return [run]


def names(rows: dict[str, list[Run]], most: int = 8) -> list[str]:
    return [case.scan.name for case in collect_panel(rows, most)]


def test_only_cases_that_all_rows_show_alike_stand_side_by_side() -> None:
    first = run_with(x=[picture("x1"), picture("x2")], y=[picture("y1")])
    second = run_with(x=[picture("x1"), picture("x2", size=3)], y=[picture("y1")])

    assert names({"a": first, "b": second}) == ["x1", "y1"]
    assert names({"a": first, "b": second, "no pictures": run_with(x=[])}) == ["x1", "y1"]
    assert names({"a": first}) == []


def test_every_client_comes_before_second_cases() -> None:
    runs = run_with(x=[picture("x1"), picture("x2")], y=[picture("y1"), picture("y2")])

    assert names({"a": runs, "b": runs}, most=3) == ["x1", "x2", "y1"]
    assert names({"a": runs, "b": runs}, most=2) == ["x1", "y1"]
