"""One run's settings, typed, with their defaults.

Every key has a default, so a file only overrides. Methods and objectives bring their own settings: the
fields of their classes. `config_file` reads such a file and checks it whole.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from wardround.data.serving.augment import Augmentation
from wardround.data.settings import DataSettings
from wardround.files import file_name
from wardround.metrics import METRICS
from wardround.models import ModelSettings
from wardround.objects import split_name
from wardround.plugins import is_import_path
from wardround.privacy.settings import PrivacySettings
from wardround.settings import Settings, shown
from wardround.text import parse_size


class Schedule(Settings):
    """How the learning rate changes with the round.

    constant; step: times gamma every `every` rounds; exponential: times gamma each round;
    polynomial: (1 - round/rounds)^power; cosine: half a cosine to zero. `warmup` rounds rise linearly;
    polynomial and cosine then start, step and exponential count from the first round.
    """

    name: Literal["constant", "step", "exponential", "polynomial", "cosine"] = "constant"
    gamma: float = Field(0.99, gt=0, le=1)
    every: int = Field(30, ge=1)
    power: float = Field(0.9, gt=0)
    warmup: int = Field(0, ge=0)

    def factor(self, round: int, rounds: int) -> float:
        """What the base rate is multiplied with in this round (0-based)."""
        if round < self.warmup:
            return (round + 1) / (self.warmup + 1)
        done = (round - self.warmup) / max(rounds - self.warmup, 1)
        if self.name == "step":
            return float(self.gamma ** (round // self.every))
        if self.name == "exponential":
            return float(self.gamma**round)
        if self.name == "polynomial":
            return float((1 - done) ** self.power)
        if self.name == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        return 1.0


class OptimizerSettings(Settings):
    """The clients' optimizer."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    learning_rate: float = Field(1e-3, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False
    clip_norm: float | None = Field(None, gt=0, description="largest gradient norm; null: no clipping")
    schedule: Schedule = Schedule()
    state: Literal["keep", "reset"] = Field(
        "reset", description="keep a client's optimizer state between rounds, or start afresh"
    )


class AverageSettings(Settings):
    """An average of the server's last models, which is validated, tested and exported in their place.

    Training goes on from the plain model.
    name: none; ema: exponential, each round's model counts 1 - decay, or the mean of all rounds as long as
    these are few; swa: the mean over the last rounds. decay: of ema, by round; share: of the rounds, for swa.
    """

    name: Literal["none", "ema", "swa"] = "none"
    decay: float = Field(0.9, ge=0, lt=1)
    share: float = Field(0.25, gt=0, le=1)


Postprocess = Literal["none", "largest_component", "auto"] | tuple[tuple[int, ...], ...]


def is_step(value: Any) -> bool:
    """Whether it is a list of foreground classes."""
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and all(type(number) is int and number >= 1 for number in value)


class EvaluateSettings(Settings):
    """When and how models are judged.

    every: validate after every so many rounds; metrics: what the test table shows; select: the metric
    that chooses the best round, on validation cases only; model: which round's model is tested.
    """

    every: int = Field(1, ge=1)
    metrics: tuple[str, ...] = ("dice", "hd95")
    select: str = "dice"
    model: Literal["best", "last"] = "best"
    test_after: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="rounds whose model is tested too, into tested/round-<n>.csv; nothing is chosen by it"
    )
    batch_size: int = Field(16, ge=1)
    window: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        description="voxels of the sliding windows that images are evaluated and predicted in; null: whole "
        "images, though predict takes volumes in windows of the training patch",
    )
    tta: bool = Field(
        False,
        description="test, calibrate and predict with the mean over mirror images (test-time augmentation), "
        "along augmentation.mirror_axes",
    )
    tolerance: float = Field(
        1.0, gt=0, description="millimetres for surface Dice; pixels where files have no spacing"
    )
    empty_policy: Literal["defined", "nan", "smooth"] = "defined"
    postprocess: Postprocess = Field(
        "none",
        description="largest_component keeps the largest connected part of each class; auto does so for all "
        "classes together, or for each, where it raises Dice on validation cases after the last round, as "
        "nnU-Net; [[1, 2], [1]] keeps the largest part of classes 1 and 2 together, then of 1",
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

    def with_steps(self, steps: tuple[tuple[int, ...], ...]) -> EvaluateSettings:
        """The same, with the steps that `postprocess: auto` came to."""
        return self.model_copy(update={"postprocess": steps or "none"})

    @field_validator("postprocess", mode="before")
    @classmethod
    def named_or_steps(cls, value: Any) -> Any:
        """One sentence about all that it can be; no steps are none."""
        if value in ("none", "largest_component", "auto"):
            return value
        if isinstance(value, list | tuple) and all(map(is_step, value)):
            return value or "none"
        raise ValueError(
            f"it is {shown(value)}; give none, largest_component, auto, or lists of classes as [[1, 2], [1]]"
        )

    @field_validator("metrics", "select")
    @classmethod
    def known(cls, value: Any, info: ValidationInfo) -> Any:
        for name in [value] if isinstance(value, str) else value:
            METRICS.find(name, f"evaluate.{info.field_name}")
        return value


def count_or_auto(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"it is {value!r}; give auto, or a number from 1 on")


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
    threads where a result must be repeated elsewhere. memory: how much of replies and clients' memories
    stays where it was computed (2 GB), the rest goes over the disk; auto takes a quarter of a GPU's free
    memory, and little without a GPU. resident: where prepared cases are while a client
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
    memory: int | Literal["auto"] = "auto"
    resident: Literal["auto", "device", "host", "disk"] = "auto"
    deterministic: bool = False

    _counted = field_validator("workers", mode="before")(count_or_auto)

    @field_validator("memory", mode="before")
    @classmethod
    def in_bytes(cls, value: Any) -> Any:
        return value if value == "auto" else parse_size(value)


class TrafficSettings(Settings):
    """How clients send their trained model.

    upload: full; float16 (lossy, half the bytes); delta: the exact difference to the model they were sent,
    smaller only once compressed; delta_float16: that, rounded (lossy, but small changes keep their digits).
    """

    upload: Literal["full", "float16", "delta", "delta_float16"] = "full"
    compress: Literal["none", "zlib"] = Field("none", description="zlib: lossless, for replies to `train`")

    @property
    def is_lossy(self) -> bool:
        return self.upload in ("float16", "delta_float16")


class LimitSettings(Settings):
    """What one client may do to the model, whatever it sends.

    max_share: largest share of all training cases that one client's count for, 1 for any; auto: from three
    clients on, five times what the others have on average, or as many as all of them together where that is
    more. max_norm: how many times as
    large as the others' an update may be, null for any; auto: 20, with more room where a client has more
    cases, less where its own updates were smaller before, and 60 for a single tensor.
    refuse_opposite: refuse a client whose updates point against those of the others that annotate the same
    classes, where these agree.
    """

    max_share: float | Literal["auto"] = "auto"
    max_norm: float | Literal["auto"] | None = "auto"
    refuse_opposite: bool = True
    cases: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict,
        description="training cases that clients agreed to have, by name; one that registers more is refused",
    )

    @field_validator("max_share", mode="before")
    @classmethod
    def sensible_share(cls, value: Any) -> Any:
        if value == "auto" or (type(value) in (int, float) and 0 < value <= 1):
            return value
        raise ValueError(f"it is {shown(value)}; give auto, or a number above 0 and at most 1")

    @field_validator("max_norm", mode="before")
    @classmethod
    def sensible_norm(cls, value: Any) -> Any:
        if value in ("auto", None) or (type(value) in (int, float) and 1 <= value < math.inf):
            return value
        raise ValueError(f"it is {shown(value)}; give auto, null, or a number from 1 on")


class CheckpointSettings(Settings):
    """What stays on the disk for `--resume`."""

    keep: int = Field(3, ge=1, le=10, description="checkpoints that can be resumed")
    every: int | Literal["auto"] = Field(
        "auto",
        description="rounds from one checkpoint to the next; auto: 1, and up to ten where clients' memories "
        "are so large that the disk cannot keep up",
    )

    _counted = field_validator("every", mode="before")(count_or_auto)

    @property
    def least_often(self) -> int:
        """The largest number of rounds from one checkpoint to the next, where hospitals train."""
        return 1 if self.every == "auto" else self.every


FIRST_SECONDS, LEAST_SECONDS, SPARE_TIMES = 3600.0, 300.0, 5  # of a deadline that is not set


class Config(Settings):
    """One run."""

    name: str = Field("run", min_length=1, max_length=200)
    output: Path | None = Field(None, description="run folder; default runs/<name>")
    seed: int = 42
    rounds: int = Field(10, ge=1)
    local_epochs: int = Field(1, ge=1)
    local_steps: int | None = Field(
        None,
        ge=1,
        description="optimizer steps of a client in one round, whatever its number of cases, in place of "
        "local_epochs: full batches, drawn pass after pass over its cases; centralised takes the clients' "
        "steps together",
    )
    batch_size: int = Field(8, ge=1)
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "fedavg"})
    objective: dict[str, Any] = Field(default_factory=dict)
    exclusion: float = Field(
        0.0,
        ge=0,
        description="weight of the exclusion loss at clients that annotate some classes only: what they "
        "outline is none of the others; 0 leaves the marginal loss alone",
    )
    optimizer: OptimizerSettings = OptimizerSettings()
    augmentation: Augmentation = Augmentation()
    participation: float | tuple[str, ...] = Field(1.0, description="share of clients, or their names")
    min_clients: int = Field(1, ge=1)
    retries: int = Field(1, ge=0, description="how often a round with too few answers is repeated")
    deadline: float | None = Field(
        None,
        gt=0,
        description="seconds a client may take for one task; default: an hour, and at hospitals, once "
        "answers to the same task were seen, five times the longest of them, at least five minutes",
    )
    absent_after: float = Field(
        20.0,
        ge=5,
        description="seconds without a sign of life after which a hospital is not waited for; it takes part "
        "again in the round after its return",
    )
    model_average: AverageSettings = AverageSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    compute: ComputeSettings = ComputeSettings()
    traffic: TrafficSettings = TrafficSettings()
    privacy: PrivacySettings = PrivacySettings()
    limits: LimitSettings = LimitSettings()
    without: tuple[str, ...] = Field(
        (), description="clients that no longer take part in a run that is resumed (--without)"
    )
    checkpoint: CheckpointSettings = CheckpointSettings()
    trackers: tuple[Literal["tensorboard", "mlflow"], ...] = Field(
        (), description="who else keeps the numbers; each needs its extra, for example wardround[mlflow]"
    )

    @field_validator("participation")
    @classmethod
    def sensible(cls, value: Any) -> Any:
        if isinstance(value, float) and not 0 < value <= 1:
            raise ValueError("it must be above 0 and at most 1, or a list of client names")
        return value

    @field_validator("local_steps")
    @classmethod
    def alone(cls, value: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("local_epochs", 1)
        if value is not None and epochs != 1:
            raise ValueError(
                f"local_epochs is {epochs} as well, but only one can hold. Leave one of them out"
            )
        return value

    def count_steps(self, num_train: int) -> int:
        """Optimizer steps of one round at a client with so many training cases."""
        if self.local_steps is not None:
            return self.local_steps if num_train else 0
        return self.local_epochs * self.count_batches(num_train)

    def give_seconds(self, longest: float = 0.0) -> float:
        """For one task; longest: seconds of the longest answer to it so far, 0 where there was none."""
        if self.deadline is not None:
            return self.deadline
        return max(LEAST_SECONDS, SPARE_TIMES * longest) if longest else FIRST_SECONDS

    def count_batches(self, num_train: int) -> int:
        """Steps of one pass over so many cases."""
        return -(-num_train // self.batch_size)

    @property
    def objects(self) -> dict[str, str]:
        """What was handed over in Python, by its setting (see `wardround.objects`)."""
        names = {"model.name": self.model.name}
        names |= {f"method.{key}": str(value) for key, value in self.method.items()}
        names |= {f"objective.{key}": str(value) for key, value in self.objective.items()}
        found = {key: name for key, name in names.items() if split_name(name)[1] and is_import_path(name)}
        cases = self.data.in_memory
        said = cases if isinstance(cases, dict) else {}
        return found | {f"data.in_memory.{client}": text for client, text in said.items()}

    @property
    def folder(self) -> Path:
        return self.output if self.output is not None else Path("runs") / file_name(self.name)
