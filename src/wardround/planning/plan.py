"""plan(): what a run will take, before it is started. It trains nothing and writes no run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wardround.config import Config
from wardround.data.federation import open_federation
from wardround.data.roles import POOLED
from wardround.engine.host import network_for
from wardround.engine.transports.placement import Placement, place, present_sizes
from wardround.methods import build_method
from wardround.models.base import Segmenter
from wardround.planning.cases import ClientPlan, client_plans, counts, known, usual_shape
from wardround.planning.costs import Time, Traffic, disk_of, time_of, traffic_of
from wardround.planning.dry_run import rehearse
from wardround.planning.memory import (
    HALF,
    Memory,
    activation_bytes,
    largest_batch,
    memories,
    shared_bytes,
    tensor_bytes,
)
from wardround.training.device import Compute, choose, choose_device, set_threads


@dataclass(frozen=True)
class Problem:
    """What would not fit, and what to do about it."""

    what: str
    suggestion: str


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
