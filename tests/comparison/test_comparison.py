"""Comparisons run, resume and tell the truth: killed twice, the tables are the same bytes."""

import csv
import fcntl
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helpers import settings
from pytest import LogCaptureFixture, MonkeyPatch, approx, fixture, mark, raises

import wardround as wr
from comparison.here import Here
from wardround import batch
from wardround.api import Result
from wardround.batch import find_stage, is_in_use
from wardround.comparison import Comparison, compare
from wardround.comparison.grid import Row, build_grid
from wardround.comparison.outcome import fill_defaults
from wardround.comparison.presets import share_runs
from wardround.comparison.run import plan_comparison, run_grid
from wardround.config_file import load_config
from wardround.data.settings import DataSettings
from wardround.errors import CheckpointError, ConfigError, WardroundError
from wardround.tables import formula_safe

TABLES = ("table-dice.md", "table-dice.csv", "table-dice.tex", "statistics.json")


def values(sweep: Any, **changes: Any) -> dict[str, Any]:
    return {**settings(Path("unused"), **{"rounds": 1, **changes}), "sweep": sweep}


@fixture
def quick(monkeypatch: MonkeyPatch) -> Iterator[None]:
    """Cells without processes: starting Python takes seconds."""
    monkeypatch.setattr(batch, "ChildProcess", Here)
    monkeypatch.setattr(batch, "POLL_SECONDS", 0)
    yield


class Seen:
    def __init__(self) -> None:
        self.ends: list[tuple[str, bool]] = []
        self.stages: dict[str, str] = {}

    def on_plan(self, grid: Any, stages: Any) -> None:
        self.stages = dict(stages)

    def on_jobs(self, jobs: int, why: str) -> None: ...

    def on_rounds(self, name: str, done: int, rounds: int) -> None: ...

    def on_end(self, name: str, value: float | None, error: str | None) -> None:
        self.ends.append((name, error is None))


# A comparison


def test_a_row_read_off_a_longer_run_has_the_numbers_of_a_run_of_its_own(quick: None, tmp_path: Path) -> None:
    evaluate = {"metrics": ["dice"], "overlays": 0, "calibrate": False, "model": "last"}
    rows = [
        Row(f"{rounds} rounds", settings(Path("unused"), rounds=rounds, evaluate=evaluate))
        for rounds in (1, 2)
    ]
    alone = run_grid(build_grid(rows), tmp_path / "alone")
    shared = run_grid(build_grid(share_runs(rows)), tmp_path / "shared")

    assert [cell.row for cell in alone.cells] == ["1 rounds", "2 rounds"]
    assert [cell.row for cell in shared.cells] == ["2 rounds"]
    assert shared.table().rows == alone.table().rows
    assert shared.table().rows[0][1:] != shared.table().rows[1][1:]


def test_a_comparison_gives_tables_statistics_and_results(quick: None, tmp_path: Path) -> None:
    twin = {"label": "twin", "method": {"name": "fedavg"}}
    found = compare(values({"methods": ["fedavg", "local", twin], "seeds": 2}), output=tmp_path, jobs=2)

    assert list(found.results) == [
        "fedavg-seed42", "fedavg-seed43", "local-seed42", "local-seed43", "twin-seed42", "twin-seed43",
    ]  # fmt: skip
    assert isinstance(found.results["local-seed42"], Result) and len(found.results) == 6
    table = found.table("dice")
    assert [row[0] for row in table.rows] == ["fedavg", "local", "twin"] and table.rows[0][1].sd is not None
    test = found.statistics().row("twin").test
    assert test is not None and (test.p, test.p_holm, test.difference) == (1.0, 1.0, 0.0)
    assert all((tmp_path / name).exists() for name in (*TABLES, "comparison.json"))
    again = Comparison.load(tmp_path)
    assert inspect.unwrap(wr.compare) is compare and wr.Comparison is Comparison
    assert str(again.table()) == str(table) and again.failures == {}
    assert again.table().rows[0][1].mean == approx(
        sum(found.results[name].test.value("dice") for name in ("fedavg-seed42", "fedavg-seed43")) / 2
    )


def test_a_comparison_counts_no_client_without_labels(quick: None, tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": 8, "unlabelled": ["east"]}}
    chosen = {"data": data, "objective": {"name": "mean_teacher", "warmup": 0.0}}
    found = compare(values({"methods": ["fedavg", "fedprox"], "seeds": 1}, **chosen), output=tmp_path)
    assert found.failures == {}
    assert {name: list(result.test.cases) for name, result in found.results.items()} == {
        "fedavg-seed42": ["north", "south"], "fedprox-seed42": ["north", "south"],
    }  # fmt: skip


def test_finished_cells_are_not_run_again_and_a_grid_may_grow(quick: None, tmp_path: Path) -> None:
    compare(values({"seeds": 1}), output=tmp_path)
    before = (tmp_path / "cells/fedavg-seed42/result.json").stat().st_mtime_ns
    seen = Seen()
    found = compare(values({"seeds": 2, "methods": ["fedavg", "local"]}), output=tmp_path, watch=seen)

    assert (tmp_path / "cells/fedavg-seed42/result.json").stat().st_mtime_ns == before
    assert seen.stages["fedavg-seed42"] == "done" and len(found.results) == 4
    assert [name for name, _ in seen.ends][:2] == ["fedavg-seed42", "local-seed42"]  # seed by seed


def test_a_cell_is_the_run_that_its_file_gives_by_hand(quick: None, tmp_path: Path) -> None:
    found = compare(values({"seeds": [7]}), output=tmp_path / "all")
    alone = wr.run(tmp_path / "all/cells/fedavg-seed7.yaml", overrides=[f"output={tmp_path / 'alone'}"])

    assert alone.params_sha256 == found.results["fedavg-seed7"].params_sha256


def test_other_settings_are_refused_or_overwritten(quick: None, tmp_path: Path) -> None:
    compare(values({"methods": ["fedavg", "local"]}), output=tmp_path)
    changed = values({"methods": ["fedavg", "local"]}, local_epochs=2)

    with raises(CheckpointError, match=r"cell 'fedavg, seed 42': .*'local_epochs' was 1 and is 2 now"):
        compare(changed, output=tmp_path)
    found = compare(changed, output=tmp_path, overwrite=True)
    assert found.results["local-seed42"].config.local_epochs == 2


def test_compute_settings_may_change(quick: None, tmp_path: Path) -> None:
    compare(values({}), output=tmp_path)
    seen = Seen()
    compare(values({}, compute={"threads": 1, "workers": 2}), output=tmp_path, watch=seen)

    assert set(seen.stages.values()) == {"done"}


def test_a_failure_is_told_and_does_not_stop_the_rest(quick: None, tmp_path: Path) -> None:
    bad = {
        "label": "bad",
        "optimizer": {"name": "sgd", "learning_rate": 1e30},
        "local_epochs": 3,
        "retries": 0,
    }
    found = compare(values({"methods": [bad, "fedavg"]}), output=tmp_path)

    assert list(found.failures) == ["bad-seed42"] and "the loss became NaN" in found.failures["bad-seed42"]
    assert list(found.results) == ["fedavg-seed42"]
    assert "Not complete: bad 0 of 1" in found.table().caption
    assert found.reference == "bad"
    assert [row.why_not for row in found.statistics().rows] == ["reference, failed", "reference: failed"]
    assert "other data" not in (tmp_path / "table-dice.md").read_text()
    assert Comparison.load(tmp_path).failures == found.failures


def test_leave_one_out_shows_every_client_as_unseen(quick: None, tmp_path: Path) -> None:
    found = compare(values({}), output=tmp_path, leave_one_out=True)
    table = found.table()

    for name in ("east", "north", "south"):
        run = found.results[f"fedavg-seed42-without-{name}"]
        assert run.test is not None
        shown = table.rows[0][list(table.columns).index(name)].mean
        assert abs(shown - run.test.clients["dice"][name].mean) < 1e-12
        assert run.records[0]["clients"] == sorted({"east", "north", "south"} - {name})
    assert table.columns[5:] == ["seen clients", "east", "north", "south"]


def test_the_cross_site_matrix_of_local_models(quick: None, tmp_path: Path) -> None:
    evaluate = {"metrics": ["dice"], "cross_site": True, "overlays": 0}
    found = compare(values({"methods": ["local"]}, evaluate=evaluate), output=tmp_path)
    table = found.cross_site()

    assert table is not None and len(table.rows) == 3
    crossed = found.results["local-seed42"].outcome.cross_site
    assert table.rows[0][2].mean == crossed["east"].clients["dice"]["east"].mean
    assert (tmp_path / "cross-site-dice.tex").exists()


def test_without_cross_site_there_is_no_matrix(quick: None, tmp_path: Path) -> None:
    assert compare(values({}), output=tmp_path).cross_site() is None


@mark.parametrize("name", ["<script>alert(1)</script>", "=cmd()", "a|b", "x" * 250, "\u202eחולים", '"../'])
def test_hostile_client_names_survive_the_way_through_files(quick: None, name: str, tmp_path: Path) -> None:
    found = compare(values({}), output=tmp_path)
    path = tmp_path / "cells/fedavg-seed42/cases.csv"
    lines = path.read_text().splitlines()
    rows = [[formula_safe(name) if c == "north" else c for c in row] for row in csv.reader(lines)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    path.write_text(text.getvalue())
    again = Comparison.load(tmp_path)
    again.write()

    assert name in again.table().columns and found.folder == tmp_path
    assert "<script" not in (tmp_path / "table-dice.md").read_text().replace("\\<script", "")


# Stage of a folder


def test_the_stage_of_a_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = load_config(settings(folder, rounds=1))

    assert find_stage(folder, config) == "new"
    wr.run(config)
    assert find_stage(folder, config) == "done"
    (folder / "result.json").unlink()
    assert find_stage(folder, config) == "unfinished"
    (folder / "checkpoints/latest.json").unlink()
    assert find_stage(folder, config) == "new"


def test_a_folder_is_in_use_while_its_lock_is_held(tmp_path: Path) -> None:
    assert not is_in_use(tmp_path)
    with (tmp_path / ".lock").open("w") as lock:
        assert not is_in_use(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_in_use(tmp_path)


def test_a_cell_whose_process_outlived_a_kill_is_waited_for(
    quick: None, tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    asked: list[Path] = []

    def busy_twice(folder: Path) -> bool:
        asked.append(folder)
        return len(asked) <= 2

    monkeypatch.setattr(batch, "is_in_use", busy_twice)
    found = compare(values({}), output=tmp_path)

    assert len(asked) == 3 and len(found.results) == 1
    assert caplog.text.count("is in use by another process; waiting") == 1


# Mistakes


def test_cases_that_cannot_be_used_are_counted_in_the_caption(quick: None, tmp_path: Path) -> None:
    found = compare(values({}), output=tmp_path)
    for cell in found.cells:
        (cell.folder / "left_out.json").write_text('{"north": {"p1": "cannot be read", "p2": "is empty"}}')

    assert "cannot be used: north 2; left_out.json" in Comparison.load(tmp_path).table().caption


def test_two_comparisons_do_not_share_a_folder(quick: None, tmp_path: Path) -> None:
    grid, folder = plan_comparison(values({}), {}, tmp_path)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with raises(WardroundError, match="in use by another comparison"):
            run_grid(grid, folder)


def test_a_folder_of_a_single_run_is_refused(tmp_path: Path) -> None:
    wr.run(settings(tmp_path, rounds=1))

    with raises(ConfigError, match="contains a single run"):
        compare(values({}), output=tmp_path)


def test_files_of_others_are_not_replaced(quick: None, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("my own", encoding="utf-8")

    with raises(ConfigError, match=r"report\.html is not of a comparison"):
        compare(values({}), output=tmp_path)
    with raises(ConfigError, match=r"report\.html is a file"):
        compare(values({}), output=page)
    (tmp_path / ".lock").touch()  # of a comparison
    assert plan_comparison(values({}), {}, tmp_path)[1] == tmp_path


@mark.parametrize("text", [None, "{", "{}", '{"version": 99}'])
def test_what_is_no_comparison_is_told(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "comparison.json").write_text(text)

    with raises(CheckpointError, match="no comparison|cannot be read|another version"):
        Comparison.load(tmp_path)


def test_a_metric_that_was_not_measured_is_told(quick: None, tmp_path: Path) -> None:
    with raises(ConfigError, match="'hd95' was not measured"):
        compare(values({}), output=tmp_path).table("hd95")


def test_jobs_must_be_positive(tmp_path: Path) -> None:
    with raises(ConfigError, match="jobs is 0"):
        compare(values({}), output=tmp_path, jobs=0)


# Killed


def start(config: Path, folder: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "wardround",
        "compare",
        str(config),
        "-o",
        str(folder),
        "--jobs",
        "1",
        "-q",
    ]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def kill_when(process: subprocess.Popen[str], path: Path, lines: int) -> None:
    """kill -9 to the whole group, once a cell has done some rounds."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.005)
    assert process.poll() is None, "it ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@mark.slow
def test_killed_twice_and_resumed_gives_the_same_bytes(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    chosen = values({"methods": ["fedavg", "local"]}, rounds=25)
    del chosen["output"]
    config = tmp_path / "sweep.yaml"
    config.write_text(yaml.safe_dump(chosen))
    folder = tmp_path / "killed"

    for cell in ("fedavg", "local"):
        kill_when(start(config, folder), folder / f"cells/{cell}-seed42/records.jsonl", 2)
    rounds = batch.count_rounds(folder / "cells/local-seed42")
    assert not (folder / "cells/local-seed42/result.json").exists() and rounds >= 2
    last = start(config, folder)
    _, errors = last.communicate(timeout=120)

    assert last.returncode == 0, errors
    with monkeypatch.context() as patch:
        patch.setattr(batch, "ChildProcess", Here)
        patch.setattr(batch, "POLL_SECONDS", 0)
        through = compare(config, output=tmp_path / "through")
    for name in TABLES:
        assert (folder / name).read_bytes() == (through.folder / name).read_bytes(), name
    stored = json.loads((folder / "comparison.json").read_text())
    assert stored == json.loads((through.folder / "comparison.json").read_text())


def test_settings_of_an_earlier_version_mean_the_same_data() -> None:
    now = DataSettings.read({"federation": "federation.yaml"}).model_dump(mode="json")
    earlier = {key: value for key, value in now.items() if key != "common"}
    assert fill_defaults(earlier) == fill_defaults(now) == now
    assert fill_defaults({"folders": "a"}) == {"folders": "a"}
