"""A comparison on disk: comparison.json, its cells, and the tables made from them.

    FOLDER/
      comparison.json         rows, seeds, folds, cells and their folders, failures
      cells/<name>/           an ordinary run folder for each cell; cells/<name>.yaml is its configuration
      jobs/                   of a comparison on a cluster: what was submitted, and its logs
      table-<metric>.md .csv .tex
      clients-<metric>.md .csv .tex      every client's score, its 95 % interval and number of cases
      published-<metric>.md .csv .tex    of a paper's table: printed numbers beside ours
      cross-site-<metric>.md .csv .tex   where cells have evaluate.cross_site
      table-cost.md .csv .tex            seconds and megabytes of a round
      figures/*.png                      written with the report
      statistics.json         everything the tables say, with all digits

comparison.json:

    version     1
    name, reference, metrics, select, preset, notes
    seeds, folds, held_out    the axes that are averaged over (held_out: groups of client names)
    rows        [{label, method, changes, run_of, after}]        run_of, after: read off another row's run
    cells       [{name, folder, row, seed, fold, held_out}]      folder is relative to FOLDER
    failures    {cell name: sentence}                            of the last attempt
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wardround.api import Result
from wardround.comparison.costs import cost_table, measure_costs
from wardround.comparison.grid import Grid, cell_title
from wardround.comparison.headline import describe_headline
from wardround.comparison.presets import describe_published, list_printed_values
from wardround.comparison.published import compare_order, published_table
from wardround.comparison.runs import Run, join_origins, read_run
from wardround.comparison.scores import (
    Replicate,
    ReplicateKey,
    RowScores,
    Sheet,
    Statistics,
    compute_statistics,
    read_cases,
    select_clients,
    set_apart,
)
from wardround.comparison.statistics import CaseKey
from wardround.comparison.tables import (
    cross_site_table,
    hospital_table,
    join_tables,
    score_table,
    significance_table,
    summarise_structures,
)
from wardround.data.settings import DataSettings
from wardround.engine.judging.evaluation import Evaluation
from wardround.engine.judging.result_tables import read_units
from wardround.engine.outcome import read_status
from wardround.engine.run_folder import TESTED
from wardround.errors import CheckpointError, ConfigError
from wardround.files import parse_json, write_json, write_text
from wardround.metrics import METRICS, combine_units
from wardround.papers import presets as papers
from wardround.tables import Table
from wardround.yaml_file import read_yaml

VERSION = 1


@dataclass(frozen=True)
class StoredCell:
    """One cell in comparison.json. folder: its run folder."""

    name: str
    folder: Path
    row: str
    seed: int
    fold: int | None
    held_out: tuple[str, ...]

    @property
    def title(self) -> str:
        return cell_title(self.row, self.seed, self.fold, self.held_out)

    @property
    def is_done(self) -> bool:
        return read_status(self.folder) == "done"

    def read_result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        return result

    def read_left_out(self) -> dict[str, dict[str, str]]:
        """Client -> case -> why it could not be used."""
        path = self.folder / "left_out.json"
        return parse_json(path.read_text(encoding="utf-8")) if path.exists() else {}


class Results(Mapping[str, Result]):
    """The finished runs by cell name, each read on access (a run holds its model)."""

    def __init__(self, cells: Sequence[StoredCell]) -> None:
        self._folders = {cell.name: cell.folder for cell in cells if cell.is_done}

    def __getitem__(self, name: str) -> Result:
        return Result.load(self._folders[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._folders)

    def __len__(self) -> int:
        return len(self._folders)


class Comparison:
    """A comparison on disk: its cells, tables and statistics.

    rows: labels in the order of the tables; metrics: what was measured, the first is the main one.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.facts = facts
        self.name = str(facts["name"])
        self.rows: list[str] = [row["label"] for row in facts["rows"]]
        self._read_off = {row["label"]: (row.get("run_of"), row.get("after")) for row in facts["rows"]}
        self.metrics: list[str] = list(facts["metrics"])
        self.reference = str(facts["reference"])
        self.failures: dict[str, str] = dict(facts["failures"])
        self._statistics: dict[str, Statistics] = {}
        self.cells: list[StoredCell] = []
        for entry in facts["cells"]:
            place = entry["row"], entry["seed"], entry["fold"], tuple(entry["held_out"])
            self.cells.append(StoredCell(entry["name"], folder / entry["folder"], *place))

    @classmethod
    def load(cls, folder: str | Path) -> Comparison:
        """Open a comparison on disk."""
        path = Path(folder) / "comparison.json"
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            if facts["version"] != VERSION:
                raise CheckpointError(f"{path} was written by another version of wardround.")
            return cls(Path(folder), facts)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} contains no comparison (there is no comparison.json).") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error!r}).") from None

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        rows = ", ".join(self.rows)
        return f"<Comparison {self.name}: {rows}; {len(self.cells)} runs{failed}, in {self.folder}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"{self.table().html()}<p>{html.escape(repr(self)[1:-1])}</p>"

    # Tables and statistics

    @property
    def results(self) -> Results:
        """The finished runs by cell name."""
        return Results(self.cells)

    @cached_property
    def sheet(self) -> Sheet:
        """All case scores, row by row; read on first access."""
        facts = self.facts
        expected = len(facts["seeds"]) * max(1, len(facts["folds"]))
        preset = papers.load(facts["preset"]) if facts["preset"] else None
        over = "seeds" if not facts["folds"] else "folds" if len(facts["seeds"]) == 1 else "seeds and folds"
        rows = [self._read_row(label) for label in self.rows]
        if not facts["held_out"]:
            tests = {label: [run.test for run in runs] for label, runs in self.runs.items()}
            rows = set_apart(
                rows, {k: [n for t in found if t for n in t.held_out] for k, found in tests.items()}
            )
        print_notes: list[str] = []
        clients = {key.client for row in rows for part in row.scores(self.metrics[0]) for key in part}
        if preset is not None:
            synthetic = any(is_synthetic(json.loads(row.data)) for row in rows if row.data)
            about = describe_published(preset, self.rows, sorted(clients), self.lengths, synthetic)
            print_notes = [about, *preset.published.notes, *preset.published.cautions]
        return Sheet(
            title=self.name,
            rows=rows,
            reference=self.reference,
            metrics=self.metrics,
            expected=expected,
            over=over,
            held_out=bool(facts["held_out"]),
            published={} if preset is None else list_printed_values(preset, clients, self.lengths),
            print_notes=print_notes,
            notes=[*facts["notes"], *describe_left_out(self.cells)],
            lengths=self.lengths,
            partition=join_origins(run for runs in self.runs.values() for run in runs),
        )

    @cached_property
    def lengths(self) -> str:
        """The unit of distances in the finished cells."""
        return combine_units(read_units(cell.read_result()) for cell in self.cells if cell.is_done)

    def table(self, metric: str | None = None) -> Table:
        """Rows methods; columns mean, SD between clients, worst client, weighted mean, each client."""
        return score_table(self.sheet, self._metric(metric))

    def hospitals(self, metric: str | None = None) -> Table:
        """One row a client and method: its score with the number of cases and the 95 % interval."""
        return hospital_table(self.sheet, self._metric(metric))

    def statistics(self, metric: str | None = None) -> Statistics:
        """Intervals, paired tests against the reference with Holm's correction, effect sizes."""
        chosen = self._metric(metric)
        if chosen not in self._statistics:
            self._statistics[chosen] = compute_statistics(self.sheet, chosen)
        return self._statistics[chosen]

    def significance(self, metric: str | None = None) -> Table:
        """`statistics` as a table."""
        return significance_table(self.sheet, self.statistics(metric))

    def headline(self) -> list[str]:
        """The result by the first metric in words, as parts of a text."""
        methods = {row["label"]: str(row["method"]) for row in self.facts["rows"]}
        return describe_headline(self.sheet, self.statistics(), methods)

    def published(self, metric: str | None = None) -> Table | None:
        """A paper's printed numbers beside ours, and the order of rows; None where there are none."""
        return published_table(self.sheet, self._metric(metric))

    def cross_site(self, metric: str | None = None) -> Table | None:
        """The model of each client on the test cases of every client; None without evaluate.cross_site."""
        chosen = self._metric(metric)
        runs: dict[str, list[Mapping[str, Evaluation]]] = {}
        for cell in self.cells:
            if cell.is_done and not cell.held_out:
                stored = cell.read_result()["cross_site"]
                if stored:
                    run = {name: Evaluation.from_dict(entry) for name, entry in stored.items()}
                    runs.setdefault(cell.row, []).append(run)
        return cross_site_table(runs, chosen, f"{self.name}, cross-site", self.lengths) if runs else None

    def cost(self) -> Table:
        """Score, seconds and megabytes of a round, row by row."""
        return cost_table(measure_costs(self.runs, self.sheet), self.sheet)

    @cached_property
    def runs(self) -> dict[str, list[Run]]:
        """The finished runs of every row that has its own."""
        found: dict[str, list[Run]] = {}
        for label in self.rows:
            cells = [cell for cell in self.cells if cell.row == label and cell.is_done]
            if cells:
                found[label] = [read_run(cell.folder, label) for cell in cells]
        return found

    def _metric(self, name: str | None) -> str:
        chosen = self.metrics[0] if name is None else name
        if chosen not in self.metrics:
            known = ", ".join(self.metrics)
            raise ConfigError(f"'{chosen}' was not measured in {self.folder}. It has: {known}.")
        return chosen

    # Reading the cells

    def _read_row(self, label: str) -> RowScores:
        groups: dict[ReplicateKey, list[StoredCell]] = {}
        run_of, after = self._read_off[label]
        for cell in self.cells:
            if cell.row == (run_of or label):
                groups.setdefault((cell.seed, cell.fold), []).append(cell)
        complete = {key: cells for key, cells in groups.items() if all(cell.is_done for cell in cells)}
        replicates = {key: read_replicate(cells, after) for key, cells in complete.items()}
        if not complete:
            failed = any(cell.name in self.failures for cells in groups.values() for cell in cells)
            return RowScores(label, {}, failed=failed)
        settings = read_yaml(next(iter(complete.values()))[0].folder / "config.yaml")
        data = json.dumps(drop_fold(fill_defaults(settings["data"])), sort_keys=True)
        chosen = settings["evaluate"]
        group = f"{data}, {after or settings.get('rounds')} rounds"
        empty_policy, tested = chosen["empty_policy"], chosen["model"]
        objective = settings.get("objective") or {}
        return RowScores(label, replicates, data, empty_policy, tested, group=group, objective=objective)

    # Writing

    def write(self) -> None:
        """All tables and statistics.json, from the cells that are done."""
        everything: dict[str, Any] = {"name": self.name, "reference": self.reference, "metrics": {}}
        for metric in self.metrics:
            scores, tests, crossed = self.table(metric), self.significance(metric), self.cross_site(metric)
            shown = [scores, tests] if len(self.rows) > 1 else [scores]
            write_tables(self.folder, f"table-{metric}", shown, join_tables(scores, tests))
            hospitals = self.hospitals(metric)
            write_tables(self.folder, f"clients-{metric}", [hospitals], hospitals)
            printed = self.published(metric)
            if printed is not None:
                write_tables(self.folder, f"published-{metric}", [printed], printed)
            if crossed is not None:
                write_tables(self.folder, f"cross-site-{metric}", [crossed], crossed)
            everything["metrics"][metric] = self.numbers(metric)
        cost = self.cost()
        write_tables(self.folder, "table-cost", [cost], cost)
        write_json(self.folder / "statistics.json", everything)

    def numbers(self, metric: str) -> dict[str, Any]:
        """Everything about a metric as plain values: summaries, tests, captions."""
        statistics = self.statistics(metric)
        clients = self.sheet.clients(metric)
        whole, *rest = summarise_structures(self.sheet, metric).values()
        apart = dict(zip(self.sheet.regions(metric), rest, strict=False))
        entry = METRICS[metric]
        return {
            "label": entry.label,
            "unit": entry.unit_in(self.lengths),
            "higher_is_better": entry.higher_is_better,
            "clients": clients,
            "objectives": self.sheet.objectives,
            "summaries": [dataclasses.asdict(summary) for summary in whole],
            "structures": {name: [dataclasses.asdict(s) for s in found] for name, found in apart.items()},
            "statistics": dataclasses.asdict(statistics),
            "published": list_published(self.published(metric), self.sheet, metric),
            "captions": [self.table(metric).caption, self.significance(metric).caption],
        }


def read_replicate(cells: Sequence[StoredCell], after: int | None = None) -> Replicate:
    """One seed and fold from its runs: one, or one for each held-out client; after: the round, or the end."""
    file = "cases.csv" if after is None else TESTED.format(after)
    scores: dict[str, dict[CaseKey, float]] = {}
    seen: dict[str, dict[CaseKey, float]] = {}
    for cell in cells:
        found = read_cases(cell.folder / file)
        out = set(cell.held_out)
        unseen = select_clients(found, out.__contains__) if out else found
        for metric, values in unseen.items():
            scores.setdefault(metric, {}).update(values)
        if out:
            test = read_run(cell.folder).test
            out.update(test.held_out if test is not None else ())  # federation.yaml may hold out others
            for metric, values in select_clients(found, lambda client, out=out: client not in out).items():  # type: ignore[misc]
                # a client is seen in several runs: each of them counts
                marked = {key._replace(case=f"{key.case}\x1f{cell.name}"): v for key, v in values.items()}
                seen.setdefault(metric, {}).update(marked)
    return Replicate(cells[0].seed, cells[0].fold, scores, seen)


def describe_left_out(cells: Sequence[StoredCell]) -> list[str]:
    """How many cases of each client no run could use, for the captions."""
    found: dict[str, set[str]] = {}
    for cell in cells:
        for client, cases in cell.read_left_out().items() if cell.is_done else ():
            found.setdefault(client, set()).update(cases)
    if not found:
        return []
    counts = ", ".join(f"{client} {len(cases)}" for client, cases in sorted(found.items()))
    return [f"Left out, as cases that cannot be used: {counts}; left_out.json of each run says why."]


def drop_fold(settings: Any) -> Any:
    """The data settings without the number of the fold or split: others have the same cases."""
    if isinstance(settings, Mapping):
        return {key: drop_fold(value) for key, value in settings.items() if key not in ("fold", "repeat")}
    return settings


def fill_defaults(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data settings of a run, with keys that an earlier version had not: so its runs can be paired."""
    try:
        return DataSettings.read(data).model_dump(mode="json")
    except ConfigError:  # of a version that had others
        return data


def is_synthetic(data: Mapping[str, Any]) -> bool:
    """Whether data settings mean phantoms: no other source is named."""
    return data.get("federation") is None and data.get("folders") is None  # folders: earlier versions


def write_comparison(folder: Path, grid: Grid, failures: Mapping[str, str]) -> None:
    """Write comparison.json."""
    facts = {"version": VERSION, **grid.as_dict(), "failures": dict(failures)}
    write_json(folder / "comparison.json", facts)


def write_tables(folder: Path, name: str, tables: Sequence[Table], wide: Table) -> None:
    """Tables below each other as Markdown and LaTeX, and side by side as CSV."""
    markdown = "\n\n".join(f"## {table.title}\n\n{table.markdown()}" for table in tables)
    write_text(folder / f"{name}.md", markdown + "\n")
    write_text(folder / f"{name}.tex", "\n".join(table.latex() for table in tables))
    write_text(folder / f"{name}.csv", wide.csv())


def list_published(table: Table | None, sheet: Sheet, metric: str) -> dict[str, Any] | None:
    """Printed and measured values, and the order of rows, as plain values."""
    if table is None:
        return None
    order = compare_order(sheet, metric)
    rows = [
        {
            "label": label,
            "column": column,
            "printed": dataclasses.asdict(printed),
            "measured": dataclasses.asdict(measured),
        }
        for label, column, printed, measured, _ in table.rows
    ]
    return {"rows": rows, "order": None if order is None else dataclasses.asdict(order)}
