"""FedProto: Federated Prototype Learning across Heterogeneous Clients.

Tan et al., AAAI 2022. https://arxiv.org/abs/2105.00243

Clients exchange one mean feature vector a class, its prototype. Each pulls its own prototypes towards
the mean over all clients, so that classes look alike in all models.

Symbols: C_j prototype of class j in the batch, C_kj of client k in its last local epoch, n_kj its voxels;
C̄_j the server's; lambda (`lam`) weight of the term.
What leaves a client: its prototypes and their voxel counts, and its model if `aggregate_weights`.

Differs: models are averaged too, as in FedEvi's comparison; `aggregate_weights: false` is the paper.
Differs: features are voxels of the last decoder map. Prototypes are means over all voxels of the last
epoch, not means of batch means; the term is the mean over classes, where the paper adds them up.
Differs: `distance: kl` compares softmaxes of prototypes. FedEvi's code takes the divergence of raw
features, which is not defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.clients import Client, Clients
from wardround.data.cases import Batch
from wardround.losses.contrastive_objectives import probe_output
from wardround.losses.objective import Context
from wardround.messages import Message, ServerState
from wardround.methods.base import Method
from wardround.models.base import Segmenter
from wardround.params import Params

Distance = Literal["mse", "kl"]

MOST_VOXELS = 2.0**53  # float64 counts no further


@dataclass(frozen=True)
class FedProto(Method):
    """Pulls each client's mean features of a class towards those of all clients.

    lam: weight of the pull, 0 gives FedAvg; distance: squared error a feature, or the divergence of
    softmaxes; weighting: the server's prototypes are means by voxels, or of all clients that have the class
    alike; aggregate_weights: false lets nothing but prototypes travel, so each client keeps its own model.
    """

    title = "FedProto"
    paper = "Tan et al., AAAI"
    year = 2022
    link = "https://arxiv.org/abs/2105.00243"
    kind = "objective"
    sends = "a mean feature vector and a voxel count for each class"
    needs_every_class = "it compares mean features of every class"
    needs_labels = needs_every_class
    needs = frozenset({"features", "decoder"})
    up = frozenset({"prototypes"})
    secure_sum = False
    needs_each_model = "every client's prototypes are joined by their own counts"

    lam: Annotated[float, Field(ge=0)] = 1.0
    distance: Distance = "mse"
    weighting: Literal["voxels", "uniform"] = "voxels"
    aggregate_weights: bool = True

    # Server

    def start(self, model: nn.Module) -> ServerState:
        assert isinstance(model, Segmenter)
        decoder = probe_output(model).decoder
        assert decoder is not None
        num_classes = max(2, model.num_outputs)
        none = {
            "means": torch.zeros(num_classes, decoder.shape[1]),
            "counts": torch.zeros(num_classes, dtype=torch.float64),
        }
        return replace(super().start(model), memory={"prototypes": Params(none)})

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        prototypes, started = state.memory["prototypes"], state.memory.get("started", [])
        extras = {"prototypes": prototypes} if prototypes["counts"].any() else {}
        if self.aggregate_weights:
            replies = clients.ask("train", Message(params=state.params, extras=extras))
        else:  # the common start is sent once
            new = {name: Message(params=state.params) for name in clients.present if name not in started}
            replies = clients.ask("train", Message(extras=extras), each=new)

        held = [r.extras["prototypes"] for r in replies if is_usable(r.extras.get("prototypes"), prototypes)]
        memory = {"prototypes": join_prototypes(held, prototypes, by_voxels=self.weighting == "voxels")}
        if not self.aggregate_weights:
            names = sorted({*started, *(reply.client for reply in replies)})
            return state.next(memory={**memory, "started": names})
        weights = self.weigh(state, replies)
        params = self.average(state, replies, weights)
        return state.next(params=params, memory=memory, notes=self.notes(replies, weights))

    # Client

    def train(self, client: Client, message: Message) -> Message:
        start = message.params if self.aggregate_weights else client.kept_model() or message.params
        assert isinstance(client.model, Segmenter)
        num_classes = max(2, client.model.num_outputs)
        received = message.extras.get("prototypes", Params()).to(client.device)
        seen: list[tuple[Tensor, Tensor]] = []

        def pull(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            features = context.output.decoder
            assert features is not None
            sums, counts = class_sums(features, batch.label, num_classes)
            if client.is_last_pass(context):
                seen.append((sums.detach(), counts))
            if not received:  # the first round has no prototypes
                return features.new_zeros((), dtype=torch.float32)
            present = (counts > 0) & (received["counts"] > 0)
            local = sums / counts.clamp_min(1)[:, None]  # C_j
            gap = distance(local, received["means"], present, self.distance).float()
            term = self.lam * gap  # lambda d(C_j, C̄_j)
            context.note("prototypes", term)
            return term

        fitted = client.fit(start=start, add=pull if self.lam else None)
        extras = {"prototypes": average_classes(seen)} if self.lam else {}
        return Message(fitted.params, extras) if self.aggregate_weights else Message(extras=extras)

    # Both

    def shared(self, model: nn.Module) -> list[str]:
        return super().shared(model) if self.aggregate_weights else []


def class_sums(features: Tensor, label: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Σ f and number of voxels of each class, (B, F, *spatial), (B, *spatial) -> (C, F), (C,) in float64."""
    flat, values = features.flatten(2), label.flatten(1).clamp_max(num_classes - 1)[:, None]
    masks = [values == j for j in range(num_classes)]  # (B, 1, voxels)
    sums = [(flat * mask).sum(dim=(0, 2), dtype=torch.float64) for mask in masks]
    return torch.stack(sums), torch.stack([mask.sum() for mask in masks]).double()


def average_classes(seen: Sequence[tuple[Tensor, Tensor]]) -> Params:
    """C_kj and n_kj of all batches together; a class that was not there has zeros."""
    sums, counts = (torch.stack(part).sum(dim=0) for part in zip(*seen, strict=True))
    means = (sums / counts.clamp_min(1)[:, None]).float()
    return Params({"means": means, "counts": counts})


def distance(local: Tensor, received: Tensor, present: Tensor, kind: Distance) -> Tensor:
    """The mean distance of prototypes (C, F) over the classes that are present (C,); 0 if none is."""
    if kind == "mse":
        each = (local - received).square().mean(dim=1)
    else:
        target = received.log_softmax(dim=1)
        each = (target.exp() * (target - local.log_softmax(dim=1))).sum(dim=1)
    return each.where(present, 0.0).sum() / present.sum().clamp_min(1)


def join_prototypes(held: Sequence[Params], last: Params, *, by_voxels: bool) -> Params:
    """C̄_j, the mean over the clients that have class j, by voxels or alike; of none, the last."""
    means, counts = last["means"].double(), last["counts"].double()
    if held:
        voxels = torch.stack([part["counts"].double().cpu() for part in held])  # (K, C)
        shares = voxels if by_voxels else (voxels > 0).double()
        total = shares.sum(dim=0)
        new = sum(n[:, None] * part["means"].double().cpu() for n, part in zip(shares, held, strict=True))
        means = torch.where(total[:, None] > 0, new / total.clamp_min(1)[:, None], means)
        counts = torch.where(total > 0, voxels.sum(dim=0), counts)
    return Params({"means": means.to(last["means"].dtype), "counts": counts.to(last["counts"].dtype)})


def is_usable(sent: Params | None, known: Params) -> bool:
    """Whether prototypes that came in have the names, shapes, types and counts that can be."""
    if sent is None or set(sent) != set(known) or any(sent.spec(n) != known.spec(n) for n in known):
        return False
    return bool(((sent["counts"] >= 0) & (sent["counts"] <= MOST_VOXELS)).all())
