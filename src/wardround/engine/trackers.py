"""Trackers: the numbers of a run in TensorBoard or MLflow as well, for those who keep theirs there.

A tracker gets every record and the result: numbers and the names of clients, never names of
cases. Both libraries are optional and imported only when asked for. A tracker that fails is left out for
the rest of the run, with a warning: a full disk at the tracker's must not cost a night's training.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from wardround.errors import ConfigError
from wardround.files import file_name, write_json

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Keeps the numbers of a run."""

    def on_record(self, record: Mapping[str, Any]) -> None:
        """After every round, with its line of records.jsonl."""

    def on_end(self, result: Mapping[str, Any]) -> None:
        """Once, with what result.json says; a stopped run has no test in it."""


# What trackers get


def scalars(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every finite number of a nested record, named by its place: `loss/north/total`.

    >>> dict(scalars({"round": 1, "loss": {"north": {"total": 0.5}}}))
    {'round': 1.0, 'loss/north/total': 0.5}
    """
    if isinstance(value, Mapping):
        for key, entry in value.items():
            part = file_name(str(key))
            yield from scalars(entry, f"{path}/{part}" if path else part)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield path, float(value)


LEFT_OUT = ("sd", "num", "num_skipped", "num_infinite", "num_clients", "num_left_out", "num_cases", "worst")


def record_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round: loss, weights and their ingredients, validation, seconds, bytes, trouble."""
    plain = {key: value for key, value in record.items() if key not in ("round", "validation", "exchanges")}
    for kind in ("refused", "lost", "warnings"):
        plain[kind] = len(plain.get(kind, ()))
    found = dict(scalars(plain))
    found.update(evaluation_scalars("validation", record.get("validation")))
    for exchange in record.get("exchanges", []):
        for kind in ("seconds", "bytes_up", "bytes_down"):
            for client, value in scalars(exchange.get(kind, {})):
                key = f"{kind}/{client}"
                found[key] = found.get(key, 0.0) + value
    return found


def evaluation_scalars(prefix: str, evaluation: Any) -> dict[str, float]:
    """Means only: of each client, over clients, and of the worst client."""
    found: dict[str, float] = {}
    for metric, entry in (evaluation or {}).items():
        means = {client: summary.get("mean") for client, summary in entry.get("clients", {}).items()}
        overall = {
            key: value for key, value in entry.items() if key not in ("clients", "held_out", *LEFT_OUT)
        }
        if "held_out" in entry:
            overall["held_out"] = entry["held_out"]["mean"]
        worst = {"worst": entry["worst"][1]} if entry.get("worst") else {}
        found.update(scalars({"clients": means, **overall, **worst}, f"{prefix}/{file_name(metric)}"))
    return found


def flat_settings(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """`method.name`: every setting as text."""
    for key, value in config.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, name)
        else:
            yield name, str(value)


# The trackers


class TensorBoard:
    """Event files in the run folder, under tensorboard/."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_round: int = 0) -> None:
        module = import_optional("tensorboard", "torch.utils.tensorboard")
        again = {"purge_step": first_round + 1} if first_round else {}
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), **again)
        self._config = config

    def on_record(self, record: Mapping[str, Any]) -> None:
        for name, value in record_scalars(record).items():
            self._writer.add_scalar(name, value, int(record["round"]))
        self._writer.flush()

    def on_end(self, result: Mapping[str, Any]) -> None:
        step = int(result.get("rounds", 0))
        for name, value in evaluation_scalars("test", result.get("test")).items():
            self._writer.add_scalar(name, value, step)
        self._writer.add_text("params_sha256", str(result.get("params_sha256", "")), step)
        self._writer.add_text("config", json.dumps(dict(flat_settings(self._config)), indent=2), step)
        self._writer.close()


MOST_TEXT = 500  # characters of a parameter, as MLflow allows


class MLflow:
    """A run in MLflow's store, wherever MLFLOW_TRACKING_URI points; a resumed run goes on in it."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_round: int = 0) -> None:
        module = import_optional("mlflow", "mlflow")
        self._client = module.MlflowClient()
        note = folder / "mlflow.json"
        if first_round and note.exists():
            self._run = str(json.loads(note.read_text(encoding="utf-8"))["run_id"])
            return
        found = self._client.get_experiment_by_name("wardround")
        experiment = found.experiment_id if found else self._client.create_experiment("wardround")
        name = file_name(str(config.get("name", "run")))
        self._run = str(self._client.create_run(experiment, run_name=name).info.run_id)
        write_json(note, {"run_id": self._run})
        for key, value in flat_settings(config):
            self._client.log_param(self._run, file_name(key), value[:MOST_TEXT])

    def on_record(self, record: Mapping[str, Any]) -> None:
        for name, value in record_scalars(record).items():
            self._client.log_metric(self._run, name, value, step=int(record["round"]))

    def on_end(self, result: Mapping[str, Any]) -> None:
        for name, value in evaluation_scalars("test", result.get("test")).items():
            self._client.log_metric(self._run, name, value, step=int(result.get("rounds", 0)))
        self._client.set_tag(self._run, "params_sha256", str(result.get("params_sha256", "")))
        status = "FINISHED" if result.get("status") == "done" else "KILLED"
        self._client.set_terminated(self._run, status=status)


TRACKERS: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def import_optional(name: str, module: str) -> Any:
    """An optional library, or a sentence that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"trackers names '{name}', which is not installed. Install it with: pip install "
            f"'wardround[{name}]', or leave it out of `trackers`."
        ) from None


class Tracking:
    """All trackers of a run together; one that fails is left out, with a warning, and the run goes on."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def on_record(self, record: Mapping[str, Any]) -> None:
        self._notify(lambda tracker: tracker.on_record(record))

    def on_end(self, result: Mapping[str, Any]) -> None:
        self._notify(lambda tracker: tracker.on_end(result))

    def _notify(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever a tracker does, the run goes on
                log.warning("tracker '%s' is left out from here on: %s", name, error)
                del self._trackers[name]


def open_trackers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any], first_round: int = 0
) -> Tracking:
    """The trackers a configuration names. first_round: how many rounds a resumed run already has."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"trackers names '{name}'. There are: {', '.join(TRACKERS)}.")
    opened: dict[str, Tracker] = {}
    for name in dict.fromkeys(names):
        try:
            opened[name] = TRACKERS[name](folder, config, first_round)
        except ConfigError:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0].rstrip(".") + "."
            raise ConfigError(
                f"tracker '{name}' cannot be opened: {reason} Fix it, or leave it out of `trackers`."
            ) from None
    return Tracking(opened)
