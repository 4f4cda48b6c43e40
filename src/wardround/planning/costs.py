"""What a run costs beside memory: bytes sent, bytes on disk, and seconds."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wardround.config import Config
from wardround.engine.transports.placement import EXCHANGE_BYTES_A_SECOND, Placement, deal
from wardround.methods import build_method, build_objective
from wardround.models.base import Segmenter
from wardround.params import Params
from wardround.planning.cases import ClientPlan
from wardround.planning.dry_run import DryRun
from wardround.planning.memory import optimizer_bytes, tensor_bytes

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
        kept = everything if needs & {"previous", "state"} else 0
        if config.optimizer.state == "keep":
            kept += optimizer_bytes(config.optimizer, tensor_bytes(Params.trainable(model)))
        state, memory = everything, 2 * kept
    trainers = sum(1 for client in clients if client.train)
    server = 2 * state + 2 * everything  # the new checkpoint is whole before the old one goes; so is the best
    exchange = (1 + trainers) * everything if placement.workers > 1 else 0
    place = next(
        path for path in (config.folder.absolute(), *config.folder.absolute().parents) if path.exists()
    )
    return server + exchange + 3 * memory * trainers // 2, shutil.disk_usage(place).free


# Time


@dataclass(frozen=True)
class Time:
    """Seconds, from the dry run: one training step, a round, its validation, the test, the start, all."""

    step: float
    round: float
    validation: float
    test: float
    start: float
    total: float


def estimate_time(
    config: Config,
    dry_run: DryRun | None,
    clients: Sequence[ClientPlan],
    share: float,
    placement: Placement,
    everything: int,
) -> Time | None:
    """From the seconds of the dry run; the busiest worker decides."""
    if dry_run is None:
        return None
    by_name = {client.name: client for client in clients}
    hands = deal({c.name: c.train + c.val + c.test for c in clients}, placement.workers)
    trainers = sum(1 for client in clients if client.train)
    most = {"train": 0.0, "val": 0.0, "test": 0.0}
    for hand in hands:
        members = [by_name[name] for name in hand]
        train = sum(client.steps * dry_run.step for client in members)
        train += sum(sum(dry_run.others.values()) for client in members if client.train)
        most["train"] = max(most["train"], train * share)
        most["val"] = max(most["val"], sum(client.val for client in members) * dry_run.case)
        most["test"] = max(most["test"], sum(client.test for client in members) * dry_run.test_case)
    files = (1 + trainers * share) * everything / EXCHANGE_BYTES_A_SECOND if placement.workers > 1 else 0.0
    validations = math.ceil(config.rounds / config.evaluate.every)
    round_ = most["train"] + files + dry_run.server * trainers * share + dry_run.checkpoint
    start = 3.0 if placement.workers > 1 else 1.0
    total = start + config.rounds * round_ + validations * most["val"] + most["test"]
    return Time(dry_run.step, round_, most["val"], most["test"], start, total)
