"""Tables for readers that are no list of settings."""

from __future__ import annotations

from wardround.papers.cards import count_table
from wardround.papers.data import PaperData
from wardround.papers.presets import load


def test_a_table_of_data_stands_beside_what_is_there() -> None:
    have = PaperData(None, None, ("Without IU: its cases are not there.",), {"NYU": 162, "AHN": 10})
    table = count_table(load("aaw-table1"), {"T1": have}, ["Not run: T2 (it is not there)."])
    lines = {row[0]: row[1:] for row in table.rows}
    assert lines["NYU"] == ["T1", 162, 162, 0] and lines["AHN"] == ["T1", 17, 10, -7]
    assert lines["IU"] == ["T1", 74, 0, -74] and lines["total"] == ["T1", 723, 172, -551]
    assert "Not run: T2" in table.caption and "Without IU" in table.caption
