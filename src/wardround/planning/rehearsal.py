"""A short rehearsal: the real method and network on a few random cases, to see time, traffic and disk.

Two rounds through the engine's own clients, gate and checkpoints, in a temporary folder: what a method sends,
in as many exchanges as it likes, is measured instead of guessed.
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
from wardround.config import Config
from wardround.data.cases import Case, ClientData, TensorSplit
from wardround.data.federation import Federation, Seen
from wardround.data.roles import NOT_HOSPITALS, POOLED, PROXY
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.host import Host
from wardround.engine.records import Egress
from wardround.engine.transports.local import InProcess, Spilling
from wardround.messages import Message, ServerState
from wardround.methods import build_method
from wardround.metrics import METRICS
from wardround.seeding import seed_everything

BUDGET = 8.0  # seconds of training, about
CLIENTS = 4  # as many take part, of those there are
JUDGED = 4  # cases a client is judged on


@dataclass(frozen=True)
class Rehearsal:
    """What two rounds showed.

    step: seconds of one training step with all that belongs to it; case, test_case: of judging a case in a
    round and at the end; others: seconds of a client's further tasks in a round, by name; server: seconds a
    reply, and `checkpoint` a round; down, up: bytes a client and round, by task; setup: bytes a client before
    the first round; memory_bytes: on a client's disk; state_bytes: on the server's; peak: bytes on a GPU.
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


def rehearse(
    config: Config,
    federation: Federation,
    shape: Sequence[int],
    steps: int,
    *,
    device: str,
    budget: float = BUDGET,
) -> Rehearsal:
    """Two rounds of up to four clients with random cases; steps: of a usual client in one epoch."""
    compute = config.compute.model_copy(update={"device": device})
    if compute.compile in ("auto", "inductor", "full"):  # making kernels takes a minute, which is too long
        compute = compute.model_copy(update={"compile": "off"})
    config = config.model_copy(update={"local_epochs": 1, "compute": compute, "min_clients": 1})
    stage = random_federation(federation, shape, config.batch_size)
    with tempfile.TemporaryDirectory(prefix="wardround-plan-") as folder, silence():
        return Theatre(config, stage, Path(folder)).play(steps, budget)


@contextmanager
def silence() -> Iterator[None]:
    """What happens to random cases is no news."""
    log = logging.getLogger("wardround")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


class Theatre:
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
        self.clients = self._registered()

    def _registered(self) -> Clients:
        """The server's view of the clients as they are now."""
        transport = InProcess(self.host, Spilling(self.folder / "exchange"))
        return Clients(
            transport,
            transport.register(),
            rounds=self.config.rounds,
            min_clients=1,
            tasks=dict.fromkeys(self.method.tasks, self.method.up),
            judge=self.method.complaint,
            on_reply=self.egress.record,
        )

    def play(self, steps: int, budget: float) -> Rehearsal:
        if self.host.bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.host.bench.device)
        first = self._one_step()
        if first > budget:
            return Rehearsal(
                first, peak=self._peak(), note="one step alone took longer than the time allowed"
            )
        first = min(first, self._one_step())  # the first one also reserves memory
        try:
            return self._two_rounds(first, steps, budget)
        except Exception as error:
            note = f"the method could not be rehearsed ({error}), so only its training step was timed"
            return Rehearsal(first, peak=self._peak(), note=note)
        finally:
            self.egress.close()

    def _one_step(self) -> float:
        """Seconds of one plain training step."""
        client = self.host.client(self.clients.trainable[0])
        start = self.method.start(self.host.bench.model).params
        before = client.data
        client.data = repeated(before, self.config.batch_size)
        seed_everything(self.config.seed, "rehearsal")
        started = time.perf_counter()
        run_to_completion(lambda: client.fit(start))
        self._wait()
        client.data, client.memory, client.fitted = before, {}, None
        return time.perf_counter() - started

    def _two_rounds(self, first: float, steps: int, budget: float) -> Rehearsal:
        present = self.clients.trainable
        count = int(max(1, min(steps, budget / 2 / (first * len(present)))))
        self.clients.begin_round(-1, present)
        state = self.method.prepare(self.method.start(self.host.bench.model), self.clients)
        setup = traffic(self.clients)
        each = (sum(setup[0].values()), sum(setup[1].values()))
        state, _, _ = self._round(state, 0)  # the second round is the usual one: memories are filled
        for name in present:
            client = self.host.client(name)
            client.data = repeated(client.data, count * self.config.batch_size)
        self.clients = self._registered()
        state, wall, seconds = self._round(state, 1)
        down, up = traffic(self.clients)
        started = time.perf_counter()
        Checkpoints(self.folder / "checkpoints").save(1, state.params, state.memory, {})
        checkpoint = time.perf_counter() - started
        quick = [name for name in self.config.evaluate.metrics if not METRICS[name].is_surface]
        quick = list(dict.fromkeys([self.config.evaluate.select, *quick]))
        return Rehearsal(
            step=seconds.get("train", 0.0) / len(present) / count,
            case=self._judging(state, quick),
            test_case=self._judging(state, self.config.evaluate.metrics),
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

    def _round(self, state: ServerState, number: int) -> tuple[ServerState, float, dict[str, float]]:
        """One round: the state after it, its seconds, and the clients' seconds by task."""
        self.clients.begin_round(number, self.clients.trainable)
        started = time.perf_counter()
        state = self.method.run_round(state, self.clients)
        self._wait()
        wall = time.perf_counter() - started
        seconds: dict[str, float] = {}
        for exchange in self.clients.exchanges:
            if exchange.lost:
                raise RuntimeError(next(iter(exchange.lost.values())))
            seconds[exchange.task] = seconds.get(exchange.task, 0.0) + sum(exchange.seconds.values())
        return state, wall, seconds

    def _judging(self, state: ServerState, metrics: Sequence[str]) -> float:
        """Seconds a case."""
        name = next(name for name in self.clients.names if name not in NOT_HOSPITALS)
        message = Message(params=state.params, scalars={"split": "val", "metrics": list(metrics)})
        answer = self.host.run(name, "evaluate", 1, message)
        return answer.seconds / max(1, len(self.host.client(name).data.val))

    def _wait(self) -> None:
        if self.host.bench.device.type == "cuda":
            torch.cuda.synchronize(self.host.bench.device)

    def _peak(self) -> int | None:
        device = self.host.bench.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def traffic(clients: Clients) -> tuple[dict[str, int], dict[str, int]]:
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


def random_federation(like: Federation, shape: Sequence[int], batch_size: int) -> Federation:
    """Up to four clients with one batch each, of the same shape, channels and classes as the real cases."""
    return Federation(
        names=list(like.names)[:CLIENTS],
        counts=like.counts,
        dimensions=like.dimensions,
        in_channels=like.in_channels,
        num_classes=like.num_classes,
        regions=like.regions,
        load_one=lambda name: random_client(like, shape, batch_size),
        proxy=like.proxy,
        look_back=lambda: Seen(None, tuple(shape)),
    )


def random_client(like: Federation, shape: Sequence[int], count: int) -> ClientData:
    draw = torch.Generator().manual_seed(0)
    cases = [random_case(like, shape, draw, number) for number in range(max(count, JUDGED))]
    return ClientData(TensorSplit.of(cases[:count]), TensorSplit.of(cases[:JUDGED]), TensorSplit.of([]))


def random_case(like: Federation, shape: Sequence[int], draw: torch.Generator, number: int) -> Case:
    """Noise, with a ball in the middle that is labelled: inner shells are higher classes."""
    image = torch.randn(like.in_channels, *shape, generator=draw)
    axes = [torch.linspace(-1, 1, side) for side in shape]
    radius = torch.stack(torch.meshgrid(*axes, indexing="ij")).square().sum(dim=0).sqrt()
    shells = like.num_classes - 1
    label = ((0.5 - radius).clamp(min=0) * shells / 0.5).ceil().to(torch.uint8).clamp(max=shells)
    image += label
    return Case(f"case-{number}", image, label, (1.0,) * len(shape))


def repeated(data: ClientData, size: int) -> ClientData:
    """The same client with so many training cases, over and over the same few."""
    train = data.train
    assert isinstance(train, TensorSplit)
    index = torch.arange(size, device=train.images.device) % len(train)
    names = [train.names[int(place)] for place in index]
    spacings = [train.spacing(int(place)) for place in index]
    return ClientData(
        TensorSplit(names, train.images[index], train.labels[index], spacings), data.val, data.test
    )
