"""FedLAW: Revisiting Weighted Aggregation in Federated Learning with Neural Networks.

Li et al., ICML 2023. https://arxiv.org/abs/2302.10911

The server has a few labelled cases of its own and learns on them, every round, how much each client's model
should count and by how much their mean should shrink, which acts like weight decay.

Symbols: θ_k client model, p_k its share of training cases; λ = softmax(ℓ) weights, γ = e^g scale;
θ = γ Σ λ_k θ_k the new model, L its loss on the server's cases.
What leaves a client: θ_k. With `proxy: clients`, for simulation only, every client is sent all models and
returns ℓ and g, which the server averages.
What the server needs: memory for all models at once, on the device they are tried out on.

Differs: buffers are the λ mean, which γ does not scale, and no gradient goes through them; the released code
takes the running statistics of the server's cases (`model.bn_stats: reestimate` measures the clients').
Differs: γ stays in [0.5, 1.5].
Differs: ℓ and g learn on every other case; the rest choose the epoch, the start included, because a few
cases overfit. In the release the cases come out of the test set; here they are a centre's own (`data.proxy`).
Differs: with `evaluate.window`, ℓ and g learn on one such window of each case, around something labelled.
Differs: one client alone is taken as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from wardround.aggregation.mean import collect_params, layerwise_mean
from wardround.aggregation.weights import by_samples, is_number, softmax
from wardround.clients import Client, Clients
from wardround.config import Config
from wardround.data.cases import Batch, Split
from wardround.data.roles import PROXY
from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.params import Params
from wardround.training.batches import shuffle_indices
from wardround.training.inference import cut_window

log = logging.getLogger(__name__)

BETAS = (0.5, 0.999)  # of Adam, as released
HALVED_AFTER = 20  # epochs after which the learning rate is halved, as released
AVERAGED_AFTER = 5  # epochs of a phase before iterates are averaged, variant swa
TOO_LARGE = 1e30  # nothing learned is; sums of larger numbers may overflow
NOT_LEARNED = (
    "FedLAW: nothing was learned on the server's cases in this round, so weights go by training cases and "
    "gamma is 1."
)


@dataclass(frozen=True)
class FedLAW(Method):
    """Learns aggregation weights and a common scale on cases of the server.

    proxy: whose cases are learned on, the server's own (`data.proxy`) or, in simulation, the validation
    cases of every client; server_lr, epochs, batch_size: of that learning, 0 epochs give FedAvg;
    variant: ℓ and g together (joint), or first ℓ, then g, each for half the epochs and averaged over the
    later ones (swa); gamma_min, gamma_max: limits of γ, 1 and 1 leave the scale out.
    """

    title = "FedLAW"
    paper = "Li et al., ICML"
    year = 2023
    link = "https://arxiv.org/abs/2302.10911"
    sends = "nothing; with proxy: clients also K + 1 numbers, and clients are sent all models"
    secure_sum = False
    needs_each_model = "every model is needed by itself"
    needs = frozenset({"proxy"})
    tasks = ("train", "tune")
    up = frozenset({"logits", "log_gamma", "loss"})

    proxy: Literal["server", "clients"] = "server"
    variant: Literal["joint", "swa"] = "joint"
    server_lr: Annotated[float, Field(gt=0)] = 0.005
    epochs: Annotated[int, Field(ge=0)] = 20
    batch_size: Annotated[int, Field(ge=1)] = 8
    gamma_min: Annotated[float, Field(gt=0, le=1)] = 0.5
    gamma_max: Annotated[float, Field(ge=1)] = 1.5

    # Server

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = clients.ask("train", Message(params=state.params))
        replies = [reply for reply in replies if reply.num_examples > 0] or replies  # log 0 has no start
        weights, gamma = by_samples(replies), 1.0
        more: dict[str, Any] = {}
        if len(replies) > 1 and self.epochs:
            learned = self.learn(state, clients, replies, first_logits(weights))
            if learned is None:
                log.warning("round %d: %s", state.round + 1, NOT_LEARNED)
                more["warnings"] = [NOT_LEARNED]
            else:
                *logits, g, more["proxy_loss"] = learned
                weights, gamma = softmax(logits), self.limit_gamma(g)
                log.info("round %d: gamma is %.4g", state.round + 1, gamma)
        params = state.params.updated(combine(collect_params(replies), weights, gamma, state.trainable))
        return state.next(params=params, notes=self.notes(replies, weights, gamma=gamma, **more))

    def learn(
        self, state: ServerState, clients: Clients, replies: Sequence[Reply], logits: Sequence[float]
    ) -> list[float] | None:
        """ℓ, g and the loss they reach, averaged over the clients that learned them; None if none did."""
        items = collect_params(replies)
        names = [reply.client for reply in replies]
        message = Message(
            params=state.params.without(items[0]),  # what does not travel
            extras=dict(zip(names, items, strict=True)),
            scalars={"logits": list(logits)},
        )
        answers = clients.ask("tune", message, to=[PROXY] if self.proxy == "server" else names)
        rows = [row for row in map(read_numbers, answers) if len(row) == len(names) + 2]
        return [fmean(column) for column in zip(*rows, strict=True)] or None

    def limit_gamma(self, g: float) -> float:
        """γ = e^g inside its limits; beyond those of floating point, e^g need not be known."""
        return min(max(math.exp(min(g, 700.0)), self.gamma_min), self.gamma_max)

    # Where the cases are: the server, or each client

    def tune(self, client: Client, message: Message) -> Message:
        """Learn ℓ and g on half of the cases and choose the epoch on the others; nothing else changes."""
        use_val = self.proxy == "clients" and len(client.data.val)
        split = client.data.val if use_val else client.data.train
        if not len(split):
            return Message()
        order = torch.arange(len(split))
        learning, stopping = (order[::2], order[1::2]) if len(split) > 1 else (order, order)
        fixed = message.params.to(client.device)
        own = Params(client.memory.get("own", {})).to(client.device)
        items = [model.to(client.device) for model in message.extras.values()]
        mixture = Mixture(client.model, client.objective, items, {**fixed, **own})

        def batches(epoch: int) -> Iterator[Batch]:
            for index in shuffle_indices(len(learning), self.batch_size, client.seed("tune"), epoch):
                yield read_cases(client, split, learning[index], epoch, *index.tolist())

        starts = range(0, len(stopping), self.batch_size)
        held_out = [
            read_cases(client, split, stopping[start : start + self.batch_size], "held out", start)
            for start in starts
        ]
        was_training = client.model.training
        client.model.eval()
        try:
            logits, g, loss = self.fit(mixture, message.scalars["logits"], batches, held_out)
        finally:
            client.model.train(was_training)
        if not math.isfinite(loss):
            return Message()
        return Message(scalars={"logits": logits.tolist(), "log_gamma": float(g), "loss": loss})

    def fit(
        self,
        mixture: Mixture,
        logits: Sequence[float],
        batches: Callable[[int], Iterator[Batch]],
        held_out: Sequence[Batch],
    ) -> tuple[Tensor, Tensor, float]:
        """The ℓ and g of the lowest held-out loss, the start among them, and that loss."""
        ell = torch.tensor(logits, dtype=torch.float64, device=mixture.device)
        g = torch.zeros((), dtype=torch.float64, device=mixture.device)
        best = (ell.clone(), g.clone(), mixture.mean_loss(ell, g, held_out))
        phases = [([ell, g], self.epochs)]
        if self.variant == "swa":
            phases = [([ell], (self.epochs + 1) // 2), ([g], self.epochs // 2)]
        for moving, epochs in phases:
            ell.copy_(best[0])
            g.copy_(best[1])
            adam = torch.optim.Adam(moving, lr=self.server_lr, betas=BETAS)
            window: list[tuple[Tensor, Tensor]] = []
            for epoch in range(epochs):
                adam.param_groups[0]["lr"] = self.server_lr * 0.5 ** (epoch // HALVED_AFTER)
                for batch in batches(epoch):
                    ell.grad, g.grad = mixture.slopes(ell, g, batch)
                    adam.step()
                    g.clamp_(math.log(self.gamma_min), math.log(self.gamma_max))
                if self.variant == "joint" or epoch <= AVERAGED_AFTER:
                    window.clear()
                window.append((ell.clone(), g.clone()))
                mean = [torch.stack(values).mean(dim=0) for values in zip(*window, strict=True)]
                loss = mixture.mean_loss(mean[0], mean[1], held_out)
                if loss < best[2] or not math.isfinite(best[2]):
                    best = (mean[0], mean[1], loss)
        return best

    # Both

    def check(self, config: Config, objective: Objective) -> None:
        if self.epochs and self.proxy == "server" and config.data.proxy is None:
            raise ConfigError(
                "method 'fedlaw' learns its weights on labelled cases of the server, and there are none. "
                "Set data.proxy to a centre whose cases the server may use, or, in simulation, "
                "method.proxy=clients."
            )
        unusable = {"pooled", "local"} if self.proxy == "server" else {"pooled"}
        if config.model.bn_stats in unusable:
            raise ConfigError(
                f"method 'fedlaw' tries out mixed models, for which model.bn_stats {config.model.bn_stats} "
                "gives no running statistics. Use average or reestimate."
            )

    def warnings(self, config: Config, model: nn.Module) -> list[str]:
        if self.proxy == "server":
            return []
        return [
            "FedLAW: with method.proxy=clients every client is sent all models. Use it in simulation only."
        ]


def read_cases(client: Client, split: Split, indices: Tensor, *purpose: object) -> Batch:
    """Cases to learn on: whole, or where `evaluate.window` is set a window of each."""
    if client.window is None:
        return split.batch(indices)
    draw = client.generator("window", *purpose)
    cut = [cut_window(split.batch([int(index)]), client.window, draw) for index in indices]
    return Batch(torch.cat([case.image for case in cut]), torch.cat([case.label for case in cut]))


class Mixture:
    """θ = γ Σ λ_k θ_k as a function of ℓ and g, and its loss on a batch; all models lie on the device."""

    def __init__(
        self, model: nn.Module, objective: Objective, items: Sequence[Params], fixed: Mapping[str, Tensor]
    ) -> None:
        learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        floating = [name for name in items[0] if items[0][name].is_floating_point() and name not in fixed]
        stacks = {name: torch.stack([item[name] for item in items]) for name in floating}  # (K, ...)
        self.learned = {name: stack for name, stack in stacks.items() if name in learned}
        self.buffers = {name: stack for name, stack in stacks.items() if name not in learned}
        self.device = next(iter(stacks.values())).device
        self._model, self._objective, self._fixed = model, objective, fixed

    def tensors(self, ell: Tensor, g: Tensor) -> dict[str, Tensor]:
        """The mixed model; γ scales what learns, not the buffers."""
        weights = torch.softmax(ell, dim=0)
        learned = {name: sum_weighted(stack, g.exp() * weights) for name, stack in self.learned.items()}
        return learned | {name: sum_weighted(stack, weights) for name, stack in self.buffers.items()}

    def loss(self, tensors: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Each case's loss, (B,)."""
        logits: Tensor = functional_call(self._model, {**self._fixed, **tensors}, (batch.image,))
        return self._objective.sample_losses(logits, batch.label)

    def mean_loss(self, ell: Tensor, g: Tensor, batches: Sequence[Batch]) -> float:
        with torch.no_grad():
            tensors = self.tensors(ell, g)
            return float(torch.cat([self.loss(tensors, batch) for batch in batches]).double().mean())

    def slopes(self, ell: Tensor, g: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """∂L/∂ℓ and ∂L/∂g from one backward pass to θ and K inner products, s_k = ⟨∂L/∂θ, γ θ_k⟩."""
        tensors = self.tensors(ell, g)
        leaves = [tensors[name].requires_grad_() for name in self.learned]
        slopes = torch.autograd.grad(self.loss(tensors, batch).mean(), leaves, materialize_grads=True)
        s = torch.zeros_like(ell)
        for stack, slope in zip(self.learned.values(), slopes, strict=True):
            s += (stack.flatten(1) @ slope.flatten()).double() * g.exp()
        weights = torch.softmax(ell, dim=0)
        mean = weights @ s  # = ⟨∂L/∂θ, θ⟩, and γ = e^g has that slope
        return weights * (s - mean), mean


def sum_weighted(stack: Tensor, weights: Tensor) -> Tensor:
    """Σ_k w_k of a stack (K, ...)."""
    total: Tensor = torch.tensordot(weights.to(stack.dtype), stack, dims=1)
    return total


def combine(
    items: Sequence[Params], weights: Sequence[float], gamma: float, trainable: Sequence[str]
) -> Params:
    """γ Σ λ_k θ_k of what learns, Σ λ_k θ_k of the buffers."""
    learned, scaled = set(trainable), [gamma * weight for weight in weights]
    return layerwise_mean(items, {name: scaled if name in learned else weights for name in items[0]})


def first_logits(weights: Sequence[float]) -> list[float]:
    """ℓ_k = log p_k."""
    return [math.log(weight) for weight in weights]


def read_numbers(answer: Reply) -> list[float]:
    """ℓ, g and the loss of an answer in one row; empty if something is missing."""
    sent, logits = answer.scalars, answer.scalars.get("logits")
    values = [*(logits if isinstance(logits, list) else []), sent.get("log_gamma"), sent.get("loss")]
    return values if all(is_number(value) and abs(value) < TOO_LARGE for value in values) else []
