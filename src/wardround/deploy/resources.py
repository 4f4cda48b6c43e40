"""The `resources:` of a site.yaml: how much of the hospital's machine one run may take.

Values of a configuration are held against it before they are parsed, a network before it gets any numbers:
what is too large is refused without being built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError, field_validator
from torch import nn

from wardround.config import Config
from wardround.data.federation import Federation
from wardround.data.federation_file import PrepareSettings
from wardround.engine.networks import training_shape
from wardround.methods import build_method, build_objective
from wardround.models.base import Segmenter
from wardround.models.measure import sketch
from wardround.params import Params
from wardround.planning.costs import PROCESS_BYTES, activation_bytes, optimizer_bytes
from wardround.settings import Settings, refuse_boolean
from wardround.text import format_bytes, format_size, parse_size

LIMITED = ("model", "method", "objective")  # sections whose numbers decide how much is built
REPEATED = ("depth", "layers", "blocks")  # in the name of a number of layers
DEEPEST = 8  # sections inside each other that are looked at; no setting of ours has as many
LARGEST = 2**63  # a refusal repeats no longer number


class Resources(Settings):
    """Limits of one run; null: none."""

    threads: int | None = Field(64, ge=1)
    memory: int | None = Field(128 * 10**9, ge=1)
    parameters: int | None = Field(200 * 10**6, ge=1)
    filters: int | None = Field(128, ge=1)
    width: int | None = Field(4096, ge=1)
    layers: int | None = Field(128, ge=1)
    kernel: int | None = Field(16, ge=1)
    voxels: int | None = Field(200 * 10**6, ge=1)
    batch: int | None = Field(256, ge=1)
    epochs: int | None = Field(100, ge=1)
    steps: int | None = Field(100_000, ge=1)
    seconds: int | None = Field(24 * 3600, ge=1)

    _bytes = field_validator("memory", mode="before")(
        lambda value: None if value is None else parse_size(value)
    )
    _numbers = field_validator("*", mode="before")(refuse_boolean)

    @classmethod
    def unlimited(cls) -> Resources:
        return cls(**dict.fromkeys(cls.model_fields))

    def over_limit(self, name: str, what: str, value: float) -> str | None:
        """Why this value is refused, or None; what: the setting, or what was measured, in words."""
        limit = getattr(self, name)
        if limit is None or value <= limit:
            return None
        given, most = (format_bytes(int(n)) if name == "memory" else f"{n:,}" for n in (value, limit))
        return f"{what} is {given}, but at most {most} is allowed at this hospital {self.cite(name)}"

    @staticmethod
    def cite(name: str) -> str:
        return f"(resources.{name} in its site.yaml)"

    # A configuration, before and after it is parsed

    def refuses_numbers(self, values: Mapping[str, Any]) -> str | None:
        """Why a number of the network, the method or the objective is refused, or None; before parsing."""
        for section in LIMITED:
            for place, number in list_numbers(values.get(section), section):
                reason = self.over_limit(find_limit(place), place, number)
                if reason is not None:
                    return reason
        return None

    def refuses_config(self, config: Config) -> str | None:
        """Why a configuration asks for too much, or None."""
        data = config.data
        boxes = {"patch": data.patch, "prepare.size": prepared_size(data.prepare)}
        asked = [
            ("threads", "compute.threads", config.compute.threads),
            ("batch", "batch_size", config.batch_size),
            ("batch", "evaluate.batch_size", config.evaluate.batch_size),
            ("batch", "evaluate.passes", config.evaluate.passes),
            ("epochs", "local_epochs", config.local_epochs),
            ("steps", "local_steps", config.local_steps),
        ]
        asked += [("voxels", f"the voxels of data.{n}", math.prod(box)) for n, box in boxes.items() if box]
        for name, what, value in asked:
            reason = None if value is None else self.over_limit(name, what, value)
            if reason is not None:
                return reason
        return None

    def refuses_scans(self, config: Config, federation: Federation) -> str | None:
        """Why scans are not prepared as the run asks, or None; how the hospital prepares its own is free."""
        shape = federation.prepared_shape
        if not config.data.prepare or shape is None:
            return None
        return self.over_limit("voxels", "the voxels of a scan with this data.prepare", math.prod(shape))

    # A task

    def refuses_steps(self, config: Config, num_train: int) -> str | None:
        """Why a training task is too long, or None; the number of steps would give away that of cases."""
        if self.steps is None or config.count_steps(num_train) <= self.steps:
            return None
        return f"a training task may have at most {self.steps:,} steps at this hospital {self.cite('steps')}"

    def too_long(self, seconds: float) -> str | None:
        """Why a task that has run for so long ends, or None."""
        if self.seconds is None or seconds <= self.seconds:
            return None
        return f"a task may take at most {self.seconds:,} seconds at this hospital {self.cite('seconds')}"

    # A network

    def refuses_network(self, config: Config, federation: Federation) -> str | None:
        """Why the network is too large, or None; it is built without numbers."""
        outputs = build_objective(config).num_outputs(federation.num_classes)
        sizes = {"in_channels": federation.in_channels, "dimensions": federation.dimensions}
        model = sketch(config.model, num_outputs=outputs, **sizes)
        name = f"network '{config.model.name}'"
        return (
            self.over_limit("parameters", f"the number of parameters of {name}", count_parameters(model))
            or self.over_limit("width", f"the widest layer of {name}", widest_layer(model))
            or self.over_limit("kernel", f"the largest kernel of {name}", largest_kernel(model))
            or self._memory_refused(config, federation, model)
        )

    def _memory_refused(self, config: Config, federation: Federation, model: Segmenter) -> str | None:
        shape = training_shape(config, federation)
        if self.memory is None or shape is None:
            return None
        reason = self.over_limit("memory", "the memory of training", training_bytes(config, model, shape))
        if reason is None:
            return None
        batch = f"a batch of {config.batch_size} of {format_size(shape)}"
        return f"{reason}, for {batch}; set compute.micro_batch lower"


def training_bytes(config: Config, model: Segmenter, shape: Sequence[int]) -> int:
    """Bytes that training takes beside the cases, roughly."""
    parameters, trainable = Params(model.state_dict()).num_bytes, Params.trainable(model).num_bytes
    references = build_method(config).needs | build_objective(config).needs
    at_once = min(config.batch_size, config.compute.micro_batch or config.batch_size)
    batch = (at_once, model.in_channels, *shape)
    kept = activation_bytes(model, batch, checkpointing=config.compute.checkpointing) or 0
    models = 3 + len(
        references & {"global", "previous", "teacher"}
    )  # its own, the one that came, the one that leaves
    return (
        PROCESS_BYTES + models * parameters + trainable + optimizer_bytes(config.optimizer, trainable) + kept
    )


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def widest_layer(model: nn.Module) -> int:
    """Most channels that a layer takes or gives; of a layer over whole images, their voxels."""
    return max((max(p.shape[:2]) for p in model.parameters() if p.ndim in (2, 4, 5)), default=0)


def largest_kernel(model: nn.Module) -> int:
    """The longest side of a convolution's kernel."""
    return max((max(p.shape[2:]) for p in model.parameters() if p.ndim in (4, 5)), default=0)


def find_limit(place: str) -> str:
    """The limit of a number, by the name of its setting."""
    is_depth = place.startswith("model.") and any(word in place for word in REPEATED)
    return "filters" if place == "model.base_filters" else "layers" if is_depth else "width"


def prepared_size(prepare: Mapping[str, Any] | None) -> Sequence[int] | None:
    """The size that scans shall be brought to, if it can be read; if not, preparing says so."""
    try:
        return PrepareSettings.model_validate({"size": (prepare or {}).get("size")}).size
    except ValidationError:
        return None


def list_numbers(value: Any, place: str, depth: int = 0) -> Iterator[tuple[str, float]]:
    """Every number inside a section, with its key; what lies deeper than any setting counts as too large."""
    if isinstance(value, Mapping | list | tuple):
        if depth == DEEPEST:
            yield place, LARGEST
            return
        inside = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in inside:
            yield from list_numbers(part, f"{place}.{str(key)[:40]}", depth + 1)
    elif isinstance(value, int | float | str):
        try:  # parsing takes a number in quotes for a number
            yield place, min(value if isinstance(value, int) else float(value), LARGEST)
        except ValueError:
            return
