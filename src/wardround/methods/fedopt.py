"""FedOpt: Adaptive Federated Optimization. FedAdam, FedYogi, FedAdagrad, and the older FedAvgM.

Reddi et al., ICLR 2021. https://arxiv.org/abs/2003.00295 (Algorithm 2)
FedAvgM: Hsu, Qi and Brown, arXiv 2019. https://arxiv.org/abs/1909.06335

The mean change of the clients' models is taken for a gradient, and the server has an optimizer of its own
for it: momentum, or a step divided coordinate by coordinate by the size of earlier changes.

Symbols: x global model; Δ weighted mean of the clients' changes; m, v first and second moments of Δ;
η server_lr; β₁ beta, β₂ beta2; τ how strongly steps adapt (smaller is stronger).
What leaves a client: its model.

Differs: clients are weighted by training cases, as in FedAvg; Algorithm 2 has the plain mean.
Differs: v starts at 0, not at τ² or more: the denominator √v + τ is positive all the same.
Differs: only tensors that learn are stepped; running statistics and counters follow FedAvg.
Differs: `decay_power` lets the server's rate fall as polynomial schedules do; the paper keeps it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from wardround.aggregation.mean import average_update
from wardround.clients import Clients
from wardround.messages import Message, ServerState
from wardround.methods.base import Method
from wardround.params import Params

Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Moments = dict[str, Tensor]


@dataclass(frozen=True)
class ServerOptimizer(Method):
    """Steps along the mean change of the clients' models with an optimizer at the server."""

    kind = "server optimizer"
    moments: ClassVar[tuple[str, ...]] = ("m", "v")  # what the server remembers of every tensor

    decay_power: Annotated[float, Field(ge=0)] = 0.0

    @property
    def is_fedavg(self) -> bool:
        """Whether the step is the mean change itself, so that nothing need be computed or remembered."""
        return False

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = clients.ask("train", Message(params=state.params))
        weights = self.weigh(state, replies)
        average = self.average(state, replies, weights)
        if self.is_fedavg:
            return state.next(params=average, notes=self.notes(replies, weights))

        x: Moments = {}
        memory: dict[str, Moments] = {key: {} for key in self.moments}
        update_square = step_square = 0.0
        factor = (1 - state.round / clients.rounds) ** self.decay_power
        for name, delta in average_update(state, average).items():
            known = {key: state.memory[key][name].to(delta) for key in self.moments if key in state.memory}
            before = known or {key: torch.zeros_like(delta) for key in self.moments}
            step, after = self.step(delta, before, state.round + 1)
            step = factor * step
            dtype = average[name].dtype
            x[name] = (state.params[name].to(delta) + step).to(dtype)
            for key in self.moments:
                memory[key][name] = after[key].to(dtype)
            update_square += float(delta.square().sum())
            step_square += float(step.square().sum())
        return state.next(
            params=average.updated(x),
            memory={key: Params(tensors) for key, tensors in memory.items()},
            notes=self.notes(
                replies, weights, update_norm=math.sqrt(update_square), step_norm=math.sqrt(step_square)
            ),
        )

    def step(self, delta: Tensor, before: Moments, number: int) -> tuple[Tensor, Moments]:
        """How far one tensor moves in server step `number` (from 1), and its moments after that."""
        raise TypeError(f"{type(self).__name__} must write step")


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """Momentum at the server.

    server_lr: η, length of a step; beta: how much of the last step is kept. 1 and 0 give FedAvg.
    decay_power: exponent of (1 - round/rounds), which multiplies server_lr; 0 keeps it.
    """

    title = "FedAvgM"
    paper = "Hsu et al., arXiv"
    year = 2019
    link = "https://arxiv.org/abs/1909.06335"
    moments = ("m",)

    server_lr: Rate = 1.0
    beta: Decay = 0.9

    @property
    def is_fedavg(self) -> bool:
        return self.server_lr == 1 and self.beta == 0 and self.decay_power == 0

    def step(self, delta: Tensor, before: Moments, number: int) -> tuple[Tensor, Moments]:
        m = self.beta * before["m"] + delta
        return self.server_lr * m, {"m": m}


@dataclass(frozen=True)
class FedAdagrad(ServerOptimizer):
    """Steps divided by the root of all squared changes so far.

    server_lr: η, length of a step; beta: β₁, decay of the first moment; tau: τ, the least divisor;
    decay_power: exponent of (1 - round/rounds), which multiplies server_lr; 0 keeps it.
    """

    title = "FedAdagrad"
    paper = "Reddi et al., ICLR"
    year = 2021
    link = "https://arxiv.org/abs/2003.00295"

    server_lr: Rate = 1e-2
    beta: Decay = 0.0
    tau: Rate = 1e-3

    def step(self, delta: Tensor, before: Moments, number: int) -> tuple[Tensor, Moments]:
        m = self.beta * before["m"] + (1 - self.beta) * delta
        v = self.second_moment(before["v"], delta.square())
        return self.server_lr * m / (v.sqrt() + self.tau), {"m": m, "v": v}

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedYogi(FedAdagrad):
    """As FedAdam, but the second moment falls slowly when changes become small.

    server_lr: η, length of a step; beta: β₁, decay of the first moment; beta2: β₂, of the second;
    tau: τ, the least divisor;
    decay_power: exponent of (1 - round/rounds), which multiplies server_lr; 0 keeps it.
    """

    title = "FedYogi"

    beta: Decay = 0.9
    beta2: Decay = 0.99

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class FedAdam(FedAdagrad):
    """Steps divided by the root of a running mean of squared changes.

    server_lr: η, length of a step; beta: β₁, decay of the first moment; beta2: β₂, of the second;
    tau: τ, the least divisor;
    decay_power: exponent of (1 - round/rounds), which multiplies server_lr; 0 keeps it;
    bias_correction: make up for moments that start at 0, as Adam does and the paper does not.
    """

    title = "FedAdam"

    beta: Decay = 0.9
    beta2: Decay = 0.99
    bias_correction: bool = False

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square

    def step(self, delta: Tensor, before: Moments, number: int) -> tuple[Tensor, Moments]:
        step, after = super().step(delta, before, number)
        if self.bias_correction:
            step = step * math.sqrt(1 - self.beta2**number) / (1 - self.beta**number)
        return step, after
