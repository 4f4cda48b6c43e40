"""A dry run: the real method and network on a few random cases, to measure time, traffic and disk.

It takes two rounds through the engine's own clients, gate and checkpoints, in a temporary folder.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from wardround.clients import Clients
from wardround.clients.client import run_to_completion
from wardround.config import CheckpointSettings, Config
from wardround.data.cases import Case, ClientData, TensorSplit
from wardround.data.federation import Federation, ScanSummary
from wardround.data.roles import NOT_HOSPITALS, POOLED, PROXY
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.egress import Egress
from wardround.engine.host import Host
from wardround.engine.transports.local import InProcess, Spilling
from wardround.messages import Message, ServerState
from wardround.methods import build_method
from wardround.metrics import METRICS
from wardround.seeding import seed_everything

BUDGET = 8.0  # seconds of training, about
CLIENTS = 4  # as many take part, of those there are
VALIDATED = 4  # validation cases of a client


@dataclass(frozen=True)
class DryRun:
    """What two rounds measured.

    step: seconds of one training step, overheads included; case, test_case: seconds to evaluate a case in a
    round and at the end; others: seconds of a client's further tasks in a round, by name; server: seconds per
    reply; checkpoint: seconds per round; down, up: bytes per client and round, by task; setup: bytes per
    client before the first round; memory_bytes: on a client's disk; state_bytes: on the server's; peak: bytes
    on a GPU; note: what could not be measured, as a sentence.
    """

    step: float
    case: float = 0.0
    test_case: float = 0.0
    others: Mapping[str, float] = field(default_factory=dict)
    server: float = 0.0
    checkpoint: float = 0.0
    down: Mapping[str, int] | None = None
    up: Mapping[str, int] | None = None
    setup: tuple[int, int] = (0, 0)
    memory_bytes: int | None = None
    state_bytes: int | None = None
    peak: int | None = None
    note: str = ""


def do_dry_run(
    config: Config,
    federation: Federation,
    shape: Sequence[int],
    steps: int,
    *,
    device: str,
    budget: float = BUDGET,
) -> DryRun:
    """Two rounds of up to four clients with random cases; steps: at most, of a client in the second."""
    compute = config.compute.model_copy(update={"device": device})
    if compute.compile in ("auto", "inductor", "full"):  # compiling takes a minute
        compute = compute.model_copy(update={"compile": "off"})
    config = config.model_copy(
        update={
            "local_epochs": 1,
            "local_steps": None,
            "compute": compute,
            "min_clients": 1,
            "checkpoint": CheckpointSettings(keep=1),
        }
    )
    cases = make_random_federation(federation, shape, config.batch_size)
    with tempfile.TemporaryDirectory(prefix="wardround-plan-") as folder, silence_logs():
        return DryRunner(config, cases, Path(folder)).run(steps, budget)


@contextmanager
def silence_logs() -> Iterator[None]:
    """Warnings about random cases tell a user nothing."""
    log = logging.getLogger("wardround")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


class DryRunner:
    """A host with random cases, and the server's side of a run."""

    def __init__(self, config: Config, federation: Federation, folder: Path) -> None:
        method = build_method(config)
        names = [*federation.names, *([POOLED] if method.pooled else [])]
        if "proxy" in method.needs and federation.proxy is not None:
            names.append(PROXY)
        self.config, self.federation, self.folder, self.method = config, federation, folder, method
        (folder / "exchange").mkdir()
        self.host = Host(config, folder / "clients", names, federation=federation)
        self.egress = Egress(folder / "egress.jsonl")
        self.clients = self._register()

    def _register(self) -> Clients:
        """The server's view of the clients as they are now."""
        transport = InProcess(self.host, Spilling(self.folder / "exchange"))
        return Clients(
            transport,
            transport.register(),
            rounds=self.config.rounds,
            min_clients=1,
            tasks=dict.fromkeys(self.method.tasks, self.method.up),
            judge=self.method.check_reply,
            on_reply=self.egress.record,
        )

    def run(self, steps: int, budget: float) -> DryRun:
        if self.host.bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.host.bench.device)
        first = self._time_step()
        if first > budget:
            return DryRun(first, peak=self._peak(), note="one step alone took longer than the time allowed")
        first = min(first, self._time_step())  # the first one also reserves memory
        try:
            return self._run_two_rounds(first, steps, budget)
        except Exception as error:
            note = f"the dry run of the method failed ({error}), so only its training step was timed"
            return DryRun(first, peak=self._peak(), note=note)
        finally:
            self.egress.close()

    def _time_step(self) -> float:
        """Seconds of one plain training step."""
        client = self.host.client(self.clients.trainable[0])
        start = self.method.start(self.host.bench.model).params
        before = client.data
        client.data = repeat_cases(before, self.config.batch_size)
        seed_everything(self.config.seed, "dry run")
        started = time.perf_counter()
        run_to_completion(lambda: client.fit(start))
        self._synchronize()
        client.data, client.memory, client.fitted = before, {}, None
        return time.perf_counter() - started

    def _run_two_rounds(self, first: float, steps: int, budget: float) -> DryRun:
        present = self.clients.trainable
        count = int(max(1, min(steps, budget / 2 / (first * len(present)))))
        self.clients.begin_round(-1, present)
        state = self.method.prepare(self.method.start(self.host.bench.model), self.clients)
        setup = count_traffic(self.clients)
        each = (sum(setup[0].values()), sum(setup[1].values()))
        state, _, _ = self._run_round(state, 0)  # the second round is the usual one: memories are filled
        for name in present:
            client = self.host.client(name)
            client.data = repeat_cases(client.data, count * self.config.batch_size)
        self.clients = self._register()
        state, wall, seconds = self._run_round(state, 1)
        down, up = count_traffic(self.clients)
        started = time.perf_counter()
        Checkpoints(self.folder / "checkpoints").snapshot(1, state.params, state.memory, {}).write()
        checkpoint = time.perf_counter() - started
        quick = [name for name in self.config.evaluate.metrics if not METRICS[name].is_surface]
        quick = list(dict.fromkeys([self.config.evaluate.select, *quick]))
        return DryRun(
            step=seconds.get("train", 0.0) / len(present) / count,
            case=self._time_evaluation(state, quick),
            test_case=self._time_evaluation(state, self.config.evaluate.metrics),
            others={task: took / len(present) for task, took in seconds.items() if task != "train"},
            server=max(0.0, wall - sum(seconds.values())) / len(present),
            checkpoint=checkpoint,
            down=down,
            up=up,
            setup=each,
            memory_bytes=folder_bytes(self.folder / "clients") // len(present),
            state_bytes=folder_bytes(self.folder / "checkpoints"),
            peak=self._peak(),
        )

    def _run_round(self, state: ServerState, number: int) -> tuple[ServerState, float, dict[str, float]]:
        """One round: the state after it, its seconds, and the clients' seconds by task."""
        self.egress.begin(number)  # replies on the disk are hashed before the round removes them
        self.clients.begin_round(number, self.clients.trainable)
        started = time.perf_counter()
        state = self.method.run_round(state, self.clients)
        self._synchronize()
        wall = time.perf_counter() - started
        seconds: dict[str, float] = {}
        for exchange in self.clients.exchanges:
            if exchange.lost:
                raise RuntimeError(next(iter(exchange.lost.values())))
            seconds[exchange.task] = seconds.get(exchange.task, 0.0) + sum(exchange.seconds.values())
        return state, wall, seconds

    def _time_evaluation(self, state: ServerState, metrics: Sequence[str]) -> float:
        """Seconds per case."""
        name = next(name for name in self.clients.names if name not in NOT_HOSPITALS)
        message = Message(params=state.params, scalars={"split": "val", "metrics": list(metrics)})
        answer = self.host.run(name, "evaluate", 1, message)
        return answer.seconds / max(1, len(self.host.client(name).data.val))

    def _synchronize(self) -> None:
        if self.host.bench.device.type == "cuda":
            torch.cuda.synchronize(self.host.bench.device)

    def _peak(self) -> int | None:
        device = self.host.bench.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def count_traffic(clients: Clients) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes down and up by task, for one client of the round."""
    down: dict[str, int] = {}
    up: dict[str, int] = {}
    for exchange in clients.exchanges:
        for sizes, total in ((exchange.bytes_down, down), (exchange.bytes_up, up)):
            total[exchange.task] = total.get(exchange.task, 0) + sum(sizes.values())
    count = max(1, len(clients.present))
    return {task: b // count for task, b in down.items()}, {task: b // count for task, b in up.items()}


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# Random cases


def make_random_federation(like: Federation, shape: Sequence[int], batch_size: int) -> Federation:
    """Up to four clients with one batch each, of the same shape, channels and classes as the real cases."""
    return Federation(
        names=list(like.names)[:CLIENTS],
        counts=like.counts,
        dimensions=like.dimensions,
        in_channels=like.in_channels,
        num_classes=like.num_classes,
        regions=like.regions,
        load_one=lambda name: make_random_client(like, shape, batch_size),
        proxy=like.proxy,
        summarise_scans=lambda: ScanSummary(None, tuple(shape)),
    )


def make_random_client(like: Federation, shape: Sequence[int], count: int) -> ClientData:
    draw = torch.Generator().manual_seed(0)
    cases = [make_random_case(like, shape, draw, number) for number in range(max(count, VALIDATED))]
    return ClientData(TensorSplit.of(cases[:count]), TensorSplit.of(cases[:VALIDATED]), TensorSplit.of([]))


def make_random_case(like: Federation, shape: Sequence[int], draw: torch.Generator, number: int) -> Case:
    """Noise with a labelled ball in the middle; inner shells are higher classes."""
    image = torch.randn(like.in_channels, *shape, generator=draw)
    axes = [torch.linspace(-1, 1, side) for side in shape]
    radius = torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(dim=0).sqrt()
    shells = like.num_classes - 1
    label = ((0.5 - radius).clamp(min=0) * shells / 0.5).ceil().to(torch.uint8).clamp(max=shells)
    image += label
    return Case(f"case-{number}", image, label, (1.0,) * len(shape))


def repeat_cases(data: ClientData, size: int) -> ClientData:
    """The client with this many training cases: its own, repeated."""
    train = data.train
    assert isinstance(train, TensorSplit)
    index = torch.arange(size, device=train.images.device) % len(train)
    names = [train.names[int(place)] for place in index]
    spacings = [train.spacing(int(place)) for place in index]
    repeated = TensorSplit(names, train.images[index], train.labels[index], spacings)
    return ClientData(repeated, data.val, data.test)
