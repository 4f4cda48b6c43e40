"""Package: what every kind of export is made from, read from the run's folder alone.

    model.json    settings of the network, objective, preparation, classes, temperature; no data paths, no
                  names of clients

Heads that only training uses (projections, a second network) are left out. `opened` reads a package back; the
loader.py of exported folders imports it under this name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file

from wardround import models
from wardround.comparison.runs import Run, read_run
from wardround.config import ComputeSettings, Config
from wardround.config_file import resolve
from wardround.data.preparing.record import Preparation
from wardround.data.serving.mirroring import describe_mirror_axes
from wardround.engine.outcome import read_status
from wardround.errors import CheckpointError, ConfigError
from wardround.files import jsonable, parse_json, write_json
from wardround.methods import METHODS, build_method, build_named, build_objective
from wardround.models.base import Segmenter
from wardround.params import Params
from wardround.prediction.trained import TrainedModel
from wardround.storage import save_tensors
from wardround.text import format_size
from wardround.training.device import autocast_dtype, choose_device
from wardround.version import __version__

FORMAT = 1
MODEL = "model.json"
WEIGHTS = "model.safetensors"
AS_STORED = "Axes stay as stored in the file; nothing is reoriented."


@dataclass(frozen=True)
class Package:
    """A run's model without what only training needs.

    run: its files, for the card; network: on the CPU, in evaluation mode; layers_of: settings of the
    method that put layers of its own in front of the network, or None; names: of clients on the card.
    """

    trained: TrainedModel
    run: Run
    network: Segmenter
    layers_of: Mapping[str, Any] | None
    names: Mapping[str, str]
    anonymous: bool

    @classmethod
    def of(cls, run: Path | str, *, client: str | None = None, anonymous: bool = False) -> Package:
        """The tested model of a finished run, or a client's personal one."""
        folder = Path(run)
        trained = TrainedModel.load(folder, client=client, device="cpu")
        status = read_status(folder)
        if status != "done":
            said = "was stopped before its test" if status == "stopped" else "is not finished"
            raise CheckpointError(
                f"the run in {folder} {said}, so there is no result for a model card. "
                f"Finish it first: wardround train {folder} --resume"
            )
        network, layers_of = without_heads(trained)
        facts = read_run(folder)
        clients = sorted({*facts.clients, *facts.num_trained, *([] if client is None else [client])})
        names = {n: f"site {k}" if anonymous else n for k, n in enumerate(clients, start=1)}
        return cls(trained, facts, network, layers_of, names, anonymous)

    @property
    def name(self) -> str:
        return "model" if self.anonymous else self.trained.config.name

    @property
    def params(self) -> Params:
        return Params.of(self.network)

    @property
    def calibration(self) -> dict[str, Any] | None:
        """What prediction needs of calibration.json, without numbers of single clients."""
        known = self.trained.calibration
        if known is None:
            return None
        return {key: known[key] for key in ("temperature", "quantiles") if known.get(key) is not None}

    @property
    def temperature(self) -> float:
        return float((self.calibration or {}).get("temperature", 1.0))

    @property
    def preparation(self) -> Preparation:
        """How to prepare a scan; of 2D images, only slices of volumes are reoriented."""
        found = self.trained.preparation
        if found.dimensions == 3 or found.settings.slices is not None:
            return found
        return replace(found, prepare={**found.prepare, "orientation": None})

    @property
    def orientation_note(self) -> str:
        """How axes are reoriented, in sentences."""
        slices = self.preparation.settings.slices
        if slices is None:
            return AS_STORED if self.preparation.prepare.get("orientation") is None else ""
        axes = self.preparation.settings.orientation
        first = f"reoriented to {axes}, then" if axes else "left as stored, then"
        values = "" if slices.clip is None else f" after clipping values above percentile {slices.clip:g}"
        return (
            f"Images are slices: volumes were {first} cut along {slices.along}{values}. "
            "`wardround predict` does the same with a whole volume; scores are those of slices."
        )

    @property
    def inference_note(self) -> str:
        """What the run's masks need beside the network, in sentences; "" where that is nothing."""
        settings, axes = self.trained.config.evaluate, self.trained.config.augmentation.mirror_axes
        how = [] if settings.window is None else [f"in windows of {format_size(settings.window)}"]
        how += [f"as the mean over mirror images{describe_mirror_axes(axes)}"] if settings.tta else []
        if not how:
            return ""
        return f"Masks are made {' and '.join(how)}, as the run was tested; the network alone is not."

    def as_dict(self) -> dict[str, Any]:
        """The content of model.json."""
        trained, network = self.trained, self.network
        settings = models.resolve(trained.config.model)
        return {
            "format": FORMAT,
            "made_by": f"wardround {__version__}",
            "name": self.name,
            "network": {
                "settings": settings.model_dump(mode="json"),
                "in_channels": network.in_channels,
                "num_outputs": network.num_outputs,
                "dimensions": network.dimensions,
            },
            "layers_of": self.layers_of,
            "objective": resolve(trained.config)["objective"],
            "classes": list(trained.preparation.classes),
            "values": list(trained.preparation.values),
            "channels": list(trained.preparation.channels),
            "preparation": jsonable(asdict(self.preparation)),
            "postprocess": trained.config.evaluate.postprocess,
            "tta": trained.config.evaluate.tta,
            "mirror_axes": trained.config.augmentation.mirror_axes,
            "window": trained.config.evaluate.window,
            "calibration": self.calibration,
            "params_sha256": self.params.sha256(),
        }

    def save(self, model: Path, weights: Path) -> None:
        """model.json and the tensors."""
        write_json(model, self.as_dict())
        save_tensors(weights, self.params, {"format": "pt", "made_by": f"wardround {__version__}"})

    def anonymise(self, text: str) -> str:
        """A text of the run with the card's names of clients."""
        if not self.anonymous or not self.names:
            return text
        longest_first = sorted(self.names, key=len, reverse=True)
        pattern = r"(?<!\w)(" + "|".join(map(re.escape, longest_first)) + r")(?!\w)"
        return re.sub(pattern, lambda found: self.names[found[1]], text)


def without_heads(trained: TrainedModel) -> tuple[Segmenter, dict[str, Any] | None]:
    """The network alone, and the settings of a method whose own layers it needs (HarmoFL's input layer)."""
    config, preparation = trained.config, trained.preparation
    with torch.random.fork_rng(devices=[]):
        network = models.build(
            config.model,
            in_channels=preparation.in_channels,
            num_outputs=trained.objective.num_outputs(preparation.num_classes),
            dimensions=preparation.dimensions,
        )
        layers_of = None
        if type(network) is not type(trained.model):
            trained.method.start_model(network)
            layers_of = resolve(config)["method"]
    Params(trained.model.state_dict()).only(network.state_dict()).load_into(network)
    return network.eval().requires_grad_(False), layers_of


# Reading one back


def opened(model: Path | str, weights: Path | str, device: str = "cpu") -> TrainedModel:
    """A packaged model, ready to predict; model: its model.json, weights: its safetensors file."""
    model, weights = Path(model), Path(weights)
    try:
        facts = parse_json(model.read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']}, and this wardround reads {FORMAT}")
        preparation = TypeAdapter(Preparation).validate_python(facts["preparation"])
        config = Config.model_validate(
            {
                "name": facts["name"],
                "model": facts["network"]["settings"],
                "method": facts["layers_of"] or {"name": "fedavg"},
                "objective": facts["objective"],
                "augmentation": {"mirror_axes": facts.get("mirror_axes")},  # absent in older exports
                "evaluate": {
                    "postprocess": facts["postprocess"],
                    "tta": facts.get("tta", False),  # absent in older exports
                    "window": facts.get("window"),
                },
            }
        )
        calibration, network = facts["calibration"], network_of(facts)
        network.load_state_dict(load_file(weights), strict=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename} is missing; export the model again.") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{model.parent} has no usable model ({reason}).") from None
    where = choose_device(ComputeSettings(device=device))
    return TrainedModel(
        folder=model.parent,
        config=config,
        method=build_method(config),
        objective=build_objective(config),
        model=network.to(where).eval().requires_grad_(False),
        params=Params.of(network),
        preparation=preparation,
        device=where,
        autocast=autocast_dtype(config.compute, where),
        calibration=calibration,
    )


def network_of(facts: Mapping[str, Any]) -> Segmenter:
    """The network that model.json describes, without its weights."""
    shape = dict(facts["network"])
    if min(shape["in_channels"], shape["num_outputs"]) < 1:
        raise ValueError("a network without channels or outputs")
    with torch.random.fork_rng(devices=[]):
        network = models.build(models.ModelSettings(**shape.pop("settings")), **shape)
        if facts["layers_of"] is not None:
            build_named(METHODS, facts["layers_of"], "method").start_model(network)
    return network
