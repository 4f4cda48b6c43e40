"""Clients small enough to follow by hand: a model of a few weights, a loss whose gradient is given.

    north = client("north", gradient=lambda w, step: w - target, steps=3)
    first, second = rounds(method, state([1.0, -2.0]), [north, east], 2)

Training, memory, messages and the gate are the product's own, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import config
from torch import Tensor, nn

from wardround.clients import Answer, Client, Clients, Registration
from wardround.data.annotation import Annotation
from wardround.data.cases import UNLABELLED, Batch, ClientData, TensorSplit
from wardround.losses.objective import Context, Objective
from wardround.messages import Message, ServerState
from wardround.methods.base import Method
from wardround.models.base import Segmenter
from wardround.params import Params
from wardround.training.workbench import Workbench

Gradient = Callable[[Tensor, int], Tensor | Sequence[float]]


class Weights(Segmenter):
    """A network that is one vector w, with a buffer that does not learn."""

    def __init__(self, start: Sequence[float]) -> None:
        super().__init__(in_channels=1, num_outputs=1, dimensions=2, divisor=1)
        self.w = nn.Parameter(vector(start))
        self.register_buffer("buffer", torch.zeros(1, dtype=torch.float64))


@dataclass(frozen=True)
class Given(Objective):
    """A loss whose gradient at w in a step is `gradient(w, step)`."""

    gradient: Gradient = lambda w, step: w

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        w = model.get_parameter("w")
        return (w * torch.as_tensor(self.gradient(w.detach().clone(), context.step), dtype=w.dtype)).sum()

    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        return logits.flatten(1).mean(dim=1)


def vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def state(w: Sequence[float], **memory: Any) -> ServerState:
    """The server's state with these weights."""
    return ServerState(params=Params.of(Weights(w)), memory=memory, trainable=("w",))


def client(
    name: str = "north",
    *,
    gradient: Gradient,
    steps: int = 1,
    num_weights: int = 2,
    optimizer: Mapping[str, Any] | None = None,
) -> Client:
    """A client that takes so many steps a round, one training case each."""
    chosen = {"name": "sgd", "learning_rate": 0.1, **(optimizer or {})}
    plain = {"flip": 0.0, "intensity": 0.0}
    settings = config(Path("unused"), batch_size=1, optimizer=chosen, augmentation=plain)
    bench = Workbench(
        Weights([0.0] * num_weights), Given(gradient), settings.optimizer, device=torch.device("cpu")
    )
    images, labels = torch.zeros(steps, 1, 1, 1), torch.zeros(steps, 1, 1, dtype=torch.long)
    train = TensorSplit([str(n) for n in range(steps)], images, labels, [(1.0, 1.0)] * steps)
    data = ClientData(train, TensorSplit.of([]), TensorSplit.of([]))
    return Client(name, data, bench, settings, frozenset())


class Loop:
    """A transport that runs a method's tasks at these clients."""

    def __init__(self, method: Method, clients: Sequence[Client]) -> None:
        self.method = method
        self.clients = {client.name: client for client in clients}

    def deliver(
        self, task: str, round: int, messages: Mapping[str, Message], sync_state: Any
    ) -> Iterator[Answer]:
        for name, message in messages.items():
            client = self.clients[name]
            client.round = round
            reply = getattr(self.method, task)(client, message)
            num_steps = client.fitted.num_steps if client.fitted is not None else 0
            yield Answer(name, reply, num_examples=client.num_examples, num_steps=num_steps)


class Script:
    """A transport whose answers are written down."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = {answer.client: answer for answer in answers}

    def deliver(
        self, task: str, round: int, messages: Mapping[str, Message], sync_state: Any
    ) -> Iterator[Answer]:
        yield from (self.answers[name] for name in messages)


def answer(name: str, w: Sequence[float], *, examples: int = 1, steps: int = 1, **message: Any) -> Answer:
    """What a client sends that ended with these weights."""
    reply = Message(params=Params.of(Weights(w)), **message)
    return Answer(name, reply, num_examples=examples, num_steps=steps)


def federation(
    method: Method, members: Sequence[Client | Answer], *, absent: int = 0, num_weights: int = 2
) -> Clients:
    """The server's view of clients, or of answers; absent: how many more registered but do not take part."""
    tensors = {name: Params.of(Weights([0.0] * num_weights)).spec(name) for name in ("w", "buffer")}
    present = {
        member.name if isinstance(member, Client) else member.client: member.num_examples
        for member in members
    }
    everyone = {**present, **{f"absent {number}": 1 for number in range(absent)}}
    trained = [member for member in members if isinstance(member, Client)]
    transport = Loop(method, trained) if trained else Script([m for m in members if isinstance(m, Answer)])
    clients = Clients(
        transport,
        [Registration(name, count, tensors=tensors, trainable=("w",)) for name, count in everyone.items()],
        rounds=10,
        min_clients=1,
        tasks=dict.fromkeys(method.tasks, method.up),
        judge=method.check_reply,
    )
    clients.begin_round(0, list(present))
    return clients


def rounds(
    method: Method, start: ServerState, members: Sequence[Client], count: int, *, num_weights: int = 2
) -> Iterator[ServerState]:
    """The states after each of so many rounds with all these clients."""
    clients = federation(method, members, num_weights=num_weights)
    for number in range(count):
        clients.begin_round(number, [member.name for member in members])
        start = method.run_round(start, clients)
        yield start


def weights(params: Mapping[str, Tensor]) -> list[float]:
    """w of these params, or of a control variate, as plain numbers."""
    return [float(value) for value in params["w"]]


def pull_to(target: float, curvature: float = 1.0) -> Gradient:
    """The gradient of curvature/2 (w - target)²."""
    return lambda w, step: curvature * (w - target)


def always(gradient: Sequence[float]) -> Gradient:
    """The same gradient everywhere."""
    return lambda w, step: gradient


# Two weights that look at images, for objectives that see cases


class Line(Segmenter):
    """The logit of a pixel is w_0 times its brightness plus w_1."""

    def __init__(self) -> None:
        super().__init__(in_channels=1, num_outputs=1, dimensions=2, divisor=1)
        self.w = nn.Parameter(vector([0.0, 0.0]))

    def forward(self, image: Tensor) -> Tensor:
        return self.w[0] * image + self.w[1]


def looking_client(
    name: str,
    objective: Objective,
    images: Tensor,
    labels: Tensor,
    *,
    model: Segmenter | None = None,
    annotation: Annotation | None = None,
    **changes: Any,
) -> Client:
    """A client of `Line`, or another model of one w, with one step a round; a label below 0 is none. Its second
    views equal the first."""
    same = {"flip": 0.0, "intensity": 0.0, "second_view": {"intensity": 0.0}}
    optimizer = {"name": "sgd", "learning_rate": 0.5}
    settings = config(
        Path("unused"), batch_size=len(images), optimizer=optimizer, augmentation=same, **changes
    )
    bench = Workbench(model or Line(), objective, settings.optimizer, device=torch.device("cpu"))
    names, none = [str(n) for n in range(len(images))], TensorSplit.of([])
    train = TensorSplit(names, images, labels, [(1.0, 1.0)] * len(images))
    bare = int((labels < 0).flatten(1).any(dim=1).sum())
    data = ClientData(train, none, none, annotation, num_unlabelled=bare)
    return Client(name, data, bench, settings, frozenset())


def average_rounds(clients: Sequence[Client], start: Sequence[float], count: int) -> list[list[float]]:
    """w after each of so many rounds of plain averaging, every client alike."""
    params, found = Params({"w": vector(start)}), []
    for number in range(count):
        replies = []
        for member in clients:
            member.round = number
            replies.append(member.fit(start=params).params["w"])
        params = Params({"w": torch.stack(replies).mean(dim=0)})
        found.append([float(value) for value in params["w"]])
    return found


# The same in NumPy

IMAGES = torch.tensor([[[[0.5, -1.0], [2.0, 0.1]]], [[[1.5, 0.3], [-0.7, 0.9]]]], dtype=torch.float64)
LABELS = torch.tensor([[[1, 0], [1, 0]], [[1, 1], [0, 1]]])
NONE = torch.full_like(LABELS, UNLABELLED)


def sigmoid(w: Any, images: Any) -> Any:
    return 1 / (1 + np.exp(-(w[0] * images + w[1])))


def supervised(w: Any, images: Any, labels: Any) -> float:
    """Soft Dice of each case plus binary cross entropy."""
    p, losses = sigmoid(w, images), []
    for own, y in zip(p, labels, strict=True):
        dice = (2 * (own * y).sum() + 1e-5) / (own.sum() + y.sum() + 1e-5)
        losses.append(1 - dice - (y * np.log(own) + (1 - y) * np.log(1 - own)).mean())
    return float(np.mean(losses))


def descend(loss: Callable[[Any], float], w: Any, rate: float = 0.5) -> Any:
    """A step along the gradient by central differences."""
    steps = np.eye(len(w)) * 1e-5
    return w - rate * np.array([(loss(w + step) - loss(w - step)) / 2e-5 for step in steps])
