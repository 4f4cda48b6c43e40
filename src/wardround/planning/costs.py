"""What a run costs beside memory: bytes sent, bytes on disk, and seconds."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wardround.config import Config
from wardround.engine.transports.placement import EXCHANGE_BYTES_A_SECOND, Placement
from wardround.engine.transports.workers import deal
from wardround.methods import build_method, build_objective
from wardround.models.base import Segmenter
from wardround.params import Params
from wardround.planning.cases import ClientPlan
from wardround.planning.dry_run import Rehearsal
from wardround.planning.memory import optimizer_bytes, tensor_bytes

# Traffic and disk


@dataclass(frozen=True)
class Traffic:
    """Bytes between the server and all clients; measured: seen in the rehearsal, else estimated.

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


def traffic_of(
    config: Config, rehearsal: Rehearsal | None, shared: int, everything: int, present: int, hospitals: int
) -> Traffic:
    """Bytes of one round: the method's exchanges, and the model that goes out to be validated."""
    method = build_method(config)
    measured = rehearsal is not None and rehearsal.down is not None and rehearsal.up is not None
    setup = (0, 0)
    if measured:
        assert rehearsal is not None and rehearsal.down is not None and rehearsal.up is not None
        up = rehearsal.up
        parts = {task: (down * present, up.get(task, 0) * present) for task, down in rehearsal.down.items()}
        setup = (rehearsal.setup[0] * present, rehearsal.setup[1] * present)
    else:
        parts = {"train": (everything * present, shared * present)}
        parts |= {task: (everything * present, 0) for task in method.tasks if task != "train"}
    parts["validation"] = (everything * hospitals // config.evaluate.every, 0)
    return Traffic(parts, config.rounds, setup, measured)


def disk_of(
    config: Config,
    rehearsal: Rehearsal | None,
    everything: int,
    model: Segmenter,
    clients: Sequence[ClientPlan],
    placement: Placement,
) -> tuple[int, int]:
    """Bytes in the run folder at its fullest, and free where it will be."""
    if rehearsal is not None and rehearsal.state_bytes is not None and rehearsal.memory_bytes is not None:
        state, memory = rehearsal.state_bytes, rehearsal.memory_bytes  # two rounds' memories
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
    """Seconds, from the rehearsal: of one training step, one round, the test at the end, and all."""

    step: float
    round: float
    validation: float
    test: float
    start: float
    total: float


def time_of(
    config: Config,
    rehearsal: Rehearsal | None,
    clients: Sequence[ClientPlan],
    share: float,
    placement: Placement,
    everything: int,
) -> Time | None:
    """From the rehearsal's seconds: the busiest worker decides."""
    if rehearsal is None:
        return None
    by_name = {client.name: client for client in clients}
    hands = deal({c.name: c.train + c.val + c.test for c in clients}, placement.workers)
    trainers = sum(1 for client in clients if client.train)
    most = {"train": 0.0, "val": 0.0, "test": 0.0}
    for hand in hands:
        members = [by_name[name] for name in hand]
        train = sum(client.steps * rehearsal.step for client in members)
        train += sum(sum(rehearsal.others.values()) for client in members if client.train)
        most["train"] = max(most["train"], train * share)
        most["val"] = max(most["val"], sum(client.val for client in members) * rehearsal.case)
        most["test"] = max(most["test"], sum(client.test for client in members) * rehearsal.test_case)
    files = (1 + trainers * share) * everything / EXCHANGE_BYTES_A_SECOND if placement.workers > 1 else 0.0
    validations = math.ceil(config.rounds / config.evaluate.every)
    round_ = most["train"] + files + rehearsal.server * trainers * share + rehearsal.checkpoint
    start = 3.0 if placement.workers > 1 else 1.0
    total = start + config.rounds * round_ + validations * most["val"] + most["test"]
    return Time(rehearsal.step, round_, most["val"], most["test"], start, total)
