"""The Python interface: run a configuration, read its result."""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from wardround.config import Config
from wardround.config_file import load_config
from wardround.data.federation import Federation
from wardround.data.in_memory import describe_clients, open_in_memory
from wardround.data.preparing.record import PREPARATION, Preparation
from wardround.data.settings import DataSettings
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.experiment import Experiment
from wardround.engine.judging.evaluation import Evaluation
from wardround.engine.judging.result_tables import client_table
from wardround.engine.networks import build_model, network_for
from wardround.engine.outcome import Listener, Outcome, SeveralListeners
from wardround.engine.records import read_lines
from wardround.engine.run_folder import RunFolder, check_objects
from wardround.errors import CheckpointError, ConfigError
from wardround.models.base import Segmenter
from wardround.models.norm import from_moments, running_stats
from wardround.objects import split_name
from wardround.params import Params
from wardround.progress import follow
from wardround.tables import Table, formula_read


@dataclass(frozen=True)
class Result:
    """A finished run.

    test: the evaluation on test cases; outcome: the server's state after the last round.
    """

    config: Config
    outcome: Outcome

    @classmethod
    def load(cls, folder: str | Path, **objects: Any) -> Result:
        """A run that is already on disk.

        objects: model, method and objective as they were handed to `wr.run`; from then on this process knows
        them, and `wr.predict` and `wr.export` find them too.
        """
        folder = Path(folder)
        if not (folder / "result.json").exists():
            raise CheckpointError(f"{folder} holds no finished run (there is no result.json).")
        path = folder / "config.yaml"
        config = load_config(path, [f"output={json.dumps(str(folder))}"], **objects)
        if objects:
            check_objects(config, path)
        return cls(config, RunFolder(config).load_outcome())

    def __repr__(self) -> str:
        rounds = f"{self.outcome.state.round} of {self.config.rounds} rounds"
        method = split_name(self.config.method.get("name", "fedavg"))[0].rpartition(":")[2]
        return f"<Result {self.config.name}: {method}, {rounds}, {self._score()}, in {self.folder}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        if self.test is None:
            return f"<p>{html.escape(repr(self)[1:-1])}</p>"
        return f"{self.table.html()}<p>{html.escape(repr(self)[1:-1])}</p>"

    def _score(self) -> str:
        if self.test is None:
            return "not tested"
        metric = self.config.evaluate.metrics[0]
        return f"test {metric} {self.test.value(metric):.3f}"

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def test(self) -> Evaluation | None:
        return self.outcome.test

    @property
    def status(self) -> str:
        return self.outcome.status

    @property
    def params_sha256(self) -> str:
        """Fingerprint of the final parameters."""
        return str(self.summary["params_sha256"])

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What result.json says."""
        loaded: dict[str, Any] = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        return loaded

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dictionary a round."""
        return read_lines(self.folder / "records.jsonl")

    @property
    def cases(self) -> list[dict[str, Any]]:
        """One dictionary a test case and region: client, case, region, and every metric as a number."""
        self._require_test()
        with (self.folder / "cases.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        names = ("client", "case", "region")
        return [
            {key: formula_read(text) if key in names else float(text or "nan") for key, text in row.items()}
            for row in rows
        ]

    @property
    def table(self) -> Table:
        """Test metrics of each client, mean, SD between clients, weighted mean and worst."""
        metrics, name = self.config.evaluate.metrics, self.config.name
        made = self.outcome.partition
        return client_table(
            self._require_test(), metrics, name, self.outcome.units, [] if made is None else [made.sentence]
        )

    def _require_test(self) -> Evaluation:
        if self.test is not None:
            return self.test
        if not self.config.data.test:
            raise LookupError(f"the run in {self.folder} was not tested (data.test is false)")
        raise LookupError(f"the run in {self.folder} was stopped before its test; resume it first")

    @cached_property
    def params(self) -> Params:
        """The tested model: the best on validation cases, or the last."""
        progress = self.outcome.progress
        if self.config.evaluate.model == "best" and progress.best_file is not None:
            return Checkpoints(self.folder / "checkpoints").load_best(progress.best_file)
        return self.outcome.state.params

    @cached_property
    def model(self) -> nn.Module:
        """The tested model as a network in evaluation mode."""
        model = self._build_network()
        params = self.params
        if self.config.model.bn_stats == "pooled":
            params = Params(from_moments(params, running_stats(model)))
        params.load_into(model)
        return model.eval()

    def _build_network(self) -> Segmenter:
        """By what the run wrote down of its cases, which need not be here; older runs did not write it."""
        path = self.folder / PREPARATION
        return network_for(self.config, Preparation.load(path)) if path.exists() else build_model(self.config)


def run(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    data: Mapping[str, Any] | None = None,
    model: Any = None,
    method: Any = None,
    objective: Any = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    from_round: int | None = None,
    listener: Listener | None = None,
    quiet: bool = False,
) -> Result:
    """Train as a configuration says and test the result.

    config: a YAML file, a name of `wardround configs`, a dictionary or a Config; data: cases of each client
    instead of the `data:` section: a PyTorch `Dataset` or a list of `(image, label)` arrays, or a mapping
    with `train`, `val` and `test` of these; model: a name, a subclass of `nn.Module` or a function that makes
    one; method: a name, a subclass of `wr.Method` or an object of one; objective: a name, a loss of (logits,
    labels), a subclass of `wr.Objective` or an object of one; overrides: settings on top, `["rounds=3"]`;
    resume, overwrite: what to do with a run folder that exists; from_round: resume after this round, one of
    the last `checkpoint.keep`; listener: is told how the run goes, see `wr.Listener`; quiet: no progress bar
    in terminal and notebook.

    >>> import numpy as np
    >>> cases = [(np.random.rand(16, 16), np.eye(16, dtype=int)) for _ in range(10)]
    >>> wr.run({"rounds": 2}, data={"north": cases, "south": cases})  # doctest: +SKIP
    """
    checked = load_config(config, overrides, model=model, method=method, objective=objective)
    federation = None
    if data is not None:
        checked, federation = take_data(checked, data)
    with follow(quiet) as screen:
        listeners = [each for each in (screen, listener) if each is not None]
        experiment = Experiment(checked, listener=SeveralListeners(listeners), federation=federation)
        return Result(checked, experiment.run(resume=resume, overwrite=overwrite, from_round=from_round))


def take_data(config: Config, data: Mapping[str, Any]) -> tuple[Config, Federation]:
    """The configuration with what it writes down of the cases, and the cases."""
    if config.data.model_copy(update={"in_memory": False}) != DataSettings():
        raise ConfigError("data is given in Python and in the configuration; leave out one of them.")
    federation = open_in_memory(data, config.seed)
    section = config.data.model_copy(update={"in_memory": describe_clients(federation)})
    return config.model_copy(update={"data": section}), federation
