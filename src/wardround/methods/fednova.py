"""FedNova: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.

Wang et al., NeurIPS 2020. https://arxiv.org/abs/2007.07481

A client with more local steps moves further and so pulls the mean towards its own optimum. FedNova divides
each client's move by how much its optimizer could accumulate, and scales the mean back afterwards.

Symbols: x global model, w_k client model, tau_k its steps, p_k = n_k / sum n; rho momentum, eta rate;
a_k normaliser, ||a_k||_1 in the paper; d_k = (x - w_k) / a_k.
What leaves a client: w_k and the number a_k.

Differs: no normaliser is published for Adam; a_k counts steps, and a run says so in its records.
Differs: with a proximal term, tau_eff = sum p_k tau_k and a_k follow the authors' code.
Differs: Nesterov momentum has a normaliser too, made the same way: what a gradient of 1 accumulates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from torch import nn

from wardround.aggregation.mean import average_update, move_along
from wardround.aggregation.weights import collect, weighted_mean
from wardround.clients import Client, Clients
from wardround.config import Config
from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.messages import Message, ServerState
from wardround.methods.base import Method
from wardround.methods.proximal import pull
from wardround.params import Params
from wardround.training.optimizers import accumulated


@dataclass(frozen=True)
class FedNova(Method):
    """Averages client moves a step, so that more local steps do not mean more say; equal steps give FedAvg.

    mu: strength of a proximal pull as in FedProx, 0 leaves it out. server_momentum: share of the last
    server move that is repeated, 0 for none.
    """

    title = "FedNova"
    paper = "Wang et al., NeurIPS"
    year = 2020
    link = "https://arxiv.org/abs/2007.07481"
    sends = "one number (a)"
    up = frozenset({"a"})

    mu: Annotated[float, Field(ge=0)] = 0.0
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0

    # Server

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        answers = clients.ask("train", Message(params=state.params))
        a = collect(answers, "a", least=1)  # the first step alone makes it 1
        replies = [reply for reply in answers if a.get(reply.client, math.inf) <= most(reply.num_steps)]
        if not replies:
            return state.next()
        p = self.weigh(state, replies)
        steps = [reply.num_steps if self.mu else a[reply.client] for reply in replies]
        tau_eff = weighted_mean(p, steps)  # sum p_k a_k
        factors = [w * (tau_eff / a[reply.client]) for w, reply in zip(p, replies, strict=True)]

        if factors == p:  # equal steps
            params = self.average(state, replies, p)
        else:  # x - tau_eff sum p_k d_k = x + sum factor_k (w_k - x); running statistics are averaged
            params = move_along(state, replies, factors, p)
        memory = dict(state.memory)
        if self.server_momentum:
            params, memory["velocity"] = self.accelerate(state, params)
        return state.next(params=params, memory=memory, notes=self.notes(replies, p, a=a, tau_eff=tau_eff))

    def accelerate(self, state: ServerState, params: Params) -> tuple[Params, Params]:
        """x + v and v, where v is the round's move and a share of the last v."""
        v, last = average_update(state, params), state.memory.get("velocity", {})
        for name in last:
            v[name] += self.server_momentum * last[name].to(v[name].device)
        x = {name: (state.params[name].to(v[name].device) + v[name]).to(params[name].dtype) for name in v}
        return params.updated(x), Params(v)

    # Client

    def train(self, client: Client, message: Message) -> Message:
        fitted = client.fit(start=message.params, add=pull(client, message.params, self.mu))
        a, sgd = float(fitted.num_steps), client.optimizer
        if sgd.name == "sgd":
            eta_mu = client.learning_rate * self.mu
            a = accumulated(fitted.num_steps, sgd.momentum, eta_mu, nesterov=sgd.nesterov)
        return Message(params=fitted.params, scalars={"a": a})

    # Both

    def check(self, config: Config, objective: Objective) -> None:
        pull = config.optimizer.learning_rate * self.mu
        if config.optimizer.name == "sgd" and pull >= 1:
            raise ConfigError(
                f"method.mu times optimizer.learning_rate is {pull:g}; from 1 on, a step pulls a client past "
                "the model it received. Lower one of them."
            )

    def warnings(self, config: Config, model: nn.Module) -> list[str]:
        used = config.optimizer
        if used.name != "sgd":
            return [f"FedNova: no normaliser is known for {used.name}, so local steps are counted instead."]
        if used.momentum and used.state == "keep":
            return ["FedNova: its normaliser assumes momentum that starts afresh; use optimizer.state=reset."]
        return []


def most(num_steps: int) -> float:
    """The largest a_k of so many steps, that of Nesterov momentum near 1; 0 for none."""
    return num_steps * (num_steps + 3) / 2
