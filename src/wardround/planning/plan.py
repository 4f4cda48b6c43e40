"""make_plan(): what a run will take, before it is started. It writes no run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wardround.config import Config
from wardround.data.opening import open_federation
from wardround.data.roles import POOLED
from wardround.engine.networks import network_for
from wardround.engine.transports.placement import Placement, place, present_sizes
from wardround.methods import build_method
from wardround.models.base import Segmenter
from wardround.params import Params
from wardround.planning.costs import (
    HALF,
    ROOM,
    ClientPlan,
    Memory,
    Time,
    Traffic,
    activation_bytes,
    count_cases,
    estimate_disk,
    estimate_memory,
    estimate_shape,
    estimate_time,
    estimate_traffic,
    largest_batch,
    plan_clients,
    shared_bytes,
    with_shape,
)
from wardround.planning.dry_run import do_dry_run
from wardround.privacy.words import describe_cost
from wardround.text import format_bytes
from wardround.training.device import Compute, choose, choose_device, set_threads


@dataclass(frozen=True)
class PlanProblem:
    """What does not fit, and what to do about it."""

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
    problems: Sequence[PlanProblem] = ()
    notes: Sequence[str] = field(default_factory=tuple)

    def as_dict(self) -> dict[str, Any]:
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
            "choices": {**self.compute.as_dict(), **self.placement.as_dict()},
            "memory": [{**vars(entry), "total": entry.total, "fits": entry.fits} for entry in self.memory],
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


def make_plan(config: Config, *, measure: bool = True) -> Plan:
    """Estimate what a run will take; measure: also do a dry run, which gives time and traffic."""
    choose_device(config.compute)  # an unknown device is refused at once
    federation = open_federation(config.data, config.seed)
    method = build_method(config)
    model = network_for(config, federation)
    shape, notes = estimate_shape(config, federation)
    notes += describe_cost(config.privacy)
    clients = plan_clients(config, count_cases(config, federation), pooled=method.pooled)
    names = [client.name for client in clients if client.train]
    present = len(present_sizes(config, federation, names)) if names else 0
    share = present / max(1, len(names))
    steps = round(config.rounds * share * sum(client.steps for client in clients))

    placement = place(config, with_shape(federation, shape), [*federation.names, *([POOLED] * method.pooled)])
    compute = choose(config.compute, model, shape, config.batch_size, steps)
    dry_run = None
    if measure and names:
        set_threads(placement.threads)
        usual = [client.steps for client in clients if client.steps]
        usual_steps = max(1, round(sum(usual) / len(usual) / config.local_epochs))
        dry_run = do_dry_run(config, federation, shape, usual_steps, device=placement.devices[0])
        notes += [dry_run.note[0].upper() + dry_run.note[1:] + "."] if dry_run.note else []
        if compute.inductor:
            notes.append("The time is without compiled kernels; the run will be faster.")

    shared, everything = shared_bytes(config, model), Params(model.state_dict()).num_bytes
    memory = estimate_memory(config, federation, model, shape, clients, placement, compute, dry_run)
    traffic = estimate_traffic(config, dry_run, shared, everything, present, len(federation.names))
    disk, free = estimate_disk(config, dry_run, everything, model, clients, placement)
    planned = Plan(
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
        time=estimate_time(config, dry_run, clients, share, placement, everything, federation.prepared_shape),
        notes=notes,
    )
    return replace(planned, problems=find_problems(planned, model))


# What does not fit


def find_problems(plan: Plan, model: Segmenter) -> list[PlanProblem]:
    found = [
        PlanProblem(
            f"{name_device(entry)} needs about {format_bytes(entry.total)} of memory, and "
            f"{format_bytes(entry.free)} are free",
            suggest_remedy(plan, entry, model),
        )
        for entry in plan.memory
        if not entry.fits
    ]
    if plan.disk_bytes > plan.disk_free:
        found.append(
            PlanProblem(
                f"the run folder grows to about {format_bytes(plan.disk_bytes)}, and "
                f"{format_bytes(plan.disk_free)} are free",
                "write elsewhere with --set output=FOLDER",
            )
        )
    return found


def name_device(entry: Memory) -> str:
    count = "" if entry.processes == 1 else f" with {entry.processes} processes"
    return ("this machine" if entry.device == "cpu" else entry.device) + count


def suggest_remedy(plan: Plan, entry: Memory, model: Segmenter) -> str:
    """The first change that makes it fit, the least costly one first."""
    config, parts = plan.config, entry.parts
    room = ROOM * entry.free
    kept = parts["activations"] or 0
    others = entry.known - kept
    if entry.processes > 1 and entry.known <= room:
        fewer = max(1, min(entry.processes - 1, int((room - entry.server) // entry.known)))
        return f"use fewer workers: --set compute.workers={fewer * len(plan.memory)}"
    cases = parts["cases"] or 0
    if entry.known - cases <= room and cases > kept and config.data.federation is not None:
        return "leave the cases on disk: --set compute.resident=disk"
    batch = largest_batch(config, plan.clients)
    for smaller in (batch // 2**power for power in range(1, 12)):
        if smaller >= 1 and others + kept * smaller / batch <= room:
            return f"pass fewer cases through the network at once: --set compute.micro_batch={smaller}"
    if not config.compute.checkpointing:
        few = activation_bytes(model, (1, model.in_channels, *plan.shape), checkpointing=True)
        factor = HALF if plan.compute.autocast is not None else 1.0
        if few is not None and others + few * factor <= room:
            return (
                "recompute activations instead of keeping them: "
                "--set compute.checkpointing=true --set compute.micro_batch=1"
            )
    halved = [max(16, side // 2) for side in plan.shape]
    if config.data.federation is not None and kept > others:
        return f"train on smaller patches: --set data.patch={str(halved).replace(' ', '')}"
    return "use smaller images (size) or a smaller network (model.base_filters)"
