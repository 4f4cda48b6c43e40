"""FedMA: Federated Learning with Matched Averaging.

Wang et al., ICLR 2020. https://arxiv.org/abs/2002.06440

Two networks may learn the same features in another order of their channels, and their plain mean is then
neither. FedMA reorders each client's channels to match a reference, layer by layer, before it averages.

Symbols: w_k model of client k, n_k its training cases, p_k = n_k / n; a channel's vector: all weights that
make it and read it; order[j]: the channel of a client that becomes channel j.
What leaves a client: w_k.
What the server needs: memory for all models at once, in their new order.

Differs: widths stay. The paper's Beta-Bernoulli process may add channels to the global model, which the
registered shapes of a federation forbid; ours is an assignment of equal numbers to the largest client's.
Differs: all layers in one exchange, by sweeps over them. `layerwise` is the paper's protocol: one layer is
matched, averaged and frozen at a time, and the others trained again, from whole models sent each time.
Differs: the output layer is averaged by p_k; the paper weighs it by class frequencies.
Differs: a client's own first network is the common one with the entries of every tensor shuffled: as good
as a new draw for weights drawn alike. Who joins after the first round starts from the matched model.
Differs: optimizer moments and the previous model, which are in the old order, are dropped by a client
whose channels moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from wardround import models
from wardround.aggregation.mean import mean
from wardround.clients import Client, Clients
from wardround.config import Config
from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.models.channel_groups import ChannelGroup, channel_groups, permute
from wardround.params import Params
from wardround.training.sketch import sketch_model

SMALLEST_GAIN = 1e-9  # of the mean cost: a better order than the present one, not rounding


@dataclass(frozen=True)
class FedMA(Method):
    """Reorders the channels of client models to match, then averages.

    sweeps: passes over the layers at most, 0 leaves every order (with independent_init false: FedAvg);
    independent_init: in the first round each client starts from a network of its own, as in the paper;
    refine: match once more, to the mean; layerwise: one exchange and local training for each layer.
    """

    title = "FedMA"
    paper = "Wang et al., ICLR"
    year = 2020
    link = "https://arxiv.org/abs/2002.06440"
    secure_sum = False
    needs_each_model = "it matches the layers of every client's own model"

    sweeps: Annotated[int, Field(ge=0)] = 5
    independent_init: bool = True
    refine: bool = False
    layerwise: bool = False

    # Server

    def start(self, model: nn.Module) -> ServerState:
        groups = {name: asdict(group) for name, group in channel_groups(model).items()}
        return replace(super().start(model), memory={"groups": groups, "moved": []})

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        groups = {name: ChannelGroup(**group) for name, group in state.memory["groups"].items()}
        before = set(state.memory["moved"])
        apart = self.independent_init and state.round == 0 and len(clients.present) > 1

        ask = Message(params=state.params, scalars={"own_start": True} if apart else {})
        replies = clients.ask("train", ask, each={name: Message(scalars={"forget": True}) for name in before})
        moved: Counter[str] = Counter({reply.client: 0 for reply in replies})
        if self.layerwise and len(replies) > 1:
            replies = self.layer_by_layer(state, clients, replies, groups, moved)
        replies, moves = self.match_replies(state, replies, groups, state.trainable)
        moved.update(moves)

        # moments of a network of one's own, or in an order that is gone
        stale = set(clients.present) if apart else {name for name, count in moved.items() if count}
        weights = self.weigh(state, replies)
        return state.next(
            params=self.average(state, replies, weights),
            memory={**state.memory, "moved": sorted(stale | (before - set(moved)))},
            notes=self.notes(replies, weights, channels_moved=dict(moved)),
        )

    def match_replies(
        self,
        state: ServerState,
        replies: list[Reply],
        groups: Mapping[str, ChannelGroup],
        names: Collection[str],
    ) -> tuple[list[Reply], dict[str, int]]:
        """The replies in the order of the largest client's channels, and how many channels moved."""
        moves = {reply.client: 0 for reply in replies}
        if len(replies) < 2:
            return replies, moves
        reference = min(replies, key=lambda reply: (-reply.num_examples, reply.client)).params
        for _ in range(2 if self.refine else 1):
            found = [match(reply.params, reference, groups, names, self.sweeps) for reply in replies]
            replies = [replace(reply, params=new) for reply, (new, _) in zip(replies, found, strict=True)]
            for reply, (_, count) in zip(replies, found, strict=True):
                moves[reply.client] += count
            if self.refine:
                reference = self.average(state, replies, self.weigh(state, replies))
        return replies, moves

    def layer_by_layer(
        self,
        state: ServerState,
        clients: Clients,
        replies: list[Reply],
        groups: Mapping[str, ChannelGroup],
        moved: Counter[str],
    ) -> list[Reply]:
        """Algorithm 1: match and average a layer, freeze it, train the rest on, up to the last."""
        frozen: list[str] = []
        for name, group in groups.items():
            replies, moves = self.match_replies(state, replies, {name: group}, group.layer)
            moved.update(moves)
            layer = mean([reply.params.only(group.layer) for reply in replies], self.weigh(state, replies))
            frozen += group.layer
            each = {
                reply.client: Message(
                    params=reply.params.updated(layer),
                    scalars={"forget": True} if moves[reply.client] else {},
                )
                for reply in replies
            }
            ask = Message(scalars={"frozen": list(frozen)})
            answers = clients.ask("train", ask, each=each, to=list(each))
            if not answers:
                break  # what there is will be matched in one pass
            replies = answers
        return replies

    # Client

    def train(self, client: Client, message: Message) -> Message:
        start, frozen = message.params, set(message.scalars.get("frozen", ()))
        if message.scalars.get("forget"):
            for key in ("optimizer", "previous"):
                client.memory.pop(key, None)
        if message.scalars.get("own_start"):
            names = list(Params.trainable(client.model))
            start = shuffle_entries(start, names, client.generator("own start"))

        def rest(model: nn.Module) -> None:
            for name, parameter in model.named_parameters():
                if name in frozen:
                    parameter.grad = None  # the optimizer then passes it over, its weight decay too

        return Message(params=client.fit(start=start, after_backward=rest if frozen else None).params)

    # Both

    def check(self, config: Config, objective: Objective) -> None:
        settings = models.resolve(config.model)
        if settings.name not in models.MODELS:
            raise ConfigError(
                f"method 'fedma' reorders channels, and how model '{settings.name}' hands them on is not "
                "known. Choose one of wardround's own networks, for example unet2d."
            )
        if settings.bn_stats == "local" and settings.norm == "batch":
            raise ConfigError(
                "method 'fedma' reorders channels, but model.bn_stats is local: their statistics would stay "
                "at the clients in the old order. Use another bn_stats, or norm instance."
            )
        model = sketch_model(config, objective)
        assert model is not None  # one of our own is always there
        objective.start_model(model)
        try:
            channel_groups(model)
        except ConfigError as error:
            raise ConfigError(f"method 'fedma': {error}") from None

    def warnings(self, config: Config, model: nn.Module) -> list[str]:
        if self.independent_init:
            return []
        return [
            "method.independent_init is false: from a common start channels hardly ever move, and FedMA "
            "is FedAvg."
        ]


# Matching


def match(
    params: Params, reference: Params, groups: Mapping[str, ChannelGroup], names: Collection[str], sweeps: int
) -> tuple[Params, int]:
    """The params with every group in the order nearest to the reference, and how many channels moved.

    names: the tensors that are compared; all others, running statistics too, follow.
    """
    orders: dict[str, Tensor] = {}
    for _ in range(0 if params is reference else sweeps):
        changed = False
        for name, group in groups.items():
            order = best_order(costs(params, reference, group, names), group.blocks)
            here = torch.arange(group.size)
            if not torch.equal(order, here):
                params, changed = permute(params, group, order), True
                orders[name] = orders.get(name, here)[order]
        if not changed:
            break
    return params, sum(int((order != torch.arange(len(order))).sum()) for order in orders.values())


def costs(
    params: Mapping[str, Tensor], reference: Mapping[str, Tensor], group: ChannelGroup, names: Collection[str]
) -> NDArray[np.float64]:
    """Squared distance of channel i (row) from the reference's channel j (column), in float64."""
    total = torch.zeros(group.size, group.size, dtype=torch.float64)
    for name, axis, offset in group.places:
        if name in names and name in params:
            both = [tensors[name].narrow(axis, offset, group.size) for tensors in (params, reference)]
            a, b = (part.movedim(axis, 0).reshape(group.size, -1).double() for part in both)  # (C, D)
            b = b.to(a.device)
            squares = a.square().sum(1)[:, None] + b.square().sum(1)
            total += (squares - 2 * a @ b.T).cpu()
    return np.asarray(total.numpy(), dtype=np.float64)


def best_order(cost: NDArray[np.float64], blocks: int = 1) -> Tensor:
    """The order of least cost; the present one where no other is better."""
    assign = assign_channels(cost, blocks)
    gain = np.trace(cost) - cost[np.arange(len(cost)), assign].sum()
    if gain <= SMALLEST_GAIN * cost.mean():
        assign = np.arange(len(cost))
    return torch.from_numpy(np.argsort(assign))


def assign_channels(cost: NDArray[np.float64], blocks: int = 1) -> NDArray[np.int64]:
    """Where each channel goes: blocks of channels to blocks, and channels inside them, at least cost."""
    from scipy.optimize import linear_sum_assignment  # for this method alone

    size = len(cost) // blocks
    parts = cost.reshape(blocks, size, blocks, size).transpose(0, 2, 1, 3)  # (from, to, size, size)
    inside = np.array([[linear_sum_assignment(part)[1] for part in row] for row in parts])
    totals = np.take_along_axis(parts, inside[..., None], axis=3).sum(axis=(2, 3))
    outside = linear_sum_assignment(totals)[1]
    target: NDArray[np.int64] = outside[:, None] * size + inside[np.arange(blocks), outside]
    return target.reshape(-1)


def shuffle_entries(params: Params, names: Sequence[str], generator: torch.Generator) -> Params:
    """The params with the entries of each named tensor in a random order."""

    def shuffled(tensor: Tensor) -> Tensor:
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order.to(tensor.device)].reshape(tensor.shape)

    return params.updated({name: shuffled(params[name]) for name in sorted(names)})
