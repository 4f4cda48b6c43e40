"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

Karimireddy et al., ICML 2020. https://arxiv.org/abs/1910.06378

Local steps pull each client towards its own optimum. SCAFFOLD estimates that pull with control variates,
c on the server and c_k on client k, and takes it out of every step.

Symbols: x, y server and client parameters; g a batch's gradient; K local steps; eta_l, eta_g learning rates;
S clients of a round, N all clients.
What leaves a client: y and the change of c_k.

Differs: c_k becomes the mean of the round's gradients before correction. For plain SGD at a constant rate
that is the paper's option II; for Adam it still is a gradient, which (x - y) / (K eta_l) is not.
Differs: the paper never clips; `optimizer.clip_norm` clips g, before the correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from wardround.aggregation.mean import mean, move_along
from wardround.clients import Client, Clients, Registration
from wardround.clients.gate import is_finite, params_complaint
from wardround.config import Config
from wardround.errors import ClientError
from wardround.messages import Message, ServerState
from wardround.methods.fedavg import FedAvg
from wardround.methods.proximal import anchor
from wardround.params import Params
from wardround.training.learner import Step


@dataclass(frozen=True)
class SCAFFOLD(FedAvg):
    """Corrects client drift with control variates.

    server_lr: eta_g, how far the server moves along the mean change. control: how c_k is renewed, by the mean
    of the round's gradients or by option II, which assumes SGD. weighting: all alike (the paper), or by
    number of training cases.
    """

    title = "SCAFFOLD"
    paper = "Karimireddy et al., ICML"
    year = 2020
    link = "https://arxiv.org/abs/1910.06378"
    kind = "objective"
    sends = "the change of its control variate, as large as the model"
    needs = frozenset({"state"})
    up = frozenset({"control_change"})

    server_lr: Annotated[float, Field(gt=0)] = 1.0
    control: Literal["mean_gradient", "option_two"] = "mean_gradient"
    weighting: Literal["samples", "uniform"] = "uniform"

    # Server

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        known = {
            key: state.memory[key] for key in ("control",) if key in state.memory
        }  # 0 at first, not sent
        replies = clients.ask("train", Message(params=state.params, extras=known))
        changes = [reply.extras["control_change"] for reply in replies]
        before = known.get("control", changes[0].zeros())
        c = mean([before, *changes], [1.0, *[1 / clients.num_total] * len(changes)])  # Eq. 5: over N, not |S|
        weights = self.weigh(state, replies)
        if self.server_lr == 1:
            params = self.average(state, replies, weights)
        else:  # Eq. 5; running statistics are averaged all the same
            params = move_along(state, replies, [self.server_lr * weight for weight in weights], weights)
        return state.next(params=params, memory={"control": c}, notes=self.notes(replies, weights))

    def check_reply(self, task: str, message: Message, registration: Registration) -> str | None:
        return params_complaint(registration.learned, message.extras.get("control_change"))

    # Client

    def train(self, client: Client, message: Message) -> Message:
        x = anchor(client, message.params)
        c = message.extras.get("control", x.zeros()).to(client.device)
        c_k = client.memory.get("control", x.zeros()).to(client.device)
        correction, total, limit = c - c_k, x.zeros(), client.optimizer.clip_norm

        def corrected(step: Step) -> None:
            step.backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(step.model.parameters(), limit, foreach=True)
            for name, parameter in step.model.named_parameters():
                if name in total and parameter.grad is not None:
                    total[name].add_(parameter.grad)
                    parameter.grad.add_(correction[name])  # Eq. 3: y - eta_l (g + c - c_k)
            step.optimizer.step()

        fitted = client.fit(start=message.params, step=corrected)
        change = total / max(fitted.num_steps, 1) - c_k
        if self.control == "option_two":
            y = fitted.params.only(x).to(client.device)
            change = option_two(c_k, c, x, y, fitted.sum_learning_rates) - c_k
        if not is_finite(change):
            raise ClientError(f"client '{client.name}': its control variate is no longer finite.")
        client.memory["control"] = c_k + change  # what the server adds, so that both sides round alike
        return Message(params=fitted.params, extras={"control_change": change})

    def warnings(self, config: Config, model: nn.Module) -> list[str]:
        sgd = config.optimizer.name == "sgd" and not config.optimizer.momentum
        if sgd or self.control == "mean_gradient":
            return []
        return ["SCAFFOLD: option II assumes SGD without momentum; choose method.control=mean_gradient."]


def option_two(c_k: Params, c: Params, x: Params, y: Params, sum_of_rates: float) -> Params:
    """Eq. 4, option II, with the rates actually used; a round at rate 0 says nothing."""
    return c_k - c + (x - y) / sum_of_rates if sum_of_rates > 0 else c_k
