"""`wardround papers run` from a data folder to the report."""

from __future__ import annotations

from pathlib import Path

from helpers import call
from pytest import CaptureFixture, MonkeyPatch

import wardround as wr
from wardround.comparison.presets import plan_paper
from wardround.papers.presets import load
from wardround.papers.scaling import Scale


def test_a_table_is_run_from_data_in_its_true_layout_to_the_report(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    small, alone = Scale.parse("0.01"), ["compute.threads=1"]
    grid = plan_paper(load("safcf-table7"), ["synthetic"], folder, scale=small, overrides=alone)
    for cell in grid.cells:  # in this process, so that the test need not wait for others to start
        wr.run(dict(cell.settings), overrides=[f"output={folder / 'cells' / cell.name}"])
    words = ["safcf-table7", "--data", "synthetic", "--scale", "0.01", "-o", str(folder), "--jobs", "1"]
    words += ["--set", *alone]
    code, out, err = call(monkeypatch, capsys, "papers", "run", *words)

    assert code == 0 and "1 done" in err
    assert "| method | column | printed | measured | difference |" in out and "| SAFCF | BUS" not in out
    assert "| SAFCF | busis | 0.890" in out and "Scaled to 0.01." in out and "bound .80" in out
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "printed and measured" in page and "Not as in the paper: rounds 1 instead of 100" in page


def test_a_folder_without_the_data_is_explained(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = call(
        monkeypatch, capsys, "papers", "run", "fedevi-table1", "--data", str(tmp_path / "empty")
    )

    assert code == 2 and "empty" in err and "Traceback" not in err
