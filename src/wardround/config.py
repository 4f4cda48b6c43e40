"""Typed settings with their defaults; reads YAML, names the wrong key.

Every key has a default, so a file only overrides. Methods and objectives bring their own settings:
the fields of their classes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from wardround.clients.traffic import TrafficSettings
from wardround.data.folders import FolderSettings
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.serving.augment import Augmentation
from wardround.errors import ConfigError
from wardround.models import MODELS, ModelSettings, check_dimensions, is_foreign, resolve
from wardround.models.user_networks import NotHere
from wardround.text import suggestion
from wardround.training.optimizers import OptimizerSettings
from wardround.yaml_file import PlainLoader, read_yaml

if TYPE_CHECKING:
    from wardround.losses.objective import Objective
    from wardround.methods.base import Method
    from wardround.models.base import Segmenter


log = logging.getLogger(__name__)


class Settings(BaseModel):
    """A section of the configuration: unknown keys are errors, values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSettings(Settings):
    """Where the cases come from: a federation.yaml, folders of one layout, or made-up hospitals.

    prepare, splits: settings laid over those of federation.yaml, such as {size: [128, 128]}; patch: voxels
    of the parts of volumes that are trained on, null takes whole images where they have one shape;
    foreground: share of patches around something labelled.
    """

    phantom: PhantomSettings = PhantomSettings()
    folders: FolderSettings | None = None
    federation: Path | None = Field(
        None, description="federation.yaml of real data, relative to the current directory"
    )
    hospitals: bool = Field(
        False, description="cases are at the hospitals, each with its own federation.yaml: wardround submit"
    )
    prepare: dict[str, Any] | None = None
    splits: dict[str, Any] | None = None
    patch: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    foreground: float = Field(0.5, ge=0, le=1)
    proxy: str | None = Field(
        None, description="centre whose cases are at the server, for methods that need some; not a client"
    )

    @model_validator(mode="after")
    def one_source(self) -> Self:
        given = {
            "phantom": self.phantom != PhantomSettings(),
            "folders": self.folders is not None,
            "federation": self.federation is not None,
            "hospitals": self.hospitals,
        }
        named = [name for name, is_given in given.items() if is_given]
        if len(named) > 1:
            raise ValueError(
                f"{' and '.join(named)} are both given, but cases come from one. Keep that alone, "
                f"for example data: {{{named[-1]}: ...}}"
            )
        for name in ("prepare", "splits", "patch"):
            if getattr(self, name) is not None and self.federation is None and not self.hospitals:
                raise ValueError(f"{name} needs real data: set data.federation to a federation.yaml")
        if self.patch is not None and len(self.patch) not in (2, 3):
            raise ValueError(f"patch is {list(self.patch)}; give two numbers for images, three for volumes")
        return self

    @property
    def is_phantom(self) -> bool:
        """Whether made-up hospitals are asked for, rather than left in place by settings without data."""
        return self.phantom != PhantomSettings()

    @property
    def dimensions(self) -> int | None:
        """2 or 3 where the settings alone say it."""
        if self.is_phantom:
            return self.phantom.dimensions
        sides = self.folders.size if self.folders is not None else self.patch
        return None if sides is None else len(sides)


class EvaluateSettings(Settings):
    """When and how models are judged.

    every: validate after every so many rounds; metrics: what the test table shows; select: the metric
    that chooses the best round, on validation cases only; model: which round's model is tested.
    """

    every: int = Field(1, ge=1)
    metrics: tuple[str, ...] = ("dice", "hd95")
    select: str = "dice"
    model: Literal["best", "last"] = "best"
    batch_size: int = Field(16, ge=1)
    tolerance: float = Field(
        1.0, gt=0, description="millimetres for surface Dice; pixels where files have no spacing"
    )
    empty_policy: Literal["defined", "nan", "smooth"] = "defined"
    postprocess: Literal["none", "largest_component"] = Field(
        "none", description="largest_component keeps the largest connected part of each class"
    )
    surface_penalty: Literal["inf", "diagonal"] = "inf"
    cross_site: bool = Field(False, description="also test each client's own model at every other client")
    overlays: int = Field(3, ge=0, description="cases of each client in overlays.png")
    calibrate: bool = Field(
        True,
        description="write calibration.json: a common temperature, and whether the model is rightly sure",
    )
    passes: int = Field(
        8, ge=2, description="passes a scan for the uncertainty of a variational stem or of dropout"
    )

    @field_validator("metrics", "select")
    @classmethod
    def known(cls, value: Any) -> Any:
        from wardround.metrics import METRICS

        for name in [value] if isinstance(value, str) else value:
            if name not in METRICS:
                near = suggestion(name, METRICS) or f" There are: {', '.join(METRICS)}."
                raise ValueError(f"'{name}' is not a metric.{near}")
        return value


class ComputeSettings(Settings):
    """Where and how the work is done; `wardround plan` and environment.json say what `auto` chose.

    precision: of the network; losses that need more take more. memory_format: channels_last is the faster
    one on a GPU. compile: record training steps as CUDA graphs, build kernels for the network (inductor),
    or both (full); auto does what pays for itself. micro_batch: cases that go through the network at once,
    gradients of a batch are added up; null takes whole batches and smaller ones when memory is short.
    checkpointing: compute activations again in the backward pass instead of keeping them. workers:
    processes that share a round's clients, on several GPUs one device each; auto starts them where the work
    to come is worth it. threads: of each process, null shares the cores evenly among the workers. Results
    are the same bytes for any number of workers with the same threads; null follows the machine, so set
    threads where a result must be repeated elsewhere. resident: where prepared cases are while a client
    trains, auto takes the fastest that has room (the results are the same). deterministic: the same bytes
    every time on one kind of GPU too, at some cost.
    """

    device: str = "auto"
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    compile: Literal["auto", "off", "graphs", "inductor", "full"] = "auto"
    micro_batch: int | None = Field(None, ge=1)
    checkpointing: bool = False
    workers: int | Literal["auto"] = "auto"
    threads: int | None = Field(None, ge=1)
    resident: Literal["auto", "device", "host", "disk"] = "auto"
    deterministic: bool = False

    @field_validator("workers", mode="before")
    @classmethod
    def counted(cls, value: Any) -> Any:
        if value == "auto" or (type(value) is int and value >= 1):
            return value
        raise ValueError(f"it is {value!r}; give auto, or a number from 1 on")


class Config(Settings):
    """One run."""

    name: str = Field("run", min_length=1, max_length=200)
    output: Path | None = Field(None, description="run folder; default runs/<name>")
    seed: int = 42
    rounds: int = Field(10, ge=1)
    local_epochs: int = Field(1, ge=1)
    batch_size: int = Field(8, ge=1)
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "fedavg"})
    objective: dict[str, Any] = Field(default_factory=dict)
    optimizer: OptimizerSettings = OptimizerSettings()
    augmentation: Augmentation = Augmentation()
    participation: float | tuple[str, ...] = Field(1.0, description="share of clients, or their names")
    min_clients: int = Field(1, ge=1)
    retries: int = Field(1, ge=0, description="how often a round with too few answers is repeated")
    deadline: float = Field(3600.0, gt=0, description="seconds a client may take for one task")
    evaluate: EvaluateSettings = EvaluateSettings()
    compute: ComputeSettings = ComputeSettings()
    traffic: TrafficSettings = TrafficSettings()
    trackers: tuple[Literal["tensorboard", "mlflow"], ...] = Field(
        (), description="who else keeps the numbers; each needs its extra, for example wardround[mlflow]"
    )

    @field_validator("participation")
    @classmethod
    def sensible(cls, value: Any) -> Any:
        if isinstance(value, float) and not 0 < value <= 1:
            raise ValueError("it must be above 0 and at most 1, or a list of client names")
        return value

    @property
    def folder(self) -> Path:
        from wardround.files import file_name

        return self.output if self.output is not None else Path("runs") / file_name(self.name)

    def build_method(self) -> Method:
        from wardround.methods import METHODS

        method: Method = build_named(METHODS, self.method, "method")
        return method

    def build_objective(self) -> Objective:
        """The chosen objective, or the method's own when none is named."""
        from wardround.methods import OBJECTIVES

        chosen = dict(self.objective)
        if "name" not in chosen:
            chosen["name"] = self.build_method().objective
        objective: Objective = build_named(OBJECTIVES, chosen, "objective")
        return objective

    def sketch_model(self) -> Segmenter | None:
        """The network without numbers, for checks before any data are read.

        None for one that cannot be built yet: its module lies elsewhere, or it fits only data we do not know.
        """
        from wardround.models.measure import sketch

        phantom = self.data.phantom if self.data.is_phantom else PhantomSettings()
        num_outputs = self.build_objective().num_outputs(phantom.num_classes)
        known, info = self.data.dimensions, MODELS.get(self.model.name)
        guesses = (known,) if known is not None else info.dimensions if info is not None else (2, 3)
        for dimensions in guesses:
            try:
                return sketch(
                    self.model,
                    in_channels=phantom.channels,
                    num_outputs=num_outputs,
                    dimensions=dimensions,
                )
            except NotHere:
                return None
            except ConfigError:
                if self.data.is_phantom or not is_foreign(self.model):
                    raise
        return None

    def as_dict(self) -> dict[str, Any]:
        """Every setting written out, defaults and the method's own included."""
        plain = self.model_dump(mode="json")
        method, objective = self.build_method(), self.build_objective()
        plain["method"] = {"name": self.method.get("name", "fedavg"), **dataclasses.asdict(method)}
        name = self.objective.get("name", method.objective)
        plain["objective"] = {"name": name, **dataclasses.asdict(objective)}
        plain["output"] = str(self.folder)
        return plain


@lru_cache(maxsize=256)
def reader(kind: type[Any]) -> TypeAdapter[Any]:
    """What makes objects of a class from plain values; making it takes longer than using it."""
    return TypeAdapter(kind)


def build_named(registry: Mapping[str, type[Any]], settings: Mapping[str, Any], where: str) -> Any:
    """An object of the named class, its fields checked like every other setting."""
    chosen = dict(settings)
    name = chosen.pop("name", "fedavg" if where == "method" else None)
    if name not in registry:
        raise ConfigError(
            f"{where}.name is {name!r}.{suggestion(str(name), registry)} List all: wardround {where}s"
        )
    kind: Any = registry[name]
    fields = {entry.name for entry in dataclasses.fields(kind)}
    for key in chosen:
        if key not in fields:
            raise ConfigError(
                f"{where}.{key} is not a setting of '{name}'.{suggestion(key, fields)} "
                f"It has: {', '.join(sorted(fields)) or 'none'}."
            )
    try:
        return reader(kind).validate_python(chosen)
    except ValidationError as error:
        raise ConfigError(explained(error, f"{where}.")) from None


def load_config(source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] = ()) -> Config:
    """A checked configuration from a YAML file, a dictionary or a Config, with `a.b=c` on top."""
    if isinstance(source, Config):
        if not overrides:
            return source
        label, values = "", source.model_dump(mode="json")
    elif isinstance(source, Mapping):
        label, values = "", dict(source)
    else:
        label, values = f"{source}: ", read_yaml(Path(source))
    for override in overrides:
        apply_override(values, override)
    return parse(values, label)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Lay one `a.b=c` over nested settings; the value is read as YAML."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {override}: write it as key=value, for example --set rounds=3.")
    try:
        value = yaml.load(text, Loader=PlainLoader)  # noqa: S506
    except yaml.YAMLError:
        raise ConfigError(f"--set {override}: '{text}' is not a YAML value.") from None
    *path, last = key.strip().split(".")
    place = values
    for part in path:
        inner = place.get(part)
        if inner is None:
            inner = place[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: '{part}' is a single value and has no '{last}'.")
        place = inner
    place[last] = value


def parse(values: Mapping[str, Any], label: str = "") -> Config:
    """Check everything that can be checked before a run, with one sentence for the first mistake."""
    if "datasets" in values and "about" in values:
        raise ConfigError(
            f"{label}this describes a paper's table, which is several runs on data of your own. "
            "See what it needs with: wardround papers show NAME"
        )
    if "sweep" in values:
        raise ConfigError(
            f"{label}this has a `sweep:` and is several runs. Run it with: wardround compare FILE"
        )
    try:
        config = Config.model_validate(values)
        method, objective = config.build_method(), config.build_objective()
        check_model(config)
        check_features(config, method, objective)
        if config.model.bn_stats == "pooled" and config.traffic.is_lossy:
            raise ConfigError(
                f"traffic.upload is {config.traffic.upload}, which rounds the mean squares that "
                "model.bn_stats: pooled sends, until variances vanish. Use upload: delta or another bn_stats."
            )
        method.check(config, objective)
        objective.check(config)
        for warning in objective.warnings(config):
            log.warning(warning)
    except ValidationError as error:
        raise ConfigError(label + explained(error)) from None
    except ConfigError as error:
        raise ConfigError(label + str(error)) from None
    return config


def check_model(config: Config) -> None:
    """Refuse a network that is not there, its settings, and data it is not made for.

    A network of the user's may lie elsewhere, as when an old run is looked at: then building it says so.
    """
    try:
        resolve(config.model)
    except NotHere as error:
        log.debug("%s", error)
    if config.data.dimensions is not None:
        check_dimensions(config.model, config.data.dimensions)


def check_features(config: Config, method: Method, objective: Objective) -> None:
    """Refuse a network that does not show the features somebody compares."""
    from wardround.losses.contrastive_objectives import trial_output
    from wardround.models.measure import features_text

    needs = method.needs | objective.needs
    model = config.sketch_model() if "features" in needs else None
    if model is None:
        return
    if not model.has_features:
        raise ConfigError(
            f"objective or method needs encoder features, which model '{config.model.name}' does not offer "
            f"({features_text(model)}). Name a module in model.features, or choose another network."
        )
    if "decoder" in needs and trial_output(model).decoder is None:
        raise ConfigError(
            f"objective or method needs decoder features of the image's size, but the output layer of model "
            f"'{config.model.name}' is given smaller ones. Choose another network, for example unet2d."
        )


def explained(error: ValidationError, prefix: str = "") -> str:
    """The first mistake in words: where, what was given, what is expected."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if not str(part).startswith(("function-", "tuple[", "float"))]
    where = prefix + ".".join(place)
    value = first.get("input")
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = known_keys(place[:-1])
        return f"{where} is not a setting.{suggestion(place[-1], known)}"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ").rstrip(".")
    if first["type"] == "value_error":
        return f"{where}: {message}." if not message.endswith(("?", ".")) else f"{where}: {message}"
    return f"{where} is {value!r}; it must be {message}."


def known_keys(path: Sequence[str]) -> list[str]:
    """The settings inside a section of the configuration."""
    section: Any = Config
    for part in path:
        field = section.model_fields.get(part)
        section = field.annotation if field is not None else None
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return []
    return list(section.model_fields)
