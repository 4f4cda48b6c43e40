"""Tables of the papers on real data at a reduced budget: the plans of `wardround papers run`, as one pool.

    python benchmarks/papers/run.py --data DATA --results papers.tar.gz --minutes 9 --jobs 16
    python benchmarks/papers/summarise.py papers.tar.gz > benchmarks/papers/README.md

DATA holds the folders polyp4 (four sources of polyps) and lgg3d (glioma, four hospitals). All tables are run
with one split first, in the order of TABLES, then with the second and the third: whenever time is over, what
is done can be compared. Rows of two tables with the same settings are one run. A finished run keeps its
scores and records alone. The results file is written after every table's last run, twice a minute, and at the
end; the same command goes on with what is left, on another machine with `--before papers.tar.gz`.

    python benchmarks/papers/run.py ... --list        # runs that are left, and how long they will take
    python benchmarks/papers/run.py ... --small       # two rows a table, one round: also on the CPU
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml

from wardround.batch import find_stage, in_json, read_status, run_each
from wardround.comparison.grid import Grid, quiet_config_warnings
from wardround.comparison.outcome import VERSION
from wardround.comparison.presets import plan_paper
from wardround.comparison.run import order_cells
from wardround.config_file import load_config, resolve
from wardround.errors import WardroundError
from wardround.files import write_json
from wardround.papers.presets import load
from wardround.papers.scaling import Scale

KEPT = ("config.yaml", "environment.json", "result.json", "cases.csv", "records.jsonl", "tested")
SECONDS_BETWEEN_FILES = 30.0

FAST = ("compute.precision=tf32", "checkpoint.keep=1")
# FedEvi prints 200 rounds on 384x384 images. SAFCF prints 100 rounds of 40 epochs at 1e-5, batches of 8,
# 128x128x128, 32 filters; AAW 300 rounds at 1e-4, 256x256x80. In the few hundred steps of a client here Adam
# hardly moves a weight at these rates: hence higher ones, and more steps by smaller batches. They were not
# tuned for these tables: 1e-3 is known to learn lgg3d with 16 filters (`benchmarks/networks.py`).
POLYP = ("rounds=0.075,size=0.42", ("datasets=polyp", *FAST))
MORE_STEPS = ("batch_size=4", *FAST)
BRAIN = (
    "rounds=0.1,epochs=0.1,size=0.375,filters=0.5",
    ("optimizer.learning_rate=3e-3", *MORE_STEPS),
)
DEALT = (f"{BRAIN[0]},clients=0.3", BRAIN[1])
PANCREAS = ("rounds=0.1,size=0.25", ("datasets=T1", "optimizer.learning_rate=1e-3", *MORE_STEPS))
SMALL = "rounds=0.001,epochs=0.001,size=0.01,filters=0.1,clients=0.1,cases=0.1"


@dataclass(frozen=True)
class PlannedTable:
    """A preset on a data set. seeds: as many as the papers' splits, where the preset has fewer."""

    preset: str
    data: str
    budget: tuple[str, tuple[str, ...]]
    seeds: tuple[int, ...] | None = None


TABLES = (
    PlannedTable("fedevi-table1", "polyp4", POLYP),
    PlannedTable("fedevi-table4", "polyp4", POLYP),
    PlannedTable("fedevi-table5", "polyp4", POLYP),
    PlannedTable("safcf-table1", "lgg3d", BRAIN),
    PlannedTable("safcf-table2", "lgg3d", BRAIN),
    PlannedTable("safcf-table3", "lgg3d", BRAIN),
    PlannedTable("safcf-table4", "lgg3d", BRAIN),
    PlannedTable("safcf-table6", "lgg3d", DEALT),
    PlannedTable("aaw-table2", "lgg3d", PANCREAS, (42, 43, 44)),
)


class OutOfTimeError(Exception):
    """The minutes are over, or the process was asked to end."""


# What is run


@dataclass
class Pool:
    """The runs of all tables. used_by: run -> the cells (table, name) that are read off it."""

    grids: dict[str, Grid]
    runs: dict[str, dict[str, Any]]
    used_by: dict[str, list[tuple[str, str]]]


def plan_tables(options: argparse.Namespace) -> Pool:
    """The grids of the tables, and their runs: every table's first split, then the second of each."""
    grids = {table.preset: plan_table(table, options) for table in options.tables}
    ordered = [
        (grid.seeds.index(cell.seed), place, cell)
        for place, grid in enumerate(grids.values())
        for cell in order_cells(grid)
    ]
    names = list(grids)
    pool = Pool(grids, {}, {})
    known: dict[str, str] = {}
    for _, place, cell in sorted(ordered, key=lambda entry: entry[:2]):
        settings = json.loads(json.dumps(dict(cell.settings), default=str))
        run = known.setdefault(identify(settings), f"{names[place]}-{cell.name}")
        settings = {**settings, "compute": {**settings.get("compute", {}), "threads": options.threads}}
        pool.runs[run] = merge_tests(pool.runs[run], settings) if run in pool.runs else settings
        pool.used_by.setdefault(run, []).append((names[place], cell.name))
    return pool


def plan_table(table: PlannedTable, options: argparse.Namespace) -> Grid:
    """As `wardround papers run` plans it; data and prepared cases are shared by all tables."""
    scale, overrides = table.budget
    preset = load(table.preset)
    rows = list(dict.fromkeys(cell.row for cell in preset.list_runs() if cell.label in preset.published.rows))
    return plan_paper(
        preset,
        [str(options.data / table.data)],
        options.work,
        scale=Scale.parse(SMALL if options.small else scale),
        only=[rows[0], rows[-1]] if options.small else None,
        seeds=table.seeds,
        overrides=overrides,
    )


def identify(settings: Mapping[str, Any]) -> str:
    """Equal for runs that train alike: what they are called and what is measured at the end do not matter."""
    every = resolve(load_config(settings))
    tested = {key: value for key, value in every["evaluate"].items() if key not in ("metrics", "test_after")}
    rest = {key: value for key, value in every.items() if key not in ("name", "output")}
    return in_json({**rest, "evaluate": tested})


def merge_tests(one: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A run that measures what both of two equal ones do."""
    evaluate = dict(one["evaluate"])
    for key in ("metrics", "test_after"):
        both = [*evaluate.get(key, ()), *other["evaluate"].get(key, ())]
        if both:
            evaluate[key] = list(dict.fromkeys(both))
    return {**one, "evaluate": evaluate}


# What is left


def list_left(pool: Pool, work: Path) -> list[str]:
    """The runs that are not done. One that was made with other settings is refused before any starts."""
    with quiet_config_warnings(True):
        configs = {name: load_config(settings) for name, settings in pool.runs.items()}
        return [
            name for name, config in configs.items() if find_stage(work / "cells" / name, config) != "done"
        ]


def describe_left(pool: Pool, left: Sequence[str], options: argparse.Namespace) -> str:
    """The runs that are left with the seconds they took with other seeds, and how long all of them take."""
    known: dict[str, list[float]] = {}
    for name in set(pool.runs) - set(left):
        result = json.loads((options.work / "cells" / name / "result.json").read_text(encoding="utf-8"))
        known.setdefault(name.rpartition("-seed")[0], []).append(result["seconds"])
    others = {name: known.get(name.rpartition("-seed")[0], []) for name in left}
    seconds = {name: sum(own) / len(own) for name, own in others.items() if own}
    lines = [f"  {name}: {f'{seconds[name]:.0f} s' if name in seconds else 'not known'}" for name in left]
    calls = dict.fromkeys(
        f"{call['device']}, {call['jobs']} side by side" for call in read_calls(options.work)
    )
    total, whole = sum(seconds.values()), schedule(list(seconds.values()), options.jobs)
    lines.append(
        f"{len(left)} of {len(pool.runs)} runs are left: {total / 60:.0f} minutes of runs, about "
        f"{whole / 60:.0f} with {options.jobs} side by side. "
        f"Seconds: of the same rows with other seeds, on {' and '.join(calls) or 'nothing'}."
    )
    return "\n".join(lines)


def schedule(seconds: Sequence[float], jobs: int) -> float:
    """When the last run ends if each begins, in this order, as soon as a place is free."""
    ends = [0.0] * jobs
    for own in seconds:
        heapq.heapreplace(ends, ends[0] + own)
    return max(ends)


# Running


def run_pool(pool: Pool, options: argparse.Namespace, end: float) -> dict[str, str]:
    """Run what is not done; at the end of the time what runs is given up. The reasons of failures."""
    failures: dict[str, str] = {}
    cells, packed, ended = options.work / "cells", time.monotonic(), set[str]()
    try:
        with (
            stop_after(end - time.monotonic()),
            quiet_config_warnings(True),
            closing(run_each(pool.runs, cells, jobs=options.jobs, resume=True)) as runs,
        ):
            for name, error in runs:
                ended.add(name)
                if error is not None:
                    failures[name] = str(error).removeprefix(f"run '{name}' failed: ")
                else:
                    strip(cells / name)
                print(
                    f"{len(ended)} of {len(pool.runs)}: {name} {failures.get(name, '')}".rstrip(), flush=True
                )
                done = is_table_done(pool, name, ended)
                if done or time.monotonic() - packed > SECONDS_BETWEEN_FILES:
                    pack(pool, failures, options)
                    packed = time.monotonic()
    except OutOfTimeError as error:
        print(f"{error}: {len(ended)} of {len(pool.runs)} runs ended.", flush=True)
    return failures


@contextmanager
def stop_after(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError after so long, or at SIGTERM."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError("Out of time" if number == signal.SIGALRM else "Stopped")

    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGTERM)}
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def is_table_done(pool: Pool, name: str, ended: set[str]) -> bool:
    """Whether this run was the last of a table."""
    tables = {table for table, _ in pool.used_by[name]}
    left = {table for run, uses in pool.used_by.items() if run not in ended for table, _ in uses}
    return not tables <= left


def strip(folder: Path) -> None:
    """Remove models and memories of a finished run: many of them fill a disk."""
    for path in folder.iterdir():
        if path.name in KEPT:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


# What is brought back


def pack(pool: Pool, failures: Mapping[str, str], options: argparse.Namespace) -> None:
    """The results file: comparison.json of every table, and what is kept of finished runs."""
    runs = {cell: run for run, cells in pool.used_by.items() for cell in cells}
    for name, grid in pool.grids.items():
        facts = {"version": VERSION, **grid.as_dict()}
        for cell in facts["cells"]:
            cell["folder"] = f"../cells/{runs[name, cell['name']]}"
        own = {
            cell: failures[run] for (table, cell), run in runs.items() if table == name and run in failures
        }
        write_json(options.work / name / "comparison.json", {**facts, "failures": own})
    options.results.parent.mkdir(parents=True, exist_ok=True)
    partial = options.results.with_name(f"partial-{options.results.name}")
    with tarfile.open(partial, "w:gz", compresslevel=6) as file:
        for path in list_kept(options.work):
            file.add(path, path.relative_to(options.work))
    partial.replace(options.results)


def list_kept(work: Path) -> list[Path]:
    """Also of tables that are not in this call: with `--tables` the others stay in the file."""
    done = [folder for folder in sorted(work.glob("cells/*/")) if read_status(folder) == "done"]
    kept = [folder / name for folder in done for name in KEPT if (folder / name).exists()]
    return [work / "calls.json", *sorted(work.glob("*/comparison.json")), *kept]


def unpack(path: Path, work: Path) -> None:
    """The finished runs of another machine; data are where this machine has them, and what it has stays."""
    with tarfile.open(path) as file:
        new = [member for member in file.getmembers() if not (work / member.name).exists()]
        file.extractall(work, new, filter="data")
    for config in work.glob("cells/*/config.yaml"):
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
        federation = Path(settings["data"]["federation"])
        settings["data"]["federation"] = str(work.absolute() / "data" / federation.name)
        config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def note_call(options: argparse.Namespace, seconds: float | None = None) -> None:
    """One entry a call of this script; seconds are missing where it was ended from outside."""
    calls = read_calls(options.work)
    if seconds is None:
        facts = {"device": name_device(), "torch": torch.__version__, "jobs": options.jobs}
        calls.append({**facts, "small": options.small, "seconds": None})
    else:
        calls[-1]["seconds"] = round(seconds)
    write_json(options.work / "calls.json", calls)


def read_calls(work: Path) -> list[dict[str, Any]]:
    path = work / "calls.json"
    calls: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return calls


def name_device() -> str:
    """Asked of the driver's tool: CUDA would make this process a user of the GPU."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "CPU"


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/papers"), help="folder of the runs")
    parser.add_argument("--results", type=Path, help="default: papers.tar.gz in the folder of the runs")
    parser.add_argument("--before", type=Path, help="a results file whose runs need not be done again")
    parser.add_argument("--minutes", type=float, default=9.0, help="for this call, from its start")
    parser.add_argument("--jobs", type=int, default=16, help="runs side by side")
    parser.add_argument("--threads", type=int, default=1, help="of each run")
    parser.add_argument("--tables", help="presets, with commas; default all")
    parser.add_argument("--list", action="store_true", help="say what is left, and run nothing")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(words)
    known = {table.preset: table for table in TABLES}
    wanted = options.tables.split(",") if options.tables else list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        parser.error(f"--tables has no '{unknown[0]}'; there are {', '.join(known)}")
    options.tables = [known[name] for name in wanted]
    options.work = options.work.absolute()
    options.results = options.results or options.work / "papers.tar.gz"
    return options


def main() -> None:
    options = parse_options()
    started = time.monotonic()
    logging.getLogger("wardround").setLevel(logging.ERROR)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.before is not None:
        unpack(options.before, options.work)
    try:
        pool = plan_tables(options)
        left = list_left(pool, options.work)
    except WardroundError as error:
        sys.exit(f"error {error} Here: another --work, and no --before.")
    if options.list:
        print(describe_left(pool, left, options))
        return
    note_call(options)
    seconds = time.monotonic() - started
    cells = sum(len(grid.cells) for grid in pool.grids.values())
    print(
        f"{len(pool.grids)} tables, {cells} cells in {len(pool.runs)} runs, {len(left)} left; "
        f"planned in {seconds:.0f} s"
    )
    failures = run_pool(pool, options, started + 60 * options.minutes)
    note_call(options, time.monotonic() - started)
    pack(pool, failures, options)
    print(f"{options.results}: {options.results.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
