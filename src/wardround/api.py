"""The Python interface: run a configuration, read its result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from wardround.config import Config
from wardround.config_file import load_config
from wardround.data.in_memory import open_in_memory
from wardround.data.preparing.record import PREPARATION, Preparation
from wardround.data.settings import DataSettings
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.experiment import Experiment
from wardround.engine.judging.evaluation import Evaluation
from wardround.engine.judging.result_tables import client_table
from wardround.engine.networks import build_model, network_for
from wardround.engine.outcome import Listener, Outcome
from wardround.engine.records import read_lines
from wardround.engine.run_folder import RunFolder
from wardround.errors import CheckpointError, ConfigError
from wardround.models.base import Segmenter
from wardround.models.norm import from_moments, running_stats
from wardround.params import Params
from wardround.tables import Table


@dataclass(frozen=True)
class Result:
    """A finished run.

    test: the evaluation on test cases; outcome: the server's state after the last round.
    """

    config: Config
    outcome: Outcome

    @classmethod
    def load(cls, folder: str | Path) -> Result:
        """A run that is already on disk."""
        folder = Path(folder)
        if not (folder / "result.json").exists():
            raise CheckpointError(f"{folder} holds no finished run (there is no result.json).")
        config = load_config(folder / "config.yaml", [f"output={json.dumps(str(folder))}"])
        return cls(config, RunFolder(config).load_outcome())

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
        loaded: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return loaded

    @property
    def records(self) -> list[dict[str, Any]]:
        """One dictionary a round."""
        return read_lines(self.folder / "records.jsonl")

    @property
    def table(self) -> Table:
        """Test metrics of each client, mean, SD between clients, weighted mean and worst."""
        if self.test is None:
            if not self.config.data.test:
                raise LookupError(f"the run in {self.folder} was not tested (data.test is false)")
            raise LookupError(f"the run in {self.folder} was stopped before its test; resume it first")
        metrics, name = self.config.evaluate.metrics, self.config.name
        made = self.outcome.partition
        return client_table(
            self.test, metrics, name, self.outcome.units, [] if made is None else [made.sentence]
        )

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
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    from_round: int | None = None,
    listener: Listener | None = None,
) -> Result:
    """Train as a configuration says (a YAML file, a dictionary or a Config) and test the result.

    data: cases of each client instead of the `data:` section: a PyTorch `Dataset` or a list of
    `(image, label)` arrays, or a mapping with `train`, `val` and `test` of these; overrides: settings on top,
    as `--set` has them; resume, overwrite: what to do with a run folder that exists; from_round: resume after
    this round, one of the last `checkpoint.keep`; listener: is told how the run goes.

    >>> import numpy as np
    >>> cases = [(np.random.rand(16, 16), np.eye(16, dtype=int)) for _ in range(10)]
    >>> wr.run({"rounds": 2}, data={"north": cases, "south": cases})  # doctest: +SKIP
    """
    federation = None
    if data is not None:
        config = load_config(config, overrides)
        if config.data != DataSettings() and config.data != DataSettings(in_memory=True):
            raise ConfigError("data is given in Python and in the configuration; leave out one of them.")
        overrides = ["data.in_memory=true"]
        federation = open_in_memory(data, config.seed)
    checked = load_config(config, overrides)
    experiment = Experiment(checked, listener=listener, federation=federation)
    return Result(checked, experiment.run(resume=resume, overwrite=overwrite, from_round=from_round))
