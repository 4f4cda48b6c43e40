"""What a run trains on, and what it costs: memory by device, bytes sent, bytes on disk, seconds."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from wardround.config import Config, OptimizerSettings
from wardround.data.federation import Federation, ScanSummary
from wardround.data.phantom import cases as phantom
from wardround.data.roles import POOLED
from wardround.data.serving.loading import RealData
from wardround.data.serving.loading import estimate_shape as estimate_prepared_shape
from wardround.data.serving.resident import DEVICE_SHARE
from wardround.engine.transports.placement import EXCHANGE_BYTES_A_SECOND, Placement, deal
from wardround.machine import free_memory
from wardround.methods import build_method, build_objective
from wardround.models.base import Segmenter
from wardround.models.measure import kept_bytes
from wardround.models.probe import meta_copy
from wardround.params import Params
from wardround.planning.dry_run import DryRun
from wardround.text import format_size
from wardround.training.device import Compute
from wardround.training.inference import count_windows

PROCESS_BYTES = 300 * 2**20  # Python and torch; on a GPU, about what CUDA takes
HALF = 0.6  # what autocast leaves of the activations: norms and losses stay in float32
LOSS_COPIES = 4  # of the logits: probabilities, targets, their gradients
ROOM = 0.9  # of the free memory that may be filled


@dataclass(frozen=True)
class ClientPlan:
    """One client: its cases, and its training steps in one round."""

    name: str
    train: int
    val: int
    test: int
    steps: int


def estimate_shape(config: Config, federation: Federation) -> tuple[tuple[int, ...], list[str]]:
    """Voxels along each side of a training image, from the first image where cases are not prepared yet."""
    if config.data.patch is not None:
        return tuple(config.data.patch), []
    if config.data.federation is not None:
        data = RealData(config.data.federation, config.data)
        usual = estimate_prepared_shape(data.first_image, data.file.prepare)
        if data.file.prepare.size is not None:
            return tuple(usual), []
        return tuple(data.default_patch), [
            f"The shape is taken from the first image, {format_size(usual)} when prepared; cases of "
            "different shapes are trained on in patches."
        ]
    return config.data.phantom.shape, []


def with_shape(federation: Federation, shape: Sequence[int]) -> Federation:
    """The federation with a known shape, so that nothing is prepared to find it."""
    return replace(federation, summarise_scans=lambda: ScanSummary(None, tuple(shape)))


def count_cases(config: Config, federation: Federation) -> dict[str, tuple[int, int, int]]:
    """Training, validation and test cases of each client."""
    if config.data.federation is None:
        made = config.data.phantom
        return {name: phantom.count_split_cases(made, name) for name in federation.names}
    listing = RealData(config.data.federation, config.data).listing
    splits = {n: Counter(entry.split or "train" for entry in listing.of(n)) for n in federation.names}
    return {n: (found["train"], found["val"], found["test"]) for n, found in splits.items()}


def plan_clients(
    config: Config, counted: Mapping[str, tuple[int, int, int]], *, pooled: bool
) -> list[ClientPlan]:
    every = [ClientPlan(name, *cases, config.count_steps(cases[0])) for name, cases in counted.items()]
    if not pooled:
        return every
    judged = [ClientPlan(name, 0, val, test, 0) for name, (_, val, test) in counted.items()]
    train = sum(cases[0] for cases in counted.values())
    together = config.count_steps(train) if config.local_steps is None else sum(c.steps for c in every)
    return [*judged, ClientPlan(POOLED, train, 0, 0, together)]


# Traffic and disk


@dataclass(frozen=True)
class Traffic:
    """Bytes between the server and all clients; measured: in the dry run, else estimated.

    parts: task -> bytes down and up in one round, of all clients together.
    """

    parts: Mapping[str, tuple[int, int]]
    rounds: int
    setup: tuple[int, int]
    measured: bool

    @property
    def down(self) -> int:
        return sum(down for down, _ in self.parts.values())

    @property
    def up(self) -> int:
        return sum(up for _, up in self.parts.values())

    @property
    def total(self) -> int:
        return sum(self.setup) + self.rounds * (self.down + self.up)


def estimate_traffic(
    config: Config, dry_run: DryRun | None, shared: int, everything: int, present: int, hospitals: int
) -> Traffic:
    """Bytes of one round: the method's exchanges, and the model sent for validation."""
    setup, measured = (0, 0), False
    if dry_run is not None and dry_run.down is not None and dry_run.up is not None:
        up, measured = dry_run.up, True
        parts = {task: (down * present, up.get(task, 0) * present) for task, down in dry_run.down.items()}
        setup = (dry_run.setup[0] * present, dry_run.setup[1] * present)
    else:
        tasks = build_method(config).tasks
        parts = {"train": (everything * present, shared * present)}
        parts |= {task: (everything * present, 0) for task in tasks if task != "train"}
    parts["validation"] = (everything * hospitals // config.evaluate.every, 0)
    return Traffic(parts, config.rounds, setup, measured)


def estimate_disk(
    config: Config,
    dry_run: DryRun | None,
    everything: int,
    model: Segmenter,
    clients: Sequence[ClientPlan],
    placement: Placement,
) -> tuple[int, int]:
    """Most bytes in the run folder at any time, and bytes free there."""
    if dry_run is not None and dry_run.state_bytes is not None and dry_run.memory_bytes is not None:
        state, memory = dry_run.state_bytes, dry_run.memory_bytes  # memories of two rounds
    else:
        needs = build_method(config).needs | build_objective(config).needs
        kept = everything if needs & {"previous", "teacher", "state"} else 0
        if config.optimizer.state == "keep":
            kept += optimizer_bytes(config.optimizer, Params.trainable(model).num_bytes)
        state, memory = everything, 2 * kept
    state += everything if config.model_average.name != "none" else 0
    trainers = sum(1 for client in clients if client.train)
    keep = min(config.checkpoint.keep, config.rounds)
    server = (keep + 1) * (
        state + everything
    )  # a new file is whole before an old one goes; each may be the best
    exchange = (1 + trainers) * everything if placement.workers > 1 else 0
    folder = config.folder.absolute()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    memories = (keep + 2) * memory * trainers // 2  # one more than rounds kept, and that of the best model
    return server + exchange + memories, shutil.disk_usage(place).free


# Time


@dataclass(frozen=True)
class Time:
    """Seconds, from the dry run: one training step, a round, its validation, the test, the start, all.

    training: of a round, what its steps take.
    """

    step: float
    round: float
    validation: float
    test: float
    start: float
    total: float
    training: float


def estimate_time(
    config: Config,
    dry_run: DryRun | None,
    clients: Sequence[ClientPlan],
    share: float,
    placement: Placement,
    everything: int,
    whole: Sequence[int] | None = None,
) -> Time | None:
    """From the seconds of the dry run; the busiest worker decides. whole: voxels of a prepared scan."""
    if dry_run is None:
        return None
    windows = count_windows(whole, config.evaluate.window)
    by_name = {client.name: client for client in clients}
    hands = deal({c.name: c.train + c.val + c.test for c in clients}, placement.workers)
    trainers = sum(1 for client in clients if client.train)
    most = {"steps": 0.0, "train": 0.0, "val": 0.0, "test": 0.0}
    for hand in hands:
        members = [by_name[name] for name in hand]
        steps = sum(client.steps * dry_run.step for client in members)
        others = sum(sum(dry_run.others.values()) for client in members if client.train)
        most["steps"] = max(most["steps"], steps * share)
        most["train"] = max(most["train"], (steps + others) * share)
        most["val"] = max(most["val"], sum(client.val for client in members) * dry_run.case * windows)
        seconds = sum(estimate_test(config, dry_run, client, windows) for client in members)
        most["test"] = max(most["test"], seconds)
    files = (1 + trainers * share) * everything / EXCHANGE_BYTES_A_SECOND if placement.workers > 1 else 0.0
    validations = math.ceil(config.rounds / config.evaluate.every)
    round_ = most["train"] + files + dry_run.server * trainers * share + dry_run.checkpoint
    start = 3.0 if placement.workers > 1 else 1.0
    tests = most["test"] * (1 + len(config.evaluate.test_after))
    total = start + config.rounds * round_ + validations * most["val"] + tests
    return Time(dry_run.step, round_, most["val"], most["test"], start, total, most["steps"])


def estimate_test(config: Config, dry_run: DryRun, client: ClientPlan, windows: int) -> float:
    """Seconds of a client's test: its scores, and the passes for pictures, calibration and the choice of
    postprocessing."""
    settings = config.evaluate
    axes = config.augmentation.mirror_axes
    axes = config.evaluate.window or config.data.patch or (0, 0) if axes is None else axes
    mirrors = 2 ** len(axes) if settings.tta else 1
    of_test = 1 + (settings.overlays > 0) + settings.calibrate
    of_validation = 2 * settings.calibrate + (settings.postprocess == "auto")
    passes = client.test * of_test + client.val * of_validation
    surfaces = max(0.0, dry_run.test_case - dry_run.case)
    return passes * dry_run.case * windows * mirrors + client.test * surfaces


# Memory: what training needs on each device, by part


@dataclass(frozen=True)
class Memory:
    """Memory of one device; on the CPU, of the machine.

    parts: bytes of one process by use, None where unknown; processes: how many share the device; server:
    bytes of a server process beside them; measured: peak bytes of one process in the dry run, on a GPU.
    """

    device: str
    parts: Mapping[str, int | None]
    processes: int
    free: int
    server: int = 0
    measured: int | None = None

    @property
    def known(self) -> int:
        """Bytes of one process, unknown parts left out."""
        return sum(part for part in self.parts.values() if part is not None)

    @property
    def total(self) -> int:
        """Bytes of all processes on this device; the measured peak counts where it is higher."""
        one = max(self.known, (self.measured or 0) + (self.parts["process"] or 0))
        return self.processes * one + self.server

    @property
    def fits(self) -> bool:
        return self.total <= ROOM * self.free


def activation_bytes(model: Segmenter, batch_shape: Sequence[int], *, checkpointing: bool) -> int | None:
    """What the backward pass keeps of one batch, counted without computing; None if it cannot be counted."""
    ghost = meta_copy(model)
    for part in ghost.modules():  # a stem has its backbone inside
        if isinstance(part, Segmenter):
            part.checkpointing = checkpointing
    try:
        kept = kept_bytes(ghost, torch.empty(tuple(batch_shape), device="meta"))
    except Exception:  # some networks read values, which a meta tensor does not have
        return None
    logits = batch_shape[0] * model.num_outputs * math.prod(batch_shape[2:]) * torch.float32.itemsize
    return kept + LOSS_COPIES * logits


def optimizer_bytes(settings: OptimizerSettings, trainable: int) -> int:
    """Moments of the optimizer: two of Adam, one of SGD with momentum."""
    slots = (1 if settings.momentum else 0) if settings.name == "sgd" else 2
    return slots * trainable


def case_bytes(channels: int, shape: Sequence[int]) -> int:
    """One case in memory: image in float32, label in eight bytes."""
    return (4 * channels + 8) * math.prod(shape)


def estimate_memory(
    config: Config,
    federation: Federation,
    model: Segmenter,
    shape: Sequence[int],
    clients: Sequence[ClientPlan],
    placement: Placement,
    compute: Compute,
    dry_run: DryRun | None,
) -> list[Memory]:
    """Memory of each device; of its processes, the one with most cases counts."""
    parameters, trainable = Params(model.state_dict()).num_bytes, Params.trainable(model).num_bytes
    needs = build_method(config).needs | build_objective(config).needs
    size = largest_batch(config, clients)
    batch = (size, model.in_channels, *shape)
    kept = activation_bytes(model, batch, checkpointing=config.compute.checkpointing)
    if kept is not None and compute.autocast is not None:
        kept = int(HALF * kept)
    one = case_bytes(federation.in_channels, shape)
    cases = {client.name: client.train + client.val + client.test for client in clients}
    hands = deal(federation.sizes(list(cases)), placement.workers)
    found = []
    for device in dict.fromkeys(placement.devices):
        on_gpu = torch.device(device).type == "cuda"
        free = torch.cuda.mem_get_info(torch.device(device))[0] if on_gpu else free_memory()
        here = [hand for hand, where in zip(hands, placement.devices, strict=False) if where == device]
        held = [one * sum(cases[name] for name in hand) for hand in here]
        data = max(held, default=0)
        if on_gpu and config.compute.resident != "device":  # a client's cases move only if they fit
            data = sum(min(one * cases[n], int(DEVICE_SHARE * free)) for n in max(here, key=len, default=[]))
            data = 0 if config.compute.resident in ("host", "disk") else data
        parts: dict[str, int | None] = {
            "process": PROCESS_BYTES,
            "parameters": parameters,
            "gradients": trainable,
            "optimizer": optimizer_bytes(config.optimizer, trainable),
            "references": parameters * len(needs & {"global", "previous", "teacher"}),
            "messages": 2 * parameters,
            "activations": kept,
            "cases": data,
        }
        peak = dry_run.peak if dry_run is not None and on_gpu else None
        server = PROCESS_BYTES + 3 * parameters if placement.workers > 1 and not on_gpu else 0
        found.append(Memory(device, parts, max(1, len(here)), free, server, peak))
    return found


def largest_batch(config: Config, clients: Sequence[ClientPlan]) -> int:
    """Most cases that pass through the network at once."""
    whole = min(config.batch_size, max((client.train for client in clients), default=1))
    return max(1, min(config.compute.micro_batch or whole, whole))


def shared_bytes(config: Config, model: Segmenter) -> int:
    """Bytes of the tensors that clients send."""
    travelling = set(build_method(config).shared(model)) - set(build_objective(config).local_names(model))
    return Params(model.state_dict()).only(travelling).num_bytes
