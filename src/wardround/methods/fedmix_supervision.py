"""FedMix: Mixed Supervised Federated Learning for Medical Image Segmentation.

Wicaksana et al., IEEE TMI 2023. https://arxiv.org/abs/2205.01840

Hospitals annotate in different detail: masks, boxes, image labels, nothing. Two networks label the weakly
annotated images for each other where they agree, and clients weigh by images used and by loss.

Symbols: F_1, F_2 two networks of one shape, ŷ_1, ŷ_2 their masks; epsilon (`agreement`) least Dice of
the two; n'_k images used, L_k mean loss of F_1; lambda (`lam`), beta of the weights.
What leaves a client: both networks, n'_k and L_k. F_1 alone is tested and used.

Weak annotations are made from the masks: a box around every connected part of a class; whether an image
has any foreground. A weakly annotated client never trains on its masks.
Differs: a client without an accepted image does not train and has weight 0; the released notebook goes on
with other images. Two empty masks agree.
Differs: an image label without foreground is an empty mask, always accepted (the notebook leaves it out);
one with foreground is never accepted with an empty mask.
Differs: F_2 starts with the first weights of F_1, shuffled inside each tensor, which suits any network.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.aggregation.weights import collect, normalise
from wardround.clients import Client, Clients
from wardround.config import Config
from wardround.data.cases import Batch, TensorSplit, as_stack
from wardround.errors import ConfigError
from wardround.losses.objective import Context, Objective
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.models.base import Segmenter
from wardround.params import Params
from wardround.text import suggest

Annotation = Literal["mask", "box", "image", "none"]
SECOND = "second."  # state-dict names of F_2 start with it
PAIR = 256  # two labels in one number: that for F_1 + PAIR * that for F_2
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class FedMixSupervision(Method):
    """Trains two networks that label weakly annotated images for each other.

    annotation: by client name what its training images have (mask, box, image or none); who is not named
    has masks. agreement: least Dice of the two networks' masks for an image to be used; box_dice: least Dice
    of mask and boxes; lam: weight of the losses beside the image counts, 0 leaves counts alone; beta: power
    of the losses.
    """

    title = "FedMix (mixed supervision)"
    paper = "Wicaksana et al., IEEE TMI"
    year = 2023
    link = "https://arxiv.org/abs/2205.01840"
    sends = "a second network, the number of images used, the mean loss"
    needs_every_class = "it makes labels of all classes itself"
    up = frozenset({"num_used", "loss"})
    objective = "dice"

    annotation: dict[str, Annotation] | None = None
    agreement: Share = 0.9
    box_dice: Share = 0.5
    lam: Annotated[float, Field(ge=0)] = 10.0
    beta: Annotated[float, Field(ge=0)] = 1.5

    # Server

    def prepare(self, state: ServerState, clients: Clients) -> ServerState:
        """A misspelt name would quietly train on masks."""
        for name in self.annotation or {}:
            if name not in clients.names:
                hint = suggest(name, clients.names)
                raise ConfigError(f"method.annotation names '{name}', which is not a client.{hint}")
        return state

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        used, losses = collect(replies, "num_used", 0), collect(replies, "loss", 0)
        counts = [min(used.get(reply.client, 0), reply.num_examples) for reply in replies]
        return adaptive_weights(counts, [losses.get(r.client, 0) for r in replies], self.lam, self.beta)

    def notes(self, replies: Sequence[Reply], weights: Sequence[float], **ingredients: Any) -> dict[str, Any]:
        used, losses = collect(replies, "num_used"), collect(replies, "loss")
        return super().notes(replies, weights, num_used=used, first_loss=losses, **ingredients)

    # Client

    def train(self, client: Client, message: Message) -> Message:
        kind = (self.annotation or {}).get(client.name, "mask")
        split = None if kind == "mask" else self.pseudo_labelled(client, message.params, kind)
        num_used = client.num_examples if split is None else len(split)
        if not num_used:
            return Message(params=message.params, scalars={"num_used": 0})
        devices = [client.device] if client.device.type == "cuda" else []

        def both(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            second, apart = get_second(model), copy.copy(context)
            apart.terms = {}  # the records show the terms of F_1
            label_1, label_2 = batch.label % PAIR, batch.label // PAIR
            if split is None:
                label_1 = label_2 = batch.label
            loss = client.loss(model, Batch(batch.image, label_1), context)
            context.note("first", loss)
            with torch.random.fork_rng(devices):  # F_1 draws what it would draw alone
                if context.step == 0:
                    second.start_fit()
                other = client.loss(second, Batch(batch.image, label_2), apart)
            context.note("second", other)
            return loss + torch.stack([other, *second.extra_losses(context.num_examples).values()]).sum()

        fitted = client.fit(start=message.params, loss=both, split=split)
        return Message(params=fitted.params, scalars={"num_used": num_used, "loss": fitted.loss["first"]})

    def labels_itself(self, client: str) -> bool:
        return (self.annotation or {}).get(client) == "none"

    def pseudo_labelled(self, client: Client, received: Params, kind: Annotation) -> TensorSplit:
        """The accepted images, with ŷ_2 of the received networks to train F_1 and ŷ_1 to train F_2."""
        cases = as_stack(client.data.train, "method 'fedmix_supervision' with weak annotations")
        second = {name: received[name] for name in received if name.startswith(SECOND)}
        first, other = received.without(second), {n.removeprefix(SECOND): t for n, t in second.items()}
        masks = [
            torch.cat([client.objective.predict(z).long() for z, _ in client.predictions(cases, params)])
            for params in (first, Params(other))  # F_2's tensors run in F_1's place
        ]
        num_classes = max(2, get_second(client.model).num_outputs)
        y_1, y_2, accepted = self.judge(masks[0], masks[1], cases.labels, kind, num_classes)
        index = accepted.nonzero()[:, 0]
        chosen = index.tolist()
        names, spacings = [cases.names[i] for i in chosen], [cases.spacing(i) for i in chosen]
        return TensorSplit(names, cases.images[index], (y_2 + PAIR * y_1)[index], spacings)

    def judge(
        self, y_1: Tensor, y_2: Tensor, truth: Tensor, kind: Annotation, num_classes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Both masks (N, *spatial) cut to what the annotation allows, and which images to use (N,)."""
        where = find_allowed(truth, kind, num_classes)
        y_1, y_2 = keep_allowed(y_1, where), keep_allowed(y_2, where)
        accepted = dice(one_hot(y_1, num_classes), one_hot(y_2, num_classes)) >= self.agreement
        if kind == "box":
            accepted &= dice(one_hot(y_1, num_classes), where) >= self.box_dice
        if kind == "image":
            accepted &= (foreground(y_1) & foreground(y_2)) == foreground(truth)
        return y_1, y_2, accepted

    # Both

    def start_model(self, model: nn.Module) -> None:
        second = copy.deepcopy(model)
        with torch.no_grad():
            for tensor in second.parameters():
                tensor.copy_(tensor.flatten()[torch.randperm(tensor.numel())].view_as(tensor))
        model.second = second

    def check(self, config: Config, objective: Objective) -> None:
        if objective.needs:
            raise ConfigError(
                f"method 'fedmix_supervision' trains two networks, and objective "
                f"'{config.objective.get('name')}' compares features of one. Use dice or dice_bce."
            )
        if config.model.bn_stats in ("local", "reestimate"):
            raise ConfigError(
                f"model.bn_stats is {config.model.bn_stats}, which knows one network, but method "
                "'fedmix_supervision' trains two. Use average or pooled."
            )


def adaptive_weights(used: Sequence[float], losses: Sequence[float], lam: float, beta: float) -> list[float]:
    """w_k ∝ n'_k / Σn' + λ L_k^β / ΣL^β; a client that used no image has weight 0.

    >>> adaptive_weights([3, 1], [0.0, 0.0], lam=10, beta=1.5)
    [0.75, 0.25]
    """
    largest = max([loss for n, loss in zip(used, losses, strict=True) if n], default=0) or 1.0
    powers = [(loss / largest) ** beta if n and loss else 0.0 for n, loss in zip(used, losses, strict=True)]
    loss_part = normalise(powers) if any(powers) else powers
    data_part = normalise(used) if any(used) else list(used)
    return normalise([data + lam * loss for data, loss in zip(data_part, loss_part, strict=True)])


def get_second(model: nn.Module) -> Segmenter:
    second = model.second
    assert isinstance(second, Segmenter)
    return second


# Masks


def one_hot(label: Tensor, num_classes: int) -> Tensor:
    """The mask of each foreground class, (N, *spatial) -> (N, C - 1, *spatial)."""
    return torch.stack([label.clamp_max(num_classes - 1) == j for j in range(1, num_classes)], dim=1)


def foreground(label: Tensor) -> Tensor:
    """Which images have any, (N,)."""
    return (label > 0).flatten(1).any(dim=1)


def dice(a: Tensor, b: Tensor) -> Tensor:
    """Dice of each image, mean over classes, (N, C - 1, *spatial) twice -> (N,); two empty masks have 1."""
    overlap, total = (mask.flatten(2).sum(dim=2).double() for mask in (a & b, a.int() + b.int()))
    return torch.where(total > 0, 2 * overlap / total.clamp_min(1), 1.0).mean(dim=1)


def find_allowed(truth: Tensor, kind: Annotation, num_classes: int) -> Tensor:
    """Where each foreground class may be, as far as the annotation says, (N, C - 1, *spatial).

    box: in the box around any connected part of it; image: anywhere in an image with foreground.
    """
    masks = one_hot(truth, num_classes)
    if kind == "none":
        return torch.ones_like(masks)
    if kind == "image":
        return masks.flatten(1).any(dim=1).view(-1, *[1] * (masks.ndim - 1)).expand_as(masks)
    boxes = masks.flatten(0, 1).cpu().numpy()
    from scipy import ndimage  # boxes alone need it

    for mask in boxes:
        for box in ndimage.find_objects(ndimage.label(mask)[0]):
            mask[box] = True
    return torch.from_numpy(boxes).view(masks.shape).to(truth.device)


def keep_allowed(label: Tensor, where: Tensor) -> Tensor:
    """The label, background where its class may not be."""
    everywhere = torch.ones_like(where[:, :1])
    return label * torch.cat([everywhere, where], dim=1).gather(1, label[:, None])[:, 0]
