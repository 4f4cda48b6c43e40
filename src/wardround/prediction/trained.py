"""TrainedModel: a run's model, ready to predict, from the run's folder alone.

preparation.json in that folder says what was done to a scan before the network saw it, so that a model
can be used where the training data never were.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wardround.config import ComputeSettings, Config
from wardround.data.opening import open_federation
from wardround.data.preparing.record import PREPARATION, Preparation
from wardround.data.roles import NOT_HOSPITALS
from wardround.engine.checkpoint import Checkpoints, MemoryStore
from wardround.engine.networks import build_network
from wardround.errors import CheckpointError, ConfigError, WardroundError
from wardround.files import file_name
from wardround.losses.objective import Objective
from wardround.methods import build_method, build_objective
from wardround.methods.base import Method
from wardround.models.base import Segmenter
from wardround.models.norm import from_moments, running_stats
from wardround.params import Params
from wardround.text import suggest
from wardround.training.device import autocast_dtype, choose_device
from wardround.yaml_file import read_yaml

log = logging.getLogger(__name__)

CALIBRATION = "calibration.json"


@dataclass(frozen=True)
class TrainedModel:
    """A run's model.

    model: on its device, in evaluation mode; params: what it was loaded with; client: whose personal model it
    is, None for the common one; calibration: what calibration.json says, None where there is none; autocast:
    type the network computes in where that is not float32; warnings: what a user should know, in sentences.
    """

    folder: Path
    config: Config
    method: Method
    objective: Objective
    model: Segmenter
    params: Params
    preparation: Preparation
    device: torch.device
    autocast: torch.dtype | None = None
    client: str | None = None
    calibration: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def load(cls, run: Path | str, *, client: str | None = None, device: str = "auto") -> TrainedModel:
        """The tested model of a run; client: that hospital's personal one, with what only it remembers."""
        folder = Path(run)
        config = stored_config(folder)
        where = choose_device(ComputeSettings(device=device))
        method, objective = build_method(config), build_objective(config)
        preparation = stored_preparation(folder, config)
        model = build_network(
            config,
            in_channels=preparation.in_channels,
            num_classes=preparation.num_classes,
            dimensions=preparation.dimensions,
        )
        params, round, warnings = stored_params(folder, config)
        own: Mapping[str, Tensor] = {}
        if client is None:
            warnings += common_warnings(folder, method, objective, model)
        else:
            params, own = personal_params(folder, method, params, client, round)
        if config.model.bn_stats == "pooled":
            params = Params(from_moments(params, running_stats(model)))
        params = params.updated(own)  # what never travels is stored as it is
        try:
            params.load_into(model)
        except (KeyError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"{folder}: the stored model does not fit config.yaml ({reason}). "
                "Was one of them changed after the run?"
            ) from None
        return cls(
            folder=folder,
            config=config,
            method=method,
            objective=objective,
            model=model.to(where).eval().requires_grad_(False),
            params=params,
            preparation=preparation,
            device=where,
            autocast=autocast_dtype(config.compute, where),
            client=client,
            calibration=stored_calibration(folder),
            warnings=tuple(warnings),
        )

    @property
    def name(self) -> str:
        """How tables call it."""
        return self.config.name if self.client is None else f"{self.config.name}, {self.client}"


# What lies in a run's folder


def stored_config(folder: Path) -> Config:
    """The run's configuration; it was checked when the run began, and the data may be gone since."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}; give the folder of a run, such as runs/quickstart.")
    path = folder / "config.yaml"
    if not path.exists():
        raise ConfigError(f"{folder} is not the folder of a run (there is no config.yaml).")
    values = {**read_yaml(path), "output": str(folder)}
    return Config.read(values, f"{path}: ")


def stored_preparation(folder: Path, config: Config) -> Preparation:
    """preparation.json; a run of before it existed is looked up in its data, if they are still there."""
    path = folder / PREPARATION
    if path.exists():
        return Preparation.load(path)
    try:
        return Preparation.of(open_federation(config.data, config.seed))
    except (WardroundError, OSError) as error:
        raise CheckpointError(
            f"{folder} has no {PREPARATION} and its data cannot be opened: {error} "
            "Without them nobody knows how its scans were prepared."
        ) from None


def stored_params(folder: Path, config: Config) -> tuple[Params, int, list[str]]:
    """The tested model as it travelled, the number of rounds behind it, and warnings."""
    checkpoints = Checkpoints(folder / "checkpoints")
    if not checkpoints.exists():
        raise CheckpointError(f"{folder} holds no model yet (there is no checkpoint). Train it first.")
    facts, params, _ = checkpoints.load()
    done, warnings = int(facts["round"]), []
    if done == 0:
        raise CheckpointError(f"{folder} holds only the untrained model; let it finish its first round.")
    if config.evaluate.model == "best" and facts["best_file"] is not None:
        params, done = checkpoints.load_best(facts["best_file"]), int(facts["best_round"])
    status = stored_status(folder)
    if status != "done":
        said = "was stopped" if status == "stopped" else "is not finished"
        warnings.append(
            f"the run in {folder} {said}; this is its model after round {done} of {config.rounds}."
        )
    return Params({name: params[name] for name in params}), done, warnings


def stored_status(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "result.json").read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def stored_calibration(folder: Path) -> dict[str, Any] | None:
    path = folder / CALIBRATION
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Remove it to do without.") from None
    if not isinstance(found, dict) or not sound_calibration(found):
        raise CheckpointError(f"{path} is no calibration of wardround. Remove it to do without.")
    return found


def sound_calibration(found: Mapping[str, Any]) -> bool:
    """Whether a prediction can use it: a temperature above 0, quantiles by kind, where there are any."""
    temperature, quantiles = found.get("temperature"), found.get("quantiles") or {}
    if temperature is not None and not (
        isinstance(temperature, int | float) and 0 < temperature < float("inf")
    ):
        return False
    return isinstance(quantiles, Mapping) and all(
        kind is None or isinstance(kind, Mapping) for kind in quantiles.values()
    )


# Personal models


@dataclass
class Remembered:
    """What `Method.personal` sees of a client whose cases are elsewhere: its name and its memory."""

    name: str
    memory: dict[str, Any]

    def with_own_statistics(self, params: Params) -> Params:
        raise CheckpointError(
            f"client '{self.name}' never trained in this run, and its statistics need its cases. "
            "Leave --client out to use the common model."
        )


def clients_of(folder: Path) -> list[str]:
    """The clients that keep something in the run's folder (their folders' names)."""
    found = folder / "clients"
    names = sorted(path.name for path in found.iterdir() if path.is_dir()) if found.is_dir() else []
    return [name for name in names if name not in NOT_HOSPITALS]


def remembering(folder: Path) -> list[str]:
    """Those of them that keep a memory, not pictures alone."""
    return [name for name in clients_of(folder) if any((folder / "clients" / name).glob("*-*.safetensors"))]


def personal_params(
    folder: Path, method: Method, params: Params, client: str, round: int
) -> tuple[Params, Mapping[str, Tensor]]:
    """The model a client of the run uses itself, as it travels, and what goes on top of it.

    round: rounds behind the common model.
    """
    home = folder / "clients" / file_name(client)
    if not home.is_dir():
        # Memory alone is no personal model: SCAFFOLD remembers control variates.
        having = [
            name
            for name in remembering(folder)
            if own_params(folder / "clients" / name, method, params, name, round)
        ]
        known = ", ".join(having) or "none, since all clients use the common model"
        raise ConfigError(
            f"{folder} keeps nothing of a client '{client}'.{suggest(client, having)} "
            f"Personal models are there of: {known}."
        )
    found = own_params(home, method, params, client, round)
    if found is None:
        raise ConfigError(
            f"client '{client}' has no model of its own in {folder}: {method.title} gives all clients the "
            "common one. Use that."
        )
    return found


def own_params(
    home: Path, method: Method, params: Params, client: str, round: int
) -> tuple[Params, Mapping[str, Tensor]] | None:
    """The same of the client whose folder this is; None if it uses the common model."""
    store = MemoryStore(home)
    memory = store.load_best(round - 1) or newest(store, round)
    person: Any = Remembered(client, memory)
    found = method.personal(person, params) if memory else params
    own: Mapping[str, Tensor] = person.memory.get("own", {})
    if not own and all(found[name] is params[name] for name in params):
        return None
    return found, own


def newest(store: MemoryStore, round: int) -> dict[str, Any]:
    """The last memory, where the model is of the last round too."""
    files = store._files("memory")
    return store.load() if files and files[-1][0] < round else {}


def common_warnings(folder: Path, method: Method, objective: Objective, model: nn.Module) -> list[str]:
    """What the common model lacks, because it stays at the clients."""
    travels = set(method.shared(model)) - set(objective.local_names(model))
    stays = [name for name in model.state_dict() if name not in travels]
    if not stays:
        return []
    who = some(remembering(folder))
    if not travels:
        raise ConfigError(
            f"the run in {folder} has no common model: each client kept its own. "
            f"Choose one with --client: {who}."
        )
    return [
        f"{len(stays)} tensors of this model stay at the clients and never trained in the common one; "
        f"a personal model (--client {who}) may be better."
    ]


def some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")
