"""plan(): what a run will take, before it is started. It trains nothing and writes no run folder."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from wardround.config import Config
from wardround.data.federation import Federation, ScanSummary
from wardround.data.opening import open_federation
from wardround.data.phantom import cases as phantom
from wardround.data.roles import POOLED
from wardround.data.serving.resident import DEVICE_SHARE
from wardround.engine.host import network_for
from wardround.engine.transports.placement import EXCHANGE_BYTES_A_SECOND, Placement, place, present_sizes
from wardround.engine.transports.workers import deal
from wardround.machine import free_memory
from wardround.methods import build_method, build_objective
from wardround.models.base import Segmenter
from wardround.params import Params
from wardround.planning.memory import (
    HALF,
    PROCESS_BYTES,
    Memory,
    activation_bytes,
    case_bytes,
    optimizer_bytes,
)
from wardround.planning.rehearsal import Rehearsal, rehearse
from wardround.training.device import Compute, choose, choose_device, set_threads

__all__ = ["ClientPlan", "Plan", "Problem", "plan"]


@dataclass(frozen=True)
class ClientPlan:
    """One client: its cases, and its training steps in one round."""

    name: str
    train: int
    val: int
    test: int
    steps: int


@dataclass(frozen=True)
class Problem:
    """What would not fit, and what to do about it."""

    what: str
    suggestion: str


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


@dataclass(frozen=True)
class Time:
    """Seconds, from the rehearsal: of one training step, one round, the test at the end, and all."""

    step: float
    round: float
    validation: float
    test: float
    start: float
    total: float


@dataclass(frozen=True)
class Plan:
    """What a run will take."""

    config: Config
    title: str
    parameters: int
    model_bytes: int
    shared_bytes: int
    shape: tuple[int, ...]
    clients: Sequence[ClientPlan]
    present: int
    steps: int
    compute: Compute
    placement: Placement
    memory: Sequence[Memory]
    traffic: Traffic
    disk_bytes: int
    disk_free: int
    time: Time | None
    problems: Sequence[Problem] = ()
    notes: Sequence[str] = field(default_factory=tuple)

    def as_dict(self) -> dict[str, Any]:
        """For a program."""
        traffic, time = self.traffic, self.time
        return {
            "name": self.config.name,
            "method": self.config.method.get("name", "fedavg"),
            "rounds": self.config.rounds,
            "parameters": self.parameters,
            "model_bytes": self.model_bytes,
            "shared_bytes": self.shared_bytes,
            "batch": [self.config.batch_size, *self.shape],
            "clients": [vars(client) for client in self.clients],
            "clients_a_round": self.present,
            "steps": self.steps,
            "choices": {**self.compute.facts(), **self.placement.facts()},
            "memory": [
                {
                    "device": entry.device,
                    "processes": entry.processes,
                    "server": entry.server,
                    "parts": dict(entry.parts),
                    "measured": entry.measured,
                    "total": entry.total,
                    "free": entry.free,
                    "fits": entry.fits,
                }
                for entry in self.memory
            ],
            "traffic": {
                "tasks": {task: {"down": d, "up": u} for task, (d, u) in traffic.parts.items()},
                "round_down": traffic.down,
                "round_up": traffic.up,
                "setup": sum(traffic.setup),
                "total": traffic.total,
                "measured": traffic.measured,
            },
            "disk": {"bytes": self.disk_bytes, "free": self.disk_free},
            "time": None if time is None else vars(time),
            "problems": [vars(problem) for problem in self.problems],
            "notes": list(self.notes),
        }


def plan(config: Config, *, calibrate: bool = True) -> Plan:
    """Look at a run before it is started; calibrate: rehearse some steps to know its time."""
    choose_device(config.compute)  # refused at once
    federation = open_federation(config.data, config.seed)
    method = build_method(config)
    model = network_for(config, federation)
    shape, notes = usual_shape(config, federation)
    clients = client_plans(config, counts(config, federation), pooled=method.pooled)
    names = [client.name for client in clients if client.train]
    present = len(present_sizes(config, federation, names)) if names else 0
    share = present / max(1, len(names))
    steps = round(config.rounds * share * sum(client.steps for client in clients))

    placement = place(config, known(federation, shape), [*federation.names, *([POOLED] * method.pooled)])
    compute = choose(config.compute, model, shape, config.batch_size, steps)
    rehearsal = None
    if calibrate and names:
        set_threads(placement.threads)
        usual = [client.steps for client in clients if client.steps]
        usual_steps = max(1, round(sum(usual) / len(usual) / config.local_epochs))
        rehearsal = rehearse(config, federation, shape, usual_steps, device=placement.devices[0])
        notes += [rehearsal.note[0].upper() + rehearsal.note[1:] + "."] if rehearsal.note else []
        if compute.inductor:
            notes.append(
                "The time is without the kernels that will be made for the network, which are faster."
            )

    shared, everything = shared_bytes(config, model), tensor_bytes(model.state_dict())
    memory = memories(config, federation, model, shape, clients, placement, compute, rehearsal)
    traffic = traffic_of(config, rehearsal, shared, everything, present, len(federation.names))
    disk, free = disk_of(config, rehearsal, everything, model, clients, placement)
    made = Plan(
        config=config,
        title=method.title,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        model_bytes=everything,
        shared_bytes=shared,
        shape=tuple(shape),
        clients=clients,
        present=present,
        steps=steps,
        compute=compute,
        placement=placement,
        memory=memory,
        traffic=traffic,
        disk_bytes=disk,
        disk_free=free,
        time=time_of(config, rehearsal, clients, share, placement, everything),
        notes=notes,
    )
    return replace(made, problems=problems(made, model))


# Cases


def usual_shape(config: Config, federation: Federation) -> tuple[tuple[int, ...], list[str]]:
    """Voxels of what is trained on; real cases that are not prepared yet are judged by the first image."""
    if config.data.patch is not None:
        return tuple(config.data.patch), []
    if config.data.federation is not None:
        from wardround.data.serving.loading import RealData, prepared_shape

        data = RealData(config.data.federation, config.data)
        usual = prepared_shape(data._first_image(), data.file.prepare)
        if data.file.prepare.size is not None:
            return tuple(usual), []
        return tuple(data._usual_patch), [
            f"The shape is judged by the first image, {'x'.join(map(str, usual))} when prepared; cases of "
            "different shapes are trained on in patches."
        ]
    return config.data.phantom.shape, []


def known(federation: Federation, shape: Sequence[int]) -> Federation:
    """The federation, which says its shape without preparing anything."""
    return replace(federation, summarise_scans=lambda: ScanSummary(None, tuple(shape)))


def counts(config: Config, federation: Federation) -> dict[str, tuple[int, int, int]]:
    """Training, validation and test cases of each client."""
    if config.data.federation is None:
        made = config.data.phantom
        return {name: phantom.split_sizes(made, name) for name in federation.names}
    from wardround.data.serving.loading import RealData

    listing = RealData(config.data.federation, config.data).listing
    splits = {n: Counter(entry.split or "train" for entry in listing.of(n)) for n in federation.names}
    return {n: (found["train"], found["val"], found["test"]) for n, found in splits.items()}


def client_plans(
    config: Config, counted: Mapping[str, tuple[int, int, int]], *, pooled: bool
) -> list[ClientPlan]:
    def steps(train: int) -> int:
        return config.local_epochs * math.ceil(train / config.batch_size)

    if not pooled:
        return [ClientPlan(name, *cases, steps(cases[0])) for name, cases in counted.items()]
    judged = [ClientPlan(name, 0, val, test, 0) for name, (_, val, test) in counted.items()]
    train = sum(cases[0] for cases in counted.values())
    return [*judged, ClientPlan(POOLED, train, 0, 0, steps(train))]


# Memory


def memories(
    config: Config,
    federation: Federation,
    model: Segmenter,
    shape: Sequence[int],
    clients: Sequence[ClientPlan],
    placement: Placement,
    compute: Compute,
    rehearsal: Rehearsal | None,
) -> list[Memory]:
    """Each device with the processes on it; of processes, the one with most to hold counts."""
    parameters = tensor_bytes(model.state_dict())
    trainable = tensor_bytes(Params.trainable(model))
    needs = build_method(config).needs | build_objective(config).needs
    size = largest_batch(config, clients)
    kept = activation_bytes(
        model, (size, model.in_channels, *shape), checkpointing=config.compute.checkpointing
    )
    if kept is not None and compute.autocast is not None:
        kept = int(HALF * kept)
    one = case_bytes(federation.in_channels, shape)
    cases = {client.name: client.train + client.val + client.test for client in clients}
    hands = deal(federation.sizes(list(cases)), placement.workers)
    found = []
    for device in dict.fromkeys(placement.devices):
        on_gpu = device != "cpu"
        free = torch.cuda.mem_get_info(torch.device(device))[0] if on_gpu else free_memory()
        here = [hand for hand, where in zip(hands, placement.devices, strict=False) if where == device]
        held = [one * sum(cases[name] for name in hand) for hand in here]
        data = max(held, default=0)
        if (
            on_gpu and config.compute.resident != "device"
        ):  # each client's cases move only where there is room
            data = sum(min(one * cases[n], int(DEVICE_SHARE * free)) for n in max(here, key=len, default=[]))
            data = 0 if config.compute.resident in ("host", "disk") else data
        parts: dict[str, int | None] = {
            "process": PROCESS_BYTES,
            "parameters": parameters,
            "gradients": trainable,
            "optimizer": optimizer_bytes(config.optimizer, trainable),
            "references": parameters * len(needs & {"global", "previous"}),
            "messages": 2 * parameters,
            "activations": kept,
            "cases": data,
        }
        peak = rehearsal.peak if rehearsal is not None and on_gpu else None
        server = PROCESS_BYTES + 3 * parameters if placement.workers > 1 and not on_gpu else 0
        found.append(Memory(device, parts, max(1, len(here)), free, server, peak))
    return found


def largest_batch(config: Config, clients: Sequence[ClientPlan]) -> int:
    """Cases that go through the network at once, at most."""
    whole = min(config.batch_size, max((client.train for client in clients), default=1))
    return max(1, min(config.compute.micro_batch or whole, whole))


def tensor_bytes(tensors: Mapping[str, torch.Tensor] | Params) -> int:
    return sum(tensors[name].nbytes for name in tensors)


def shared_bytes(config: Config, model: Segmenter) -> int:
    """Of the tensors that travel."""
    travelling = set(build_method(config).shared(model)) - set(build_objective(config).local_names(model))
    return sum(tensor.nbytes for name, tensor in model.state_dict().items() if name in travelling)


# Traffic and disk


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


# What does not fit


def problems(made: Plan, model: Segmenter) -> list[Problem]:
    """Each in a sentence, with what to do."""
    found = [
        Problem(
            f"{where(entry)} needs about {size(entry.total)} of memory, and {size(entry.free)} are free",
            remedy(made, entry, model),
        )
        for entry in made.memory
        if not entry.fits
    ]
    if made.disk_bytes > made.disk_free:
        found.append(
            Problem(
                f"the run folder grows to about {size(made.disk_bytes)}, and {size(made.disk_free)} are free",
                "write elsewhere with --set output=FOLDER",
            )
        )
    return found


def where(entry: Memory) -> str:
    count = "" if entry.processes == 1 else f" with {entry.processes} processes"
    return ("this machine" if entry.device == "cpu" else entry.device) + count


def remedy(made: Plan, entry: Memory, model: Segmenter) -> str:
    """The first change that makes it fit, the least costly one first."""
    config, parts = made.config, entry.parts
    room = 0.9 * entry.free
    kept = parts["activations"] or 0
    others = entry.known - kept
    if entry.processes > 1 and entry.known <= room:
        fewer = max(1, min(entry.processes - 1, int((room - entry.server) // entry.known)))
        return f"use fewer workers: --set compute.workers={fewer * len(made.memory)}"
    cases = parts["cases"] or 0
    if entry.known - cases <= room and cases > kept and config.data.federation is not None:
        return "leave the cases on disk: --set compute.resident=disk"
    batch = largest_batch(config, made.clients)
    for smaller in (batch // 2**power for power in range(1, 12)):
        if smaller >= 1 and others + kept * smaller / batch <= room:
            return f"let fewer cases through the network at once: --set compute.micro_batch={smaller}"
    if not config.compute.checkpointing:
        few = activation_bytes(model, (1, model.in_channels, *made.shape), checkpointing=True)
        factor = HALF if made.compute.autocast is not None else 1.0
        if few is not None and others + few * factor <= room:
            return (
                "compute activations again instead of keeping them: "
                "--set compute.checkpointing=true --set compute.micro_batch=1"
            )
    halved = [max(16, side // 2) for side in made.shape]
    if config.data.federation is not None and kept > others:
        return f"train on smaller patches: --set data.patch={str(halved).replace(' ', '')}"
    return "take smaller images (size) or a smaller network (model.base_filters)"


def size(num_bytes: float) -> str:
    """Bytes for people.

    >>> size(512), size(1.5 * 2**20), size(3 * 2**30)
    ('512 B', '1.5 MB', '3.0 GB')
    """
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GB"
