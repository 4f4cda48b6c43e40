"""Run folders as values, for tables, reports and model cards; nothing here writes.

A running run is read as far as it has come. Older run folders lack some files; those read as empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from wardround.comparison.scores import CaseScores, read_cases
from wardround.configuring.plan_file import PLAN
from wardround.data.federation_file import ClientPartition
from wardround.data.readers.common import join_names
from wardround.engine.judging.evaluation import Evaluation
from wardround.engine.judging.pictures import Picture, read_panel, read_pictures
from wardround.engine.judging.result_tables import OWN_GRID, read_test, read_units
from wardround.engine.records import read_lines
from wardround.errors import CheckpointError, WardroundError
from wardround.files import file_name, parse_json
from wardround.metrics import METRICS
from wardround.storage import StoredTensors
from wardround.yaml_file import read_yaml

Series = dict[str, list[tuple[float, float]]]  # label -> (round, value)

KNOWN = frozenset(
    {"round", "clients", "loss", "weights", "warnings", "validation", "best_round", "seconds", "exchanges"}
    | {"refused", "lost", "method_choice"}
)


def number(value: Any) -> float:
    """A number, or NaN for anything else; "inf" and "nan" are how JSON lines spell them."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except ValueError:
        return math.nan


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def validation_of(record: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
    """What one round's record says of a metric on validation cases."""
    return mapping(mapping(record.get("validation")).get(metric))


class Records(tuple[Mapping[str, Any], ...]):
    """The lines of records.jsonl, one for each round, and their values as curves over rounds."""

    __slots__ = ()

    def validation_metrics(self) -> list[str]:
        found = {name for record in self for name in mapping(record.get("validation"))}
        return [name for name in METRICS if name in found]

    def validation(self, metric: str) -> Series:
        """Every client's validation mean, round by round."""
        series: Series = {}
        for round, record in self.numbered():
            for client, summary in mapping(validation_of(record, metric).get("clients")).items():
                series.setdefault(client, []).append((round, number(mapping(summary).get("mean"))))
        return dict(sorted(series.items()))

    def validation_mean(self, metric: str) -> list[tuple[float, float]]:
        pairs = [(round, validation_of(record, metric)) for round, record in self.numbered()]
        return [(round, number(entry.get("mean"))) for round, entry in pairs if entry]

    def numbered(self) -> Iterator[tuple[float, Mapping[str, Any]]]:
        for place, record in enumerate(self, start=1):
            yield number(record.get("round", place)), record

    def series(self, key: str) -> Series:
        """One key of the records by client (or, for one number a round, under its own name)."""
        series: Series = {}
        for round, record in self.numbered():
            value = record.get(key)
            entries = value.items() if isinstance(value, Mapping) else [(key, value)]
            for label, entry in entries:
                if math.isfinite(number(entry)):
                    series.setdefault(str(label), []).append((round, number(entry)))
        return dict(sorted(series.items()))

    def ingredients(self) -> dict[str, Series]:
        """What the method recorded beside its weights."""
        names = dict.fromkeys(key for record in self for key in record if key not in KNOWN)
        found = {key: self.series(key) for key in names}
        return {key: series for key, series in found.items() if series}

    def losses(self) -> dict[str, Series]:
        """Term -> client -> mean over the steps of a round; the total first."""
        terms: dict[str, Series] = {}
        for round, record in self.numbered():
            for client, values in mapping(record.get("loss")).items():
                for term, value in mapping(values).items():
                    series = terms.setdefault(str(term), {})
                    series.setdefault(client, []).append((round, number(value)))
        ordered = sorted(terms, key=lambda term: (term != "total", term))
        return {term: dict(sorted(terms[term].items())) for term in ordered}

    def exchanged(self, key: str) -> Series:
        """seconds, bytes_up or bytes_down by client, all exchanges of a round together."""
        series: Series = {}
        for round, record in self.numbered():
            sums: dict[str, float] = {}
            for exchange in record.get("exchanges", []):
                for client, value in mapping(mapping(exchange).get(key)).items():
                    sums[client] = sums.get(client, 0.0) + number(value)
            for client, value in sums.items():
                series.setdefault(client, []).append((round, value))
        return dict(sorted(series.items()))

    def trouble(self, kind: str) -> list[tuple[int, str, str]]:
        """refused or lost: round, task/client, reason."""
        return [
            (int(round), str(who), str(reason))
            for round, record in self.numbered()
            for who, reason in mapping(record.get(kind)).items()
        ]

    def warnings(self) -> dict[str, list[int]]:
        """Each warning once, with its rounds."""
        found: dict[str, list[int]] = {}
        for round, record in self.numbered():
            for text in record.get("warnings", []):
                found.setdefault(str(text), []).append(int(round))
        return found


@dataclass(frozen=True)
class ClientFiles:
    """What a client keeps in its own folder, readable where client and server share a disk.

    panel: the cases that all runs on the same data show; calibration: bins x (voxels, sum of probabilities,
    truly foreground); foreground: share in each test case.
    """

    pictures: Sequence[Picture] = ()
    panel: Sequence[Picture] = ()
    calibration: Sequence[Sequence[float]] = ()
    foreground: Sequence[float] = ()


@dataclass
class Run:
    """One run folder.

    label: its name in tables; evaluation: set in a folder that `evaluate` wrote; plan: plan.yaml, where the
    run was planned from the data.
    """

    folder: Path
    label: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    records: Records
    result: Mapping[str, Any]
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_evaluation(self) -> bool:
        """Whether a model was only evaluated here: rounds and seed are those of the run that trained it."""
        return bool(self.evaluation)

    @property
    def method(self) -> str:
        return str(mapping(self.config.get("method")).get("name", "fedavg"))

    @property
    def objective(self) -> str:
        return str(mapping(self.config.get("objective")).get("name", ""))

    @property
    def rounds(self) -> int:
        found = self.config.get("rounds", 10)
        return found if isinstance(found, int) else len(self.records)

    @property
    def status(self) -> str:
        """done, stopped, or running while there is no result."""
        done = int(number(self.result.get("rounds", 0)) or 0) if self.result else 0
        if not self.result or len(self.records) > done:  # a stopped run that goes on
            return "running"
        return str(self.result.get("status", "running"))

    @property
    def metrics(self) -> list[str]:
        wanted = mapping(self.config.get("evaluate")).get("metrics", ["dice"])
        return [name for name in wanted if name in METRICS] if isinstance(wanted, list) else ["dice"]

    @property
    def lengths(self) -> str:
        """The unit of distances; unknown before there is a result, mm where an older one does not say."""
        return read_units(self.result) if self.result else ""

    @property
    def partition(self) -> ClientPartition | None:
        """How clients were made that the data did not come with."""
        found = mapping(self.result.get("partition"))
        return ClientPartition(**found) if found else None

    @property
    def lacks(self) -> dict[str, str]:
        """Client -> channels that cases of it do not have, in words."""
        found = {client: mapping(own) for client, own in mapping(self.result.get("lacks")).items()}
        return {
            client: join_names((f"{name} ({count} cases)" for name, count in own.items()), 8)
            for client, own in found.items()
        }

    @property
    def origin(self) -> list[str]:
        """How clients were made that the data did not come with, and which channels they lack."""
        made = [] if self.partition is None else [self.partition.sentence]
        told = "; ".join(f"{client} {own}" for client, own in self.lacks.items())
        return [*made, *([f"Channels that were absent: {told}."] if told else [])]

    @property
    def remarks(self) -> list[str]:
        """What to say below a table of its scores."""
        on_scans = self.is_evaluation and str(self.evaluation.get("grid", "")).startswith("the scan")
        return [*self.origin, *([OWN_GRID] if on_scans else [])]

    @cached_property
    def cases(self) -> CaseScores:
        """Test scores of every case; none before the run is done."""
        path = self.folder / "cases.csv"
        return read_cases(path) if self.result.get("status") == "done" and path.exists() else {}

    @cached_property
    def test(self) -> Evaluation | None:
        cases = self.folder / "cases.csv"
        return read_test(self.result, self.records, self.config.get("participation", 1.0), cases)

    @cached_property
    def cross_site(self) -> dict[str, Evaluation]:
        stored = mapping(self.result.get("cross_site"))
        return {name: Evaluation.from_dict(entry) for name, entry in stored.items()}

    @cached_property
    def clients(self) -> list[str]:
        """All clients, whether they took part in training or were only tested."""
        found = {client for values in self.cases.values() for client in (key.client for key in values)}
        for record in self.records:
            found.update(mapping(validation_of(record, "loss").get("clients")))
        found.update(self.test.aggregates if self.test is not None else ())
        if not found:
            found = {name for record in self.records for name in record.get("clients", [])}
        return sorted(found)

    def notes(self) -> list[str]:
        """What an evaluation noted about its cases and its model."""
        found = self.evaluation.get("notes")
        return [str(text) for text in found] if isinstance(found, list) else []

    def failed_cases(self) -> dict[str, str]:
        """Cases that could not be evaluated, and why."""
        return {str(where): str(why) for where, why in mapping(self.evaluation.get("problems")).items()}

    @cached_property
    def unlabelled(self) -> dict[str, int]:
        """Training cases without a label of each client that has some."""
        found = mapping(self.result.get("unlabelled"))
        return {str(name): int(number(count) or 0) for name, count in found.items()}

    # Clients' own folders

    @cached_property
    def num_trained(self) -> dict[str, int]:
        """Training cases of each client, from the egress ledger (read until all are known)."""
        found: dict[str, int] = {}
        path = self.folder / "egress.jsonl"
        if path.exists():
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    if '"task": "train"' in line and line.endswith("\n"):
                        entry = mapping(json.loads(line))
                        found[str(entry.get("client"))] = int(number(entry.get("num_examples")) or 0)
                    if {*self.clients, *self.unlabelled} <= set(found):
                        break
        return found

    @cached_property
    def files(self) -> dict[str, ClientFiles]:
        return {client: read_client_files(self.folder, client) for client in self.clients}


def join_origins(runs: Iterable[Run]) -> list[str]:
    """Where the clients of runs came from and what they lack, each sentence once."""
    return list(dict.fromkeys(said for run in runs for said in run.origin))


def read_client_files(folder: Path, client: str) -> ClientFiles:
    """Pictures and counts in a client's folder; a damaged file counts as absent."""
    path = folder / "clients" / file_name(client) / "pictures.safetensors"
    if not path.exists():
        return ClientFiles()
    try:
        stored = StoredTensors(path)
        pictures, panel = read_pictures(stored), read_panel(stored)
        calibration = stored["calibration"].tolist() if "calibration" in stored else []
        foreground = stored["foreground"].tolist() if "foreground" in stored else []
    except (WardroundError, ValueError, KeyError, TypeError):
        return ClientFiles()
    return ClientFiles(pictures, panel, calibration, foreground)


def read_run(folder: Path, label: str | None = None) -> Run:
    """Read a run folder, finished or not."""
    config = read_yaml(folder / "config.yaml")
    return Run(
        folder=folder,
        label=label if label is not None else str(config.get("name", folder.name)),
        config=config,
        environment=read_json(folder / "environment.json"),
        records=Records(read_lines(folder / "records.jsonl")),
        result=read_json(folder / "result.json"),
        fingerprint=read_json(folder / "fingerprint.json"),
        calibration=read_json(folder / "calibration.json"),
        evaluation=read_json(folder / "evaluation.json"),
        plan=read_yaml(folder / PLAN) if (folder / PLAN).exists() else {},
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """An object; empty where the file is absent."""
    try:
        return mapping(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Run it again, or remove the file.") from None
