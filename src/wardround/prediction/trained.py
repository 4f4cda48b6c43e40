"""TrainedModel: a run's model, ready to predict, from the run folder alone.

preparation.json in that folder records how scans are prepared for the network, so that a model can be used
without its training data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wardround.config import ComputeSettings, Config, EvaluateSettings
from wardround.data.opening import open_federation
from wardround.data.preparing.record import PREPARATION, Preparation
from wardround.data.roles import NOT_HOSPITALS
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.judging.postprocessing import POSTPROCESS
from wardround.engine.memory_store import MemoryStore
from wardround.engine.networks import network_for
from wardround.engine.outcome import read_status
from wardround.errors import CheckpointError, ConfigError, WardroundError
from wardround.files import file_name, parse_json
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
    is, None for the common one; calibration: calibration.json, None if there is none; autocast: the type the
    network computes in, None for float32; warnings: sentences for the user.
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
        """The tested model of a run; client: that client's personal one, with what only it keeps."""
        folder = Path(run)
        config, unknown = take_postprocessing(folder, read_config(folder))
        where = choose_device(ComputeSettings(device=device))
        method, objective = build_method(config), build_objective(config)
        preparation = read_preparation(folder, config)
        model = network_for(config, preparation)
        params, round, warnings = read_params(folder, config)
        warnings += unknown
        own: Mapping[str, Tensor] = {}
        if client is None:
            warnings += warn_of_common_model(folder, method, objective, model)
        else:
            params, own = load_personal(folder, method, params, client, round)
        if config.model.bn_stats == "pooled":
            params = Params(from_moments(params, running_stats(model)))
        params = params.updated(own)  # what is never sent is stored as it is
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
            calibration=read_calibration(folder),
            warnings=tuple(warnings),
        )

    @property
    def window(self) -> tuple[int, ...] | None:
        """What scans are predicted in; None for whole images."""
        usual = self.preparation.window if self.preparation.dimensions == 3 else None
        return self.config.evaluate.window or usual

    @property
    def name(self) -> str:
        """Its name in tables."""
        return self.config.name if self.client is None else f"{self.config.name}, {self.client}"


# From the run folder


def read_config(folder: Path) -> Config:
    """The run's configuration; its data need not exist any more."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}; give the folder of a run, such as runs/quickstart.")
    path = folder / "config.yaml"
    if not path.exists():
        raise ConfigError(f"{folder} is not the folder of a run (there is no config.yaml).")
    values = {**read_yaml(path), "output": str(folder)}
    return Config.read(values, f"{path}: ")


def take_postprocessing(folder: Path, config: Config) -> tuple[Config, list[str]]:
    """The configuration with the steps that `evaluate.postprocess: auto` came to, and warnings."""
    path = folder / POSTPROCESS
    if config.evaluate.postprocess != "auto":
        return config, []
    try:
        steps = parse_json(path.read_text(encoding="utf-8"))["steps"]
        known = EvaluateSettings(postprocess=steps).postprocess
        return config.model_copy(
            update={"evaluate": config.evaluate.model_copy(update={"postprocess": known})}
        ), []
    except FileNotFoundError:
        return config, [
            f"{folder} has no {POSTPROCESS}: the choice of evaluate.postprocess comes after the last round, "
            "and masks stay as they are predicted."
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read ({reason}). Add --resume to `wardround train` to choose again."
        ) from None


def read_preparation(folder: Path, config: Config) -> Preparation:
    """preparation.json; for a run older than that file, from its data, if they still exist."""
    path = folder / PREPARATION
    if path.exists():
        return Preparation.load(path)
    try:
        return Preparation.of(open_federation(config.data, config.seed))
    except (WardroundError, OSError) as error:
        raise CheckpointError(
            f"{folder} has no {PREPARATION} and its data cannot be opened: {error} "
            "How its scans were prepared is unknown without one of them."
        ) from None


def read_params(folder: Path, config: Config) -> tuple[Params, int, list[str]]:
    """The tested model as it was sent, the number of its rounds, and warnings."""
    checkpoints = Checkpoints(folder / "checkpoints")
    if not checkpoints.exists():
        raise CheckpointError(f"{folder} has no model yet (there is no checkpoint). Train it first.")
    facts = checkpoints.read_index()
    done, warnings = int(facts["round"]), []
    if done == 0:
        raise CheckpointError(f"{folder} has only the untrained model; let it finish its first round.")
    if config.evaluate.model == "best" and facts["best_file"] is not None:
        params, done = checkpoints.load_best(facts["best_file"]), int(facts["best_round"])
    else:
        _, params, _ = checkpoints.load()
    status = read_status(folder)
    if status != "done":
        said = "was stopped" if status == "stopped" else "is not finished"
        warnings.append(
            f"the run in {folder} {said}; this is its model after round {done} of {config.rounds}."
        )
    return Params({name: params[name] for name in params}), done, warnings


def read_calibration(folder: Path) -> dict[str, Any] | None:
    path = folder / CALIBRATION
    if not path.exists():
        return None
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Remove it to predict without calibration."
        ) from None
    if not isinstance(found, dict) or not is_valid_calibration(found):
        raise CheckpointError(f"{path} is not a calibration of wardround. Remove it to predict without.")
    return found


def is_valid_calibration(found: Mapping[str, Any]) -> bool:
    """Whether prediction can use it: a temperature above 0, and quantiles by kind, if present."""
    temperature, quantiles = found.get("temperature"), found.get("quantiles") or {}
    if temperature is not None and not (isinstance(temperature, int | float) and 0 < temperature < math.inf):
        return False
    return isinstance(quantiles, Mapping) and all(
        kind is None or isinstance(kind, Mapping) for kind in quantiles.values()
    )


# Personal models


@dataclass
class Remembered:
    """A client without its cases, for `Method.personal`: its name and its memory."""

    name: str
    memory: dict[str, Any]

    def with_own_statistics(self, params: Params) -> Params:
        raise CheckpointError(
            f"client '{self.name}' never trained in this run, and its statistics need its cases. "
            "Leave --client out to use the common model."
        )


def list_clients(folder: Path) -> list[str]:
    """Names of the clients with a folder in the run folder."""
    found = folder / "clients"
    names = sorted(path.name for path in found.iterdir() if path.is_dir()) if found.is_dir() else []
    return [name for name in names if name not in NOT_HOSPITALS]


def list_personal(folder: Path) -> list[str]:
    """Names of the clients with a memory, not only pictures."""
    return [name for name in list_clients(folder) if any((folder / "clients" / name).glob("*-*.safetensors"))]


def load_personal(
    folder: Path, method: Method, params: Params, client: str, round: int
) -> tuple[Params, Mapping[str, Tensor]]:
    """A client's personal model as it is sent, and the tensors only it keeps.

    round: rounds of the common model.
    """
    home = folder / "clients" / file_name(client)
    if not home.is_dir():
        # Not every memory is a personal model: SCAFFOLD keeps control variates.
        having = [
            name
            for name in list_personal(folder)
            if find_personal(folder / "clients" / name, method, params, name, round)
        ]
        known = ", ".join(having) or "none, since all clients use the common model"
        raise ConfigError(
            f"{folder} has nothing of a client '{client}'.{suggest(client, having)} "
            f"Clients with a personal model: {known}."
        )
    found = find_personal(home, method, params, client, round)
    if found is None:
        raise ConfigError(
            f"client '{client}' has no personal model in {folder}: with {method.title}, all clients use the "
            "common one. Leave --client out."
        )
    return found


def find_personal(
    home: Path, method: Method, params: Params, client: str, round: int
) -> tuple[Params, Mapping[str, Tensor]] | None:
    """The same, from a client's folder; None if it uses the common model."""
    store = MemoryStore(home)
    memory = store.load_best(round - 1) or load_newest(store, round)
    person: Any = Remembered(client, memory)
    found = method.personal(person, params) if memory else params
    own: Mapping[str, Tensor] = person.memory.get("own", {})
    if not own and all(found[name] is params[name] for name in params):
        return None
    return found, own


def load_newest(store: MemoryStore, round: int) -> dict[str, Any]:
    """The last memory, if the model is also of the last round."""
    files = store.list_files("memory")
    return store.load() if files and files[-1][0] < round else {}


def warn_of_common_model(folder: Path, method: Method, objective: Objective, model: nn.Module) -> list[str]:
    """Warnings about tensors that the common model lacks because they stay at the clients."""
    travels = set(method.shared(model)) - set(objective.local_names(model))
    stays = [name for name in model.state_dict() if name not in travels]
    if not stays:
        return []
    who = join_names(list_personal(folder))
    if not travels:
        raise ConfigError(
            f"the run in {folder} has no common model: each client kept its own. "
            f"Choose one with --client: {who}."
        )
    return [
        f"{len(stays)} tensors of this model stay at the clients and are untrained in the common one; "
        f"a personal model (--client {who}) may be better."
    ]


def join_names(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")
